// Requests to stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 (which the launcher sends through mpirun) and SIGPIPE (the reader
// of the output has ended) set a flag. Used by the verbs that run for long. The trainer exchanges the flag with all
// ranks once a step, so that all stop at the same step, with a checkpoint.
#pragma once

namespace annulus {

// Begins to watch for these signals. The first sets the flag. Another one ends the process at once if it comes at least
// half a second later (the same key press may reach a rank twice, through the terminal and through the launcher).
// SIGPIPE and SIGUSR1 never end the process: each write to a closed pipe raises SIGPIPE, and a launcher repeats SIGUSR1
// for ranks that start late. SIGHUP and SIGPIPE stay ignored if they are ignored already (nohup). Call it once, from
// main, before any thread computes.
//
// A thread of its own waits for the signals; the calling thread and those that it starts from then on block them, and
// so do processes that it starts, unless they are given another signal mask. For a handler the system writes the state
// of the interrupted thread, several kilobytes, below its stack pointer, and while oneDNN multiplies matrices of fp32,
// the stack pointer may lie between other blocks of the heap (uxlfoundation/oneDNN issue 4845, oneDNN up to 3.11.1;
// LibTorch 2.11 has an earlier one): a handler would overwrite them.
void install_interrupt_handlers();

// Whether a signal has come. Thread safe, like interrupt_exit_code().
bool interrupted();

// The exit code after an interruption: 128 + the signal, and 143 for the launcher's SIGUSR1 or if only another rank got
// a signal.
int interrupt_exit_code();

}  // namespace annulus
