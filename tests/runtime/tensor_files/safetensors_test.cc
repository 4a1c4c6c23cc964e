// Tests of runtime/tensor_files/safetensors.h: writing and reading files, and refusing malformed ones.
#include "runtime/tensor_files/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/common/faulty_files.h"

namespace annulus::safetensors_test {
namespace {

std::string temporary(const std::string& name) { return ::testing::TempDir() + "/" + name; }

std::string content(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

void put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string with_header(const std::string& json, size_t data_bytes) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return out + json + std::string(data_bytes, '\1');
}

std::string refusal(const std::string& bytes) {
  const std::string path = temporary("refused.safetensors");
  put(path, bytes);
  try {
    SafetensorsFile file(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos);
    return error.what();
  }
  return "accepted";
}

void expect_refused(const std::string& bytes, const std::string& why) {
  const std::string text = refusal(bytes);
  EXPECT_NE(text.find(why), std::string::npos) << text;
}

std::vector<NamedTensor> some_tensors() {
  return {
      {"b.weight", at::randn({3, 5})},
      {"half", at::randn({7}).to(at::kBFloat16)},
      {"a.weight", at::randn({4, 3, 2}).to(at::kDouble).transpose(0, 2)},
      {"fp16", at::randn({2, 1}).to(at::kHalf)},
      {"steps", at::arange(5, at::kLong)},
      {"ints", at::arange(3, at::kInt)},
      {"flags", at::ones({2, 2}, at::kBool)},
      {"bytes", at::arange(9, at::kByte)},
      {"none", at::empty({0, 4})},
      {"one", at::ones({}, at::kDouble)},
  };
}

TEST(Safetensors, ReadsBackWhatItWrote) {
  const std::string path = temporary("round.safetensors");
  const auto tensors = some_tensors();
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "a \"quoted\" one"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const at::Tensor back = file.load(t.name);
    EXPECT_EQ(back.scalar_type(), t.tensor.scalar_type());
    EXPECT_TRUE(at::equal(back, t.tensor)) << t.name;
    const TensorInfo* info = file.find(t.name);
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->bytes ? info->offset % t.tensor.element_size() : 0, 0u) << t.name;
  }
  EXPECT_EQ(file.metadata().at("note"), "a \"quoted\" one");
  EXPECT_EQ(file.find("nothing"), nullptr);
  expect_error(ErrorKind::kInput, {"did you mean \"a.weight\"?"}, [&] { file.load("a.wieght"); });
}

// A tensor's bytes can be written in any pieces, in the file's order, and read back in any range.
TEST(Safetensors, WritesAndReadsInPieces) {
  const std::string path = temporary("pieces.safetensors");
  const at::Tensor a = at::arange(100, at::kFloat), b = at::arange(7, at::kLong);
  SafetensorsWriter writer(path, {{"a", at::kFloat, {4, 25}, 0, 0}, {"b", at::kLong, {7}, 0, 0}}, {},
                           FileSystem::real());
  ASSERT_EQ(writer.tensors()[0].name, "b") << "wide elements come first";
  writer.write(b.const_data_ptr(), 56);
  const char* const bytes = static_cast<const char*>(a.const_data_ptr());
  writer.write(bytes, 123);
  EXPECT_THROW(writer.finish(), Error);
  writer.write(bytes + 123, 277);
  writer.finish();
  const SafetensorsFile file(path);
  EXPECT_EQ(file.header(), writer.header());
  EXPECT_EQ(std::filesystem::file_size(path), writer.file_bytes());
  EXPECT_TRUE(at::equal(file.load("a"), a.view({4, 25})));
  EXPECT_TRUE(at::equal(file.load("b"), b));
  std::vector<float> some(10);
  file.read(*file.find("a"), 4 * 17, 40, some.data());
  for (size_t i = 0; i < some.size(); ++i) EXPECT_EQ(some[i], static_cast<float>(17 + i));
  for (const auto& [begin, length] : {std::pair<uint64_t, uint64_t>{396, 8}, {401, 0}, {0, 401}, {8, uint64_t(-8)}}) {
    EXPECT_THROW(file.read(*file.find("a"), begin, length, some.data()), Error) << begin;
  }
  // The file was truncated after it was opened.
  std::filesystem::resize_file(path, writer.file_bytes() - 4);
  EXPECT_THROW(file.read(*file.find("a"), 380, 20, some.data()), Error);
}

