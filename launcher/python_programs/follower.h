// Starts the program that carries metrics to TensorBoard and Weights & Biases (python/follower/), which needs libraries
// for Python and so runs as a process of its own. Used by the subcommands report and train.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The words of `./annulus follower WORDS...`, for exec. Throws Error(kUnavailable) as script_command() does.
std::vector<std::string> follower_command(const std::vector<std::string>& words);

// Starts a process that writes event files of a run into RUN/tensorboard while the run goes on, and ends soon after
// this process. What it prints goes to RUN/logs/tensorboard.log. It is in a session of its own and has no descriptor of
// this process, so nothing that happens to it reaches the run. Returns "", or why it could not be started.
std::string start_follower(const std::string& run);

}  // namespace annulus
