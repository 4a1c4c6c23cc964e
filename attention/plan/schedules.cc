// The schedules ring, all-gather and group-cast without groups; see schedules.h.
#include "attention/plan/schedules.h"

#include <utility>
#include <vector>

#include "attention/plan/program_maker.h"

namespace annulus {
namespace {

// The ring. The block of owner o visits the ranks o + d, o + 2 d, ..., where d is 1 or -1 (the opposite direction).
class Ring : ProgramMaker {
 public:
  Ring(Needs& needs, Program& program) : ProgramMaker(needs, program) {
    for (const RowBits& bits : needs.read_by(rank())) reads_.push_back(bits.any());
  }

  void make() {
    const bool from_the_end = program_.request.keep_last && last_needs_all();
    make_forward(from_the_end);
    make_backward(from_the_end ? -1 : 1);
  }

 private:
  int visitor(int owner, int d, int visit) const { return wrap(int64_t{owner} + int64_t{d} * visit, ranks()); }
  int owner_at(int d, int visit) const { return wrap(int64_t{rank()} - int64_t{d} * visit, ranks()); }

  // The rows of a block that the ranks of visits [first, past) need, where first is 1 or past is ranks(). Visit i
  // against the direction of the ring is visit ranks() - i with it.
  RowSet needed(int owner, int d, int first, int past) const {
    return d > 0 ? needs_.needed_on_the_way(owner, first, past)
                 : needs_.needed_on_the_way(owner, ranks() - past + 1, ranks() - first + 1);
  }

  // Whether, for every block, the rank that holds it last in the forward needs every row that any other rank needs.
  bool last_needs_all() const {
    for (int owner = 0; owner < ranks(); ++owner) {
      if (!needs_.last_visit_needs_all(owner)) return false;
    }
    return true;
  }

  // Visit 0 is that of the owner. A block arrives in the step before the one that computes with it.
  void make_forward(bool keep_last) {
    program_.forward.resize(static_cast<size_t>(ranks()));
    int held = kOwnKVBuffer;
    for (int visit = 0; visit < ranks(); ++visit) {
      Step& step = program_.forward[static_cast<size_t>(visit)];
      if (held >= 0) compute(step, owner_at(1, visit), held);
      held = pass_on(step, 1, visit, held, keep_last && visit + 2 == ranks() ? BufferKind::kSavedKV : BufferKind::kKV);
    }
  }

  // In the step in which this rank computes with the block of visit `visit`, sends the rows of that block that ranks
  // further along need, and receives the next block. Returns the buffer of the next block, or -1 if nothing comes.
  int pass_on(Step& step, int d, int visit, int held, BufferKind kind) {
    if (visit + 1 >= ranks()) return -1;
    RowSet ahead = needed(owner_at(d, visit), d, visit + 1, ranks());
    if (!ahead.blocks.empty()) send(step, wrap(rank() + d, ranks()), held, std::move(ahead));
    RowSet coming = needed(owner_at(d, visit + 1), d, visit + 1, ranks());
    if (coming.blocks.empty()) return -1;
    const int buffer = add_buffer(kind, std::move(coming));
    receive(step, wrap(rank() - d, ranks()), buffer);
    if (kind == BufferKind::kSavedKV) program_.saved = buffer;
    return buffer;
  }

  int last_visit(int owner, int d) const {
    const auto [first, last] = needs_.first_and_last_visit(owner);
    return d > 0 || first == 0 ? last : ranks() - first;
  }

  // d = 1: step 0 is the owner's visit, and an additional last step brings gradients to their owners. d = -1: step 0 is
  // visit 1, whose block was kept, and the rank's own block comes last.
  void make_backward(int d) {
    const int P = ranks();
    const int first = d > 0 ? 0 : 1;
    program_.backward.resize(static_cast<size_t>(P > 1 && d > 0 ? P + 1 : P));
    const auto step_of = [&](int visit) -> Step& { return program_.backward[static_cast<size_t>(visit - first)]; };
    Step& own = d > 0 ? program_.backward.front() : program_.backward.back();

    int held = d > 0 ? kOwnKVBuffer : program_.saved;
    for (int visit = first; visit < P; ++visit) {
      Step& step = step_of(visit);
      if (visit > 0) contribute(step, d, visit, held, step_of(visit + 1));
      held = pass_on(step, d, visit, held, BufferKind::kKV);
    }
    compute_into(own, rank(), kOwnKVBuffer, kOwnGradBuffer);
    if (const int last = last_visit(rank(), d); last > 0) {
      const int part = add_buffer(BufferKind::kGrad, needed(rank(), d, 1, P));
      Step& home = step_of(last + 1);  // if d = -1, this is not after `own`
      receive(home, visitor(rank(), d, last), part);
      (d > 0 ? home : own).adds.push_back({kOwnGradBuffer, part});
    }
  }

