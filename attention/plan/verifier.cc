// See verifier.h.
#include "attention/plan/verifier.h"

#include <deque>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

// ---- Arithmetic modulo the prime 2^61 - 1
// ----------------------------------------------------------------------------

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

uint64_t add(uint64_t a, uint64_t b) {
  const uint64_t sum = a + b;
  return sum >= kPrime ? sum - kPrime : sum;
}
uint64_t subtract(uint64_t a, uint64_t b) { return a >= b ? a - b : a + kPrime - b; }
uint64_t multiply(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return add(static_cast<uint64_t>(product & kPrime), static_cast<uint64_t>(product >> 61));
}

// Reduced to the field.
uint64_t weight(uint64_t stream, int64_t index) {
  return splitmix64((stream << 56) + static_cast<uint64_t>(index) * kSplitmix64Step) % kPrime;
}

enum Stream : uint64_t { kQuery = 1, kKey = 2, kBatch = 3, kHead = 4 };

// The weights of positions 0..length-1 and, for each stride asked for, their sums along that stride:
// prefix[stride][i + stride] = w(i) + prefix[stride][i].
class Weights {
 public:
  Weights(Stream stream, int64_t length) : weights_(static_cast<size_t>(length)) {
    for (int64_t i = 0; i < length; ++i) weights_[static_cast<size_t>(i)] = weight(stream, i);
  }
  int64_t length() const { return static_cast<int64_t>(weights_.size()); }
  uint64_t at(int64_t i) const { return weights_[static_cast<size_t>(i)]; }

  const std::vector<uint64_t>& prefix(int64_t stride) {
    std::vector<uint64_t>& sums = prefixes_[stride];
    if (sums.empty()) {
      sums.assign(weights_.size() + static_cast<size_t>(stride), 0);
      for (size_t i = 0; i < weights_.size(); ++i) sums[i + static_cast<size_t>(stride)] = add(sums[i], weights_[i]);
    }
    return sums;
  }
  uint64_t sum(const Span& s) {
    if (s.empty()) return 0;
    const std::vector<uint64_t>& sums = prefix(s.count == 1 ? 1 : s.stride);
    const int64_t step = s.count == 1 ? 1 : s.stride;
    return subtract(sums[static_cast<size_t>(s.last() + step)], sums[static_cast<size_t>(s.begin)]);
  }

 private:
  std::vector<uint64_t> weights_;
  std::map<int64_t, std::vector<uint64_t>> prefixes_;
};

// For each member x of `outer`, calls visit(x, i0, i1) where inner members numbered [i0, i1) lie within [x + lo, x +
// hi].
template <typename Visit>
void for_each_row(const Span& outer, const Span& inner, int64_t lo, int64_t hi, Visit visit) {
  for (int64_t i = 0; i < outer.count; ++i) {
    const int64_t x = outer.at(i);
    const int64_t first = std::max<int64_t>(0, ceil_div(x + lo - inner.begin, inner.stride));
    const int64_t past = std::min(inner.count, floor_div(x + hi - inner.begin, inner.stride) + 1);
    if (first < past) visit(x, first, past);
  }
}

uint64_t product_weight(const Span& batch, const Span& heads) {
  uint64_t b = 0, h = 0;
  for (int64_t i = 0; i < batch.count; ++i) b = add(b, weight(kBatch, batch.at(i)));
  for (int64_t i = 0; i < heads.count; ++i) h = add(h, weight(kHead, heads.at(i)));
  return multiply(b, h);
}

// The fingerprint of the pairs of queries x keys within the band.
uint64_t pairs_weight(Weights& query, Weights& key, const Span& queries, const Span& keys, const Band& band) {
  if (queries.empty() || keys.empty() || band.empty()) return 0;
  if (band.unbounded_below() && band.unbounded_above()) return multiply(query.sum(queries), key.sum(keys));
  const int64_t stride = keys.count == 1 ? 1 : keys.stride;
  const std::vector<uint64_t>& sums = key.prefix(stride);
  uint64_t total = 0;
  for_each_row(queries, keys, band.lo, band.hi, [&](int64_t q, int64_t first, int64_t past) {
    const auto from = static_cast<size_t>(keys.begin + first * stride);
    const auto to = static_cast<size_t>(keys.begin + past * stride);
    total = add(total, multiply(query.at(q), subtract(sums[to], sums[from])));
  });
  return total;
}

