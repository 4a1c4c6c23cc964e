// Sets what the C library does with memory that is freed. Used by the program annulus (launcher/program.cc).
#pragma once

namespace annulus {

// From now on the C library keeps freed memory, up to 512 MiB at the end of its heap, for later allocations. Each step
// allocates and frees tensors of the same sizes; by default glibc would return each to the kernel, and allocating it
// again would cause a page fault for every page. Blocks of more than 32 MiB are still returned, because glibc does not
// keep larger ones. This applies to the whole process. Call it before other threads start.
void keep_freed_memory();

}  // namespace annulus
