// Requests to stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 (which the launcher sends through mpirun) and SIGPIPE (the reader
// of the output has ended) set a flag. Used by the verbs that run for long. The trainer exchanges the flag with all
// ranks once a step, so that all stop at the same step, with a checkpoint.
#pragma once

namespace annulus {

// Installs the handlers. The first signal sets the flag. Another one ends the process at once if it comes at least half
// a second later (the same key press may reach a rank twice, through the terminal and through the launcher). SIGPIPE
// and SIGUSR1 never end the process: each write to a closed pipe raises SIGPIPE, and a launcher repeats SIGUSR1 for
// ranks that start late. SIGHUP and SIGPIPE stay ignored if they are ignored already (nohup). Call it once, from main.
void install_interrupt_handlers();

// Whether a signal has come. Thread safe, like interrupt_exit_code().
bool interrupted();

// The exit code after an interruption: 128 + the signal, and 143 for the launcher's SIGUSR1 or if only another rank got
// a signal.
int interrupt_exit_code();

}  // namespace annulus
