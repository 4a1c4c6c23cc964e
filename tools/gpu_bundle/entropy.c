// For a C library older than the one that the bundle's libraries were built with (glibc before 2.36 has no arc4random).
// collect.py makes it lib/libannulus_entropy.so, run.sh preloads it.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

void arc4random_buf(void* to, size_t bytes) {
  for (char* at = to; bytes > 0;) {
    const ssize_t got = getrandom(at, bytes, 0);
    if (got < 0) continue;  // interrupted
    at += got;
    bytes -= (size_t)got;
  }
}

uint32_t arc4random(void) {
  uint32_t value;
  arc4random_buf(&value, sizeof value);
  return value;
}
