// See launch.h.
#include "launcher/launch/launch.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "comm/bootstrap/launch_info.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/logging/log_setup.h"
#include "common/terminal.h"
#include "common/text.h"
#include "launcher/doctor/host_checks.h"
#include "launcher/hosts/host_discovery.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/hosts/session_dir.h"
#include "launcher/hosts/sockets.h"
#include "launcher/launch/log_folder.h"
#include "launcher/launch/rank.h"
#include "launcher/launch/restarts.h"
#include "launcher/launch/signals.h"
#include "launcher/launch/supervisor.h"
#include "launcher/topology/host_plan.h"
#include "launcher/topology/report.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

void set_env(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

// The variables that are passed to ranks: forwarded_variables() and ANNULUS_LAUNCH_MPIRUN, which MpirunProcess sets.
std::vector<std::string> variables_of_ranks() {
  std::vector<std::string> names = forwarded_variables();
  if (std::getenv("ANNULUS_LAUNCH_MPIRUN") == nullptr) names.emplace_back("ANNULUS_LAUNCH_MPIRUN");
  return names;
}

// Where the ranks go.
struct Planned {
  std::string text;                                     // a table to print
  bool oversubscribed = false;                          // more ranks than cores: mpirun must allow it
  std::vector<std::pair<std::string, int>> hosts = {};  // and their ranks, for mpirun
};

HostRequest request_of(const LaunchOptions& options) {
  return {.ranks = options.ranks,
          .context = options.context(options.ranks),
          .device = options.device,
          .hcas = options.network.hcas};
}

// Plans a job on this host alone, or on hosts that the user has named to mpirun itself.
Planned plan_here(const LaunchOptions& options) {
  if (const std::string by = hosts_named_by(options.mpi_args); !by.empty()) {
    // In this case mpirun decides how many ranks each host gets, and whether they may be more than its cores.
    return {"placement: the hosts are named by " + by +
            "; each rank takes its place on its own host (`annulus topology --xml FILE`, once for each host, shows "
            "it)\n"};
  }
  const PlacedHost placed = place_on(this_host(), request_of(options));
  Planned planned{topology_table({placed.machine}, placed.placement), placed.placement.oversubscribed};
  if (options.hosts) planned.hosts = {{options.hosts->hosts.front().name, options.ranks}};
  return planned;
}

// Logs a table, and prints it without the prefix of a record ("annulus: ").
void say_table(LogLevel level, const std::string& table) {
  if (log_settings().json) return log(level, "hosts", table);
  log_unshown(level, "hosts", table);
  if (log_enabled(level)) std::fputs(table.c_str(), stderr);
}

// Throws if the ranks cannot run on these hosts; prints warnings once. Returns the table of findings.
std::string check_hosts(const std::vector<HostReport>& reports, const std::vector<int>& ranks,
                        const LaunchOptions& options) {
  const CheckRequest request{
      .ranks = ranks, .interfaces = options.network.interfaces, .device = options.device, .by_launch = true};
  std::vector<Finding> findings = check_together(reports, request);
  for (size_t i = 0; i < reports.size(); ++i) {
    for (Finding& finding : check_host(reports[i], request, i)) findings.push_back(std::move(finding));
  }
  const auto is_error = [](const Finding& finding) { return finding.severity == Severity::kError; };
  const auto first = std::find_if(findings.begin(), findings.end(), is_error);
  const std::string differences = difference_table(reports);
  const std::string table = findings_table(findings, /*all=*/false);
  if (first == findings.end()) {
    if (!table.empty() && !options.dry_run) say_table(LogLevel::kWarn, table + "\n");
    return table + (options.dry_run && !differences.empty() ? "what differs between the hosts:\n" + differences : "");
  }
  say_table(LogLevel::kError, table);
  if (!differences.empty()) say_table(LogLevel::kError, "what differs between the hosts:\n" + differences);
  throw Error(first->kind, "launcher",
              (first->host.empty() ? "" : "host " + first->host + ": ") + first->check + ": " + first->found + "; " +
                  first->remedy);
}

// Plans a job on several hosts, or on one other host, after asking them. Returns nothing if a signal stopped that;
// `stop_signal` is then its number.
std::optional<Planned> plan_over_hosts(const LaunchOptions& options, LauncherSocket& socket, const Signals* signals,
                                       int& stop_signal) {
  DiscoveryOptions asked{.hosts = *options.hosts,
                         .interfaces = options.network.interfaces,
                         .mpi_args = options.mpi_args,
                         .facts = {.files = options.files, .devices = options.device != "cpu"}};
  if (signals != nullptr) {
    asked.stop_fd = signals->fd;
    asked.stop = [&] { return (stop_signal = signals->take_request()) != 0; };
  }
  const std::vector<HostReport> reports = discover_hosts(asked, socket);
  if (reports.empty()) return std::nullopt;
  std::vector<Host> hosts;
  for (const HostReport& report : reports) hosts.push_back(report.host);
  const HostRequest request = request_of(options);
  std::vector<int> slots;
  for (const HostSlots& host : options.hosts->hosts) slots.push_back(host.slots);
  std::optional<PlacedHosts> placed;
  try {
    placed = place_on(hosts, slots, request);
  } catch (const Error&) {
    check_hosts(reports, {}, options);  // may throw a more helpful error, such as missing GPUs of a host
    throw;
  }
  std::vector<int> ranks(hosts.size(), 0);
  Planned planned;
  for (const RankPlacement& rank : placed->placement.ranks) {
    const auto host = static_cast<size_t>(rank.host_index);
    if (ranks[host]++ == 0) planned.hosts.emplace_back(options.hosts->hosts[host].name, 0);
    ++planned.hosts.back().second;
  }
  // Only hosts that get ranks are checked, so that another host cannot stop the job.
  std::vector<HostReport> used;
  std::vector<int> ranks_of_used;
  for (size_t i = 0; i < reports.size(); ++i) {
    if (ranks[i] == 0) continue;
    used.push_back(reports[i]);
    ranks_of_used.push_back(ranks[i]);
  }
  const std::string found = check_hosts(used, ranks_of_used, options);
  planned.text = topology_table(placed->machines, placed->placement) + (found.empty() ? "" : "\n" + found);
  planned.oversubscribed = placed->placement.oversubscribed;
  return planned;
}

// Throws before anything starts if the launcher may not open enough files, because ranks would then get no answer.
void require_files(int ranks, size_t hosts) {
  const int64_t most = raise_file_limit();
  // For each rank: its two output streams, its control connection, and its log; for each host its watch.
  const int64_t wanted = 64 + int64_t{4} * ranks + static_cast<int64_t>(hosts);
  if (most >= wanted) return;
  throw Error(ErrorKind::kResource, "launcher",
              "the launcher of " + counted(ranks, "rank") + " needs " + std::to_string(wanted) +
                  " open files, but this process may have " + std::to_string(most) + "; use ulimit -n " +
                  std::to_string(std::max<int64_t>(wanted, 4096)) +
                  " before the start, or permanently nofile in /etc/security/limits.conf");
}

// Throws before anything starts if ranks may not write files as large as those that MPI makes in shared memory: Open
// MPI needs 4 MiB and a little more, and would end the ranks without a reason.
void require_file_size() {
  constexpr rlim_t kNeeded = rlim_t{8} << 20;
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= kNeeded) return;
  throw Error(ErrorKind::kResource, "launcher",
              "MPI needs files of " + with_commas(kNeeded, "byte") + " in shared memory, but this process may write " +
                  "files of at most " + with_commas(limit.rlim_cur, "byte") +
                  "; use ulimit -f unlimited before the start");
}

