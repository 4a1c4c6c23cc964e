// See attention_charges.h. What is kept for the backward is in AttentionOutput. The rest is held by the executor (the
// buffers of blocks) and by the kernel, which declares it itself.
#include "attention/execution/attention_charges.h"

#include <algorithm>
#include <vector>

#include "attention/execution/select_blocks.h"
#include "attention/execution/sinks.h"
#include "attention/plan/traffic.h"
#include "attention/tiles/tile_views.h"

namespace annulus {
namespace {

// Sets size.keys to the positions of the largest block of keys that a kernel is given, and size.blocks to their number.
void count_blocks(const Program& program, CallSize& size) {
  int64_t blocks = 0;
  for (const Buffer& buffer : program.buffers) {
    if (buffer.holds_sums() || !buffer.of_keys()) continue;
    for (const RowBlock& block : buffer.rows.blocks) {
      size.keys = std::max(size.keys, block.positions_count());
      ++blocks;
    }
  }
  size.blocks = std::max<int64_t>(1, blocks);
}

// The queries of other ranks that come to this one in the direction in which more do, in positions with all heads of
// all batch rows.
int64_t queries_of_others(const Program& program) {
  const int64_t rows =
      std::max(traffic(program, program.forward).peak_query_rows, traffic(program, program.backward).peak_query_rows);
  const AttentionShape& shape = program.request.shape;
  return ceil_div(rows, std::max<int64_t>(1, shape.batch * shape.heads));
}

}  // namespace

Part attention_charges(const PlanRequest& request, const Program* program, int rank, const CallTraits& call,
                       const Kernel& kernel) {
  const auto [head_dim, type, gpu, dropout, softcap, sinks] = call;
  const AttentionShape& s = request.shape;
  const PatternSpec& pattern = request.pattern;
  CallSize size{.batch = s.batch,
                .queries = query_layout(request).count(rank),
                .heads = s.heads,
                .kv_heads = s.kv_heads,
                .head_dim = head_dim,
                .keys = key_layout(request).count(rank),
                .blocks = request.ranks,
                .gathers = pattern.kind != PatternSpec::Kind::kFull || !pattern.documents.empty() ||
                           !pattern.kept_keys.empty() || has_mask(pattern),
                .dropout = dropout,
                .softcap = softcap,
                .masked = has_mask(pattern),
                .type = type};
  const int64_t own_keys = size.key_elements();
  if (program) count_blocks(*program, size);
  const int64_t e = size.element(), wide = static_cast<int64_t>(c10::elementSize(accumulator_type(type)));
  const int64_t queries = size.query_elements() * e;

  Part part{kAttentionPart, {}};
  std::vector<Charge>& charges = part.charges;
  charges.push_back({"out", queries, When::kKept});
  charges.push_back({"lse", size.lse_elements() * wide, When::kKept});
  int64_t gradients = own_keys * wide;
  if (program) {
    const auto held = [&](const std::vector<Step>& steps, bool backward) {
      return storage_of(*program, steps).peak(pool_bytes(backward, head_dim, e, wide));
    };
    const int64_t saved =
        program->saved < 0 ? 0 : 2 * program->buffers[static_cast<size_t>(program->saved)].rows.rows() * head_dim * e;
    charges.push_back({"keys and values of other ranks", saved, When::kKept});
    charges.push_back(
        {"blocks that travel", std::max<int64_t>(0, held(program->forward, false) - saved), When::kForward});
    gradients = held(program->backward, true);
  }
  // When the results are converted to the inputs' dtype, nothing travels any more.
  const int64_t results = e == wide ? 0 : queries + own_keys * e;
  charges.push_back(
      {"blocks that travel, and gradients", std::max(gradients, own_keys * wide + results), When::kBackward});
  CallSize of_kernels = size;  // those of other ranks' queries live at the same time
  if (program && program->moves_queries()) of_kernels.queries += queries_of_others(*program);
  for (const Charge& charge : kernel.charges(of_kernels)) charges.push_back(charge);
  if (sinks) {
    const auto bytes = [&](bool of_backward) {
      return sink_bytes(s.batch * size.queries, s.heads, head_dim, e, wide, of_backward);
    };
    charges.push_back({"sinks", bytes(false), When::kForward});
    charges.push_back({"gradients of sinks", bytes(true), When::kBackward});
  }
  charges.push_back({"selection of blocks", selection_bytes(request, rank, head_dim, gpu), When::kForward});
  return part;
}

}  // namespace annulus
