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

// Returns the tensor "mask" of a pattern's file. It must have one of these dtypes and the shape [batch or 1, heads or
// 1, rows, columns]; `form` says in messages what the last two count.
const TensorInfo& mask_of(const SafetensorsFile& file, const std::string& path, bool bools, const std::string& form,
                          const AttentionShape& shape, int64_t rows, int64_t columns) {
  const TensorInfo* mask = file.find("mask");
  if (!mask) {
    throw Error(ErrorKind::kInput, "pattern",
                path + " has no tensor \"mask\": expected " + (bools ? "bool or " : "") + "uint8 " + form);
  }
  if (mask->dtype != at::kByte && !(bools && mask->dtype == at::kBool)) {
    throw Error(ErrorKind::kInput, "pattern",
                "the mask in " + path + " must be of dtype " + (bools ? "BOOL or " : "") + "U8, not " +
                    std::string(safetensors_dtype(mask->dtype)));
  }
  const std::vector<int64_t>& size = mask->shape;
  if (size.size() != 4 || (size[0] != 1 && size[0] != shape.batch) || (size[1] != 1 && size[1] != shape.heads) ||
      size[2] != rows || size[3] != columns) {
    throw Error(ErrorKind::kPlan, "pattern",
                "the mask in " + path + " has the shape " + list_text(size) + "; for " + form + " expected " +
                    block_map_shapes(shape.batch, shape.heads, rows, columns));
  }
  return *mask;
}

void require_digest(const std::string& what, const std::string& path, const std::string& got,
                    const std::string& wanted) {
  if (wanted.empty() || got == wanted) return;
  throw Error(ErrorKind::kInput, "pattern",
              what + " in " + path + " has the digest " + got + ", but the pattern says " + wanted);
}

std::shared_ptr<const BlockMap> read_map(const BlocksSpec& spec, const AttentionShape& shape) {
  const SafetensorsFile file(spec.file);
  if (const auto block = file.metadata().find("block");
      block != file.metadata().end() && block->second != std::to_string(spec.block)) {
    throw Error(ErrorKind::kPlan, "pattern",
                "the mask in " + spec.file + " has blocks of " + block->second +
                    " tokens, but the pattern says block = " + std::to_string(spec.block));
  }
  const int64_t query_blocks = ceil_div(shape.q_len, spec.block), key_blocks = ceil_div(shape.k_len, spec.block);
  const std::string form =
      "[batch or 1, heads or 1, query blocks, key blocks] with blocks of " + std::to_string(spec.block);
  const std::vector<int64_t>& size =
      mask_of(file, spec.file, /*bools=*/false, form, shape, query_blocks, key_blocks).shape;
  const at::Tensor values = file.load("mask");
  auto map = std::make_shared<BlockMap>(
      block_map_from_dense(values.const_data_ptr<uint8_t>(), spec.block, size[0], size[1], query_blocks, key_blocks));
  require_digest("the block map", spec.file, map->digest(), spec.digest);
  return map;
}

std::shared_ptr<const TokenMask> read_mask(const MaskSpec& spec, const AttentionShape& shape, const HeldBits& held) {
  const SafetensorsFile file(spec.file);
  const TensorInfo& mask = mask_of(file, spec.file, /*bools=*/true, "[batch or 1, heads or 1, queries, keys]", shape,
                                   shape.q_len, shape.k_len);
  const std::vector<int64_t>& size = mask.shape;
  std::vector<uint8_t> rows;
  const MaskRows read = [&](int64_t number, int64_t first, int64_t count) {
    rows.resize(static_cast<size_t>(count * size[3]));
    file.read(mask, static_cast<uint64_t>((number * size[2] + first) * size[3]), rows.size(), rows.data());
    return rows.data();
  };
  auto made = std::make_shared<TokenMask>(
      make_token_mask(size[0], size[1], size[2], size[3], read, held, "the mask in " + spec.file));
  require_digest("the mask", spec.file, made->digest, spec.digest);
  return made;
}

void read_all(PatternSpec& spec, const AttentionShape& shape, const HeldBits& held) {
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

PatternSpec read_block_maps(const PatternSpec& spec, const AttentionShape& shape, const HeldBits& held) {
  validate(spec, shape);
  PatternSpec read = spec;
  read_all(read, shape, held);
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
