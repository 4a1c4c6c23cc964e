// See freed_memory.h.
#include "memory/freed_memory.h"

#include <malloc.h>

namespace annulus {

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

}  // namespace annulus
