// The cpu kernel: flash attention on CPUs (flash.h) for LibTorch's tensors. It gives the tiles of a step to threads, in
// the pieces of cpu_items.h. choose_kernel.cc makes it. Tiles with the same query rows, or with many keys in common,
// are computed together (tile_sets.h): only the number of pairs counts. If keys or values are not finite, tiles with a
// band or a mask are computed densely in blocks (attention/tiles/dense_tiles.h): a hidden infinity times 0 is NaN.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <thread>
#include <type_traits>
#include <utility>

#include "attention/kernels/cpu/cpu_items.h"
#include "attention/kernels/cpu/cpu_kernel.h"
#include "attention/kernels/cpu/flash.h"
#include "attention/kernels/cpu/tile_math.h"
#include "attention/kernels/cpu/tile_sets.h"
#include "attention/tiles/dense_tiles.h"
#include "attention/tiles/tile_groups.h"
#include "attention/tiles/tile_views.h"
#include "common/error.h"
#include "memory/pool/pool_tensor.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

ElementType storage_of(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kDouble     ? ElementType::kDouble
         : type == at::kBFloat16 ? ElementType::kBFloat16
         : type == at::kHalf     ? ElementType::kHalf
                                 : ElementType::kFloat;
}

// Rows of one head of a [batch, rows, heads, D] tensor, for reading.
StoredRows stored_rows(const at::Tensor& tensor, int64_t batch, int64_t head, const Span& rows) {
  const int64_t first = batch * tensor.stride(0) + head * tensor.stride(2) + rows.begin * tensor.stride(1);
  return {static_cast<const char*>(tensor.const_data_ptr()) + first * tensor.element_size(),
          tensor.stride(1) * rows.stride, storage_of(tensor)};
}

// The same for writing.
ResultRows result_rows(const at::Tensor& tensor, int64_t batch, int64_t head, const Span& rows) {
  const StoredRows stored = stored_rows(tensor, batch, head, rows);
  return {const_cast<void*>(stored.data), stored.step, stored.storage};
}

void set_to_zero(const at::Tensor& tensor, int64_t batch, int64_t head, int64_t row) {
  std::memset(result_rows(tensor, batch, head, {row, 1, 1}).data, 0,
              static_cast<size_t>(tensor.size(3) * tensor.element_size()));
}

// The same for writing to a tensor of T.
template <typename T>
Rows<T> head_rows(const at::Tensor& tensor, int64_t batch, int64_t head, const Span& rows) {
  const ResultRows results = result_rows(tensor, batch, head, rows);
  return {static_cast<T*>(results.data), results.step};
}

// Whether no element of a [batch, rows, heads, D] tensor is infinite or NaN. The elements of a row are adjacent, and
// where those of all heads are, they are read together.
template <typename T>
bool all_finite(const at::Tensor& tensor) {
  constexpr int64_t kRows = 256;  // that a thread takes at a time
  constexpr double kReads = 40;   // to read an element of memory takes as long as about so many operations
  const bool adjacent = tensor.stride(2) == tensor.size(3);
  const int64_t rows = tensor.size(1), heads = adjacent ? 1 : tensor.size(2);
  const int64_t dim = adjacent ? tensor.size(2) * tensor.size(3) : tensor.size(3);
  const int64_t blocks = ceil_div(rows, kRows);
  const int64_t threads = threads_for(kReads * static_cast<double>(tensor.numel()));
  std::atomic<bool> finite = true;
  for_each_in_parallel(tensor.size(0) * heads * blocks, threads, {}, [&](size_t item, size_t) {
    const auto i = static_cast<int64_t>(item);
    const Span some = Span::range(i % blocks * kRows, std::min(rows, (i % blocks + 1) * kRows));
    const StoredRows x = stored_rows(tensor, i / blocks / heads, i / blocks % heads, some);
    if (!tile_math<T>().finite(x, some.count, dim)) finite = false;
  });
  return finite;
}

// Which rows of a new gradient, a [batch, rows, heads, D] tensor, have been written. The others need not be set to zero
// before something is added to them.
class WrittenFlags {
 public:
  // So far no row of `gradient` has been written.
  explicit WrittenFlags(const at::Tensor& gradient)
      : rows_(gradient.size(1)),
        heads_(gradient.size(2)),
        flags_(static_cast<size_t>(gradient.size(0) * heads_ * rows_), 0) {}
  // All rows of any gradient have been written.
  WrittenFlags() = default;

  // The flags of one head's `rows`.
  WrittenRows of(int64_t batch, int64_t head, const Span& rows) {
    if (flags_.empty()) return {};
    return {flags_.data() + (batch * heads_ + head) * rows_ + rows.begin, rows.stride};
  }