// ---- The proof
// -------------------------------------------------------------------------------------------------------

// A gradient buffer's content: the fingerprint of the pairs whose contributions it holds.
struct State {
  bool full = false;
  uint64_t pairs = 0;
};

class Verifier {
 public:
  Verifier(const std::vector<Program>& programs, const Pattern& pattern, int max_faults)
      : programs_(programs),
        pattern_(pattern),
        request_(programs.at(0).request),
        max_faults_(static_cast<size_t>(max_faults)),
        query_(kQuery, request_.shape.q_len),
        key_(kKey, request_.shape.k_len),
        marks_(static_cast<size_t>(request_.shape.k_len)) {}

  Proof run() {
    check_ownership();
    expect_pattern();
    if (proof_.faults.empty()) {
      for (const bool backward : {false, true}) check_direction(backward);
    }
    return std::move(proof_);
  }

 private:
  int ranks() const { return static_cast<int>(programs_.size()); }
  const std::vector<Step>& steps(int rank, bool backward) const {
    const Program& program = programs_[static_cast<size_t>(rank)];
    return backward ? program.backward : program.forward;
  }
  const Buffer* buffer(int rank, int number) const {
    const std::vector<Buffer>& all = programs_[static_cast<size_t>(rank)].buffers;
    return number >= 0 && number < static_cast<int>(all.size()) ? &all[static_cast<size_t>(number)] : nullptr;
  }
  void fault(const std::string& text) {
    if (proof_.faults.size() < max_faults_) proof_.faults.push_back(text);
  }
  std::string at(int rank, bool backward, size_t step) const {
    return "rank " + std::to_string(rank) + ", " + (backward ? "backward" : "forward") + " step " +
           std::to_string(step) + ": ";
  }

  // Every position of queries and of keys belongs to exactly one rank.
  void check_ownership() {
    for (const bool keys : {false, true}) {
      const int64_t length = keys ? request_.shape.k_len : request_.shape.q_len;
      std::vector<uint8_t> owners(static_cast<size_t>(length));
      for (const Program& program : programs_) {
        for (const Span& s : keys ? program.key_spans : program.query_spans) {
          for (int64_t i = 0; i < s.count; ++i) {
            const int64_t x = s.at(i);
            if (x < 0 || x >= length || owners[static_cast<size_t>(x)]++) {
              fault("rank " + std::to_string(program.rank) + " claims " + (keys ? "key " : "query ") +
                    std::to_string(x) +
                    (x < 0 || x >= length ? ", which does not exist" : ", which another rank owns"));
              return;
            }
          }
        }
      }
      for (int64_t x = 0; x < length; ++x) {
        if (!owners[static_cast<size_t>(x)]) {
          fault(std::string("no rank owns ") + (keys ? "key " : "query ") + std::to_string(x));
          return;
        }
      }
    }
  }

  // What each rank must compute (pairs of its queries) and get home (pairs of its keys), from the pattern alone.
  void expect_pattern() {
    std::vector<uint64_t> by_query(static_cast<size_t>(query_.length())), by_key(static_cast<size_t>(key_.length()));
    for (const Slice& s : pattern_.slices) {
      const uint64_t factor = product_weight(s.batch, s.heads);
      const auto accumulate = [factor](const Span& outer, const Span& inner, const Band& band, Weights& outer_weights,
                                       Weights& inner_weights, std::vector<uint64_t>& sums, int64_t* pairs) {
        const int64_t stride = inner.count == 1 ? 1 : inner.stride;
        const std::vector<uint64_t>& prefix = inner_weights.prefix(stride);
        for_each_row(outer, inner, band.lo, band.hi, [&](int64_t x, int64_t first, int64_t past) {
          const uint64_t row = subtract(prefix[static_cast<size_t>(inner.begin + past * stride)],
                                        prefix[static_cast<size_t>(inner.begin + first * stride)]);
          uint64_t& sum = sums[static_cast<size_t>(x)];
          sum = add(sum, multiply(factor, multiply(outer_weights.at(x), row)));
          if (pairs) *pairs += past - first;
        });
      };
      int64_t pairs = 0;
      accumulate(s.queries, s.keys, s.band, query_, key_, by_query, &pairs);
      accumulate(s.keys, s.queries, {-s.band.hi, -s.band.lo}, key_, query_, by_key, nullptr);
      proof_.pairs += pairs * s.batch.count * s.heads.count;
    }
    const auto gather = [](const std::vector<Span>& spans, const std::vector<uint64_t>& sums) {
      uint64_t total = 0;
      for (const Span& s : spans) {
        for (int64_t i = 0; i < s.count; ++i) total = add(total, sums[static_cast<size_t>(s.at(i))]);
      }
      return total;
    };
    for (const Program& program : programs_) {
      expected_queries_.push_back(gather(program.query_spans, by_query));
      expected_keys_.push_back(gather(program.key_spans, by_key));
    }
  }

