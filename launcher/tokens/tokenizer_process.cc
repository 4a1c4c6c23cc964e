// See tokenizer_process.h.
#include "launcher/tokens/tokenizer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "comm/bootstrap/bootstrap.h"
#include "common/descriptor.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "launcher/python_programs/script.h"

namespace annulus {
namespace {

constexpr int kPollMs = 100;  // how often a wait looks for an interruption
constexpr std::chrono::milliseconds kSignalArrives{1000};

[[noreturn]] void fail_to_run(const std::string& what, int reason) {
  throw Error(ErrorKind::kResource, "tokenize",
              "the tokenizer could not be run: " + what + ": " + std::strerror(reason));
}

// Returns whether this process is interrupted. A terminal sends Ctrl-C to all its processes, and `timeout` or a job
// manager SIGTERM, so the child may end before the thread that watches for signals here has seen its own.
bool interrupted_like(int signal) {
  if (signal != SIGINT && signal != SIGTERM && signal != SIGHUP) return interrupted();
  const auto until = std::chrono::steady_clock::now() + kSignalArrives;
  while (!interrupted() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return interrupted();
}

std::vector<int64_t> ids_of(const std::string& answer) {
  const nlohmann::json ids = nlohmann::json::parse(answer, nullptr, /*allow_exceptions=*/false);
  std::vector<int64_t> tokens;
  if (ids.is_array()) tokens.reserve(ids.size());
  for (const nlohmann::json& id : ids) {
    if (!ids.is_array() || !id.is_number_unsigned()) break;
    tokens.push_back(id.get<int64_t>());
  }
  if (!ids.is_array() || tokens.size() != ids.size()) {
    throw Error(ErrorKind::kInternal, "tokenize",
                "the process that encodes text wrote no ids: " + answer.substr(0, 200));
  }
  return tokens;
}

}  // namespace

// A process whose standard input and output are one socket. A pipe would be no simpler, and writing to one whose reader
// has ended raises SIGPIPE, which counts as an interruption (common/interrupt.h).
class TokenizerChild {
 public:
  TokenizerChild(const std::vector<std::string>& words, std::string what) : what_(std::move(what)) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail_to_run("socketpair", errno);
    socket_.emplace(ends[0]);
    const Descriptor theirs(ends[1]);
    const std::vector<std::string> command = tokenizer_command(words);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, theirs, STDOUT_FILENO);
    if (const int wrong = spawn(command, actions, 0, pid_); wrong != 0) fail_to_run(command[0], wrong);
  }
  TokenizerChild(const TokenizerChild&) = delete;
  TokenizerChild& operator=(const TokenizerChild&) = delete;
  // The process keeps nothing that could be lost, and it may be loading a tokenizer or encoding a text, or be stopped.
  ~TokenizerChild() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    wait_for_end();
  }

  // Sends a request and returns what the process writes up to the end of a line. If the process ends first, throws the
  // error that its status tells, or returns what there is if that is 0. Returns {} if this process is interrupted.
  std::string ask(std::string_view request) {
    std::string answer;
    while ((!request.empty() || !answer.ends_with('\n')) && exchange(request, answer)) continue;
    if (!answer.ends_with('\n')) require_success();
    return interrupted() ? std::string() : answer;
  }

  // Waits until the process ends, and throws the error that its status tells. Returns if this process is interrupted.
  void finish() {
    shutdown(*socket_, SHUT_WR);
    std::string_view nothing;
    for (std::string ignored; exchange(nothing, ignored);) ignored.clear();
    require_success();
  }

 private:
  static bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

  // Waits until a part of the request can be sent, or a part of the answer is there, and moves it. Either direction may
  // be full, so neither waits for the other. Returns false if the process has closed its end or this one is
  // interrupted.
  bool exchange(std::string_view& request, std::string& answer) {
    pollfd ready{*socket_, static_cast<short>(POLLIN | (request.empty() ? 0 : POLLOUT)), 0};
    const int count = poll(&ready, 1, kPollMs);
    if (interrupted()) return false;
    if (count < 0 && errno != EINTR) fail_to_run("poll", errno);
    if (count <= 0) return true;
    if ((ready.revents & POLLOUT) != 0) send_some(request);
    return (ready.revents & ~POLLOUT) == 0 || receive_some(answer);
  }

  // Removes from `request` what could be sent: all of it if nobody receives it any more, which receive_some() will see.
  void send_some(std::string_view& request) {
    const ssize_t sent = send(*socket_, request.data(), request.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0 || !later(errno)) request.remove_prefix(sent >= 0 ? sent : request.size());
  }

  // Returns false if the process has closed its end. (If it left something unread, the error is ECONNRESET.)
  bool receive_some(std::string& answer) {
    const ssize_t size = recv(*socket_, piece_.data(), piece_.size(), MSG_DONTWAIT);
    if (size > 0) answer.append(piece_.data(), size);
    return size > 0 || (size < 0 && later(errno));
  }

  int wait_for_end() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
    pid_ = -1;
    return status;
  }

  void require_success() {
    if (interrupted()) return;
    const int status = wait_for_end();
    if (interrupted_like(WIFSIGNALED(status) ? WTERMSIG(status) : 0)) return;
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      throw Error(ErrorKind::kResource, "tokenize",
                  "the process that " + what_ + " was ended by signal " + std::to_string(signal) +
                      (signal == SIGKILL ? ": was this machine out of memory?" : ""));
    }
    if (const int code = WEXITSTATUS(status); code != 0) {
      const auto kind =
          code <= static_cast<int>(ErrorKind::kUnavailable) ? static_cast<ErrorKind>(code) : ErrorKind::kInternal;
      throw ReportedError(Error(kind, "tokenize", "the process that " + what_ + " failed"));
    }
  }

  const std::string what_;
  std::optional<Descriptor> socket_;
  pid_t pid_ = -1;  // -1 once its status is known
  std::array<char, 65536> piece_;
};

std::vector<std::string> tokenizer_command(const std::vector<std::string>& words) {
  return script_command("tokenizer", "tokenize", "the tokenizer libraries", words);
}

TokenizerProcess::TokenizerProcess(const std::string& tokenizer)
    : child_(std::make_unique<TokenizerChild>(std::vector<std::string>{"encode", "--tokenizer=" + tokenizer},
                                              "encodes text")) {}

TokenizerProcess::~TokenizerProcess() = default;

std::vector<int64_t> TokenizerProcess::encode(std::string_view text, bool beginning) {
  if (failure_) std::rethrow_exception(failure_);
  try {
    if (child_ && !interrupted()) {
      std::string request = (beginning ? "beginning " : "bare ") + std::to_string(text.size()) + "\n";
      request += text;
      const std::string answer = child_->ask(request);
      if (!interrupted()) return ids_of(answer);
    }
    child_.reset();
    return {};
  } catch (...) {
    failure_ = std::current_exception();
    child_.reset();
    throw;
  }
}

void run_tokenizer(const std::vector<std::string>& words, const std::string& what) {
  TokenizerChild(words, what).finish();
}

std::string make_token_table(const std::string& tokenizer) {
  const char* const folder = text_from_environment("TMPDIR");
  std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/annulus-table-XXXXXX";
  const Descriptor made(mkostemp(path.data(), O_CLOEXEC));
  if (made < 0) {
    throw Error(ErrorKind::kResource, "sample", path + " could not be made: " + writing_error_text(errno));
  }
  try {
    run_tokenizer({"table", "--tokenizer=" + tokenizer, "--output=" + path}, "makes the table of tokens");
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
  return path;
}

}  // namespace annulus
