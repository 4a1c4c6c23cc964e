// What the verifier proves of one rank's program, alone: the parts 1 to 4 of verifier.h. Internal to the verifier.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/plan/fingerprint.h"
#include "attention/plan/layout.h"
#include "attention/plan/verifier.h"

namespace annulus {

class RankProof {
 public:
  // `layouts` are the request's. `weights` may be shared by proofs made one after the other. All must outlive this.
  RankProof(const Program& program, const Pattern& pattern, const Layout& queries, const Layout& keys,
            PairWeights& weights);

  // Adds to `proof`: faults until there are `max_faults`, and this rank's tiles, transfers and pairs. Of each direction
  // the first step with faults is told: what follows from it says nothing.
  void run(Proof& proof, size_t max_faults);

 private:
  struct State {
    bool full = false;
    int left = 0;  // how often a gradient buffer's content was sent or added elsewhere
  };

  void check_own_rows();
  void check_buffers();
  std::optional<std::string> ill_formed(const RowSet& rows);
  bool share_rows(const RowBlock& a, const RowBlock& b);
  void expect_pairs();
  void follow(bool backward);
  void start_transfers(const Step& step);
  void zero(const Step& step);
  void compute(const Step& step, bool backward);
  void finish_step(const Step& step);
  void finish(bool backward);
  bool check_transfer(const Transfer& transfer, bool send);
  bool check_tile(const Tile& tile, bool backward);
  bool holds(const Buffer& buffer, int block, const Tile& tile, const Span& rows) const;
  bool includes(const RowSet& whole, const RowSet& part);
  void change_gradient(int number, const std::string& what);

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
  std::vector<uint8_t> marks_;     // scratch, by key
  std::vector<State> states_;      // by buffer
  std::vector<uint8_t> arriving_;  // by buffer, in the step that is followed
  Fingerprint expected_ = 0;       // pairs of this rank's queries
  Fingerprint computed_ = 0;       // in the direction that is followed
  std::string place_;              // "rank 2, forward step 3: "
  Proof* proof_ = nullptr;
  size_t max_faults_ = 0;
  int faults_ = 0;  // found, listed or not
};

}  // namespace annulus
