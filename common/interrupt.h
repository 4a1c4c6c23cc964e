// Requests to stop: SIGINT, SIGTERM and SIGUSR1 (what the launcher sends through mpirun) set a flag. The trainer shares
// it with all ranks once a step, so that all stop at the same step, with a checkpoint.
#pragma once

namespace annulus {

// From now on the first signal sets the flag, another one half a second or more after it ends the process at once (the
// same key press may reach a rank twice, through the terminal and through the launcher). Call once, from main.
void install_interrupt_handlers();

// True after the first signal. Thread-safe, as are the others.
bool interrupted();

// What to exit with after an interruption: 130 after SIGINT, 143 otherwise.
int interrupt_exit_code();

}  // namespace annulus
