// See schedules.h.
#include "attention/plan/schedules.h"

#include "attention/plan/tiles.h"

namespace annulus {
namespace {

int wrap(int64_t rank, int ranks) { return static_cast<int>((rank % ranks + ranks) % ranks); }

int add_buffer(Program& program, BufferKind kind, const RowSet& rows) {
  program.buffers.push_back({kind, rows});
  return static_cast<int>(program.buffers.size()) - 1;
}

// Blocks without rows (fewer positions than ranks) do not travel: both sides leave the transfer out.
void transfer(std::vector<Transfer>& list, const Program& program, int peer, int buffer) {
  const RowSet& rows = program.buffers[static_cast<size_t>(buffer)].rows;
  if (rows.rows() > 0) list.push_back({peer, buffer, rows});
}

// The tiles of a step against `buffer`, in the backward with their gradients going to `grad_buffer`.
void compute(Step& step, const ScheduleInput& input, const Program& program, int buffer, int grad_buffer = -1) {
  append_tiles(input.pattern, program.query_spans, program.buffers[static_cast<size_t>(buffer)].rows, buffer,
               grad_buffer, step.tiles);
}

}  // namespace

RowSet ScheduleInput::rows_of(int owner) const {
  return {Span::range(0, pattern.shape.batch), Span::range(0, pattern.shape.kv_heads),
          keys.spans[static_cast<size_t>(owner)]};
}

void make_ring(const ScheduleInput& input, Program& program) {
  const int P = program.request.ranks, r = program.rank;
  const int next = wrap(r + 1, P), previous = wrap(r - 1, P);

  // Forward: at step t this rank holds the block of owner r - t.
  int held = kOwnKVBuffer;
  program.forward.resize(static_cast<size_t>(P));
  for (int t = 0; t < P; ++t) {
    Step& step = program.forward[static_cast<size_t>(t)];
    compute(step, input, program, held);
    if (t + 1 == P) break;
    const bool last = t + 2 == P;
    const int incoming =
        add_buffer(program, last ? BufferKind::kSavedKV : BufferKind::kKV, input.rows_of(wrap(r - t - 1, P)));
    transfer(step.sends, program, next, held);
    transfer(step.receives, program, previous, incoming);
    held = incoming;
  }
  if (P > 1) program.saved = held;

  // Backward: at step s this rank holds the block of owner r + 1 + s, the last one being its own.
  int sending = -1;  // the gradient finished in the step before, of owner r + s
  program.backward.resize(static_cast<size_t>(P));
  for (int s = 0; s < P; ++s) {
    Step& step = program.backward[static_cast<size_t>(s)];
    const bool own = s + 1 == P;
    if (own) held = kOwnKVBuffer;
    const RowSet rows = program.buffers[static_cast<size_t>(held)].rows;
    const int grad = own ? kOwnGradBuffer : add_buffer(program, BufferKind::kGrad, rows);
    if (s == 0) {
      step.zero.push_back(grad);  // nothing arrives yet: this rank makes the first contribution
      compute(step, input, program, held, grad);
    } else {
      transfer(step.sends, program, previous, sending);
      transfer(step.receives, program, next, grad);
      const int part = static_cast<int>(program.buffers.size());
      compute(step, input, program, held, part);
      if (!step.tiles.empty()) {
        add_buffer(program, BufferKind::kGrad, rows);
        step.zero.push_back(part);
        step.adds.push_back({grad, part});
      }
    }
    sending = grad;
    if (s + 2 < P) {
      const int incoming = add_buffer(program, BufferKind::kKV, input.rows_of(wrap(r + 2 + s, P)));
      transfer(step.sends, program, previous, held);
      transfer(step.receives, program, next, incoming);
      held = incoming;
    }
  }
}

void make_all_gather(const ScheduleInput& input, Program& program) {
  const int P = program.request.ranks, r = program.rank;
  const auto gather = [&](std::vector<Step>& steps) {
    std::vector<int> blocks;
    steps.emplace_back();
    for (int d = 1; d < P; ++d) {
      const int owner = wrap(r - d, P);
      blocks.push_back(add_buffer(program, BufferKind::kKV, input.rows_of(owner)));
      transfer(steps[0].sends, program, wrap(r + d, P), kOwnKVBuffer);
      transfer(steps[0].receives, program, owner, blocks.back());
    }
    return blocks;
  };

  const std::vector<int> forward_blocks = gather(program.forward);
  compute(program.forward[0], input, program, kOwnKVBuffer);
  if (P > 1) program.forward.emplace_back();
  for (const int block : forward_blocks) compute(program.forward[1], input, program, block);

  const std::vector<int> backward_blocks = gather(program.backward);
  program.backward[0].zero.push_back(kOwnGradBuffer);
  compute(program.backward[0], input, program, kOwnKVBuffer, kOwnGradBuffer);
  if (P == 1) return;
  program.backward.resize(3);
  Step &others = program.backward[1], &home = program.backward[2];
  for (int d = 1; d < P; ++d) {
    const int block = backward_blocks[static_cast<size_t>(d - 1)];
    const int grad = add_buffer(program, BufferKind::kGrad, program.buffers[static_cast<size_t>(block)].rows);
    others.zero.push_back(grad);
    compute(others, input, program, block, grad);
    transfer(home.sends, program, wrap(r - d, P), grad);
  }
  const RowSet own_rows = program.buffers[kOwnGradBuffer].rows;
  for (int other = 0; other < P; ++other) {
    if (other == r || own_rows.rows() == 0) continue;
    const int part = add_buffer(program, BufferKind::kGrad, own_rows);
    transfer(home.receives, program, other, part);
    home.adds.push_back({kOwnGradBuffer, part});
  }
}

}  // namespace annulus
