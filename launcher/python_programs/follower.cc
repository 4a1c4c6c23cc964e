// See follower.h.
#include "launcher/python_programs/follower.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "common/version.h"
#include "launcher/python_programs/script.h"

namespace annulus {

std::vector<std::string> follower_command(const std::vector<std::string>& words) {
  std::vector<std::string> all = words;
  all.push_back(std::string("--version=") + kVersion);
  return script_command("follower", "report", "the libraries of TensorBoard and Weights & Biases", all);
}

std::string start_follower(const std::string& run) {
  std::vector<std::string> words;
  try {
    words = follower_command({"--run=" + run, "--tensorboard", "--follow", "--parent=" + std::to_string(getpid())});
  } catch (const Error& error) {
    return std::string(error.message());
  }
  const std::string logs = run + "/logs", log = logs + "/tensorboard.log";
  if (mkdir(logs.c_str(), 0777) != 0 && errno != EEXIST) return logs + ": " + std::strerror(errno);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  pid_t child = -1;
  const int wrong = spawn(words, actions, POSIX_SPAWN_SETSID, child);
  return wrong == 0 ? "" : words[0] + " or " + log + ": " + std::strerror(wrong);
}

}  // namespace annulus