// Returns the hosts that answer when each is asked alone, or nothing if a signal stopped that.
std::optional<HostList> hosts_that_answer(const LaunchOptions& options, const Signals& signals, int& stop_signal) {
  HostList answering = *options.hosts;
  answering.hosts.clear();
  for (const HostSlots& host : options.hosts->hosts) {
    DiscoveryOptions asked{
        .hosts = *options.hosts, .interfaces = options.network.interfaces, .mpi_args = options.mpi_args};
    asked.hosts.hosts = {host};
    asked.stop_fd = signals.fd;
    asked.stop = [&] { return (stop_signal = signals.take_request()) != 0; };
    try {
      LauncherSocket socket(listen_tcp(options.network.interfaces));
      if (discover_hosts(asked, socket).empty()) return std::nullopt;
      answering.hosts.push_back(host);
    } catch (const Error& error) {
      log_warn("", "host " + host.name + " is left out: " + std::string(error.message()));
    }
  }
  return answering;
}

// Leaves out the hosts that do not answer, and where the slots of the others are too few, takes as many ranks as fit
// them and can run the subcommand. Throws `missing` if nothing can be left out, and Error(kPlan) if too little is left.
// Returns false if a signal stopped it.
bool leave_out_lost_hosts(LaunchOptions& options, const Error& missing, const Signals& signals, int& stop_signal) {
  const std::optional<HostList> answering = hosts_that_answer(options, signals, stop_signal);
  if (!answering) return false;
  if (answering->hosts.empty() || answering->hosts.size() == options.hosts->hosts.size()) throw missing;
  const auto unlimited = [](const HostSlots& host) { return host.slots == 0; };
  int64_t slots = 0;
  for (const HostSlots& host : answering->hosts) slots += host.slots;
  const bool any = std::any_of(answering->hosts.begin(), answering->hosts.end(), unlimited);
  int ranks = any ? options.ranks : static_cast<int>(std::min<int64_t>(slots, options.ranks));
  std::string refused;
  for (; ranks > 0; --ranks) {
    try {
      options.context(ranks);
      break;
    } catch (const Error& error) {
      refused = error.message();
    }
  }
  if (ranks == 0) {
    throw Error(ErrorKind::kPlan, "launcher",
                "not started again: the hosts that answer have " + counted(slots, "slot") +
                    ", and no such number of ranks can run this: " + refused);
  }
  if (ranks < options.ranks) {
    log_warn("", "the hosts that answer have " + counted(slots, "slot") + ": the job goes on with " +
                     counted(ranks, "rank") + " instead of " + std::to_string(options.ranks));
  }
  options.hosts = answering;
  options.ranks = ranks;
  return true;
}