TEST(Safetensors, ThreadsReadOneFile) {
  const std::string path = temporary("threads.safetensors");
  const auto tensors = some_tensors();
  write_safetensors(path, tensors);
  const SafetensorsFile file(path);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 20 * tensors.size(); ++i) {
        const NamedTensor& expected = tensors[(i + t) % tensors.size()];
        if (!at::equal(file.load(expected.name), expected.tensor) || file.find("nothing") != nullptr) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Safetensors, ReadsFilesOfOtherLibraries) {
  // The format's own library writes keys in another order and pads the header with spaces.
  const std::string path = temporary("other.safetensors");
  put(path, with_header(R"({"x":{"shape":[2],"data_offsets":[0,8],"dtype":"F32"}}      )", 8));
  EXPECT_EQ(SafetensorsFile(path).load("x").numel(), 2);
  put(path, with_header("{}", 0));
  EXPECT_TRUE(SafetensorsFile(path).tensors().empty());
}

TEST(Safetensors, RefusesMalformedFiles) {
  EXPECT_THROW(SafetensorsFile("/nonexistent/x.safetensors"), Error);
  EXPECT_THROW(SafetensorsFile(::testing::TempDir()), Error);
  expect_refused("", "only 0 bytes");
  expect_refused("short", "only 5 bytes");
  expect_refused(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}", "the format allows");
  expect_refused(std::string("\x10\0\0\0\0\0\0\0", 8) + "{}", "truncated");
  expect_refused(with_header("[]", 0), "does not begin with '{'");
  expect_refused(with_header("{", 0), "malformed header");
  expect_refused(with_header(R"({"x":3})", 0), "\"x\": expected");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[1]}})", 4), "\"data_offsets\" is missing");
  expect_refused(with_header(R"({"x":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4), "\"F31\"");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4), "whole numbers");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4), "whole numbers");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4), "need 8 bytes");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", 4), "truncated");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5), "has 5 bytes of data");
  expect_refused(with_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8), "overlap or leave a gap");
  const std::string one = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  expect_refused(with_header("{\"x\":" + one + ",\"y\":" + one + "}", 4), "overlap or leave a gap");
  expect_refused(with_header("{\"x\":" + one + ",\"x\":" + one + "}", 4), "twice");
  expect_refused(with_header(R"({"__metadata__":{"a":1}})", 0), "only hold strings");
  expect_refused(with_header("{\"x\":" + std::string(100000, '['), 0), "nested too deeply");
}

// The time to parse a header is linear in its length; with quadratic time this header took minutes.
TEST(Safetensors, ReadsManyTensorsInLinearTime) {
  constexpr int kTensors = 100'000;
  std::string header = "{\"__metadata__\":{";
  for (int i = 0; i < kTensors; ++i) header += (i ? ",\"" : "\"") + std::to_string(i) + "\":\"\"";
  header += "}";
  for (int i = 0; i < kTensors; ++i) {
    header += ",\"" + std::to_string(i) + "\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}";
  }
  const std::string path = temporary("many.safetensors");
  put(path, with_header(header + "}", 0));
  const SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().size(), kTensors);
  EXPECT_EQ(file.metadata().size(), kTensors);
  EXPECT_EQ(file.load("99999").numel(), 0);
  std::filesystem::remove(path);
}

TEST(Safetensors, DoesNotAllocateByDeclaredSizes) {
  // Each of these sizes exceeds the memory of any machine.
  for (const std::string shape : {"[9223372036854775807]", "[4611686018427387904,4]", "[4294967296,4294967296]",
                                  "[9223372036854775807,9223372036854775807,0]", "[18446744073709551615]"}) {
    const std::string text =
        refusal(with_header("{\"x\":{\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":[0,0]}}", 0));
    EXPECT_TRUE(text.find("too large") != std::string::npos || text.find("need ") != std::string::npos) << text;
  }
  expect_refused(with_header(R"({"x":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}})", 16),
                 "truncated");
}

TEST(Safetensors, RefusesToWriteUnreadableTensors) {
  const std::string path = temporary("unwritten.safetensors");
  std::filesystem::remove(path);
  EXPECT_THROW(write_safetensors(path, {{"x", at::ones({1}, at::kShort)}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"x", at::ones({1})}, {"x", at::ones({1})}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"__metadata__", at::ones({1})}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"\xff", at::ones({1})}}), Error);
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THROW(write_safetensors("/nonexistent/x", {{"x", at::ones({1})}}), Error);
}

