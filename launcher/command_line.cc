// See command_line.h.
#include "launcher/command_line.h"

#include <cstdlib>

#include "common/text.h"

namespace annulus {
namespace {
std::vector<std::string> arguments;
std::string program = "annulus";
}  // namespace

void remember_command_line(int argc, char** argv) {
  if (argc > 0) program = argv[0];
  if (const char* name = std::getenv("ANNULUS_PROGRAM"); name != nullptr && *name != '\0') program = name;
  arguments.assign(argv + (argc > 0 ? 1 : 0), argv + argc);
}

const std::string& typed_program() { return program; }

std::vector<std::string> typed_words(int ranks) {
  const char* const launched = std::getenv("ANNULUS_LAUNCH_COMMAND");
  if (launched != nullptr && *launched != '\0') return words_of_line(launched);
  std::vector<std::string> words = {program};
  if (ranks > 1) words.insert(words.end(), {"launch", "-n", std::to_string(ranks)});
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

const std::vector<std::string>& command_arguments() { return arguments; }

}  // namespace annulus