  // The position stored at a row of consecutive spans, and which span it is in.
  static std::pair<int64_t, size_t> position_of(const std::vector<Span>& spans, int64_t row) {
    for (size_t i = 0; i < spans.size(); ++i) {
      if (row >= 0 && row < spans[i].count) return {spans[i].at(row), i};
      row -= spans[i].count;
    }
    return {-1, spans.size()};
  }

  // The rows named are these positions: the first, the last and hence (within one span) all between.
  static bool rows_are(const Span& rows, const Span& positions, const std::vector<Span>& spans) {
    if (rows.count != positions.count || rows.empty()) return false;
    const auto [first, first_span] = position_of(spans, rows.begin);
    const auto [last, last_span] = position_of(spans, rows.last());
    return first_span == last_span && first_span < spans.size() && first == positions.begin &&
           last == positions.last() && (rows.count < 3 || positions.stride == rows.stride * spans[first_span].stride);
  }

  static bool within(const Span& part, const Span& whole) {
    return !part.empty() && whole.contains(part.begin) && whole.contains(part.last()) &&
           (part.count < 3 || part.stride % whole.stride == 0);
  }

  void check_tile(int rank, bool backward, size_t step, const Tile& tile) {
    const Program& program = programs_[static_cast<size_t>(rank)];
    const Buffer* keys = buffer(rank, tile.buffer);
    const std::string place = at(rank, backward, step);
    if (!keys || keys->holds_gradient()) return fault(place + "a tile reads keys from a buffer that holds none");
    if (!rows_are(tile.query_rows, tile.query_positions, program.query_spans)) {
      return fault(place + "a tile takes query rows " + to_string(tile.query_rows) + " for queries " +
                   to_string(tile.query_positions) + ", which are stored elsewhere");
    }
    if (!holds(*keys, tile.block, tile, tile.key_rows)) {
      return fault(place + "a tile takes key rows " + to_string(tile.key_rows) + " for keys " +
                   to_string(tile.key_positions) + ", batch rows or heads, which are stored elsewhere");
    }
    if (!backward) return;
    const Buffer* grad = buffer(rank, tile.grad_buffer);
    if (!grad || !grad->holds_gradient() || !holds(*grad, tile.grad_block, tile, tile.grad_rows)) {
      fault(place + "a tile adds its gradients to rows that are not its keys'");
    }
  }

  // The tile's keys, batch rows and heads are those rows of that block of the buffer.
  bool holds(const Buffer& held_in, int number, const Tile& tile, const Span& rows) const {
    if (number < 0 || number >= static_cast<int>(held_in.rows.blocks.size())) return false;
    const RowBlock& block = held_in.rows.blocks[static_cast<size_t>(number)];
    const int64_t group = request_.shape.heads / request_.shape.kv_heads;
    bool held = rows_are(rows, tile.key_positions, block.positions) && within(tile.batch, block.batch) &&
                within(tile.heads, Span::range(0, request_.shape.heads));
    for (int64_t i = 0; held && i < tile.heads.count; ++i) held = block.heads.contains(tile.heads.at(i) / group);
    return held;
  }

