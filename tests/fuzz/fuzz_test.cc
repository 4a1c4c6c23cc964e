// Reads the kept inputs of every reader of outside data, and some hundred changes of each, in the default tests. With
// ANNULUS_FUZZ_DRAWS=N it reads N changes of each (tools/fuzz.sh searches by coverage instead).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/splitmix64.h"
#include "tests/fuzz/readers.h"

namespace annulus::fuzz_test {
namespace {

using testing::Reader;

std::vector<std::string> kept_inputs(const Reader& reader) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator("tests/fuzz/corpus/" + std::string(reader.name)))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const std::filesystem::path& path : paths) {
    std::ostringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();
    inputs.push_back(reader.sealed != nullptr ? reader.sealed(content.str()) : content.str());
  }
  return inputs;
}

// Draws changes of an input: the same for the same seed.
class Changes {
 public:
  explicit Changes(uint64_t seed) : state_(seed) {}

  std::string of(std::string bytes, const std::string& other) {
    for (uint64_t n = 1 + below(4); n > 0; --n) change(bytes, other);
    return bytes;
  }

 private:
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : splitmix64(state_++) % bound; }

  void change(std::string& bytes, const std::string& other) {
    const size_t at = below(bytes.size() + 1), most = std::min<size_t>(bytes.size() - at, 64);
    const size_t length = below(most + 1);
    switch (below(8)) {
      case 0:  // a bit
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:  // a byte
        if (at < bytes.size()) bytes[at] = static_cast<char>(below(256));
        break;
      case 2:
        bytes.erase(at, length);
        break;
      case 3:  // cut off
        bytes.resize(at);
        break;
      case 4:
        bytes.insert(at, bytes.substr(below(bytes.size() + 1), length));
        break;
      case 5:
        bytes.insert(at, other.substr(below(other.size() + 1), 1 + below(64)));
        break;
      case 6: {  // a number, as text
        static const char* const kNumbers[] = {"-1",
                                               "0",
                                               "9223372036854775807",
                                               "-9223372036854775808",
                                               "1e308",
                                               "nan",
                                               "18446744073709551616",
                                               "2147483648",
                                               "65537",
                                               "\"\"",
                                               "[]",
                                               "{}"};
        size_t begin = at;
        while (begin < bytes.size() && (bytes[begin] < '0' || bytes[begin] > '9')) ++begin;
        size_t end = begin;
        while (end < bytes.size() && bytes[end] >= '0' && bytes[end] <= '9') ++end;
        bytes.replace(begin, end - begin, kNumbers[below(std::size(kNumbers))]);
        break;
      }
      case 7: {  // a number, as it is stored
        static constexpr uint64_t kNumbers[] = {0,          1,         0x7fff,     0xffff,  0x7fffffff,
                                                0xffffffff, INT64_MAX, UINT64_MAX, 1u << 30};
        const uint64_t number = kNumbers[below(std::size(kNumbers))];
        const size_t size = size_t{1} << below(4);
        const size_t aligned = at / size * size;
        if (aligned + size <= bytes.size()) std::memcpy(bytes.data() + aligned, &number, size);
        break;
      }
    }
  }

  uint64_t state_;
};

// Reads the bytes, and returns what was wrong with the reader, or "".
std::string fault(const Reader& reader, const std::string& bytes, bool* read = nullptr) {
  try {
    reader.read(bytes);
    if (read != nullptr) *read = true;
  } catch (const Error&) {  // it says what is wrong with the input
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

std::string shown(const std::string& bytes) {
  std::string text;
  for (const char c : bytes.substr(0, 4096)) {
    if (c >= ' ' && c <= '~' && c != '\\') {
      text += c;
      continue;
    }
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned char>(c));
    text += code;
  }
  return text;
}

class Readers : public ::testing::TestWithParam<Reader> {};

TEST_P(Readers, ReadOrRefuseWhateverComes) {
  const Reader& reader = GetParam();
  const std::vector<std::string> inputs = kept_inputs(reader);
  ASSERT_FALSE(inputs.empty());
  bool read = false;  // whether some input is valid: otherwise only the first checks would be tried
  for (const std::string& input : inputs) EXPECT_EQ(fault(reader, input, &read), "") << shown(input);
  EXPECT_TRUE(read) << "no kept input of " << reader.name << " is valid";
  const char* const asked = std::getenv("ANNULUS_FUZZ_DRAWS");
  const uint64_t draws = asked != nullptr ? std::strtoull(asked, nullptr, 10) : reader.draws;
  for (uint64_t i = 0; i < draws; ++i) {
    Changes changes(i << 20);
    const std::string& input = inputs[i % inputs.size()];
    std::string bytes = changes.of(input, inputs[(i / inputs.size()) % inputs.size()]);
    if (reader.sealed != nullptr && i % 8 != 0) bytes = reader.sealed(bytes);
    ASSERT_EQ(fault(reader, bytes), "") << "change " << i << ": " << shown(bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Readers, ::testing::ValuesIn(testing::readers()), [](const auto& tested) {
  std::string name = tested.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace annulus::fuzz_test
