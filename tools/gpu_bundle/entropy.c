// Defines arc4random for the bundle's libraries on machines with glibc before 2.36, which lacks it. collect.py builds
// lib/libannulus_entropy.so from this file, and run.py preloads it.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

void arc4random_buf(void* to, size_t bytes) {
  for (char* at = to; bytes > 0;) {
    const ssize_t got = getrandom(at, bytes, 0);
    if (got < 0) continue;  // interrupted by a signal
    at += got;
    bytes -= (size_t)got;
  }
}

uint32_t arc4random(void) {
  uint32_t value;
  arc4random_buf(&value, sizeof value);
  return value;
}