  // Every row of `part` is one of `whole`, whose blocks share none: counted row by row, marking positions.
  bool includes(const RowSet& whole, const RowSet& part) {
    if (whole == part) return true;
    const auto mark = [this](const std::vector<Span>& positions, uint8_t value) {
      for (const Span& s : positions) {
        for (int64_t i = 0; i < s.count; ++i) marks_[static_cast<size_t>(s.at(i))] = value;
      }
    };
    for (const RowSet* set : {&whole, &part}) {
      for (const RowBlock& block : set->blocks) {
        for (const Span& s : block.positions) {
          if (!s.empty() && (s.begin < 0 || s.last() >= request_.shape.k_len)) return false;
        }
      }
    }
    const auto common = [](const Span& a, const Span& b) {
      int64_t n = 0;
      for (int64_t i = 0; i < a.count; ++i) n += b.contains(a.at(i));
      return n;
    };
    int64_t found = 0;
    for (const RowBlock& held : whole.blocks) {
      mark(held.positions, 1);
      for (const RowBlock& wanted : part.blocks) {
        const int64_t cells = common(wanted.batch, held.batch) * common(wanted.heads, held.heads);
        if (cells == 0) continue;
        for (const Span& s : wanted.positions) {
          for (int64_t i = 0; i < s.count; ++i) found += cells * marks_[static_cast<size_t>(s.at(i))];
        }
      }
      mark(held.positions, 0);
    }
    return found == part.rows();
  }

  // Transfers between each pair of ranks in the order both sides list them.
  struct Endpoint {
    int rank;
    size_t step;
    const Transfer* transfer;
  };
  struct Match {
    Endpoint send, receive;
  };

  bool match_transfers(bool backward, std::vector<Match>& matches) {
    std::map<std::pair<int, int>, std::pair<std::deque<Endpoint>, std::deque<Endpoint>>> channels;  // (from, to)
    for (int r = 0; r < ranks(); ++r) {
      for (size_t s = 0; s < steps(r, backward).size(); ++s) {
        const Step& step = steps(r, backward)[s];
        for (const bool send : {true, false}) {
          for (const Transfer& t : send ? step.sends : step.receives) {
            ++proof_.transfers;
            const Buffer* b = buffer(r, t.buffer);
            if (t.peer < 0 || t.peer >= ranks() || !b) {
              fault(at(r, backward, s) + "a transfer names a rank or buffer that does not exist");
              return false;
            }
            // Of keys and values some may be sent; a gradient that stays behind would be lost.
            if (send && !b->holds_gradient() ? !includes(b->rows, t.rows) : !(t.rows == b->rows)) {
              fault(at(r, backward, s) + "a transfer moves other rows than its buffer " + std::to_string(t.buffer) +
                    " holds");
              return false;
            }
            if (send) {
              channels[{r, t.peer}].first.push_back({r, s, &t});
            } else {
              channels[{t.peer, r}].second.push_back({r, s, &t});
            }
          }
        }
      }
    }
    for (auto& [key, channel] : channels) {
      auto& [sends, receives] = channel;
      const size_t n = std::min(sends.size(), receives.size());
      for (size_t i = 0; i < n; ++i) {
        const Match match{sends[i], receives[i]};
        const Buffer& from = *buffer(key.first, match.send.transfer->buffer);
        const Buffer& to = *buffer(key.second, match.receive.transfer->buffer);
        if (!(match.send.transfer->rows == match.receive.transfer->rows) ||
            from.holds_gradient() != to.holds_gradient()) {
          fault(at(key.second, backward, match.receive.step) + "expects other rows than rank " +
                std::to_string(key.first) + " sends at step " + std::to_string(match.send.step));
          return false;
        }
        matches.push_back(match);
      }
      if (sends.size() > n) {
        fault(at(key.first, backward, sends[n].step) + "a send to rank " + std::to_string(key.second) +
              " has no receive");
      }
      if (receives.size() > n) {
        fault(at(key.second, backward, receives[n].step) + "a receive from rank " + std::to_string(key.first) +
              " has no send");
      }
      if (sends.size() != receives.size()) return false;
    }
    return true;
  }

