// See rank.h.
#include "launcher/launch/rank.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "comm/hosts.h"
#include "common/environment.h"
#include "common/files.h"
#include "common/logging/log_setup.h"
#include "common/text.h"
#include "launcher/hosts/back_channel.h"
#include "launcher/hosts/sockets.h"

namespace annulus {
namespace {

constexpr size_t kLongestPiece = 3500;         // the most bytes of a text in one line
constexpr std::chrono::seconds kCallTime{20};  // the time to reach the launcher

int control_fd = -1;
int own_rank = 0;

// Sends one line, whose line breaks are sent as \1. All ranks of the launcher's host write to one pipe, which keeps a
// line of at most PIPE_BUF bytes whole. A connection of a rank on another host gives no such promise: a write may be
// partial, and the lock keeps lines of several threads apart.
void write_line(std::string text) {
  if (control_fd < 0) return;
  std::replace(text.begin(), text.end(), '\n', '\1');
  text += '\n';
  static std::mutex* const mutex = new std::mutex;  // never destroyed, because destructors of static objects may log
  const std::lock_guard<std::mutex> lock(*mutex);
  write_fully(control_fd, text);  // if the launcher is gone, PDEATHSIG ends this process
}

void send_line(std::string text) {
  if (control_fd < 0) return;
  std::fflush(stdout);
  std::fflush(stderr);
  write_line(std::move(text));
}

// Sends a text that may be longer than a line of the pipe. The last piece begins with the word `last`, and all pieces
// before it with `more`.
void write_pieces(const char* more, const char* last, const std::string& text) {
  for (size_t at = 0; at < text.size(); at += kLongestPiece) {
    const bool ends = at + kLongestPiece >= text.size();
    write_line(std::string(ends ? last : more) + " " + std::to_string(own_rank) + " " + text.substr(at, kLongestPiece));
  }
}

// Sends a record. Unlike send_line it flushes nothing, because another thread may be blocked in its output.
void send_record(const LogRecord& record, bool shown) {
  const char flags = static_cast<char>('0' + (shown ? 1 : 0) + (record.of_one ? 2 : 0));
  write_pieces("logs", "log", flags + json_text(record));
}

void send_output_to(int out, int err) {
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  close(out);
  close(err);
}

// Connects a rank on the launcher's host, through the named pipes in the launch's folder.
void open_pipes(const std::string& dir) {
  const auto parent = static_cast<pid_t>(number_from_environment("ANNULUS_LAUNCH_MPIRUN", 0, 0, 1e9));
  if (parent != 0 && getppid() != parent) _exit(137);  // mpirun ended before PR_SET_PDEATHSIG was set
  const std::string base = dir + "/rank-" + std::to_string(own_rank);
  // Non-blocking, so that opening fails if there is no reader because the launcher has ended.
  const int control = open((dir + "/control").c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  const int out = open((base + ".out").c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  const int err = open((base + ".err").c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  if (control < 0 || out < 0 || err < 0) _exit(137);
  for (int fd : {control, out, err}) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  send_output_to(out, err);
  control_fd = control;
  // MPI's shared memory files are put into the launch's folder. Otherwise two jobs in two PID namespaces would choose
  // the same names; and with the folder, files of a killed job are removed. This is set in the rank and not by mpirun,
  // because other hosts have no such folder.
  for (const char* name : {"btl_vader", "btl_sm", "osc_sm"}) {
    setenv(("OMPI_MCA_" + std::string(name) + "_backing_directory").c_str(), dir.c_str(), 1);
  }
}

// Connects a rank on another host, through the back channel.
void call_launcher(const char* back) {
  const auto call = [&](const char* stream) { return call_back(back, "rank", own_rank, stream, kCallTime); };
  const int control = call("control");
  const int out = call("out");
  const int err = call("err");
  send_output_to(out, err);
  control_fd = control;
}

}  // namespace

void attach_to_launcher(const LaunchInfo& info) {
  const char* const dir = text_from_environment("ANNULUS_LAUNCH_DIR");
  if (dir == nullptr || !info.launched) return;
  own_rank = info.rank;
  raise_file_limit();
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // mpirun is killed with the launcher, and this rank with mpirun
  // mpirun passes this on in addition to the folder that it gives each rank, and MPI refuses to have both.
  unsetenv("OMPI_MCA_orte_local_tmpdir_base");
  const char* const place = text_from_environment("ANNULUS_LAUNCH_PLACE");
  const char* const back = text_from_environment("ANNULUS_BACK");
  if (place != nullptr && place == process_place() && access((std::string(dir) + "/control").c_str(), F_OK) == 0) {
    open_pipes(dir);
  } else if (back != nullptr) {
    call_launcher(back);
  } else {
    return;  // mpirun carries the output
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);  // line by line, although stdout is a pipe
  const std::string hello =
      "start " + std::to_string(info.rank) + " " + std::to_string(static_cast<long>(getpid())) + " " + host_name();
  write_line(hello);
  set_log_console(send_record);
}

std::string process_place() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::error_code error;
  const std::string processes = std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
  return boot + " " + host.data() + " " + processes;
}

bool attached_to_launcher() { return control_fd >= 0; }

void report_exit(int code) { send_line("exit " + std::to_string(own_rank) + " " + std::to_string(code)); }

void report_error(const Error& error, bool said) {
  send_line((said ? "said " : "failed ") + std::to_string(own_rank) + " " + error.wire().substr(0, kLongestPiece));
}

void report_following(const Error& error, int failed) {
  send_line("follows " + std::to_string(own_rank) + " " + std::to_string(failed) + " " +
            error.wire().substr(0, kLongestPiece));
}

void report_number(int rank) { write_line("number " + std::to_string(own_rank) + " " + std::to_string(rank)); }

void report_checkpoint(int64_t step, const std::string& folder, const std::vector<std::string>& command) {
  std::vector<std::string> words = {std::to_string(step), folder};
  words.insert(words.end(), command.begin(), command.end());
  std::fflush(stdout);
  std::fflush(stderr);
  write_pieces("keeps", "kept", words_to_line(words));
}

}  // namespace annulus
