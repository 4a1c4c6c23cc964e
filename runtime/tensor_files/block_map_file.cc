// See block_map_file.h.
#include "runtime/tensor_files/block_map_file.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>

#include "common/error.h"
#include "common/text.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {
namespace {

std::shared_ptr<const BlockMap> read_map(const BlocksSpec& spec, const AttentionShape& shape) {
  const SafetensorsFile file(spec.file);
  const TensorInfo* mask = file.find("mask");
  if (!mask) {
    throw Error(
        ErrorKind::kInput, "pattern",
        spec.file + " has no tensor \"mask\": expected uint8 [batch or 1, heads or 1, query blocks, key blocks]");
  }
  if (mask->dtype != at::kByte) {
    throw Error(
        ErrorKind::kInput, "pattern",
        "the mask in " + spec.file + " must be of dtype U8, not " + std::string(safetensors_dtype(mask->dtype)));
  }
  if (const auto block = file.metadata().find("block");
      block != file.metadata().end() && block->second != std::to_string(spec.block)) {
    throw Error(ErrorKind::kPlan, "pattern",
                "the mask in " + spec.file + " has blocks of " + block->second +
                    " tokens, but the pattern says block = " + std::to_string(spec.block));
  }
  const int64_t query_blocks = ceil_div(shape.q_len, spec.block), key_blocks = ceil_div(shape.k_len, spec.block);
  const std::vector<int64_t>& size = mask->shape;
  if (size.size() != 4 || (size[0] != 1 && size[0] != shape.batch) || (size[1] != 1 && size[1] != shape.heads) ||
      size[2] != query_blocks || size[3] != key_blocks) {
    throw Error(ErrorKind::kPlan, "pattern",
                "the mask in " + spec.file + " has the shape " + list_text(size) + "; for blocks of " +
                    std::to_string(spec.block) + " expected " +
                    block_map_shapes(shape.batch, shape.heads, query_blocks, key_blocks));
  }
  const at::Tensor values = file.load("mask");
  auto map = std::make_shared<BlockMap>(
      block_map_from_dense(values.const_data_ptr<uint8_t>(), spec.block, size[0], size[1], query_blocks, key_blocks));
  if (const std::string digest = map->digest(); !spec.digest.empty() && spec.digest != digest) {
    throw Error(
        ErrorKind::kInput, "pattern",
        "the block map in " + spec.file + " has the digest " + digest + ", but the pattern says " + spec.digest);
  }
  return map;
}

std::shared_ptr<const TokenMask> read_mask(const MaskSpec& spec, const AttentionShape& shape,
                                           const std::vector<Span>& held) {
  const SafetensorsFile file(spec.file);
  const TensorInfo* mask = file.find("mask");
  if (!mask) {
    throw Error(ErrorKind::kInput, "pattern",
                spec.file + " has no tensor \"mask\": expected bool or uint8 [batch or 1, heads or 1, queries, keys]");
  }
  if (mask->dtype != at::kByte && mask->dtype != at::kBool) {
    throw Error(ErrorKind::kInput, "pattern",
                "the mask in " + spec.file + " must be of dtype BOOL or U8, not " +
                    std::string(safetensors_dtype(mask->dtype)));
  }
  const std::vector<int64_t>& size = mask->shape;
  if (size.size() != 4 || (size[0] != 1 && size[0] != shape.batch) || (size[1] != 1 && size[1] != shape.heads) ||
      size[2] != shape.q_len || size[3] != shape.k_len) {
    throw Error(ErrorKind::kPlan, "pattern",
                "the mask in " + spec.file + " has the shape " + list_text(size) +
                    "; for [batch or 1, heads or 1, queries, keys] expected " +
                    block_map_shapes(shape.batch, shape.heads, shape.q_len, shape.k_len));
  }
  std::vector<uint8_t> rows;
  const MaskRows read = [&](int64_t number, int64_t first, int64_t count) {
    rows.resize(static_cast<size_t>(count * size[3]));
    file.read(*mask, static_cast<uint64_t>((number * size[2] + first) * size[3]), rows.size(), rows.data());
    return rows.data();
  };
  auto made = std::make_shared<TokenMask>(
      make_token_mask(size[0], size[1], size[2], size[3], read, held, "the mask in " + spec.file));
  if (!spec.digest.empty() && spec.digest != made->digest) {
    throw Error(
        ErrorKind::kInput, "pattern",
        "the mask in " + spec.file + " has the digest " + made->digest + ", but the pattern says " + spec.digest);
  }
  return made;
}

void read_all(PatternSpec& spec, const AttentionShape& shape, const std::vector<Span>& held) {
  for (PatternSpec& member : spec.members) read_all(member, shape, held);
  if (!spec.mask.file.empty() && !spec.mask.given) {
    spec.mask.given = read_mask(spec.mask, shape, held);
    spec.mask.digest = spec.mask.given->digest;
  }
  if (spec.kind != PatternSpec::Kind::kBlocks || spec.blocks.map != BlocksSpec::Map::kFile || spec.blocks.given) return;
  spec.blocks.given = read_map(spec.blocks, shape);
  spec.blocks.digest = spec.blocks.given->digest();
}

}  // namespace

PatternSpec read_block_maps(const PatternSpec& spec, const AttentionShape& shape,
                            const std::optional<std::vector<Span>>& held) {
  validate(spec, shape);
  PatternSpec read = spec;
  read_all(read, shape, held.value_or(std::vector{Span::range(0, shape.q_len)}));
  validate(read, shape);
  return read;
}

void write_block_map(const std::string& path, const BlockMap& map) {
  const std::vector<uint8_t> active = map.dense();
  const at::Tensor mask = at::empty({map.batch, map.heads, map.query_blocks, map.key_blocks}, at::kByte);
  std::copy(active.begin(), active.end(), mask.mutable_data_ptr<uint8_t>());
  write_safetensors(path, {{"mask", mask}}, {{"block", std::to_string(map.block)}, {"digest", map.digest()}});
}

}  // namespace annulus
