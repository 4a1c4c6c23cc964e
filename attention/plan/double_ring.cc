// The schedule double-ring; see schedules.h.
#include <utility>
#include <vector>

#include "attention/plan/program_maker.h"
#include "attention/plan/schedules.h"

namespace annulus {
namespace {

// The way of a block over all ranks, one turn of an inner group after the other: visit (a, b), in step a L + b, is
// visit b of turn a. With H groups of L ranks each, the block of rank i of group h visits
//   d = 1    rank i + b of group h + a; visit (0, 0) is the owner's
//   d = -1   rank i - 1 - b of group h - 1 - a; visit (0, 0) is the last one of d = 1, and (H - 1, L - 1) the owner's
class DoubleRing : ProgramMaker {
 public:
  DoubleRing(Needs& needs, Program& program)
      : ProgramMaker(needs, program),
        L_(program.request.within),
        H_(program.request.ranks / program.request.within),
        group_(program.rank / L_),
        inner_(program.rank % L_) {
    for (const RowBits& bits : needs.read_by(rank())) reads_.push_back(bits.any());
  }

  void make() {
    const bool from_the_end = program_.request.keep_last && last_needs_all();
    make_forward(from_the_end);
    make_backward(from_the_end ? -1 : 1);
  }

 private:
  static int skipped(int d) { return d > 0 ? 0 : 1; }
  int visitor(int owner, int d, int a, int b) const {
    return wrap(owner / L_ + d * (a + skipped(d)), H_) * L_ + wrap(owner % L_ + d * (b + skipped(d)), L_);
  }
  int owner_at(int d, int a, int b) const {
    return wrap(group_ - d * (a + skipped(d)), H_) * L_ + wrap(inner_ - d * (b + skipped(d)), L_);
  }
  size_t step_of(int a, int b) const { return static_cast<size_t>(a * L_ + b); }

  // The rows that visits [first, past) of a turn need, or all visits of the turns [first, past); the owner's own visit
  // aside.
  RowSet in_turn(int owner, int d, int a, int first, int past) {
    return needs_.rows_for(owner, readers(owner, d, a * L_ + first, a * L_ + past));
  }
  RowSet in_turns(int owner, int d, int first, int past) {
    const RowBits bits = of_turns(owner, d, first, past);
    return bits.any() ? needs_.rows(bits) : RowSet{};
  }
  RowBits of_turns(int owner, int d, int first, int past) {
    RowBits together{owner, {}};
    const std::vector<RowBits>& groups = needs_.read_by_groups(owner, L_);
    for (int a = first; a < past; ++a) {
      const RowBits& of_turn = groups[static_cast<size_t>(visitor(owner, d, a, 0) / L_)];
      if (!of_turn.words.empty()) together.join(of_turn);
    }
    return together;
  }
  std::vector<int> readers(int owner, int d, int first_step, int past) const {
    std::vector<int> list;
    for (int s = first_step; s < past; ++s) {
      if (const int reader = visitor(owner, d, s / L_, s % L_); reader != owner) list.push_back(reader);
    }
    return list;
  }

  // The last visit of a turn whose rank needs any row of the owner, -1 if there is none.
  int last_in_turn(int owner, int d, int a) {
    int b = L_ - 1;
    while (b >= 0 && !needs_.read_by_any(owner, readers(owner, d, a * L_ + b, a * L_ + b + 1)).any()) --b;
    return b;
  }

  // Whether, for every block, the rank that holds it last in the forward needs every row that other groups need.
  bool last_needs_all() {
    for (int owner = 0; owner < ranks(); ++owner) {
      const RowBits last = needs_.read_by_any(owner, {visitor(owner, 1, H_ - 1, L_ - 1)});
      if (needs_.count(last) != needs_.count(of_turns(owner, 1, 1, H_))) return false;
    }
    return true;
  }

  void make_forward(bool keep_last) {
    std::vector<Step>& steps = program_.forward;
    steps.resize(static_cast<size_t>(ranks()));
    entering_.assign(static_cast<size_t>(H_), -1);
    entering_[0] = kOwnKVBuffer;
    for (int a = 0; a < H_; ++a) {
      int held = entering_[static_cast<size_t>(a)];
      for (int b = 0; b < L_; ++b) {
        Step& step = steps[step_of(a, b)];
        if (held >= 0) compute(step, owner_at(1, a, b), held);
        held = pass_on(step, 1, a, b, held, keep_last);
      }
    }
  }

