// The entry points of clang's libFuzzer for one reader, which ANNULUS_FUZZ_READER names (readers.h). tools/fuzz.sh
// builds and runs it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "common/error.h"
#include "tests/fuzz/readers.h"

namespace {

const annulus::testing::Reader& chosen() {
  static const annulus::testing::Reader& reader = []() -> const annulus::testing::Reader& {
    const char* const name = std::getenv("ANNULUS_FUZZ_READER");
    for (const annulus::testing::Reader& reader : annulus::testing::readers()) {
      if (name != nullptr && std::string_view(reader.name) == name) return reader;
    }
    std::fprintf(stderr, "ANNULUS_FUZZ_READER names none of the readers in tests/fuzz/readers.cc\n");
    std::exit(2);
  }();
  return reader;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  chosen();
  return 0;
}

// Any exception but an Error ends the process, which libFuzzer reports with the input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const annulus::testing::Reader& reader = chosen();
  try {
    reader.read(reader.sealed != nullptr ? reader.sealed(bytes) : std::string(bytes));
  } catch (const annulus::Error&) {  // it says what is wrong with the input
  }
  return 0;
}
