// See launch.h.
#include "launcher/launch/launch.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "comm/launch_info.h"
#include "common/error.h"
#include "common/terminal.h"
#include "common/text.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/launch/host_plan.h"
#include "launcher/launch/session_dir.h"
#include "launcher/launch/signals.h"
#include "launcher/launch/supervisor.h"
#include "topology/report.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

std::string now_text(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 64> text{};
  return std::string(text.data(), std::strftime(text.data(), text.size(), format, &local));
}

// The folder for the log files. Without --log-dir in a folder that cannot be written, logs go where temporary files go.
std::string make_log_dir(const std::string& wanted) {
  std::error_code error;
  const std::string name = now_text("%Y%m%d-%H%M%S-") + std::to_string(getpid());
  if (!wanted.empty()) {
    // What is there of an earlier job is kept: a command that goes on with a failed run names the same folder.
    const bool used = fs::is_regular_file(fs::path(wanted) / "launch.log", error);
    const std::string dir = used ? wanted + "/" + name : wanted;
    fs::create_directories(dir, error);
    if (!error && access(dir.c_str(), W_OK | X_OK) == 0) return dir;
    throw Error(ErrorKind::kResource, "launcher",
                "--log-dir " + wanted + " cannot be written: " + (error ? error.message() : std::strerror(errno)));
  }
  const char* tmp = std::getenv("TMPDIR");
  const std::string fallback = std::string(tmp && *tmp ? tmp : "/tmp") + "/annulus-logs-" + std::to_string(getuid());
  for (const std::string& base : {std::string("runs/logs"), fallback}) {
    const std::string dir = base + "/" + name;
    if (fs::create_directories(dir, error) && !error) return dir;
  }
  throw Error(ErrorKind::kResource, "launcher",
              "no folder for log files: neither runs/logs nor " + fallback + " can be written (" + error.message() +
                  "); name one with --log-dir");
}

void set_env(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

// Beside those, ANNULUS_LAUNCH_MPIRUN, which is set when mpirun starts.
std::vector<std::string> variables_of_ranks() {
  std::vector<std::string> names = forwarded_variables();
  if (std::getenv("ANNULUS_LAUNCH_MPIRUN") == nullptr) names.emplace_back("ANNULUS_LAUNCH_MPIRUN");
  return names;
}

// Where the ranks go, as far as this host can tell.
struct Planned {
  std::string text;             // for a person
  bool oversubscribed = false;  // more ranks than cores: mpirun must allow it
};

Planned plan(const LaunchOptions& options) {
  if (const std::string by = hosts_named_by(options.mpi_args); !by.empty()) {
    // How many ranks each host gets is mpirun's to say, and so is whether they are more than its cores.
    return {"placement: the hosts are named by " + by +
            "; each rank takes its place on its own (`annulus topology --xml FILE`, once a host, shows which)\n"};
  }
  const PlacedHost placed = place_on(
      this_host(),
      {.ranks = options.ranks, .context = options.context, .device = options.device, .hcas = options.network.hcas});
  return {topology_table({placed.machine}, placed.placement), placed.placement.oversubscribed};
}

}  // namespace

int run_launch(const LaunchOptions& options) {
  if (launch_info().launched) {
    throw Error(ErrorKind::kUsage, "launcher",
                "`launch` inside a rank: this process was itself started by mpirun or srun, and would start ranks of "
                "ranks; give mpirun the verb without `launch`, or type `launch` without mpirun");
  }
  const Mpirun mpirun = find_mpirun();
  const Planned planned = plan(options);

  set_env("ANNULUS_WORLD_SIZE", std::to_string(options.ranks));
  set_env("ANNULUS_LAUNCH_COMMAND", words_to_line(options.typed));
  set_env("ANNULUS_PROGRAM", options.typed.front());  // ranks say it in the commands they suggest
  if (std::getenv("ANNULUS_PROGRESS") == nullptr)
    set_env("ANNULUS_PROGRESS", takes_escapes(STDOUT_FILENO) ? "live" : "plain");
  set_env("ANNULUS_COLUMNS", std::to_string(terminal_columns(STDOUT_FILENO)));
  MpirunRequest request;
  request.ranks = options.ranks;
  request.oversubscribe = planned.oversubscribed;
  request.as_root = geteuid() == 0;
  request.interfaces = options.network.interfaces;
  request.extra = options.mpi_args;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorKind::kResource, "launcher", "cannot read /proc/self/exe: " + error.message());
  request.program = {self.string()};
  request.program.insert(request.program.end(), options.program.begin(), options.program.end());

  if (options.dry_run) {
    set_env("ANNULUS_LAUNCH_DIR", SessionDir::pattern());
    request.session_dir = SessionDir::pattern();
    request.forward = variables_of_ranks();
    std::printf("%s\nOpen MPI %s would be started as (%s: a fresh folder):\n\n  %s\n", planned.text.c_str(),
                mpirun.version.c_str(), request.session_dir.c_str(),
                shell_quote(mpirun_command(mpirun, request)).c_str());
    return 0;
  }

  const Signals signals;
  const SessionDir session;
  const std::string log_dir = make_log_dir(options.log_dir);
  set_env("ANNULUS_LAUNCH_DIR", session.path());
  set_env("ANNULUS_LOG_DIR", log_dir);
  if (std::getenv("HOME") == nullptr) set_env("HOME", session.path());
  if (request.as_root) {
    set_env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    set_env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  request.session_dir = session.path();
  request.forward = variables_of_ranks();
  const std::vector<std::string> command = mpirun_command(mpirun, request);

  return supervise(command, options, signals, session.path(), log_dir,
                   shell_quote(options.typed) + "\n" + now_text("%Y-%m-%d %H:%M:%S") + "\n\n" + planned.text + "\n" +
                       shell_quote(command) + "\n\n");
}

}  // namespace annulus
