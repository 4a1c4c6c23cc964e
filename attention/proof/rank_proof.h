// Proves the properties of one rank's program alone: 1 to 4 of verifier.h. Internal to the verifier.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/plan/layout.h"
#include "attention/proof/fingerprint.h"
#include "attention/proof/verifier.h"

namespace annulus {

class RankProof {
 public:
  // `queries` and `keys` are the layouts of the program's request. Successive proofs may share `weights`. All arguments
  // must outlive this object.
  RankProof(const Program& program, const Pattern& pattern, const Layout& queries, const Layout& keys,
            PairWeights& weights);

  // Adds to `proof` this rank's tiles, transfers and pairs, and its faults until the proof lists `max_faults`. Stops
  // each direction after the first step with faults, since later faults would only follow from them.
  void run(Proof& proof, size_t max_faults);

 private:
  struct State {
    bool full = false;
    int left = 0;            // how often a buffer of sums was sent or added to another
    bool computing = false;  // queries: tiles have been computed with them, which no buffer of results holds yet
    bool ended = false;      // queries: no more tiles may be computed with them
  };

  void check_own_rows();
  void check_buffers();
  std::optional<std::string> ill_formed(const Buffer& buffer);
  bool share_rows(const RowBlock& a, const RowBlock& b);
  void expect_pairs();
  void follow(bool backward);
  void start_transfers(const Step& step);
  void zero(const Step& step);
  void compute(const Step& step, bool backward);
  void end_queries(const Step& step);
  void finish_step(const Step& step);
  void finish(bool backward);
  bool check_transfer(const Transfer& transfer, bool send);
  bool check_tile(const Tile& tile, bool backward);
  std::optional<Span> heads_of(const Tile& tile) const;
  bool holds(const Buffer& buffer, int block, const Tile& tile, const Span& heads, const Span& rows) const;
  bool includes(const RowSet& whole, const RowSet& part, int64_t length);
  int64_t length_of(const Buffer& buffer) const { return buffer.of_keys() ? shape_.k_len : shape_.q_len; }
  void change_sum(int number, const std::string& what);

  const Buffer* buffer(int number) const;
  State& state(int number) { return states_[static_cast<size_t>(number)]; }
  void mark(const std::vector<Span>& positions, uint8_t value);
  void fault(const std::string& text);

  const Program& program_;
  const Pattern& pattern_;
  const AttentionShape& shape_;
  const Layout& queries_;
  const Layout& keys_;
  PairWeights& weights_;
  std::vector<int64_t> rows_;      // by buffer
  std::vector<uint8_t> marks_;     // scratch, by key or query
  std::vector<State> states_;      // by buffer
  std::vector<uint8_t> arriving_;  // by buffer, in the current step
  Fingerprint expected_ = 0;       // of the pattern's pairs of this rank's queries
  Fingerprint computed_ = 0;       // of the tiles so far in the current direction
  std::string place_;              // "rank 2, forward step 3: "
  Proof* proof_ = nullptr;
  size_t max_faults_ = 0;
  int faults_ = 0;  // found, whether listed or not
};

}  // namespace annulus