// Starts the job once. `log_dir` is as in LogFolder; the folder that was made for it is then in `logs`.
Attempt launch_once(const LaunchOptions& options, const Mpirun& mpirun, const Signals* signals,
                    const std::string& log_dir, std::optional<LogFolder>& logs) {
  // Several names are asked even if all mean this host, because that finds the error.
  const bool elsewhere = options.hosts
                             ? options.hosts->hosts.size() > 1 || !is_this_host(options.hosts->hosts.front().name)
                             : !hosts_named_by(options.mpi_args).empty();
  std::optional<LauncherSocket> socket;
  const size_t hosts = options.hosts ? options.hosts->hosts.size() : 0;
  const size_t callers = std::max(hosts, static_cast<size_t>(options.ranks));
  if (elsewhere) socket.emplace(listen_tcp(options.network.interfaces), callers);
  std::optional<Planned> planned;
  if (elsewhere && options.hosts) {
    int stop_signal = 0;
    planned = plan_over_hosts(options, *socket, signals, stop_signal);
    if (!planned) {
      log_warn("", "stopped before any rank was started");
      return {.code = 128 + stop_signal, .stopped = true};
    }
  } else {
    planned = plan_here(options);
  }

  set_env("ANNULUS_WORLD_SIZE", std::to_string(options.ranks));
  set_env("ANNULUS_LAUNCH_COMMAND", words_to_line(options.typed));
  set_env("ANNULUS_PROGRAM", options.typed.front());  // for the commands that ranks suggest
  set_env("ANNULUS_LAUNCH_PLACE", process_place());
  set_env("ANNULUS_STUCK_AFTER", exact(options.stuck_seconds));
  if (std::getenv("ANNULUS_PROGRESS") == nullptr)
    set_env("ANNULUS_PROGRESS", takes_escapes(STDOUT_FILENO) ? "live" : "plain");
  set_env("ANNULUS_COLUMNS", std::to_string(terminal_columns(STDOUT_FILENO)));
  MpirunRequest request;
  request.ranks = options.ranks;
  request.oversubscribe = planned->oversubscribed;
  request.as_root = geteuid() == 0;
  request.hosts = planned->hosts;
  request.shield_daemons = elsewhere && daemons_need_shield();
  request.interfaces = options.network.interfaces;
  request.extra = options.mpi_args;
  request.program = {own_program()};
  request.program.insert(request.program.end(), options.program.begin(), options.program.end());

  if (options.dry_run) {
    set_env("ANNULUS_LAUNCHER", "");
    set_env("ANNULUS_LAUNCH_DIR", SessionDir::pattern());
    request.session_dir = SessionDir::pattern();
    if (need_hostfile(request.hosts)) request.hostfile = request.session_dir + "/hosts";
    request.forward = variables_of_ranks();
    std::printf("%s\nOpen MPI %s would be started as follows (%s stands for a new folder):\n\n  %s\n",
                planned->text.c_str(), mpirun.version.c_str(), request.session_dir.c_str(),
                shell_quote(mpirun_command(mpirun, request)).c_str());
    return {};
  }

  const SessionDir session;
  logs.emplace(log_dir);
  if (log_dir.empty()) prune_log_folders(fs::path(logs->path()).parent_path(), options.keep_logs);
  if (!socket) socket.emplace(listen_unix(session.path() + "/launcher"), callers);
  set_env("ANNULUS_LAUNCHER", socket->address());
  set_env("ANNULUS_LAUNCH_DIR", session.path());
  set_env("ANNULUS_LOG_DIR", logs->path());
  if (std::getenv("HOME") == nullptr) set_env("HOME", session.path());
  if (request.as_root) {
    set_env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    set_env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  request.session_dir = session.path();
  if (need_hostfile(request.hosts)) {
    request.hostfile = session.path() + "/hosts";
    write_hostfile(request.hostfile, request.hosts);
  }
  request.forward = variables_of_ranks();
  const std::vector<std::string> command = mpirun_command(mpirun, request);

  return supervise(command, options, *signals, logs->path(),
                   shell_quote(options.typed) + "\n" + now_text("%Y-%m-%d %H:%M:%S") + "\n\n" + planned->text + "\n" +
                       shell_quote(command) + "\n\n",
                   *socket);
}

}  // namespace

