// Computes what a plan sends and holds; see traffic.h.
#include "attention/plan/traffic.h"

#include <array>

#include "attention/plan/schedules.h"

namespace annulus {
namespace {

int64_t bytes_of(const std::vector<Span>& spans) { return static_cast<int64_t>(spans.size() * sizeof(Span)); }
int64_t bytes_of(const RowSet& rows) {
  int64_t bytes = 0;
  for (const RowBlock& block : rows.blocks) bytes += static_cast<int64_t>(sizeof block) + bytes_of(block.positions);
  return bytes;
}

}  // namespace

int64_t program_bytes(const Program& program) {
  int64_t bytes = static_cast<int64_t>(sizeof program + program.request.uneven_lengths.size() * sizeof(int64_t)) +
                  program.request.pattern.bytes() + bytes_of(program.query_spans) + bytes_of(program.key_spans);
  for (const Buffer& buffer : program.buffers) bytes += static_cast<int64_t>(sizeof buffer) + bytes_of(buffer.rows);
  for (const auto* steps : {&program.forward, &program.backward}) {
    for (const Step& step : *steps) {
      bytes += static_cast<int64_t>(sizeof step + step.tiles.size() * sizeof(Tile) + step.adds.size() * sizeof(Add) +
                                    step.finishes.size() * sizeof(Finish));
      for (const auto* transfers : {&step.sends, &step.receives}) {
        for (const Transfer& t : *transfers) bytes += static_cast<int64_t>(sizeof t) + bytes_of(t.rows);
      }
    }
  }
  return bytes;
}

std::vector<Lifetime> lifetimes(const Program& program, const std::vector<Step>& steps) {
  std::vector<Lifetime> lives(program.buffers.size());
  const int end = static_cast<int>(steps.size()) - 1;
  const bool backward = &steps == &program.backward;
  const auto use = [&](int buffer, int step) { lives[static_cast<size_t>(buffer)].use(step); };
  use(kOwnKVBuffer, 0);
  use(kOwnKVBuffer, end);
  if (backward && program.saved >= 0) use(program.saved, 0);
  for (int s = 0; s <= end; ++s) {
    const Step& step = steps[static_cast<size_t>(s)];
    for (const Transfer& t : step.sends) use(t.buffer, s);
    for (const Transfer& t : step.receives) use(t.buffer, s);
    for (const int buffer : step.zero) use(buffer, s);
    for (const Tile& tile : step.tiles) {
      use(tile.buffer, s);
      if (tile.grad_buffer >= 0) use(tile.grad_buffer, s);
      if (tile.queries >= 0) use(tile.queries, s);
    }
    for (const Finish& finish : step.finishes) {
      use(finish.queries, s);
      use(finish.results, s);
    }
    for (const Add& add : step.adds) {
      use(add.dst, s);
      use(add.src, s);
    }
  }
  if (!backward && program.saved >= 0) use(program.saved, end);
  if (backward) use(kOwnGradBuffer, end);
  return lives;
}

namespace {

StoragePool pool_of(BufferKind kind) {
  switch (kind) {
    case BufferKind::kGrad:
    case BufferKind::kOwnGrad:
      return kGradients;
    case BufferKind::kOwnQueries:
    case BufferKind::kQueries:
      return kOtherQueries;
    case BufferKind::kOwnResults:
    case BufferKind::kResults:
      return kPartialResults;
    default:
      return kTravellingKV;
  }
}

// In the units of storage_of.
int64_t size_of(const RowSet& rows, StoragePool pool) {
  return (pool == kOtherQueries || pool == kPartialResults ? 1 : 2) * rows.rows();
}

}  // namespace

RowContent row_content(BufferKind kind, bool backward) {
  switch (pool_of(kind)) {
    case kGradients:
      return {.wide_vectors = 2};  // dk, dv
    case kOtherQueries:
      return {.vectors = backward ? 3 : 1, .wide_elements = backward};  // q; dout, out, lse
    case kPartialResults:
      return {.wide_vectors = 1, .wide_elements = !backward};  // out, lse; dq
    default:
      return {.vectors = 2};  // k, v
  }
}

std::array<int64_t, kStoragePools> pool_bytes(bool backward, int64_t head_dim, int64_t bytes, int64_t wide) {
  return {0, head_dim * bytes, head_dim * wide,
          row_content(BufferKind::kQueries, backward).bytes(head_dim, bytes, wide),
          row_content(BufferKind::kResults, backward).bytes(head_dim, bytes, wide)};
}

Storage storage_of(const Program& program, const std::vector<Step>& steps) {
  Storage storage;
  const bool backward = &steps == &program.backward;
  const std::vector<Lifetime> lives = lifetimes(program, steps);
  for (size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    if (buffer.kind == BufferKind::kOwnQueries || buffer.kind == BufferKind::kOwnResults) {
      storage.add({0, kGivenKV, {}});
      continue;
    }
    const bool given = buffer.kind == BufferKind::kOwnKV || (backward && static_cast<int>(b) == program.saved);
    const StoragePool pool = pool_of(buffer.kind);
    storage.add({size_of(buffer.rows, pool), given ? kGivenKV : pool, lives[b]});
  }
  for (size_t s = 0; s < steps.size(); ++s) {
    for (const Transfer& t : steps[s].sends) {
      const Buffer& buffer = program.buffers[static_cast<size_t>(t.buffer)];
      if (consecutive_rows(buffer.rows, t.rows)) continue;
      const StoragePool pool = pool_of(buffer.kind);
      storage.add({size_of(t.rows, pool), pool, {static_cast<int>(s), static_cast<int>(s)}});
    }
  }
  return storage;
}

Traffic traffic(const Program& program, const std::vector<Step>& steps) {
  Traffic sum;
  sum.backward = &steps == &program.backward;
  for (const Step& step : steps) {
    for (const Transfer& t : step.sends) {
      const BufferKind kind = program.buffers[static_cast<size_t>(t.buffer)].kind;
      const StoragePool pool = pool_of(kind);
      const int64_t messages = row_content(kind, sum.backward).tensors(), rows = size_of(t.rows, pool);
      const auto add = [&](int64_t& of_messages, int64_t& of_rows) { of_messages += messages, of_rows += rows; };
      switch (pool) {
        case kGradients:
          add(sum.grad_messages, sum.grad_rows);
          break;
        case kOtherQueries:
          add(sum.query_messages, sum.query_rows);
          break;
        case kPartialResults:
          add(sum.result_messages, sum.result_rows);
          break;
        default:
          add(sum.kv_messages, sum.kv_rows);
      }
    }
  }
  const Storage storage = storage_of(program, steps);
  const auto peak = [&](std::array<int64_t, kStoragePools> weights) { return storage.peak(weights); };
  sum.peak_kv_rows = peak({1, 1, 0, 0, 0});
  sum.peak_grad_rows = peak({0, 0, 1, 0, 0});
  sum.peak_query_rows = peak({0, 0, 0, 1, 0});
  sum.peak_result_rows = peak({0, 0, 0, 0, 1});
  return sum;
}

}  // namespace annulus
