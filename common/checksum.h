// XXH3-128 checksums as text: of checkpoints, texts and weights. They find damage and difference, not forgery.
#pragma once

#include <cstddef>
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

}  // namespace annulus