TEST(Safetensors, EveryFaultLeavesTheOldOrTheNewFile) {
  using Fault = FaultyFiles::Fault;
  for (const Fault fault : {Fault::kFull, Fault::kDeath, Fault::kPower, Fault::kNames}) {
    bool failed = true;
    for (int at = 0; failed; ++at) {
      ASSERT_LT(at, 100);
      const std::string folder = temporary("faults");
      std::filesystem::remove_all(folder);
      std::filesystem::create_directories(folder);
      const std::string path = folder + "/x.safetensors";
      write_safetensors(path, {{"x", at::ones({3})}});
      FaultyFiles files(fault, at);
      try {
        write_safetensors(path, {{"x", at::full({3}, 2.0)}, {"y", at::ones({2})}}, {}, files);
        files.lose_power();  // a completed write survives
        EXPECT_TRUE(SafetensorsFile(path).find("y"));
      } catch (const Error&) {
        EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
      } catch (const FaultyFiles::Dead&) {
      }
      failed = files.failed();
      const SafetensorsFile file(path);
      EXPECT_EQ(file.load("x")[0].item<float>(), file.find("y") ? 2.0f : 1.0f);
    }
  }
}

// Returns whether a possibly damaged file is read. Expects that it is refused with the right kind of error otherwise,
// and that what is read is what the bytes of the file say: header and tensors fill it without gaps, and each tensor has
// the dtype and shape that its entry has, and its bytes.
bool reads_what_is_there(const std::string& path) {
  try {
    const SafetensorsFile file(path);
    const std::string bytes = content(path);
    EXPECT_EQ(file.header(), bytes.substr(0, file.header().size()));
    uint64_t total = file.header().size();
    for (const TensorInfo& info : file.tensors()) {
      const at::Tensor tensor = file.load(info.name);
      EXPECT_EQ(tensor.scalar_type(), info.dtype);
      EXPECT_EQ(tensor.sizes().vec(), info.shape);
      EXPECT_EQ(tensor.nbytes(), info.bytes);
      EXPECT_EQ(std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()),
                bytes.substr(std::min<uint64_t>(info.offset, bytes.size()), info.bytes));
      total += info.bytes;
    }
    EXPECT_EQ(total, bytes.size());
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return false;
  }
}

RC_GTEST_PROP(SafetensorsProperty, DamagedFilesReadAsTheyAreOrAreRefused, ()) {
  static const std::string good = [] {
    const std::string path = temporary("good.safetensors");
    write_safetensors(path, some_tensors(), {{"a", "b"}});
    return content(path);
  }();
  const std::string path = temporary("damaged.safetensors");
  std::string bytes = good;
  for (int flips = *rc::gen::inRange(0, 4); flips > 0; --flips) {
    const auto at = *rc::gen::inRange<size_t>(0, bytes.size());
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << *rc::gen::inRange(0, 8)));
  }
  if (*rc::gen::arbitrary<bool>()) bytes.resize(*rc::gen::inRange<size_t>(0, bytes.size()));
  put(path, bytes);
  const bool read = reads_what_is_there(path);
  RC_ASSERT(read || bytes != good);
}

RC_GTEST_PROP(SafetensorsProperty, EveryTruncationIsRefused, ()) {
  const std::string path = temporary("cut.safetensors");
  write_safetensors(path, {{"x", at::ones({16})}, {"flag", at::ones({3}, at::kBool)}});
  const std::string bytes = content(path);
  put(path, bytes.substr(0, *rc::gen::inRange<size_t>(0, bytes.size())));
  RC_ASSERT_THROWS_AS(SafetensorsFile{path}, Error);
}

RC_GTEST_PROP(SafetensorsProperty, AnyHeaderIsReadOrRefused, ()) {
  const auto number = rc::gen::element<std::string>("0", "1", "2", "4", "8", "-1", "1e3", "18446744073709551615",
                                                    "99999999999999999999", "null", "\"4\"", "4294967296");
  const auto dtype = rc::gen::element<std::string>("\"F32\"", "\"BOOL\"", "\"F64\"", "\"\"", "3");
  std::string json = "{";
  for (int n = *rc::gen::inRange(0, 3), i = 0; i < n; ++i) {
    json += std::string(i ? "," : "") + "\"" + *rc::gen::element<std::string>("a", "b", "__metadata__") +
            "\":{\"dtype\":" + *dtype + ",\"shape\":[" + *number + "," + *number + "],\"data_offsets\":[" + *number +
            "," + *number + "]}";
  }
  const std::string path = temporary("any.safetensors");
  put(path, with_header(json + "}", *rc::gen::element<size_t>(0, 1, 4, 8, 16)));
  const bool read = reads_what_is_there(path);
  RC_CLASSIFY(read);
  // Whole numbers without a sign are the only sizes that the format has.
  if (json.find("null") != std::string::npos || json.find("\"4\"") != std::string::npos) RC_ASSERT(!read);
}

}  // namespace
}  // namespace annulus::safetensors_test
