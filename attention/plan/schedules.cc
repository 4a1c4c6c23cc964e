// The schedule ring; see schedules.h.
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

}  // namespace

void make_ring(Needs& needs, Program& program) { Ring(needs, program).make(); }

}  // namespace annulus
