// Whether MPI may copy a message between two processes of a host once, from the memory of one into that of the other,
// instead of twice, through memory that both have mapped. Used by comm/mpi, which chooses by it, and by the checks of
// hosts.
#pragma once

namespace annulus {

// Tries whether a process of this user may read another's memory with process_vm_readv, which containers and
// kernel.yama.ptrace_scope may forbid; false where processes cannot be started. Takes a millisecond or two: it forks.
// Thread safety: one caller at a time.
bool may_copy_between_processes();

}  // namespace annulus
