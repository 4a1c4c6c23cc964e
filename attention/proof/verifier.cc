// See verifier.h. rank_proof.cc proves what concerns one rank alone; this file compares the ranks with each other.
#include "attention/proof/verifier.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "attention/plan/layout.h"
#include "attention/proof/fingerprint.h"
#include "attention/proof/rank_proof.h"
#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

std::string at(int rank, bool backward, size_t step) {
  return "rank " + std::to_string(rank) + ", " + (backward ? "backward" : "forward") + " step " + std::to_string(step) +
         ": ";
}

const std::vector<Step>& steps_of(const Program& program, bool backward) {
  return backward ? program.backward : program.forward;
}

// Adds faults to a proof until it lists as many as it may.
class Faults {
 public:
  Faults(Proof& proof, int most) : proof_(proof), most_(static_cast<size_t>(most)) {}
  void add(const std::string& text) {
    if (proof_.faults.size() < most_) proof_.faults.push_back(text);
  }
  size_t most() const { return most_; }

 private:
  Proof& proof_;
  const size_t most_;
};

// Checks that every position belongs to exactly one rank. spans_of(rank) returns the spans of a rank.
template <typename SpansOf>
void check_ownership(int ranks, SpansOf spans_of, int64_t length, const std::string& what, Faults& faults) {
  std::vector<uint8_t> owned(static_cast<size_t>(length));
  for (int r = 0; r < ranks; ++r) {
    for (const Span& s : spans_of(r)) {
      for (int64_t i = 0; i < s.count; ++i) {
        const int64_t x = s.at(i);
        const std::string claim = "rank " + std::to_string(r) + " claims " + what + " " + std::to_string(x);
        if (x < 0 || x >= length) return faults.add(claim + ", which does not exist");
        if (owned[static_cast<size_t>(x)]++) return faults.add(claim + ", which another rank owns");
      }
    }
  }
  const auto free = std::find(owned.begin(), owned.end(), 0);
  if (free != owned.end()) faults.add("no rank owns " + what + " " + std::to_string(free - owned.begin()));
}

// One end of a transfer.
struct Endpoint {
  size_t step;
  const Transfer* transfer;
  int content;  // content_of
};

// Whether a buffer's rows are those of keys or queries, and whether they hold sums.
int content_of(const Buffer& buffer) { return (buffer.of_keys() ? 0 : 2) + (buffer.holds_sums() ? 1 : 0); }

// The transfers from one rank to another, as the sender's and the receiver's program list them.
struct Channel {
  std::vector<Endpoint> sends, receives;
};

void match(int from, int to, const Channel& channel, bool backward, Faults& faults) {
  const auto& [sends, receives] = channel;
  const size_t n = std::min(sends.size(), receives.size());
  for (size_t i = 0; i < n; ++i) {
    const Endpoint &send = sends[i], &receive = receives[i];
    if (!(send.transfer->rows == receive.transfer->rows) || send.content != receive.content) {
      return faults.add(at(to, backward, receive.step) + "expects other rows than rank " + std::to_string(from) +
                        " sends at step " + std::to_string(send.step));
    }
    if (send.step != receive.step) {
      return faults.add(at(to, backward, receive.step) + "waits for what rank " + std::to_string(from) +
                        " sends at step " + std::to_string(send.step) +
                        ": both ends of a transfer must lie in steps of the same number, or ranks may deadlock");
    }
  }
  if (sends.size() > n) {
    faults.add(at(from, backward, sends[n].step) + "a send to rank " + std::to_string(to) + " has no receive");
  }
  if (receives.size() > n) {
    faults.add(at(to, backward, receives[n].step) + "a receive from rank " + std::to_string(from) + " has no send");
  }
}

// Matches the transfers between each pair of ranks in the order in which both sides list them. RankProof finds those
// that name no rank or no buffer.
void match_transfers(const std::vector<Program>& programs, bool backward, Faults& faults) {
  std::map<std::pair<int, int>, Channel> channels;  // (from, to)
  for (const Program& p : programs) {
    for (size_t s = 0; s < steps_of(p, backward).size(); ++s) {
      const Step& step = steps_of(p, backward)[s];
      for (const bool send : {true, false}) {
        for (const Transfer& t : send ? step.sends : step.receives) {
          if (t.buffer < 0 || t.buffer >= static_cast<int>(p.buffers.size())) continue;
          const Endpoint end{s, &t, content_of(p.buffers[static_cast<size_t>(t.buffer)])};
          if (send) {
            channels[{p.rank, t.peer}].sends.push_back(end);
          } else {
            channels[{t.peer, p.rank}].receives.push_back(end);
          }
        }
      }
    }
  }
  for (const auto& [ranks, channel] : channels) match(ranks.first, ranks.second, channel, backward, faults);
}