  // Computes this rank's part of the gradient of the visiting block. The sum of the earlier ranks' parts arrives
  // meanwhile and is added, and the new sum is sent in the next step.
  void contribute(Step& step, int d, int visit, int held, Step& next) {
    const int owner = owner_at(d, visit);
    const int last = last_visit(owner, d);
    if (visit > last) return;
    RowSet before = needed(owner, d, 1, visit);
    int sum = -1;
    if (!before.blocks.empty()) {
      sum = add_buffer(BufferKind::kGrad, std::move(before));
      receive(step, wrap(rank() - d, ranks()), sum);
    }
    if (reads_[static_cast<size_t>(owner)]) {
      const int part = add_buffer(BufferKind::kGrad, needed(owner, d, 1, visit + 1));
      compute_into(step, owner, held, part);
      if (sum >= 0) step.adds.push_back({part, sum});
      sum = part;
    }
    if (sum >= 0) send_all(next, visit == last ? owner : wrap(rank() + d, ranks()), sum);
  }

  std::vector<bool> reads_;  // by owner: whether this rank needs any of its rows
};

// All-gather (`everyone`) and group-cast: rows go straight from their owner to the ranks that get them.
class Direct : ProgramMaker {
 public:
  Direct(Needs& needs, Program& program, bool everyone) : ProgramMaker(needs, program), everyone_(everyone) {
    for (const RowBits& bits : needs.read_by(rank())) mine_.push_back(bits.any() ? needs.rows(bits) : RowSet{});
    for (const RowBits& bits : needs.read_of(rank())) theirs_.push_back(bits.any() ? needs.rows(bits) : RowSet{});
  }

  void make() {
    const std::vector<Block> forward = gather(program_.forward);
    compute(program_.forward[0], rank(), kOwnKVBuffer);
    if (!forward.empty()) program_.forward.emplace_back();
    for (const Block& block : forward) compute(program_.forward[1], block.owner, block.buffer);

    const std::vector<Block> backward = gather(program_.backward);
    compute_into(program_.backward[0], rank(), kOwnKVBuffer, kOwnGradBuffer);
    if (ranks() == 1) return;
    program_.backward.resize(3);
    Step &others = program_.backward[1], &home = program_.backward[2];
    for (const Block& block : backward) {
      const RowSet& mine = mine_[static_cast<size_t>(block.owner)];
      if (mine.blocks.empty()) continue;
      const int grad = add_buffer(BufferKind::kGrad, mine);
      compute_into(others, block.owner, block.buffer, grad);
      send_all(home, block.owner, grad);
    }
    for (int other = 0; other < ranks(); ++other) {
      if (other == rank()) continue;
      const RowSet& theirs = theirs_[static_cast<size_t>(other)];
      if (theirs.blocks.empty()) continue;
      const int part = add_buffer(BufferKind::kGrad, theirs);
      receive(home, other, part);
      home.adds.push_back({kOwnGradBuffer, part});
    }
  }

 private:
  struct Block {
    int owner, buffer;
  };

  // Adds the first step, in which this rank receives rows from the other owners and sends its own rows to the other
  // ranks. All-gather sends to all ranks what any other rank needs. Returns the received blocks.
  std::vector<Block> gather(std::vector<Step>& steps) {
    steps.emplace_back();
    std::vector<Block> blocks;
    for (int d = 1; d < ranks(); ++d) {
      const int owner = wrap(rank() - d, ranks()), reader = wrap(rank() + d, ranks());
      RowSet going = everyone_ ? needs_.needed_on_the_way(rank(), 1, ranks()) : theirs_[static_cast<size_t>(reader)];
      if (!going.blocks.empty()) send(steps[0], reader, kOwnKVBuffer, std::move(going));
      RowSet coming = everyone_ ? needs_.needed_on_the_way(owner, 1, ranks()) : mine_[static_cast<size_t>(owner)];
      if (coming.blocks.empty()) continue;
      blocks.push_back({owner, add_buffer(BufferKind::kKV, std::move(coming))});
      receive(steps[0], owner, blocks.back().buffer);
    }
    return blocks;
  }

  const bool everyone_;
  // The rows of each other rank that this rank needs, and the rows of this rank that each other one needs; by rank,
  // without blocks if there are none.
  std::vector<RowSet> mine_, theirs_;
};

}  // namespace

void make_ring(Needs& needs, Program& program) { Ring(needs, program).make(); }
void make_all_gather(Needs& needs, Program& program) { Direct(needs, program, true).make(); }
void make_group_cast(Needs& needs, Program& program) {
  const int within = program.request.within;
  if (within > 1 && within < program.request.ranks) return make_group_cast_over_groups(needs, program);
  Direct(needs, program, false).make();
}

}  // namespace annulus
