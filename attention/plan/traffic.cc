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
      bytes += static_cast<int64_t>(sizeof step + step.tiles.size() * sizeof(Tile) + step.adds.size() * sizeof(Add));
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

Storage storage_of(const Program& program, const std::vector<Step>& steps) {
  Storage storage;
  const bool backward = &steps == &program.backward;
  const std::vector<Lifetime> lives = lifetimes(program, steps);
  for (size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    const bool given = buffer.kind == BufferKind::kOwnKV || (backward && static_cast<int>(b) == program.saved);
    const StoragePool pool = given ? kGivenKV : buffer.holds_gradient() ? kGradients : kTravellingKV;
    storage.add({2 * buffer.rows.rows(), pool, lives[b]});
  }
  for (size_t s = 0; s < steps.size(); ++s) {
    for (const Transfer& t : steps[s].sends) {
      if (consecutive_rows(program.buffers[static_cast<size_t>(t.buffer)].rows, t.rows)) continue;
      storage.add({2 * t.rows.rows(), kTravellingKV, {static_cast<int>(s), static_cast<int>(s)}});
    }
  }
  return storage;
}

Traffic traffic(const Program& program, const std::vector<Step>& steps) {
  Traffic sum;
  for (const Step& step : steps) {
    for (const Transfer& t : step.sends) {
      const bool gradient = program.buffers[static_cast<size_t>(t.buffer)].holds_gradient();
      (gradient ? sum.grad_messages : sum.kv_messages) += 2;
      (gradient ? sum.grad_rows : sum.kv_rows) += 2 * t.rows.rows();
    }
  }
  const Storage storage = storage_of(program, steps);
  sum.peak_kv_rows = storage.peak(std::array<int64_t, kStoragePools>{1, 1, 0});
  sum.peak_grad_rows = storage.peak(std::array<int64_t, kStoragePools>{0, 0, 1});
  return sum;
}

}  // namespace annulus
