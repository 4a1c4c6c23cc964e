// Requests to stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 (what the launcher sends through mpirun) and SIGPIPE (the reader
// of the output has gone) set a flag. The trainer shares it with all ranks once a step, so that all stop at the same
// step, with a checkpoint.
#pragma once

namespace annulus {

// From now on the first signal sets the flag, another one half a second or more after it ends the process at once (the
// same key press may reach a rank twice, through the terminal and through the launcher); but each write to a closed
// pipe raises SIGPIPE, and a launcher repeats SIGUSR1 for ranks that start late: these two only ask. SIGHUP and SIGPIPE
// stay ignored where they are (nohup). Call once, from main.
void install_interrupt_handlers();

// True after the first signal. Thread-safe, as are the others.
bool interrupted();

// What to exit with after an interruption: 128 + the signal, and 143 for the launcher's SIGUSR1 or where only another
// rank was asked.
int interrupt_exit_code();

}  // namespace annulus