void mix(uint64_t& hash, int64_t number) { hash = splitmix64(hash ^ static_cast<uint64_t>(number)); }

void mix(uint64_t& hash, const Span& s) {
  mix(hash, s.begin);
  mix(hash, s.stride);
  mix(hash, s.count);
}

// Lists begin with their lengths, so that different sets of rows give different sequences of numbers.
void mix(uint64_t& hash, const RowSet& rows) {
  mix(hash, static_cast<int64_t>(rows.blocks.size()));
  for (const RowBlock& block : rows.blocks) {
    mix(hash, block.batch);
    mix(hash, block.heads);
    mix(hash, static_cast<int64_t>(block.positions.size()));
    for (const Span& s : block.positions) mix(hash, s);
  }
}

std::vector<PairDigest> digests(const Program& program, bool sends) {
  const int ranks = program.request.ranks;
  std::vector<PairDigest> all(static_cast<size_t>(ranks));
  for (const bool backward : {false, true}) {
    const std::vector<Step>& steps = steps_of(program, backward);
    for (size_t s = 0; s < steps.size(); ++s) {
      for (const Transfer& t : sends ? steps[s].sends : steps[s].receives) {
        const bool buffer_exists = t.buffer >= 0 && t.buffer < static_cast<int>(program.buffers.size());
        if (t.peer < 0 || t.peer >= ranks || !buffer_exists) continue;
        TransferDigest& digest = all[static_cast<size_t>(t.peer)][backward ? 1 : 0];
        ++digest.transfers;
        mix(digest.content, static_cast<int64_t>(s));
        mix(digest.content, content_of(program.buffers[static_cast<size_t>(t.buffer)]));
        mix(digest.content, t.rows);
      }
    }
  }
  return all;
}

}  // namespace

Proof verify(const std::vector<Program>& programs, const Pattern& pattern, const Layout& queries, const Layout& keys,
             int max_faults, const std::function<void(int)>& proved) {
  if (programs.empty() || static_cast<int>(programs.size()) != programs[0].request.ranks) {
    throw Error(ErrorKind::kPlan, "verifier",
                "expected the programs of all ranks of a plan, got " + std::to_string(programs.size()));
  }
  for (size_t r = 0; r < programs.size(); ++r) {
    if (programs[r].rank != static_cast<int>(r) || !(programs[r].request == programs[0].request)) {
      throw Error(ErrorKind::kPlan, "verifier",
                  "expected the programs of one plan in rank order; program " + std::to_string(r) +
                      " is of another rank or plan");
    }
  }
  Proof proof;
  Faults faults(proof, max_faults);
  const PlanRequest& request = programs[0].request;
  const auto program = [&](int r) -> const Program& { return programs[static_cast<size_t>(r)]; };
  check_ownership(
      request.ranks, [&](int r) { return program(r).query_spans; }, request.shape.q_len, "query", faults);
  check_ownership(
      request.ranks, [&](int r) { return program(r).key_spans; }, request.shape.k_len, "key", faults);
  for (const bool backward : {false, true}) match_transfers(programs, backward, faults);
  PairWeights weights(request.shape.q_len, request.shape.k_len);
  for (const Program& p : programs) {
    RankProof(p, pattern, queries, keys, weights).run(proof, faults.most());
    if (proved) proved(p.rank + 1);
  }
  if (proof.holds()) {  // otherwise some programs were not followed to their ends
    for (const std::string& fault : compare_pairs({fingerprints(proof)})) faults.add(fault);
  }
  return proof;
}

Proof verify(const std::vector<Program>& programs, const Pattern& pattern, int max_faults,
             const std::function<void(int)>& proved) {
  if (programs.empty()) return verify(programs, pattern, Layout{}, Layout{}, max_faults, proved);
  const PlanRequest& request = programs[0].request;
  return verify(programs, pattern, query_layout(request), key_layout(request), max_faults, proved);
}

Proof verify(const std::vector<Program>& programs, int max_faults, const std::function<void(int)>& proved) {
  return verify(programs, programs.empty() ? Pattern{} : *cached_pattern(programs[0].request), max_faults, proved);
}