  // In the step of visit (a, b), sends the block's rows that later visits of the turn need to the next one, and at the
  // beginning of a turn those that the following groups need to the next group. Receives likewise. Returns the buffer
  // of the block of visit (a, b + 1), or -1 if nothing comes; the block of the next turn goes to entering_.
  int pass_on(Step& step, int d, int a, int b, int held, bool keep_last) {
    const auto keep = [&](int to_a, int to_b) { return keep_last && step_of(to_a, to_b) == step_of(H_ - 1, L_ - 1); };
    const int owner = owner_at(d, a, b);
    const int past = d > 0 ? H_ : H_ - 1;  // with d = -1 the last turn's blocks come from their owners
    if (b == 0 && a + 1 < past) {
      const int next = owner_at(d, a + 1, 0);
      send_keys(step, visitor(owner, d, a + 1, 0), held, in_turns(owner, d, a + 1, past));
      entering_[static_cast<size_t>(a) + 1] =
          receive_keys(step, visitor(next, d, a, 0), in_turns(next, d, a + 1, past), keep(a + 1, 0));
    }
    if (d < 0 && a + 2 == H_ && b + 1 == L_) {
      const int next = owner_at(d, a + 1, 0);
      send_keys(step, visitor(rank(), d, a + 1, 0), kOwnKVBuffer, in_turn(rank(), d, a + 1, 0, L_));
      entering_[static_cast<size_t>(a) + 1] = receive_keys(step, next, in_turn(next, d, a + 1, 0, L_), false);
    }
    if (b + 1 == L_) return -1;
    const int next = owner_at(d, a, b + 1);
    send_keys(step, visitor(owner, d, a, b + 1), held, in_turn(owner, d, a, b + 1, L_));
    return receive_keys(step, visitor(next, d, a, b), in_turn(next, d, a, b + 1, L_), keep(a, b + 1));
  }

  void send_keys(Step& step, int to, int buffer, RowSet rows) const {
    if (!rows.blocks.empty()) send(step, to, buffer, std::move(rows));
  }

  int receive_keys(Step& step, int from, RowSet rows, bool keep) {
    if (rows.blocks.empty()) return -1;
    const int buffer = add_buffer(keep ? BufferKind::kSavedKV : BufferKind::kKV, std::move(rows));
    if (keep) program_.saved = buffer;
    receive(step, from, buffer);
    return buffer;
  }

  // The step after a turn's last visit brings the turn's sum to the owner. With d = -1 the own block comes in the last
  // step, after the sums of other groups. Gradients stand before keys in the lists of transfers at both ends.
  void make_backward(int d) {
    std::vector<Step>& steps = program_.backward;
    steps.resize(static_cast<size_t>(d > 0 ? ranks() + 1 : ranks()));
    Step& own = d > 0 ? steps.front() : steps.back();
    Step* first = &own;  // the first step that changes the own gradients
    for (int a = H_ - 1; a >= 0; --a) {
      const int last = last_in_turn(rank(), d, a);
      if (last < 0) continue;
      Step& home = steps[step_of(a, last) + 1];
      const int sum = add_buffer(BufferKind::kGrad, in_turn(rank(), d, a, 0, L_));
      receive(home, visitor(rank(), d, a, last), sum);
      home.adds.push_back({kOwnGradBuffer, sum});
      if (d < 0) first = &home;
    }
    first->zero.push_back(kOwnGradBuffer);

    entering_.assign(static_cast<size_t>(H_), -1);
    entering_[0] = d > 0 ? kOwnKVBuffer : program_.saved;
    for (int a = 0; a < H_; ++a) {
      int held = entering_[static_cast<size_t>(a)];
      for (int b = 0; b < L_; ++b) {
        Step& step = steps[step_of(a, b)];
        if (&step != &own) contribute(step, d, a, b, held, steps[step_of(a, b) + 1]);
        held = pass_on(step, d, a, b, held, false);
      }
    }
    compute(own, rank(), kOwnKVBuffer, kOwnGradBuffer);
  }

  // Computes this rank's part of the gradient of the visiting block. Within a turn, the sum of the earlier visits'
  // parts arrives during the computation and is added, and the new sum is sent in the next step; the last visit of the
  // turn that needs the block sends it to the owner. So a sum crosses between groups only once in a turn, with the rows
  // that this group needs.
  void contribute(Step& step, int d, int a, int b, int held, Step& next) {
    const int owner = owner_at(d, a, b);
    const int last = last_in_turn(owner, d, a);
    if (b > last) return;
    int sum = -1;
    if (RowSet before = in_turn(owner, d, a, 0, b); !before.blocks.empty()) {
      sum = add_buffer(BufferKind::kGrad, std::move(before));
      receive(step, visitor(owner, d, a, b - 1), sum);
    }
    if (reads_[static_cast<size_t>(owner)]) {
      const int part = add_buffer(BufferKind::kGrad, in_turn(owner, d, a, 0, b + 1));
      compute_into(step, owner, held, part);
      if (sum >= 0) step.adds.push_back({part, sum});
      sum = part;
    }
    if (sum >= 0) send_all(next, b == last ? owner : visitor(owner, d, a, b + 1), sum);
  }

  const int L_, H_, group_, inner_;
  std::vector<bool> reads_;    // by owner: whether this rank needs any of its rows
  std::vector<int> entering_;  // by turn: the buffer of the block of its first visit, or -1
};

}  // namespace

void make_double_ring(Needs& needs, Program& program) {
  const int within = program.request.within;
  if (within == 0 || within == program.request.ranks) return make_ring(needs, program);
  DoubleRing(needs, program).make();
}

}  // namespace annulus
