// See sample_tokenizer.h.
#include "launcher/tokens/sample_tokenizer.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "comm/bootstrap/bootstrap.h"
#include "common/descriptor.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "launcher/tokens/tokenizer_script.h"

namespace annulus {
namespace {

[[noreturn]] void fail(const std::string& what, int reason) {
  throw Error(ErrorKind::kResource, "sample", "the tokenizer could not be run: " + what + ": " + std::strerror(reason));
}

// A file in memory that holds `text`. A pipe would cause SIGPIPE if the child ended before it had read everything.
int file_with(const std::string& text) {
  const int file = memfd_create("prompt", MFD_CLOEXEC);
  if (file < 0) fail("memfd_create", errno);
  if (const int error = write_fully(file, text); error != 0) fail("write", error);
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
  // This process blocks Ctrl-C for its own threads (common/interrupt.h), but it must end the child.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t child = -1;
  const int wrong = posix_spawn(&child, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (wrong != 0) fail(argv[0], wrong);
  return child;
}

// Runs the tokenizer and returns what it prints, or "" if a signal has interrupted this process. `what` completes "the
// process that ..." in messages.
std::string ask_tokenizer(const std::vector<std::string>& words, const std::string& input, const std::string& what) {
  const Descriptor in(file_with(input));
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe", errno);
  const Descriptor from(ends[0]);
  pid_t child = -1;
  {
    const Descriptor to(ends[1]);
    child = start(tokenizer_command(words), in, to);
  }
  const std::string answer = read_to_end(from);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (interrupted()) return {};
  if (WIFSIGNALED(status)) {
    throw Error(ErrorKind::kResource, "sample",
                "the process that " + what + " was ended by signal " + std::to_string(WTERMSIG(status)));
  }
  if (const int code = WEXITSTATUS(status); code != 0) {
    const auto kind =
        code <= static_cast<int>(ErrorKind::kUnavailable) ? static_cast<ErrorKind>(code) : ErrorKind::kInternal;
    throw ReportedError(Error(kind, "sample", "the process that " + what + " failed"));
  }
  return answer;
}

}  // namespace

std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text) {
  const std::string answer = ask_tokenizer({"encode-prompt", "--tokenizer=" + tokenizer}, text, "encodes the prompt");
  if (interrupted()) return {};
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

std::string make_token_table(const std::string& tokenizer) {
  const char* const folder = text_from_environment("TMPDIR");
  std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/annulus-table-XXXXXX";
  const Descriptor made(mkostemp(path.data(), O_CLOEXEC));
  if (made < 0) fail(path, errno);
  try {
    ask_tokenizer({"table", "--tokenizer=" + tokenizer, "--output=" + path}, "", "makes the table of tokens");
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
  return path;
}

}  // namespace annulus
