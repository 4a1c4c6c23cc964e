// Every reader of data from outside, as a function of bytes: what it may do with any bytes is to return, or to raise an
// Error that says what is wrong with them. fuzz_test.cc calls them with the kept inputs and changes of these, and
// libfuzzer.cc lets clang's libFuzzer look for more (tools/fuzz.sh).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus::testing {

struct Reader {
  const char* name;  // and of the folder of its kept inputs, tests/fuzz/corpus/NAME
  // Reads the bytes, and uses what was read. Raises Error for input that is not valid, and std::logic_error if what was
  // read does not read back as the same.
  void (*read)(std::string_view bytes);
  // Computes the checksum that this form has of itself, where that takes no more than the bytes: without it, changed
  // input would never pass the comparison. Null where there is none.
  std::string (*sealed)(std::string_view bytes) = nullptr;
  unsigned draws = 200;  // how many changes of its kept inputs the default tests read
};

const std::vector<Reader>& readers();

}  // namespace annulus::testing
