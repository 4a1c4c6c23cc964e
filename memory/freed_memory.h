// What the process does with memory that it frees. Used by the program annulus (launcher/program.cc).
#pragma once

namespace annulus {

// From now on the C library keeps what is freed, up to 512 MiB at the end of its heap, for what is taken next. Tensors
// of the same sizes come and go at every step: glibc would hand each back to the kernel, and have it faulted in again
// page by page. Blocks above 32 MiB still go back: that is the most that it agrees to keep in one piece. Holds for the
// whole process; to be called before other threads begin.
void keep_freed_memory();

}  // namespace annulus
