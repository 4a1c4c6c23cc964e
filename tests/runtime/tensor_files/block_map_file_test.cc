// Tests of runtime/tensor_files/block_map_file.h: block maps in safetensors files.
#include "runtime/tensor_files/block_map_file.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "common/error.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/common/expect_error.h"

namespace annulus::block_map_file_test {
namespace {

const AttentionShape kShape{2, 4, 2, 100, 150, 0};  // 7 x 10 blocks of 16

std::string temporary(const std::string& name) { return ::testing::TempDir() + "/" + name; }

PatternSpec from_file(const std::string& path, const std::string& more = "") {
  return parse_pattern("{ kind = \"blocks\", map = \"file\", block = 16, file = \"" + path + "\"" + more + " }", "");
}

BlockMap some_map() {
  return make_block_map(parse_pattern("{ kind = \"blocks\", map = \"bigbird\", block = 16, window_blocks = 1, "
                                      "global_blocks = 1, random_blocks = 2 }",
                                      ""),
                        kShape);
}

TEST(BlockMapFile, ReadsWhatWasWritten) {
  const std::string path = temporary("map.safetensors");
  const BlockMap map = some_map();
  write_block_map(path, map);
  const PatternSpec read = read_block_maps(from_file(path), kShape);
  EXPECT_EQ(*read.blocks.given, map);
  EXPECT_EQ(make_block_map(read, kShape), map);
  // The text holds the digest of the map and parses to a pattern that requires it.
  EXPECT_NE(read.text().find(map.digest()), std::string::npos);
  const PatternSpec again = parse_pattern(read.text(), "");
  EXPECT_EQ(again, read);
  EXPECT_EQ(*read_block_maps(again, kShape).blocks.given, map);
}

TEST(BlockMapFile, ReadsMapsOfUnionMembers) {
  const std::string path = temporary("member.safetensors");
  write_block_map(path, some_map());
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kUnion;
  spec.members = {causal_pattern(), from_file(path)};
  EXPECT_THROW(make_pattern(spec, kShape), Error);
  EXPECT_GT(make_pattern(read_block_maps(spec, kShape), kShape).slices.size(), 1u);
}

void expect_refused(const PatternSpec& spec, ErrorKind kind, const std::string& part) {
  expect_error(kind, {part}, [&] { read_block_maps(spec, kShape); });
}

TEST(BlockMapFile, RefusesMapsThatDoNotFit) {
  const std::string path = temporary("refused.safetensors");
  const auto with = [&](const std::string& name, const at::Tensor& tensor,
                        const std::map<std::string, std::string>& metadata = {}) {
    write_safetensors(path, {{name, tensor}}, metadata);
    return from_file(path);
  };
  expect_refused(from_file(temporary("missing.safetensors")), ErrorKind::kInput, "missing.safetensors");
  expect_refused(with("masks", at::ones({1, 1, 7, 10}, at::kByte)), ErrorKind::kInput, "no tensor \"mask\"");
  expect_refused(with("mask", at::ones({1, 1, 7, 10})), ErrorKind::kInput, "U8, not F32");
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{1, 1, 7, 9}, {1, 1, 10, 7}, {3, 1, 7, 10}, {1, 2, 7, 10}, {7, 10}}) {
    expect_refused(with("mask", at::ones(sizes, at::kByte)), ErrorKind::kPlan, "expected [2 or 1, 4 or 1, 7, 10]");
  }
  expect_refused(with("mask", at::ones({1, 1, 7, 10}, at::kByte), {{"block", "32"}}), ErrorKind::kPlan,
                 "blocks of 32 tokens");
  with("mask", at::ones({2, 4, 7, 10}, at::kByte));
  EXPECT_EQ(read_block_maps(from_file(path), kShape).blocks.given->density(), 1);
  expect_refused(from_file(path, ", digest = \"0123\""), ErrorKind::kInput, "but the pattern says 0123");
}

}  // namespace
}  // namespace annulus::block_map_file_test
