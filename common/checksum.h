// XXH3 checksums, used for files, weights, cache keys and values that ranks compare. They detect corruption and
// differences, not forgery.
//
// Thread safety: functions without state; the classes are not thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct XXH3_state_s;

namespace annulus {

// Computes the 128-bit checksum of a stream of bytes.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void update(const void* data, size_t bytes);
  // Returns the checksum of all bytes so far as 32 lower-case hexadecimal digits, most significant first.
  std::string hex() const;

 private:
  XXH3_state_s* state_;
};

// Returns Checksum::hex() of these bytes.
std::string checksum(const void* data, size_t bytes);

// Formats a checksum that a file stores as 16 bytes, most significant first, as Checksum::hex() does.
std::string hex_text(const unsigned char (&bytes)[16]);

// The 128 bits of checksum() as numbers.
struct Digest {
  uint64_t high, low;

  friend bool operator==(const Digest&, const Digest&) = default;
};
Digest digest(const void* data, size_t bytes);

// Returns the XXH3-64 hash, which is not a prefix or part of the 128-bit checksum.
uint64_t hash64(const void* data, size_t bytes);

// Computes hash64() of a stream of bytes.
class Hash64 {
 public:
  Hash64();
  ~Hash64();
  Hash64(const Hash64&) = delete;
  Hash64& operator=(const Hash64&) = delete;

  void update(const void* data, size_t bytes);
  // Returns the hash of all bytes since the last take() or the construction, and starts over.
  uint64_t take();

 private:
  XXH3_state_s* state_;
};

}  // namespace annulus