double proof_bytes(const PlanRequest& request, const Pattern& pattern) {
  // The prefix sums along each stride of the slices' spans and of the tiles made from them take 8 bytes for each
  // position.
  std::set<int64_t> query_strides = {1}, key_strides = {1};
  const int64_t dealt = request.uneven_lengths.empty() && request.layout == LayoutKind::kStriped ? request.ranks : 1;
  const auto add = [dealt](std::set<int64_t>& strides, const Span& span) {
    strides.insert(span.stride);
    strides.insert(std::lcm(span.stride, dealt));
  };
  for (const Slice& slice : pattern.slices) {
    add(query_strides, slice.queries);
    add(key_strides, slice.keys);
  }
  const auto of = [](const std::set<int64_t>& strides, int64_t length) {
    // Two more bytes for each position: one in check_ownership, one in RankProof's scratch.
    return (8 * static_cast<double>(strides.size()) + 2) * static_cast<double>(length);
  };
  return of(query_strides, request.shape.q_len) + of(key_strides, request.shape.k_len);
}

double proof_bytes(const std::vector<Program>& programs, const Pattern& pattern) {
  // The prefix sums along a stride take 8 bytes for each position and for each position before the first.
  std::set<int64_t> query_strides = {1}, key_strides = {1};
  const auto add = [](std::set<int64_t>& strides, const Span& span) {
    if (span.count > 1) strides.insert(span.stride);
  };
  for (const Slice& slice : pattern.slices) add(key_strides, slice.keys);
  for (const Program& program : programs) {
    for (const auto* steps : {&program.forward, &program.backward}) {
      for (const Step& step : *steps) {
        for (const Tile& tile : step.tiles) {
          add(query_strides, tile.query_positions);
          add(key_strides, tile.key_positions);
        }
      }
    }
  }
  const auto of = [](const std::set<int64_t>& strides, int64_t length) {
    double bytes = 2 * static_cast<double>(length);  // as above
    for (const int64_t stride : strides) bytes += 8 * static_cast<double>(length + stride);
    return bytes;
  };
  const AttentionShape& shape = pattern.shape;
  return of(query_strides, shape.q_len) + of(key_strides, shape.k_len);
}

Proof verify(const PlanRequest& request, int max_faults) { return verify(make_programs(request), max_faults); }

Proof verify_rank(const Program& program, const Pattern& pattern, int max_faults) {
  Proof proof;
  const PlanRequest& request = program.request;
  const Layout queries = query_layout(request), keys = key_layout(request);
  PairWeights weights(request.shape.q_len, request.shape.k_len);
  RankProof(program, pattern, queries, keys, weights).run(proof, static_cast<size_t>(max_faults));
  return proof;
}

std::vector<PairDigest> sent_digests(const Program& program) { return digests(program, /*sends=*/true); }
std::vector<PairDigest> received_digests(const Program& program) { return digests(program, /*sends=*/false); }

std::array<uint64_t, 3> fingerprints(const Proof& proof) {
  return {proof.computed[0], proof.computed[1], proof.expected};
}

std::vector<std::string> compare_pairs(const std::vector<std::array<uint64_t, 3>>& computed_and_expected) {
  std::array<Fingerprint, 3> sums{};
  for (const auto& of_rank : computed_and_expected) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = add(sums[i], of_rank[i]);
  }
  std::vector<std::string> faults;
  for (const size_t direction : {0, 1}) {
    if (sums[direction] == sums[2]) continue;
    faults.push_back(std::string(direction == 0 ? "forward" : "backward") +
                     ": the tiles of all ranks are not the pattern's pairs, each as often as it is counted");
  }
  return faults;
}

std::vector<std::string> compare_digests(int from, int to, const PairDigest& sent, const PairDigest& received) {
  std::vector<std::string> faults;
  for (const size_t direction : {0, 1}) {
    const TransferDigest &s = sent[direction], &r = received[direction];
    if (s == r) continue;
    std::string text = std::string(direction == 0 ? "forward" : "backward") + ": rank " + std::to_string(from) +
                       " sends rank " + std::to_string(to) + " " + std::to_string(s.transfers) + " blocks, and rank " +
                       std::to_string(to) + " expects ";
    text += s.transfers == r.transfers ? "other blocks, or in other steps" : std::to_string(r.transfers);
    faults.push_back(text);
  }
  return faults;
}

}  // namespace annulus