  // Sets the rows of `gradient` to zero that have not been written.
  void zero_the_rest(const at::Tensor& gradient) const {
    for (size_t i = 0; i < flags_.size(); ++i) {
      if (flags_[i] != 0) continue;
      const int64_t row = static_cast<int64_t>(i) % rows_, head = static_cast<int64_t>(i) / rows_ % heads_;
      const int64_t batch = static_cast<int64_t>(i) / rows_ / heads_;
      set_to_zero(gradient, batch, head, row);
    }
  }

 private:
  int64_t rows_ = 0, heads_ = 0;
  std::vector<uint8_t> flags_;
};

// The tensor, copied if the elements of a row are not adjacent.
at::Tensor prepared(const at::Tensor& tensor) { return tensor.stride(3) == 1 ? tensor : tensor.contiguous(); }

template <typename T>
class CpuKernel : public Kernel {
 public:
  void begin_forward(const at::Tensor& q, const KernelCall& call) override {
    call_ = call;
    q_ = prepared(q);
    out_ = at::Tensor();
    lse_ = at::empty({q.size(0), q.size(2), q.size(1)}, q_.options().dtype(kType));
    std::fill_n(lse_.template data_ptr<T>(), lse_.numel(), static_cast<T>(-kInfinity));
  }

  void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) override {
    load(keys);
    const std::vector<TileSet> sets = sets_of(tiles);
    if (is_first(out_)) out_ = new_result(written_once(tiles, sets));  // rows are written when they have seen a key
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
    for_each_wave(sets, 4, kApart, poll, [&](const std::vector<Item>& wave, double flops, const FlashDone& done) {
      RECORD_FUNCTION(kForwardRecord, std::vector<c10::IValue>{});
      for_each_in_parallel(static_cast<int64_t>(wave.size()), threads_for(flops), poll, [&](size_t i, size_t thread) {
        const Item& item = wave[i];
        std::vector<KeyPiece<T>> pieces;
        for (const SharedKeys& keys : item.set->keys) pieces.push_back(piece_of(item, keys.tile, keys.runs));
        std::vector<QueryBlock<T>> blocks = blocks_of(item);
        for (size_t g = 0; g < blocks.size(); ++g) {
          for (int64_t h = 0; h < item.heads.count; ++h) {
            blocks[g].heads[static_cast<size_t>(h)].out =
                result_rows(out_, item.batch, item.heads.at(h), item.rows_of(g));
          }
        }
        flash_forward<T>(blocks, pieces, q_.size(3), {call_.scale, call_.softcap}, scratch_[thread], done);
      });
    });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    if (!out_.defined()) out_ = new_result(true);
    zero_rows_without_keys();
    out = out_;
    lse = lse_;
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    call_ = call;
    q_ = prepared(q);
    dout_ = prepared(dout);
    out_ = prepared(out.to(dout.scalar_type()));
    lse_ = lse.to(kType).masked_fill(lse.eq(-kInfinity), kInfinity);  // so that exp(score - lse) is 0 without keys
    dq_ = at::Tensor();
  }

  void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    load(keys);
    const std::vector<TileSet> sets = sets_of(tiles);
    if (is_first(dq_)) new_dq(at::get_num_threads() == 1 && written_once(tiles, sets));
    const bool set = grads.fresh && !any_dense(tiles);
    if (!set) zero_if_fresh(grads);
    written_ = set ? WrittenFlags(grads.k) : WrittenFlags();
    DenseQueries queries;
    for (const Tile& tile : tiles) {
      if (!is_dense(tile)) continue;
      if (!queries.q.defined()) {
        queries = {dout_.to(kType), q_.to(kType), out_.to(kType), lse_};
        zero_the_rest_of_dq();
      }
      const int64_t held = dense_tile_backward(queries, keys_, grads, tile, call_, dq_, poll);
      peak_result_elements_ = std::max(peak_result_elements_, held);
    }
    for_each_wave(sets, 10, false, poll, [&](const std::vector<Item>& wave, double flops, const FlashDone& done) {
      run_backward(wave, threads_for(flops), grads, poll, done);
    });
    written_.zero_the_rest(grads.k);
    written_.zero_the_rest(grads.v);
    for (const FlashScratch<T>& scratch : scratch_) {
      const size_t held = scratch.dk.size() + scratch.dv.size();
      peak_result_elements_ = std::max(peak_result_elements_, static_cast<int64_t>(held));
    }
  }

  at::Tensor finish_backward() override {
    if (!dq_.defined()) new_dq(true);
    zero_the_rest_of_dq();
    return dq_;
  }

  std::vector<Charge> charges(const CallSize& size) const override {
    const auto wide = static_cast<int64_t>(sizeof(T));
    const int64_t queries = size.query_elements() * wide, lse = size.lse_elements() * wide;
    const int64_t threads = at::get_num_threads();
    const int64_t rows = std::min(size.gathers ? kMostSetRows : kMostRows, size.lse_elements());
    const auto scratch = [&](bool backward) {
      return threads * flash_scratch_elements(rows, size.head_dim, backward) * wide;
    };
    // Each of c kv heads in a wave is shared by at most (threads - 1) / c additional threads.
    const int64_t partial = (threads - 1) * queries / std::max<int64_t>(1, size.batch * size.kv_heads);
    std::vector<Charge> charges = {{"dq", queries, When::kBackward},
                                   {"dq of threads that share a kv head", partial, When::kBackward},
                                   {"lse", lse, When::kBackward},
                                   {"scratch of threads", scratch(false), When::kForward},
                                   {"scratch of threads, backward", scratch(true), When::kBackward}};
    if (size.type == kType) return charges;
    charges.push_back({"out, in fp32", queries, When::kForward});
    return charges;
  }

 private:
  static constexpr at::ScalarType kType = std::is_same_v<T, double> ? at::kDouble : at::kFloat;
  static constexpr ElementType kStorage = std::is_same_v<T, double> ? ElementType::kDouble : ElementType::kFloat;
  // The calling thread polls when it has computed so much, which takes about 4 ms.
  static constexpr double kPolledFlops = 3e8;
  static constexpr double kFlops = 1e10;    // of a thread in a wave; this only keeps lists short
  static constexpr size_t kMostSets = 256;  // the most sets in a wave, and the most that are compared with each other

  void load(const KeyBlock& keys) {
    keys_ = {prepared(keys.k), prepared(keys.v), keys.batch, keys.heads};
    known_ = keys.finite;
    finite_ = known_ != nullptr ? *known_ : Finite::kUnknown;
  }
  bool loaded_is_finite() {
    if (finite_ == Finite::kUnknown) {
      finite_ = all_finite<T>(keys_.k) && all_finite<T>(keys_.v) ? Finite::kYes : Finite::kNo;
    }
    if (known_ != nullptr) *known_ = finite_;
    return finite_ == Finite::kYes;
  }
  bool is_dense(const Tile& tile) {
    const bool hides = tile.mask >= 0 || !(tile.band.unbounded_below() && tile.band.unbounded_above());
    return hides && !loaded_is_finite();
  }

  bool any_dense(std::span<const Tile> tiles) {
    return std::any_of(tiles.begin(), tiles.end(), [&](const Tile& t) { return is_dense(t); });
  }

  // The tiles that are not dense.
  std::vector<TileSet> sets_of(std::span<const Tile> tiles) {
    std::vector<Tile> fast;
    std::copy_if(tiles.begin(), tiles.end(), std::back_inserter(fast), [&](const Tile& t) { return !is_dense(t); });
    return tile_sets(fast, set_limits(lse_.numel(), call_.group));
  }

  // Whether each query row's results are written only once, and may be rounded to bf16 then. They are if no two sets
  // have a row in common.
  bool written_once(std::span<const Tile> tiles, std::span<const TileSet> sets) {
    if (!call_.at_once || q_.scalar_type() != at::kBFloat16 || any_dense(tiles)) return false;
    if (sets.size() > kMostSets) return false;  // too many to compare with each other
    for (size_t i = 0; i < sets.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (share_queries(sets[i], sets[j])) return false;
      }
    }
    return true;
  }

  // Whether no tiles have come before. Nothing can be added to a result that has been rounded.
  static bool is_first(const at::Tensor& result) {
    if (result.defined() && result.scalar_type() != kType) {
      throw Error(ErrorKind::kInternal, "kernel", "tiles came in two calls, though the first should have had all");
    }
    return !result.defined();
  }

  // A new tensor like q, in its dtype if results are rounded, and otherwise in the one that is computed in.
  at::Tensor new_result(bool rounded) const {
    if (rounded || q_.scalar_type() == kType) return at::empty(q_.sizes(), q_.options());
    return pool_tensor(q_.sizes(), q_.options().dtype(kType), PoolPurpose::kScratch);  // the caller will round it
  }
  void new_dq(bool rounded) {
    dq_ = new_result(rounded);
    dq_written_ = WrittenFlags(dq_);
  }

  // Calls run(items, flops, done) for waves of sets, in which `done` calls `poll`. `cost` is the number of
  // floating-point operations for each pair and element of a head. If `apart`, no two sets of a wave have a query row
  // in common.
  template <typename Run>
  void for_each_wave(std::span<const TileSet> sets, int64_t cost, bool apart, const Poll& poll, Run run) {
    const double pair = static_cast<double>(cost * q_.size(3));
    double since = 0;  // what the calling thread has computed since the last poll
    const FlashDone watched = [&, caller = std::this_thread::get_id()](double pairs) {
      if (std::this_thread::get_id() != caller) return;
      since += pair * pairs;
      if (since >= kPolledFlops) since = 0, poll();
    };
    const FlashDone done = poll ? watched : FlashDone();
    // The threads of a backward divide the heads among them.
    const auto threads = static_cast<size_t>(at::get_num_threads());
    const bool heads_apart = !apart && threads > 1;
    if (scratch_.size() < threads) scratch_.resize(threads);
    std::vector<Item> wave;
    std::vector<const TileSet*> held;  // the sets of the wave
    double flops = 0;
    const auto flush = [&] {
      if (!wave.empty()) run(wave, flops, done);
      wave.clear(), held.clear(), flops = 0;
    };
    for (const TileSet& set : sets) {
      const auto meets = [&set](const TileSet* other) { return share_queries(*other, set); };
      if (apart && (held.size() == kMostSets || std::any_of(held.begin(), held.end(), meets))) flush();
      for (Item& item : items_of(set, call_.group, heads_apart)) {
        const double work = pair * static_cast<double>(item.pairs());
        if (work == 0) continue;
        if (held.empty() || held.back() != &set) held.push_back(&set);
        wave.push_back(std::move(item));
        flops += work;
        if (flops >= kFlops * static_cast<double>(threads)) flush();
      }
    }
    flush();
    if (poll) poll();
  }

  std::vector<QueryBlock<T>> blocks_of(const Item& item) const {
    std::vector<QueryBlock<T>> blocks;
    for (size_t g = 0; g < item.rows.size(); ++g) {
      const Span rows = item.rows_of(g);
      QueryBlock<T>& block = blocks.emplace_back();
      block.count = rows.count;
      block.positions = item.positions_of(g);
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
    }
    return blocks;
  }

  KeyPiece<T> piece_of(const Item& item, const Tile& tile, std::span<const int> runs) const {
    const int64_t b = indices_of({item.batch, 1, 1}, keys_.batch, "batch rows").begin;
    const int64_t h = indices_of({item.heads.begin / call_.group, 1, 1}, keys_.heads, "kv heads").begin;
    KeyPiece<T> piece;
    piece.blocks = runs;
    piece.positions = tile.key_positions;
    piece.band = tile.band;
    piece.mask = call_.mask_of(tile);
    piece.k = stored_rows(keys_.k, b, h, tile.key_rows);
    piece.v = stored_rows(keys_.v, b, h, tile.key_rows);
    return piece;
  }

  void zero_rows_without_keys() {
    const T* lse = lse_.const_data_ptr<T>();
    for (int64_t b = 0; b < out_.size(0); ++b) {
      for (int64_t h = 0; h < out_.size(2); ++h) {
        for (int64_t i = 0; i < out_.size(1); ++i, ++lse) {
          if (*lse == -kInfinity) set_to_zero(out_, b, h, i);
        }
      }
    }
  }

  // Blocks that add to the same rows of dk and dv must not run at the same time, so one thread takes all blocks of a kv
  // head, in order. If there are fewer kv heads than threads, several threads divide a head's rows of dk and dv among
  // them, and each but the first adds to a dq of its own.
  void run_backward(const std::vector<Item>& wave, int64_t threads, const KeyBlock& grads, const Poll& poll,
                    const FlashDone& done) {
    std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> heads;  // the blocks of each (batch row, kv head)
    for (size_t i = 0; i < wave.size(); ++i) heads[{wave[i].batch, wave[i].heads.begin / call_.group}].push_back(i);
    const std::vector<std::pair<std::pair<int64_t, int64_t>, std::vector<size_t>>> lists(heads.begin(), heads.end());
    const auto count = static_cast<int64_t>(lists.size());
    const int64_t shares = ceil_div(threads, count);
    std::vector<ScratchBuffer<T>> partial(wave.size() * static_cast<size_t>(shares - 1));
    RECORD_FUNCTION(kBackwardRecord, std::vector<c10::IValue>{});
    for_each_in_parallel(count * shares, threads, poll, [&](size_t task, size_t thread) {
      const int64_t share = static_cast<int64_t>(task) / count;
      for (const size_t i : lists[task % lists.size()].second) {
        const Item& item = wave[i];
        const std::vector<KeyPiece<T>> pieces = pieces_of(item, grads, share, shares);
        if (pieces.empty()) continue;
        std::vector<QueryBlock<T>> blocks = blocks_of(item);
        T* own = nullptr;
        if (share > 0) {
          ScratchBuffer<T>& dq = partial[i * static_cast<size_t>(shares - 1) + static_cast<size_t>(share - 1)];
          dq.assign(static_cast<size_t>(item.heads.count * item.count() * q_.size(3)), T{0});
          own = dq.data();
        }
        for (int64_t h = 0; h < item.heads.count; ++h) {
          const int64_t head = item.heads.at(h);
          for (size_t g = 0; g < blocks.size(); ++g) {
            const Span rows = item.rows_of(g);
            QueryRows<T>& of_head = blocks[g].heads[static_cast<size_t>(h)];
            of_head.dout = stored_rows(dout_, item.batch, head, rows);
            of_head.result = stored_rows(out_, item.batch, head, rows);
            if (own != nullptr) {
              of_head.dq = {own, q_.size(3), kStorage};
              own += rows.count * q_.size(3);
            } else {
              of_head.dq = result_rows(dq_, item.batch, head, rows);
              of_head.written = dq_written_.of(item.batch, head, rows);
            }
          }
        }
        flash_backward<T>(blocks, pieces, q_.size(3), {call_.scale, call_.softcap}, scratch_[thread], done);
      }
    });
    for (size_t p = 0; p < partial.size(); ++p) {
      if (partial[p].empty()) continue;
      const Item& item = wave[p / static_cast<size_t>(shares - 1)];
      const T* from = partial[p].data();
      for (int64_t h = 0; h < item.heads.count; ++h) {
        for (size_t g = 0; g < item.rows.size(); ++g) {
          const ResultRows dq = result_rows(dq_, item.batch, item.heads.at(h), item.rows_of(g));
          const WrittenRows written = dq_written_.of(item.batch, item.heads.at(h), item.rows_of(g));
          for (int64_t i = 0; i < item.rows[g].count; ++i, from += q_.size(3)) {
            tile_math<T>().put(from, q_.size(3), T{1}, dq.at(i), dq.put(written.test_and_set(i)));
          }
        }
      }
    }
  }

  void zero_the_rest_of_dq() {
    dq_written_.zero_the_rest(dq_);
    dq_written_ = WrittenFlags();
  }

  // The pieces whose gradients belong to one share. Runs of kMostKeys rows are dealt to the shares in turn.
  std::vector<KeyPiece<T>> pieces_of(const Item& item, const KeyBlock& grads, int64_t share, int64_t shares) {
    const int64_t b = indices_of({item.batch, 1, 1}, grads.batch, "batch rows").begin;
    const int64_t h = indices_of({item.heads.begin / call_.group, 1, 1}, grads.heads, "kv heads").begin;
    std::vector<KeyPiece<T>> pieces;
    const auto add = [&](const Tile& tile, std::span<const int> runs) {
      pieces.push_back(piece_of(item, tile, runs));
      pieces.back().dk = head_rows<T>(grads.k, b, h, tile.grad_rows);
      pieces.back().dv = head_rows<T>(grads.v, b, h, tile.grad_rows);
      pieces.back().written = written_.of(b, h, tile.grad_rows);
    };
    for (const auto& [tile, runs] : item.set->keys) {
      if (shares == 1) {
        add(tile, runs);
        continue;
      }
      for (int64_t run = tile.grad_rows.begin / kMostKeys; run * kMostKeys <= tile.grad_rows.last(); ++run) {
        if (run % shares != share) continue;
        const Span mine = tile.grad_rows.clip(run * kMostKeys, (run + 1) * kMostKeys - 1);
        if (mine.empty()) continue;
        add(cut_keys(tile, tile.grad_rows.index_of(mine.begin), mine.count), runs);
      }
    }
    return pieces;
  }

  KernelCall call_;
  at::Tensor q_, out_, lse_, dout_, dq_;
  KeyBlock keys_;
  std::vector<FlashScratch<T>> scratch_;
  WrittenFlags written_, dq_written_;  // of the gradients of the present keys, and of dq
  Finite finite_ = Finite::kUnknown;   // whether keys_ are finite
  Finite* known_ = nullptr;            // where the caller keeps it
};

}  // namespace

std::unique_ptr<Kernel> make_cpu_kernel(at::ScalarType type) {
  if (type == at::kDouble) return std::make_unique<CpuKernel<double>>();
  return std::make_unique<CpuKernel<float>>();
}

}  // namespace annulus