  // Follows all ranks through their steps. A step ends when the peers of all its transfers have reached theirs (a send
  // may wait for its receive: nothing rests on buffering). Contents move when both ends are there.
  void check_direction(bool backward) {
    std::vector<Match> matches;
    if (!match_transfers(backward, matches)) return;

    // Matches by (rank, step), for both of their ends.
    std::vector<std::vector<std::vector<size_t>>> pending(static_cast<size_t>(ranks()));
    states_.assign(static_cast<size_t>(ranks()), {});
    done_.assign(static_cast<size_t>(ranks()), 0);
    for (int r = 0; r < ranks(); ++r) {
      pending[static_cast<size_t>(r)].resize(steps(r, backward).size());
      begin_rank(r, backward);
    }
    for (size_t m = 0; m < matches.size(); ++m) {
      const auto& [send, receive] = matches[m];
      pending[static_cast<size_t>(send.rank)][send.step].push_back(m);
      pending[static_cast<size_t>(receive.rank)][receive.step].push_back(m);
    }
    std::vector<uint64_t> in_flight(matches.size());  // fingerprint of a gradient between its ends
    std::vector<size_t> at_step(static_cast<size_t>(ranks()), 0);
    std::vector<bool> started(static_cast<size_t>(ranks()), false);
    const auto reached = [&](const Endpoint& e) {
      const size_t r = static_cast<size_t>(e.rank);
      return at_step[r] > e.step || (at_step[r] == e.step && started[r]);
    };
    std::deque<int> ready(static_cast<size_t>(ranks()));
    std::iota(ready.begin(), ready.end(), 0);
    while (!ready.empty()) {
      const int r = ready.front();
      ready.pop_front();
      const size_t i = static_cast<size_t>(r);
      while (at_step[i] < steps(r, backward).size()) {
        const std::vector<size_t>& own = pending[i][at_step[i]];
        if (!started[i]) {
          started[i] = true;
          start_step(r, backward, at_step[i]);
          for (const size_t m : own) {
            const Match& match = matches[m];
            if (match.send.rank == r && match.send.step == at_step[i]) {
              in_flight[m] = state(r, match.send.transfer->buffer).pairs;
            }
            // The peer may wait for this rank.
            ready.push_back(match.send.rank == r ? match.receive.rank : match.send.rank);
          }
        }
        bool complete = true;
        for (const size_t m : own) complete = complete && reached(matches[m].send) && reached(matches[m].receive);
        if (!complete) break;
        for (const size_t m : own) {
          const Endpoint& receive = matches[m].receive;
          if (receive.rank == r && receive.step == at_step[i]) {
            state(r, receive.transfer->buffer) = {true, in_flight[m]};
          }
        }
        finish_step(r, backward, at_step[i]);
        ++at_step[i];
        started[i] = false;
      }
    }
    for (int r = 0; r < ranks(); ++r) {
      const size_t s = at_step[static_cast<size_t>(r)];
      if (s < steps(r, backward).size()) {
        fault(at(r, backward, s) + "deadlock: this step's transfers can never complete");
      }
    }
    if (!proof_.faults.empty()) return;
    for (int r = 0; r < ranks(); ++r) finish_rank(r, backward);
  }

  State& state(int rank, int number) { return states_[static_cast<size_t>(rank)][number]; }

  void begin_rank(int rank, bool backward) {
    const Program& program = programs_[static_cast<size_t>(rank)];
    for (size_t b = 0; b < program.buffers.size(); ++b) {
      const Buffer& buffer = program.buffers[b];
      const bool saved = backward && static_cast<int>(b) == program.saved;
      // A buffer without rows has nothing to wait for.
      const bool full = buffer.kind == BufferKind::kOwnKV || saved || buffer.rows.rows() == 0;
      if (full) state(rank, static_cast<int>(b)) = {true, 0};
    }
  }

  // What the step reads while its transfers travel must be full, and nothing may arrive in it.
  void start_step(int rank, bool backward, size_t s) {
    const Step& step = steps(rank, backward)[s];
    const std::string place = at(rank, backward, s);
    std::unordered_map<int, bool> arriving, leaving;
    for (const Transfer& t : step.receives) {
      if (arriving[t.buffer]) fault(place + "two transfers arrive in buffer " + std::to_string(t.buffer));
      arriving[t.buffer] = true;
      if (state(rank, t.buffer).full) {
        fault(place + "buffer " + std::to_string(t.buffer) + " is overwritten by what rank " + std::to_string(t.peer) +
              " sends");
      }
    }
    const auto read = [&](int number, const char* what) {
      if (arriving[number] || !state(rank, number).full) {
        fault(place + what + " buffer " + std::to_string(number) + " before it is filled");
      }
    };
    for (const Transfer& t : step.sends) {
      leaving[t.buffer] = true;
      read(t.buffer, "sends");
    }
    const auto write = [&](int number) {
      if (arriving[number] || leaving[number]) {
        fault(place + "changes buffer " + std::to_string(number) + " while it travels");
      }
    };
    for (const int number : step.zero) {
      const Buffer* b = buffer(rank, number);
      if (!b || !b->holds_gradient()) {
        fault(place + "zeroes a buffer that holds no gradients");
        continue;
      }
      write(number);
      if (state(rank, number).full && b->rows.rows() > 0) {
        fault(place + "throws away the gradients in buffer " + std::to_string(number));
      }
      state(rank, number) = {true, 0};
    }
    for (const Tile& tile : step.tiles) {
      ++proof_.tiles;
      check_tile(rank, backward, s, tile);
      read(tile.buffer, "a tile reads");
      if (!proof_.faults.empty()) return;
      const uint64_t pairs = multiply(product_weight(tile.batch, tile.heads),
                                      pairs_weight(query_, key_, tile.query_positions, tile.key_positions, tile.band));
      done_[static_cast<size_t>(rank)] = add(done_[static_cast<size_t>(rank)], pairs);
      if (!backward) continue;
      write(tile.grad_buffer);
      read(tile.grad_buffer, "a tile adds to");
      State& sum = state(rank, tile.grad_buffer);
      sum.pairs = add(sum.pairs, pairs);
    }
  }

