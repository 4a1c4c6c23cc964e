// Requests to stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 (which the launcher sends through mpirun) and SIGPIPE (the reader
// of the output has exited) set a flag. Used by long-running subcommands. The trainer exchanges the flag among all
// ranks once per step, so that all write a checkpoint and stop at the same step.
#pragma once

#include <functional>

namespace annulus {

// Starts watching for these signals. The first sets the flag. Another one ends the process at once if it arrives at
// least half a second later (one key press may reach a rank twice, through the terminal and through the launcher).
// SIGPIPE and SIGUSR1 never end the process: each write to a closed pipe raises SIGPIPE, and a launcher repeats SIGUSR1
// for ranks that start late. SIGHUP and SIGPIPE stay ignored if they are ignored already (nohup). Call it once, from
// main, before any thread computes.
//
// A dedicated thread waits for the signals; the calling thread, the threads that it starts later, and child processes
// without another signal mask block them. A handler would corrupt memory: the kernel saves the state of the interrupted
// thread, several kilobytes, below its stack pointer, which may lie between heap blocks while oneDNN multiplies fp32
// matrices (uxlfoundation/oneDNN issue 4845, oneDNN up to 3.11.1; LibTorch 2.11 has an earlier one).
//
// `arrived` is called on that thread with each signal, before it sets the flag, so it may do what a handler must not;
// it must not raise.
void install_interrupt_handlers(std::function<void(int signal)> arrived = nullptr);

// Returns whether a signal has arrived. Thread safe, like interrupt_exit_code().
bool interrupted();

// Returns the exit code after an interruption: 128 + the signal, or 143 for the launcher's SIGUSR1 or if only another
// rank received a signal.
int interrupt_exit_code();

}  // namespace annulus
