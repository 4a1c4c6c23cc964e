// Tests of runtime/tensor_files/block_map_file.h: block maps and masks of tokens in safetensors files.
#include "runtime/tensor_files/block_map_file.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
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

// ---- Masks of tokens

const AttentionShape kMasked{2, 4, 2, 200, 150, 0};

PatternSpec masked(const std::string& path, const std::string& more = "") {
  return parse_pattern("{ kind = \"mask\", mask = \"" + path + "\"" + more + " }", "");
}

TEST(MaskFile, ReadsThePairsAndOnlyTheBitsOfTheHeldQueries) {
  const std::string path = temporary("tokens.safetensors");
  for (const at::ScalarType type : {at::kBool, at::kByte}) {
    const at::Tensor shown = at::rand({2, 1, 200, 150}).lt(0.3).to(type);
    shown.select(0, 1).narrow(1, 0, 128).fill_(1);
    write_safetensors(path, {{"mask", shown}});
    const PatternSpec read = read_block_maps(masked(path), kMasked);
    const TokenMask want = token_mask_from_dense(static_cast<const uint8_t*>(shown.const_data_ptr()), 2, 1, 200, 150);
    EXPECT_EQ(read.mask.digest, want.digest);
    EXPECT_EQ(read.mask.given->stored->words, want.stored->words);
    EXPECT_EQ(count_pairs(make_pattern(read, kMasked)), 4 * shown.to(at::kLong).sum().item<int64_t>());
    const PatternSpec again = parse_pattern(read.text(), "");  // demands the digest
    EXPECT_EQ(read_block_maps(again, kMasked).mask.given->stored->words, want.stored->words);
    const PatternSpec part = read_block_maps(masked(path), kMasked, HeldBits::of({Span::range(130, 140)}));
    EXPECT_EQ(part.text(), read.text());
    EXPECT_EQ(part.mask.given->stored->words.size(), 2 * 10 * 4u);  // two planes; two partly shown blocks a row
  }
}

TEST(MaskFile, RefusesWhatDoesNotFit) {
  const std::string path = temporary("refused_tokens.safetensors");
  const auto refused = [&](const std::string& name, const at::Tensor& tensor, ErrorKind kind, const std::string& part) {
    write_safetensors(path, {{name, tensor}});
    expect_error(kind, {part}, [&] { read_block_maps(masked(path), kMasked); });
  };
  expect_error(ErrorKind::kInput, {"no_tokens.safetensors"},
               [&] { read_block_maps(masked(temporary("no_tokens.safetensors")), kMasked); });
  refused("masks", at::ones({1, 1, 200, 150}, at::kByte), ErrorKind::kInput, "no tensor \"mask\"");
  refused("mask", at::ones({1, 1, 200, 150}), ErrorKind::kInput, "BOOL or U8, not F32");
  refused("mask", at::zeros({1, 1, 200, 150}, at::kBool), ErrorKind::kPlan, "refused_tokens.safetensors shows no pair");
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{200, 150}, {1, 200, 150}, {3, 1, 200, 150}, {1, 2, 200, 150}, {1, 1, 150, 200}}) {
    refused("mask", at::ones(sizes, at::kByte), ErrorKind::kPlan, "expected [2 or 1, 4 or 1, 200, 150]");
  }
  write_safetensors(path, {{"mask", at::ones({1, 1, 200, 150}, at::kByte)}});
  expect_error(ErrorKind::kInput, {"but the pattern says 0123"},
               [&] { read_block_maps(masked(path, ", mask_digest = \"0123\""), kMasked); });
  const at::Tensor half = at::rand({1, 1, 200, 150}).lt(0.5);
  write_safetensors(path, {{"mask", half}});
  const int64_t limit = mask_limit();
  set_mask_limit(100);
  expect_error(ErrorKind::kResource, {"refused_tokens.safetensors", "memory.masks"},
               [&] { read_block_maps(masked(path), kMasked); });
  set_mask_limit(limit);
}

}  // namespace
}  // namespace annulus::block_map_file_test
