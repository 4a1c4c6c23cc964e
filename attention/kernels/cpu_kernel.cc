// The cpu kernel: flash attention on CPUs (attention/cpu_flash) for LibTorch's tensors. choose_kernel.cc makes it. This
// file cuts a step's tiles into blocks of query rows and distributes these to threads.
//
// Tiles with the same query rows are computed together (attention/tiles/tile_groups.h), so the cost follows the number
// of pairs, however scattered the keys are. If keys or values are not finite, tiles with a band are computed densely in
// small blocks (attention/tiles/dense_tiles.h), because a hidden infinity times a probability of 0 would give NaN.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <type_traits>
#include <utility>

#include "attention/cpu_flash/flash.h"
#include "attention/cpu_flash/tile_math.h"
#include "attention/kernels/kernel_makers.h"
#include "attention/tiles/dense.h"
#include "attention/tiles/dense_tiles.h"
#include "attention/tiles/tile_groups.h"
#include "attention/tiles/tile_views.h"

namespace annulus {
namespace {

// Rows of one head of a [batch, rows, heads, D] tensor, for reading.
StoredRows stored_rows(const at::Tensor& tensor, int64_t batch, int64_t head, const Span& rows) {
  const at::ScalarType type = tensor.scalar_type();
  const int64_t first = batch * tensor.stride(0) + head * tensor.stride(2) + rows.begin * tensor.stride(1);
  return {static_cast<const char*>(tensor.const_data_ptr()) + first * tensor.element_size(),
          tensor.stride(1) * rows.stride,
          type == at::kDouble     ? Storage::kDouble
          : type == at::kBFloat16 ? Storage::kBFloat16
          : type == at::kHalf     ? Storage::kHalf
                                  : Storage::kFloat};
}

// The same for writing.
template <typename T>
Rows<T> head_rows(const at::Tensor& tensor, int64_t batch, int64_t head, const Span& rows) {
  T* const data = static_cast<T*>(tensor.data_ptr());
  return {data + batch * tensor.stride(0) + head * tensor.stride(2) + rows.begin * tensor.stride(1),
          tensor.stride(1) * rows.stride};
}

// The tensor, copied if the elements of a row are not adjacent.
at::Tensor prepared(const at::Tensor& tensor) { return tensor.stride(3) == 1 ? tensor : tensor.contiguous(); }

// A block of query rows of some heads that read the same kv head.
struct Item {
  const TileGroup* group;
  int64_t batch;
  Span heads;
  Span rows;  // indices into the group's query rows
};

// The number of threads that the work is worth. Waking a thread and waiting for it costs some ten microseconds, and
// much more if other processes compete for the cores.
int64_t threads_for(double flops) {
  constexpr double kWorthAThread = 2e6;
  return static_cast<int64_t>(std::clamp(flops / kWorthAThread, 1.0, static_cast<double>(at::get_num_threads())));
}

// Runs work(i, scratch) for i = 0, ..., n - 1 on up to `threads` threads, each of which takes the next i when it is
// free.
template <typename T, typename Work>
void for_each_in_parallel(int64_t n, int64_t threads, std::vector<FlashScratch<T>>& scratch, Work work) {
  threads = std::min(n, threads);
  if (static_cast<int64_t>(scratch.size()) < threads) scratch.resize(static_cast<size_t>(threads));
  if (threads == 1) {
    for (int64_t i = 0; i < n; ++i) work(static_cast<size_t>(i), scratch[0]);
    return;
  }
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      for (int64_t i = next++; i < n; i = next++) work(static_cast<size_t>(i), scratch[static_cast<size_t>(begin)]);
    }
  });
}

template <typename T>
class CpuKernel : public Kernel {
 public:
  void begin_forward(const at::Tensor& q, const KernelCall& call) override {
    call_ = call;
    q_ = prepared(q);
    out_ = at::empty(q.sizes(), q_.options().dtype(kType));  // rows are written when they have seen a key
    lse_ = at::full({q.size(0), q.size(2), q.size(1)}, -kInfinity, out_.options());
  }

