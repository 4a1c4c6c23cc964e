// XXH3 checksums, used for files, for weights, for the keys of caches and for values that ranks compare. They detect
// damage and differences, but not forgery.
//
// Thread safety: functions without state; each class says so itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct XXH3_state_s;

namespace annulus {

// The 128-bit checksum of bytes that are given piece by piece. Not thread safe.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void update(const void* data, size_t bytes);
  // The checksum of all bytes so far: 32 lower-case hexadecimal digits, the most significant first.
  std::string hex() const;

 private:
  XXH3_state_s* state_;
};

// Checksum::hex() of these bytes.
std::string checksum(const void* data, size_t bytes);

// The digits of a checksum that a file stores as 16 bytes, the most significant first.
std::string hex_text(const unsigned char (&bytes)[16]);

// The 128 bits of checksum() as numbers.
struct Digest {
  uint64_t high, low;
};
Digest digest(const void* data, size_t bytes);

// XXH3-64, which is a different function: it is not a part of the 128 bits.
uint64_t hash64(const void* data, size_t bytes);

// hash64() of bytes that are given piece by piece. Not thread safe.
class Hash64 {
 public:
  Hash64();
  ~Hash64();
  Hash64(const Hash64&) = delete;
  Hash64& operator=(const Hash64&) = delete;

  void update(const void* data, size_t bytes);
  // The hash of all bytes since the last call of take(), or since the construction.
  uint64_t take();

 private:
  XXH3_state_s* state_;
};

}  // namespace annulus
