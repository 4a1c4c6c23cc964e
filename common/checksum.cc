// See checksum.h.
#include "common/checksum.h"

// This compiles the library's code with a prefix of annulus's own, because another library in the process may contain
// another version of it.
#define XXH_NAMESPACE annulus_
#define XXH_STATIC_LINKING_ONLY
#define XXH_IMPLEMENTATION
#include <xxhash.h>

#include <cstdio>
#include <new>

namespace annulus {
namespace {

std::string text(XXH128_hash_t hash) {
  char digits[33];
  std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits;
}

}  // namespace

Checksum::Checksum() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_128bits_reset(state_);
}

Checksum::~Checksum() { XXH3_freeState(state_); }

void Checksum::update(const void* data, size_t bytes) {
  if (bytes) XXH3_128bits_update(state_, data, bytes);
}

std::string Checksum::hex() const { return text(XXH3_128bits_digest(state_)); }

std::string checksum(const void* data, size_t bytes) { return text(XXH3_128bits(bytes ? data : "", bytes)); }

Digest digest(const void* data, size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes ? data : "", bytes);
  return {hash.high64, hash.low64};
}

uint64_t hash64(const void* data, size_t bytes) { return XXH3_64bits(bytes ? data : "", bytes); }

Hash64::Hash64() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(state_);
}

Hash64::~Hash64() { XXH3_freeState(state_); }

void Hash64::update(const void* data, size_t bytes) {
  if (bytes) XXH3_64bits_update(state_, data, bytes);
}

uint64_t Hash64::take() {
  const uint64_t hash = XXH3_64bits_digest(state_);
  XXH3_64bits_reset(state_);
  return hash;
}

std::string hex_text(const unsigned char (&bytes)[16]) {
  std::string text;
  char digits[3];
  for (const unsigned char byte : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

}  // namespace annulus
