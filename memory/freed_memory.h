// Tunes the C library's allocator (glibc's mallopt). Used by the program annulus (launcher/program.cc).
#pragma once

namespace annulus {

// Makes the process keep freed memory, up to 512 MiB at the top of the heap, for later allocations. Each step allocates
// and frees tensors of the same sizes; by default glibc returns large ones to the kernel, and each new allocation
// faults on every page. Blocks of more than 32 MiB, the limit of glibc's mmap threshold, are still returned. Call it
// before other threads start.
void keep_freed_memory();

}  // namespace annulus
