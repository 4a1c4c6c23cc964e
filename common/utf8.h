// Finds characters in bytes that may not be UTF-8, such as decoded tokens. Used by runtime/data/sample_prompt.cc and
// launcher/tokens/inspect_tokens.cc; the terminal's stream of single bytes is Utf8Stream
// (runtime/inference/generator.h). Thread safe.
#pragma once

#include <cstddef>
#include <string_view>

namespace annulus {

// Returns the number of bytes of the UTF-8 character at `at`, or 0 if there is no valid one. Overlong forms of three
// and four bytes, and surrogates, pass.
inline size_t utf8_character(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t size = byte(at) < 0x80 ? 1 : byte(at) < 0xc2 ? 0 : byte(at) < 0xe0 ? 2 : byte(at) < 0xf0 ? 3 : 4;
  if (byte(at) > 0xf4 || at + size > text.size()) return 0;
  for (size_t i = at + 1; i < at + size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return size;
}

}  // namespace annulus