  void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) override {
    load(keys);
    at::Tensor wide;
    for (const Tile& tile : tiles) {
      if (!is_dense(tile)) continue;
      if (!wide.defined()) {
        wide = q_.to(kType);
        zero_rows_without_keys();
      }
      dense_tile_forward(wide, keys_, tile, call_, out_, lse_, poll);
    }
    constexpr bool kApart = true;  // the blocks of a wave run at the same time, so no two may have a row in common
    for_each_wave(tiles, 4, kApart, poll, [&](const std::vector<Item>& wave, double flops) {
      RECORD_FUNCTION(kForwardRecord, std::vector<c10::IValue>{});
      for_each_in_parallel<T>(
          static_cast<int64_t>(wave.size()), threads_for(flops), scratch_, [&](size_t i, FlashScratch<T>& scratch) {
            const Item& item = wave[i];
            std::vector<KeyPiece<T>> pieces;
            for (const Tile& tile : item.group->tiles) pieces.push_back(piece_of(item, tile));
            QueryBlock<T> block = block_of(item);
            for (int64_t h = 0; h < item.heads.count; ++h) {
              block.heads[static_cast<size_t>(h)].out = head_rows<T>(out_, item.batch, item.heads.at(h), rows_of(item));
            }
            flash_forward<T>(block, pieces, q_.size(3), static_cast<T>(call_.scale), scratch);
          });
    });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    zero_rows_without_keys();
    out = out_;
    lse = lse_;
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    call_ = call;
    q_ = prepared(q);
    dout_ = prepared(dout);
    out_ = out;
    // exp(score - lse) must be 0 in rows without keys.
    lse_ = lse.to(kType).masked_fill(lse.eq(-kInfinity), kInfinity);
    fill_delta();
    dq_ = at::zeros(q.sizes(), q_.options().dtype(kType));
  }

  void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    load(keys);
    const bool sets =
        grads.fresh && std::none_of(tiles.begin(), tiles.end(), [&](const Tile& t) { return is_dense(t); });
    if (!sets) zero_if_fresh(grads);
    holds_.assign(sets ? static_cast<size_t>(grads.k.numel() / grads.k.size(3)) : 0, 0);
    DenseQueries queries;
    for (const Tile& tile : tiles) {
      if (!is_dense(tile)) continue;
      if (!queries.q.defined()) queries = {dout_.to(kType), q_.to(kType), out_.to(kType), lse_};
      const int64_t held = dense_tile_backward(queries, keys_, grads, tile, call_, dq_, poll);
      peak_result_elements_ = std::max(peak_result_elements_, held);
    }
    for_each_wave(tiles, 10, false, poll,
                  [&](const std::vector<Item>& wave, double flops) { run_backward(wave, threads_for(flops), grads); });
    if (sets) zero_the_rest(grads);
    for (const FlashScratch<T>& scratch : scratch_) {
      const size_t held = scratch.dk.size() + scratch.dv.size();
      peak_result_elements_ = std::max(peak_result_elements_, static_cast<int64_t>(held));
    }
  }

  at::Tensor finish_backward() override { return dq_; }

  std::vector<Charge> charges(const CallSize& size) const override {
    const auto wide = static_cast<int64_t>(sizeof(T));
    const int64_t queries = size.query_elements() * wide, lse = size.lse_elements() * wide;
    const int64_t threads = at::get_num_threads(), rows = std::min(kMostRows, size.lse_elements());
    const auto scratch = [&](bool backward) {
      return threads * flash_scratch_elements(rows, size.head_dim, backward) * wide;
    };
    // Each of c kv heads in a wave is shared by at most (threads - 1) / c additional threads.
    const int64_t partial = (threads - 1) * queries / std::max<int64_t>(1, size.batch * size.kv_heads);
    std::vector<Charge> charges = {{"dq", queries, When::kBackward},
                                   {"dq of threads that share a kv head", partial, When::kBackward},
                                   {"lse and delta", 2 * lse, When::kBackward},
                                   {"scratch of threads", scratch(false), When::kForward},
                                   {"scratch of threads, backward", scratch(true), When::kBackward}};
    if (size.type == kType) return charges;
    charges.push_back({"out, in fp32", queries, When::kForward});
    return charges;
  }

 private:
  static constexpr at::ScalarType kType = std::is_same_v<T, double> ? at::kDouble : at::kFloat;
  // Between two polls no thread does much more than kPolledFlops, which takes about 4 ms. If there is nothing to poll,
  // waves of kFlops only keep the lists short.
  static constexpr double kPolledFlops = 3e8, kFlops = 1e10;
  static constexpr size_t kMostGroups = 256;    // the most groups in a wave
  static constexpr int64_t kFewestBlocks = 16;  // the fewest blocks of query rows that threads should share

  void load(const KeyBlock& keys) {
    keys_ = {prepared(keys.k), prepared(keys.v), keys.batch, keys.heads};
    known_ = keys.finite;
    finite_ = known_ != nullptr ? *known_ : Finite::kUnknown;
  }
  bool loaded_is_finite() {
    if (finite_ == Finite::kUnknown) finite_ = all_finite(keys_.k) && all_finite(keys_.v) ? Finite::kYes : Finite::kNo;
    if (known_ != nullptr) *known_ = finite_;
    return finite_ == Finite::kYes;
  }
  bool is_dense(const Tile& tile) {
    const bool banded = !(tile.band.unbounded_below() && tile.band.unbounded_above());
    return banded && !loaded_is_finite();
  }

  // Calls run(items, flops) for waves of all tiles that are not dense. A wave has about as much work as may be done
  // between two polls. `cost` is the number of floating-point operations for each pair and element of a head. If
  // `apart`, no two groups of a wave have a query row in common.
  template <typename Run>
  void for_each_wave(std::span<const Tile> tiles, int64_t cost, bool apart, const Poll& poll, Run run) {
    std::vector<Tile> fast;
    std::copy_if(tiles.begin(), tiles.end(), std::back_inserter(fast), [&](const Tile& t) { return !is_dense(t); });
    const double pair = static_cast<double>(cost * q_.size(3));
    const double most = (poll ? kPolledFlops : kFlops) * at::get_num_threads();
    const int64_t most_keys = poll ? static_cast<int64_t>(kPolledFlops / (2 * pair * kMostRows)) : Band::kUnbounded;
    const std::vector<TileGroup> groups = group_tiles(fast, std::max(kMostKeys, most_keys));
    // Normally the blocks of one head follow each other, so that its keys stay in the cache. In a backward with several
    // threads, which divide the heads among them, the heads alternate instead.
    const bool heads_apart = !apart && at::get_num_threads() > 1;
    std::vector<Item> wave;
    std::vector<const TileGroup*> held;  // the groups of the wave
    double flops = 0;
    const auto flush = [&] {
      if (wave.empty()) return;
      run(wave, flops);
      wave.clear(), held.clear(), flops = 0;
      if (poll) poll();
    };
    for (const TileGroup& group : groups) {
      const auto meets = [&group](const TileGroup* other) { return share_queries(*other, group); };
      if (apart && (held.size() == kMostGroups || std::any_of(held.begin(), held.end(), meets))) flush();
      const Tile& tile = group.tiles[0];
      const int64_t count = tile.query_rows.count;
      const int64_t rows = rows_at_once(count, tile.batch.count * tile.heads.count);
      const auto take = [&](int64_t first, int64_t b, const Span& heads) {
        const Span block = Span::range(first, std::min(count, first + rows));
        const double work = pair * static_cast<double>(block.count * keys_of(group, block) * heads.count);
        if (work == 0) return;
        if (held.empty() || held.back() != &group) held.push_back(&group);
        wave.push_back({&group, tile.batch.at(b), heads, block});
        flops += work;
        if (flops >= most) flush();
      };
      int64_t together = std::max<int64_t>(1, kMostRows / rows);
      if (at::get_num_threads() > 1) {
        const int64_t blocks = tile.batch.count * tile.heads.count * ceil_div(count, rows);
        together = std::clamp<int64_t>(blocks / kFewestBlocks, 1, together);
      }
      const std::vector<Span> sets = heads_together(tile.heads, together);
      for (int64_t b = 0; b < tile.batch.count; ++b) {
        if (heads_apart) {
          for (int64_t i = 0; i < count; i += rows) {
            for (const Span& heads : sets) take(i, b, heads);
          }
        } else {
          for (const Span& heads : sets) {
            for (int64_t i = 0; i < count; i += rows) take(i, b, heads);
          }
        }
      }
    }
    flush();
  }

  // The size of blocks of query rows. Large blocks pack their keys less often, but threads need several blocks to
  // share. Only whether there is more than one thread matters, so the number of threads changes no bit of a forward,
  // nor of dk and dv. It may change dq if a wave has fewer kv heads than threads: then several threads share a head,
  // and each but the first adds up a part of dq of its own (run_backward).
  static int64_t rows_at_once(int64_t rows, int64_t heads) {
    constexpr int64_t kFewestRows = 256;
    int64_t most = kMostRows;
    if (at::get_num_threads() > 1) {
      while (most > kFewestRows && heads * ceil_div(rows, most) < kFewestBlocks) most /= 2;
    }
    return ceil_div(rows, ceil_div(rows, most));  // blocks of about equal size
  }

  // Divides heads into sets of at most `most` that read the same kv head. Its keys are packed once for each set.
  std::vector<Span> heads_together(const Span& heads, int64_t most) const {
    std::vector<Span> sets;
    for (int64_t h = 0; h < heads.count; ++h) {
      const bool joins =
          !sets.empty() && sets.back().count < most && sets.back().begin / call_.group == heads.at(h) / call_.group;
      if (joins) {
        ++sets.back().count;
      } else {
        sets.push_back(heads.sub(h, 1));
      }
    }
    return sets;
  }

  static int64_t keys_of(const TileGroup& group, const Span& rows) {
    int64_t keys = 0;
    for (const Tile& tile : group.tiles) {
      keys += keys_seen(members(tile.query_positions, rows), tile.key_positions, tile.band).count;
    }
    return keys;
  }
  static Span rows_of(const Item& item) { return members(item.group->tiles[0].query_rows, item.rows); }

  QueryBlock<T> block_of(const Item& item) const {
    const Span rows = rows_of(item);
    QueryBlock<T> block;
    block.count = rows.count;
    block.positions = members(item.group->tiles[0].query_positions, item.rows);
    if (call_.dropout.rate > 0) {
      block.drop_threshold = drop_threshold(call_.dropout);
      block.kept = static_cast<T>(1 / (1 - call_.dropout.rate));
    }
    for (int64_t h = 0; h < item.heads.count; ++h) {
      const int64_t head = item.heads.at(h);
      QueryRows<T> of_head;
      of_head.q = stored_rows(q_, item.batch, head, rows);
      of_head.lse = lse_.data_ptr<T>() + (item.batch * lse_.size(1) + head) * lse_.size(2) + rows.begin;
      of_head.lse_step = rows.stride;
      if (call_.dropout.rate > 0) of_head.philox_key = philox_key(call_.dropout, item.batch, head);
      block.heads.push_back(of_head);
    }
    return block;
  }

  KeyPiece<T> piece_of(const Item& item, const Tile& tile) const {
    const int64_t b = indices_of({item.batch, 1, 1}, keys_.batch, "batch rows").begin;
    const int64_t h = indices_of({item.heads.begin / call_.group, 1, 1}, keys_.heads, "kv heads").begin;
    KeyPiece<T> piece;
    piece.positions = tile.key_positions;
    piece.band = tile.band;
    piece.k = stored_rows(keys_.k, b, h, tile.key_rows);
    piece.v = stored_rows(keys_.v, b, h, tile.key_rows);
    return piece;
  }

  void zero_rows_without_keys() {
    const T* lse = lse_.const_data_ptr<T>();
    for (int64_t b = 0; b < out_.size(0); ++b) {
      for (int64_t h = 0; h < out_.size(2); ++h) {
        const Rows<T> rows = head_rows<T>(out_, b, h, Span::range(0, out_.size(1)));
        for (int64_t i = 0; i < out_.size(1); ++i, ++lse) {
          if (*lse == -kInfinity) std::fill_n(rows.at(i), out_.size(3), T{0});
        }
      }
    }
  }

  // delta = rowsum(dout * out), [B, H, S].
  void fill_delta() {
    const at::Tensor out = prepared(out_.to(dout_.scalar_type()));
    delta_ = at::empty(lse_.sizes(), lse_.options());
    const int64_t heads = delta_.size(1), rows = delta_.size(2), dim = q_.size(3);
    if (delta_.numel() == 0) return;
    const int64_t threads = threads_for(4 * static_cast<double>(dout_.numel()));
    for_each_in_parallel<T>(delta_.size(0) * heads, threads, scratch_, [&](size_t i, FlashScratch<T>&) {
      const int64_t b = static_cast<int64_t>(i) / heads, h = static_cast<int64_t>(i) % heads;
      tile_math<T>().dots(stored_rows(dout_, b, h, Span::range(0, rows)), stored_rows(out, b, h, Span::range(0, rows)),
                          rows, dim, delta_.data_ptr<T>() + static_cast<int64_t>(i) * rows, 1);
    });
  }

  // Blocks that add to the same rows of dk and dv must not run at the same time, so one thread takes all blocks of a kv
  // head, in order. If there are fewer kv heads than threads, several threads divide a head's rows of dk and dv among
  // them, and each but the first adds to a dq of its own.
  void run_backward(const std::vector<Item>& wave, int64_t threads, const KeyBlock& grads) {
    std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> heads;  // the blocks of each (batch row, kv head)
    for (size_t i = 0; i < wave.size(); ++i) heads[{wave[i].batch, wave[i].heads.begin / call_.group}].push_back(i);
    const std::vector<std::pair<std::pair<int64_t, int64_t>, std::vector<size_t>>> lists(heads.begin(), heads.end());
    const auto count = static_cast<int64_t>(lists.size());
    const int64_t shares = ceil_div(threads, count);
    std::vector<std::vector<T>> partial(wave.size() * static_cast<size_t>(shares - 1));
    RECORD_FUNCTION(kBackwardRecord, std::vector<c10::IValue>{});
    for_each_in_parallel<T>(count * shares, threads, scratch_, [&](size_t task, FlashScratch<T>& scratch) {
      const int64_t share = static_cast<int64_t>(task) / count;
      for (const size_t i : lists[task % lists.size()].second) {
        const Item& item = wave[i];
        const std::vector<KeyPiece<T>> pieces = pieces_of(item, grads, share, shares);
        if (pieces.empty()) continue;
        const Span rows = rows_of(item);
        QueryBlock<T> block = block_of(item);
        T* own = nullptr;
        if (share > 0) {
          std::vector<T>& dq = partial[i * static_cast<size_t>(shares - 1) + static_cast<size_t>(share - 1)];
          dq.resize(static_cast<size_t>(item.heads.count * rows.count * q_.size(3)));
          own = dq.data();
        }
        for (int64_t h = 0; h < item.heads.count; ++h) {
          const int64_t head = item.heads.at(h);
          QueryRows<T>& of_head = block.heads[static_cast<size_t>(h)];
          of_head.dout = stored_rows(dout_, item.batch, head, rows);
          of_head.delta = delta_.data_ptr<T>() + (item.batch * delta_.size(1) + head) * delta_.size(2) + rows.begin;
          of_head.delta_step = rows.stride;
          of_head.dq = own != nullptr ? Rows<T>{own + h * rows.count * q_.size(3), q_.size(3)}
                                      : head_rows<T>(dq_, item.batch, head, rows);
        }
        flash_backward<T>(block, pieces, q_.size(3), static_cast<T>(call_.scale), scratch);
      }
    });
    for (size_t p = 0; p < partial.size(); ++p) {
      if (partial[p].empty()) continue;
      const Item& item = wave[p / static_cast<size_t>(shares - 1)];
      const T* from = partial[p].data();
      for (int64_t h = 0; h < item.heads.count; ++h) {
        const Rows<T> dq = head_rows<T>(dq_, item.batch, item.heads.at(h), rows_of(item));
        for (int64_t i = 0; i < item.rows.count; ++i) {
          for (int64_t d = 0; d < q_.size(3); ++d) dq.at(i)[d] += *from++;
        }
      }
    }
  }

  // The flags in holds_ of a head's rows of `grads`.
  uint8_t* holds_of(const KeyBlock& grads, int64_t batch, int64_t head) {
    return holds_.data() + (batch * grads.k.size(2) + head) * grads.k.size(1);
  }
  // Sets the rows of fresh gradients to zero to which no tile has added.
  void zero_the_rest(const KeyBlock& grads) {
    for (int64_t b = 0; b < grads.k.size(0); ++b) {
      for (int64_t h = 0; h < grads.k.size(2); ++h) {
        const Rows<T> dk = head_rows<T>(grads.k, b, h, Span::range(0, grads.k.size(1)));
        const Rows<T> dv = head_rows<T>(grads.v, b, h, Span::range(0, grads.v.size(1)));
        const uint8_t* const holds = holds_of(grads, b, h);
        for (int64_t row = 0; row < grads.k.size(1); ++row) {
          if (holds[row] != 0) continue;
          std::fill_n(dk.at(row), grads.k.size(3), T{0});
          std::fill_n(dv.at(row), grads.v.size(3), T{0});
        }
      }
    }
  }

  // The pieces whose gradients belong to one share. Runs of kMostKeys rows are dealt to the shares in turn.
  std::vector<KeyPiece<T>> pieces_of(const Item& item, const KeyBlock& grads, int64_t share, int64_t shares) {
    const int64_t b = indices_of({item.batch, 1, 1}, grads.batch, "batch rows").begin;
    const int64_t h = indices_of({item.heads.begin / call_.group, 1, 1}, grads.heads, "kv heads").begin;
    std::vector<KeyPiece<T>> pieces;
    const auto add = [&](const Tile& tile) {
      pieces.push_back(piece_of(item, tile));
      pieces.back().dk = head_rows<T>(grads.k, b, h, tile.grad_rows);
      pieces.back().dv = head_rows<T>(grads.v, b, h, tile.grad_rows);
      if (holds_.empty()) return;
      pieces.back().holds = holds_of(grads, b, h) + tile.grad_rows.begin;
      pieces.back().holds_step = tile.grad_rows.stride;
    };
    for (const Tile& tile : item.group->tiles) {
      if (shares == 1) {
        add(tile);
        continue;
      }
      for (int64_t run = tile.grad_rows.begin / kMostKeys; run * kMostKeys <= tile.grad_rows.last(); ++run) {
        if (run % shares != share) continue;
        const Span mine = tile.grad_rows.clip(run * kMostKeys, (run + 1) * kMostKeys - 1);
        if (mine.empty()) continue;
        const int64_t first = tile.grad_rows.index_of(mine.begin);
        Tile part = tile;
        part.grad_rows = mine;
        part.key_rows = tile.key_rows.sub(first, mine.count);
        part.key_positions = tile.key_positions.sub(first, mine.count);
        add(part);
      }
    }
    return pieces;
  }

  KernelCall call_;
  at::Tensor q_, out_, lse_, dout_, delta_, dq_;
  KeyBlock keys_;
  std::vector<FlashScratch<T>> scratch_;
  std::vector<uint8_t> holds_;        // for fresh gradients: which rows hold something (KeyPiece::holds)
  Finite finite_ = Finite::kUnknown;  // whether keys_ are finite
  Finite* known_ = nullptr;           // where the caller keeps it
};

}  // namespace

std::unique_ptr<Kernel> make_cpu_kernel(at::ScalarType type) {
  if (type == at::kDouble) return std::make_unique<CpuKernel<double>>();
  return std::make_unique<CpuKernel<float>>();
}

}  // namespace annulus