int run_launch(const LaunchOptions& options) {
  const LaunchInfo info = launch_info();
  // A shell that salloc starts may itself be a Slurm step of one task.
  if (info.launched && !(info.launcher == "Slurm" && info.size == 1)) {
    throw Error(ErrorKind::kUsage, "launcher",
                "`launch` inside a rank: this process was itself started by mpirun or srun, and would start ranks of "
                "ranks; give mpirun the subcommand without `launch`, or run `launch` without mpirun");
  }
  const Mpirun mpirun = find_mpirun();
  if (!options.dry_run) {
    require_files(options.ranks, options.hosts ? options.hosts->hosts.size() : 0);
    require_file_size();
  }
  // --dry-run keeps the default action of signals.
  std::optional<Signals> signals;
  if (!options.dry_run) signals.emplace();
  LaunchOptions now = options;
  std::optional<LogFolder> first;  // kept to the end, so that its lock is
  std::vector<Attempt> attempts;
  while (true) {
    std::optional<LogFolder> later;
    std::optional<LogFolder>& logs = first ? later : first;
    const std::string wanted =
        first ? first->path() + "/attempt-" + std::to_string(attempts.size() + 1) : options.log_dir;
    try {
      attempts.push_back(launch_once(now, mpirun, signals ? &*signals : nullptr, wanted, logs));
    } catch (const Error& error) {
      if (attempts.empty() || error.kind() != ErrorKind::kUnavailable || !now.hosts) throw;
      int stop_signal = 0;
      if (!leave_out_lost_hosts(now, error, *signals, stop_signal)) return 128 + stop_signal;
      continue;
    }
    NextAttempt next = next_attempt(attempts, options.restarts, options.program);
    if (!next.why.empty()) log_warn("", next.why);
    if (!next.again) return attempts.back().code;
    now.program = std::move(next.program);
  }
}

}  // namespace annulus
