// See encode_prompt.h.
#include "launcher/tokens/encode_prompt.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "comm/bootstrap/bootstrap.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "launcher/tokens/tokenizer_script.h"

namespace annulus {
namespace {

[[noreturn]] void fail(const std::string& what, int reason) {
  throw Error(ErrorKind::kResource, "sample",
              "the prompt could not be encoded: " + what + ": " + std::strerror(reason));
}

// Closed when it goes.
struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

// A file in memory, not a pipe: a child that ends before it has read all would raise SIGPIPE.
int file_with(const std::string& text) {
  const int file = memfd_create("prompt", MFD_CLOEXEC);
  if (file < 0) fail("memfd_create", errno);
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(file, text.data() + done, text.size() - done);
    if (n < 0) fail("write", errno);
    done += static_cast<size_t>(n);
  }
  lseek(file, 0, SEEK_SET);
  return file;
}

pid_t start(std::vector<std::string> words, int in, int out) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  pid_t child = -1;
  const int wrong = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (wrong != 0) fail(argv[0], wrong);
  return child;
}

std::string read_all(int descriptor) {
  std::string all;
  std::array<char, 4096> piece;
  while (true) {
    const ssize_t n = read(descriptor, piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return all;
    all.append(piece.data(), static_cast<size_t>(n));
  }
}

}  // namespace

std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text) {
  const std::vector<std::string> command = tokenizer_command({"encode-prompt", "--tokenizer=" + tokenizer});
  const Descriptor in{file_with(text)};
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe", errno);
  const Descriptor from{ends[0]};
  pid_t child = -1;
  {
    const Descriptor to{ends[1]};
    child = start(command, in.number, to.number);
  }
  const std::string answer = read_all(from.number);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (interrupted()) return {};
  if (WIFSIGNALED(status)) {
    throw Error(ErrorKind::kResource, "sample",
                "the process that encodes the prompt was ended by signal " + std::to_string(WTERMSIG(status)));
  }
  if (const int code = WEXITSTATUS(status); code != 0) {
    const auto kind =
        code <= static_cast<int>(ErrorKind::kUnavailable) ? static_cast<ErrorKind>(code) : ErrorKind::kInternal;
    throw ReportedError(Error(kind, "sample", "the prompt could not be encoded"));
  }
  const nlohmann::json ids = nlohmann::json::parse(answer, nullptr, /*allow_exceptions=*/false);
  std::vector<int64_t> tokens;
  for (const nlohmann::json& id : ids) {
    if (!ids.is_array() || !id.is_number_unsigned()) break;
    tokens.push_back(id.get<int64_t>());
  }
  if (!ids.is_array() || tokens.size() != ids.size()) {
    throw Error(ErrorKind::kInternal, "sample", "the process that encodes the prompt wrote no ids: " + answer);
  }
  return tokens;
}

}  // namespace annulus
