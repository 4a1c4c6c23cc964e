// XXH3 checksums: of checkpoints, texts, weights and what ranks agree on. They find damage and difference, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct XXH3_state_s;

namespace annulus {

// Of bytes that come piece by piece. Not thread-safe.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void update(const void* data, size_t bytes);
  // 32 lower-case hexadecimal digits, of all bytes so far.
  std::string hex() const;

 private:
  XXH3_state_s* state_;
};

std::string checksum(const void* data, size_t bytes);

// The digits of a checksum that lies in a file as 16 bytes, the most significant first.
std::string hex_text(const unsigned char (&bytes)[16]);

// The same 128 bits as numbers.
struct Digest {
  uint64_t high, low;
};
Digest digest(const void* data, size_t bytes);

// XXH3-64, another function: a number that depends on every bit of a short key.
uint64_t hash64(const void* data, size_t bytes);

// The same of bytes that come piece by piece. Not thread-safe.
class Hash64 {
 public:
  Hash64();
  ~Hash64();
  Hash64(const Hash64&) = delete;
  Hash64& operator=(const Hash64&) = delete;

  void update(const void* data, size_t bytes);
  // Of all bytes since the last call, or since the beginning.
  uint64_t take();

 private:
  XXH3_state_s* state_;
};

}  // namespace annulus