  void finish_step(int rank, bool backward, size_t s) {
    for (const Add& a : steps(rank, backward)[s].adds) {
      const Buffer *dst = buffer(rank, a.dst), *src = buffer(rank, a.src);
      if (!dst || !src || !dst->holds_gradient() || !src->holds_gradient() || !includes(dst->rows, src->rows)) {
        fault(at(rank, backward, s) + "adds gradients of other rows");
        continue;
      }
      if (!state(rank, a.dst).full || !state(rank, a.src).full) {
        fault(at(rank, backward, s) + "adds a gradient buffer before it is filled");
      }
      state(rank, a.dst).pairs = add(state(rank, a.dst).pairs, state(rank, a.src).pairs);
    }
  }

  void finish_rank(int rank, bool backward) {
    const Program& program = programs_[static_cast<size_t>(rank)];
    const std::string place = "rank " + std::to_string(rank) + ", " + (backward ? "backward" : "forward") + ": ";
    const size_t i = static_cast<size_t>(rank);
    if (done_[i] != expected_queries_[i]) {
      fault(place + "its tiles are not the pattern's pairs of its queries, each as often as it is counted");
    }
    if (!backward && program.saved >= 0 && !state(rank, program.saved).full) {
      fault(place + "the keys and values to keep for the backward never arrive");
    }
    if (backward) {
      for (size_t b = 0; b < program.buffers.size(); ++b) {
        if (program.buffers[b].kind != BufferKind::kOwnGrad) continue;
        const State& home = state(rank, static_cast<int>(b));
        if (!home.full || home.pairs != expected_keys_[i]) {
          fault(place + "gradients of its keys and values are lost or counted twice on the way home");
        }
      }
    }
  }

  const std::vector<Program>& programs_;
  const Pattern& pattern_;
  const PlanRequest& request_;
  const size_t max_faults_;
  Weights query_, key_;
  std::vector<uint8_t> marks_;                              // scratch of includes(), by key
  std::vector<uint64_t> expected_queries_, expected_keys_;  // by rank
  std::vector<std::unordered_map<int, State>> states_;      // by rank, buffer
  std::vector<uint64_t> done_;                              // by rank: pairs computed so far
  Proof proof_;
};

}  // namespace

Proof verify(const std::vector<Program>& programs, const Pattern& pattern, int max_faults) {
  if (programs.empty() || static_cast<int>(programs.size()) != programs[0].request.ranks) {
    throw Error(ErrorKind::kPlan, "verifier",
                "expected the programs of all ranks of a plan, got " + std::to_string(programs.size()));
  }
  for (size_t r = 0; r < programs.size(); ++r) {
    if (programs[r].rank != static_cast<int>(r) || !(programs[r].request == programs[0].request)) {
      throw Error(ErrorKind::kPlan, "verifier",
                  "expected programs of one plan in rank order; number " + std::to_string(r) + " is another");
    }
  }
  return Verifier(programs, pattern, max_faults).run();
}

Proof verify(const std::vector<Program>& programs, int max_faults) {
  return verify(programs, programs.empty() ? Pattern{} : *cached_pattern(programs[0].request), max_faults);
}

Proof verify(const PlanRequest& request, int max_faults) { return verify(make_programs(request), max_faults); }

}  // namespace annulus
