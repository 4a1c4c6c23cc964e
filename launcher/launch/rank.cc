// See rank.h.
#include "launcher/launch/rank.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>

#include "comm/hosts.h"
#include "common/environment.h"
#include "common/logging/log_setup.h"
#include "common/trace/beat.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/hosts/sockets.h"
#include "launcher/launch/watcher.h"

namespace annulus {
namespace {

constexpr std::chrono::seconds kConnectTime{20};  // the time to reach the launcher

int control_fd = -1;

void send_message(const nlohmann::json& message) {
  if (control_fd < 0) return;
  static std::mutex* const mutex = new std::mutex;  // never destroyed, because destructors of static objects may log
  const std::lock_guard<std::mutex> lock(*mutex);
  // If the launcher is gone, PDEATHSIG ends this process.
  write_all(control_fd, message_line(message), std::chrono::steady_clock::time_point::max());
}

// Sends what comes after all that this process has printed so far.
void send_after_output(const nlohmann::json& message) {
  if (control_fd < 0) return;
  std::fflush(stdout);
  std::fflush(stderr);
  send_message(message);
}

// Flushes nothing, because another thread may be blocked in its output.
void send_record(const LogRecord& record, bool shown) {
  send_message({{"record", json_text(record)}, {"shown", shown}, {"of_one", record.of_one}});
}

// Prepares a rank on the launcher's host.
void settle_beside_launcher(const std::string& dir) {
  const auto parent = static_cast<pid_t>(number_from_environment("ANNULUS_LAUNCH_MPIRUN", 0, 0, 1e9));
  if (parent != 0 && getppid() != parent) _exit(137);  // mpirun ended before PR_SET_PDEATHSIG was set
  // MPI's shared memory files are put into the launch's folder. Otherwise two jobs in two PID namespaces would choose
  // the same names; and with the folder, files of a killed job are removed. This is set in the rank and not by mpirun,
  // because other hosts have no such folder.
  for (const char* name : {"btl_vader", "btl_sm", "osc_sm"}) {
    setenv(("OMPI_MCA_" + std::string(name) + "_backing_directory").c_str(), dir.c_str(), 1);
  }
}

// Memory for this rank's beat, which has no name and goes with the process.
struct BeatMemory {
  int fd = -1;  // through which the watch of this host opens it
  BeatPage* page = nullptr;
};
BeatMemory make_beat_memory() {
  const int fd = memfd_create("annulus-beat", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(BeatPage)) != 0) return {};
  void* const memory = mmap(nullptr, sizeof(BeatPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return {};
  return {fd, new (memory) BeatPage};
}

}  // namespace

void attach_to_launcher(const LaunchInfo& info) {
  const char* const dir = text_from_environment("ANNULUS_LAUNCH_DIR");
  const char* const launcher = text_from_environment("ANNULUS_LAUNCHER");
  if (dir == nullptr || launcher == nullptr || !info.launched) return;
  raise_file_limit();
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // mpirun is killed with the launcher, and this rank with mpirun
  // mpirun passes this on in addition to the folder that it gives each rank, and MPI refuses to have both.
  unsetenv("OMPI_MCA_orte_local_tmpdir_base");
  const char* const place = text_from_environment("ANNULUS_LAUNCH_PLACE");
  const bool beside = place != nullptr && place == process_place() && access(dir, X_OK) == 0;
  // mpirun itself carries the output of a rank that it started elsewhere, although the launcher knew of this host
  // alone.
  if (!beside && is_local_address(launcher)) return;
  if (beside) settle_beside_launcher(dir);
  if (info.local_rank == 0) start_watcher(launcher, info.rank, beside ? dir : "");
  const auto connect = [&](const char* purpose) {
    return connect_to_launcher(launcher, purpose, info.rank, kConnectTime);
  };
  control_fd = connect("control");
  for (const auto& [purpose, stream] : {std::pair("out", STDOUT_FILENO), std::pair("err", STDERR_FILENO)}) {
    const int fd = connect(purpose);
    dup2(fd, stream);
    close(fd);
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);  // line by line, although stdout is a socket
  const BeatMemory beat = make_beat_memory();
  send_message(
      {{"host", host_name()}, {"beat", {{"place", process_place()}, {"process", getpid()}, {"page", beat.fd}}}});
  set_beat_page(beat.page);
  set_log_console(send_record);
}

std::string process_place() {
  std::error_code error;
  return host_identity() + " " + std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
}

bool attached_to_launcher() { return control_fd >= 0; }

void report_exit(int code) { send_after_output({{"exit", code}}); }

void report_error(const Error& error, bool said) { send_after_output({{"error", error.wire()}, {"reported", said}}); }

void report_following(const Error& error, int failed) {
  send_after_output({{"error", error.wire()}, {"reported", false}, {"cause", failed}});
}

void report_number(int rank) { send_message({{"rank", rank}}); }

void report_step(int64_t step) { send_message({{"step", step}}); }

void report_checkpoint(int64_t step, const std::string& folder, const std::vector<std::string>& command) {
  send_after_output({{"checkpoint", {{"step", step}, {"folder", folder}, {"command", command}}}});
}

}  // namespace annulus
