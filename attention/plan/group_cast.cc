// The schedules group-cast and all-gather; see schedules.h.
#include <utility>
#include <vector>

#include "attention/plan/program_maker.h"
#include "attention/plan/schedules.h"

namespace annulus {
namespace {

// Rank i of a group receives, from the ranks i of the other groups, all rows that its group needs of them, and passes
// them on inside the group. So a group's ranks share the transfers between groups. In a single group rows go straight
// from their owner to the ranks that need them, or, with `everyone` (all-gather), to all ranks.
class GroupCast : ProgramMaker {
 public:
  GroupCast(Needs& needs, Program& program, int within, bool everyone)
      : ProgramMaker(needs, program),
        everyone_(everyone),
        L_(within),
        groups_(program.request.ranks / within),
        group_(program.rank / within),
        place_(program.rank % within) {
    for (const RowBits& bits : needs.read_by(rank())) mine_.push_back(bits.any() ? needs.rows(bits) : RowSet{});
    for (const RowBits& bits : needs.read_of(rank())) theirs_.push_back(bits.any() ? needs.rows(bits) : RowSet{});
  }

  void make() {
    const std::vector<Block> forward = bring(program_.forward);
    compute(program_.forward[0], rank(), kOwnKVBuffer);
    for (const Block& block : forward) {
      if (!mine(block.owner).blocks.empty()) compute(program_.forward[block.step], block.owner, block.buffer);
    }

    const std::vector<Block> backward = bring(program_.backward);
    if (ranks() > 1) program_.backward.resize(groups_ > 1 ? 5 : 3);
    compute_into(program_.backward[0], rank(), kOwnKVBuffer, kOwnGradBuffer);
    for (const Block& block : backward) contribute(block);
    receive_gradients();
  }

 private:
  struct Block {
    int owner, buffer;
    size_t step;  // in which this rank can compute with it
  };

  int entry(int owner, int group) const { return group * L_ + owner % L_; }
  const RowSet& mine(int owner) const { return mine_[static_cast<size_t>(owner)]; }
  // The rows of an owner that a rank needs, or that any rank of a group needs.
  RowSet needed_by(int owner, int reader) {
    if (owner == rank()) return theirs_[static_cast<size_t>(reader)];
    return reader == rank() ? mine(owner) : needs_.rows_for(owner, {reader});
  }
  // The rows of an owner that a rank of its group gets.
  RowSet brought_to(int owner, int reader) {
    return everyone_ ? needs_.needed_on_the_way(owner, 1, ranks()) : needed_by(owner, reader);
  }
  RowSet needed_in(int owner, int group) {
    const RowBits& bits = needs_.read_by_groups(owner, L_)[static_cast<size_t>(group)];
    return bits.any() ? needs_.rows(bits) : RowSet{};
  }

  // Adds the steps that bring the rows of other ranks: step 0 between groups and inside the owner's group, step 1
  // inside the groups that were entered. Returns the blocks that this rank receives.
  std::vector<Block> bring(std::vector<Step>& steps) {
    steps.resize(groups_ > 1 ? 2 : 1);
    std::vector<Block> blocks;
    const auto take = [&](size_t step, int from, int owner, RowSet coming) {
      if (coming.blocks.empty()) return;
      blocks.push_back({owner, add_buffer(BufferKind::kKV, std::move(coming)), step + 1});
      receive(steps[step], from, blocks.back().buffer);
    };
    const auto give = [&](size_t step, int to, int buffer, RowSet going) {
      if (!going.blocks.empty()) send(steps[step], to, buffer, std::move(going));
    };
    for (int d = 1; d < groups_; ++d) {
      const int from = entry(rank(), wrap(group_ - d, groups_)), to = entry(rank(), wrap(group_ + d, groups_));
      give(0, to, kOwnKVBuffer, needed_in(rank(), to / L_));
      take(0, from, from, needed_in(from, group_));
    }
    const std::vector<Block> entered = blocks;
    for (int d = 1; d < L_; ++d) {
      const int from = member(-d), to = member(d);
      give(0, to, kOwnKVBuffer, brought_to(rank(), to));
      take(0, from, from, brought_to(from, rank()));
      for (const Block& block : entered) give(1, to, block.buffer, needed_by(block.owner, to));
      for (int e = 1; e < groups_; ++e) {
        const int owner = entry(from, wrap(group_ - e, groups_));
        take(1, from, owner, mine(owner));
      }
    }
    // The last blocks are computed with in a step of their own.
    if (groups_ > 1 || !blocks.empty()) steps.emplace_back();
    return blocks;
  }
  // The rank of this group that is `d` places further.
  int member(int d) const { return group_ * L_ + wrap(place_ + d, L_); }

  // Computes the gradient of a block. Steps 1 and 2 compute, step 2 brings gradients home from the owner's group, step
  // 3 brings those of other groups to the rank where the block entered, and step 4 their sums to the owner.
  void contribute(const Block& block) {
    Step& step = program_.backward[block.step];
    const int owner = block.owner;
    const int collector = owner / L_ == group_ ? owner : entry(owner, group_);
    if (collector != rank()) {
      if (mine(owner).blocks.empty()) return;
      const int part = add_buffer(BufferKind::kGrad, mine(owner));
      compute_into(step, owner, block.buffer, part);
      send_all(program_.backward[block.step + 1], collector, part);
      return;
    }
    const int sum = add_buffer(BufferKind::kGrad, rows_of(block.buffer));
    Step& inside = program_.backward[3];
    if (mine(owner).blocks.empty()) {
      inside.zero.push_back(sum);
    } else {
      compute_into(step, owner, block.buffer, sum);
    }
    for (int i = 0; i < L_; ++i) {
      const int from = group_ * L_ + i;
      if (from != rank()) add_from(inside, from, needed_by(owner, from), sum);
    }
    send_all(program_.backward[4], owner, sum);
  }

  // The owner adds the gradients of its own group, and then those of the other groups.
  void receive_gradients() {
    for (int i = 0; i < L_; ++i) {
      const int from = group_ * L_ + i;
      if (from != rank()) add_from(program_.backward[2], from, needed_by(rank(), from), kOwnGradBuffer);
    }
    for (int group = 0; group < groups_; ++group) {
      if (group != group_)
        add_from(program_.backward[4], entry(rank(), group), needed_in(rank(), group), kOwnGradBuffer);
    }
  }
  void add_from(Step& step, int from, RowSet coming, int sum) {
    if (coming.blocks.empty()) return;
    const int part = add_buffer(BufferKind::kGrad, std::move(coming));
    receive(step, from, part);
    step.adds.push_back({sum, part});
  }

  const bool everyone_;
  const int L_, groups_, group_, place_;  // this rank is rank `place_` of its group, of L_ ranks
  // By rank: the rows of it that this rank needs, and the rows of this rank that it needs; without blocks if none.
  std::vector<RowSet> mine_, theirs_;
};

}  // namespace

void make_group_cast(Needs& needs, Program& program) {
  const int within = program.request.within;
  GroupCast(needs, program, within > 1 ? within : program.request.ranks, /*everyone=*/false).make();
}
void make_all_gather(Needs& needs, Program& program) {
  GroupCast(needs, program, program.request.ranks, /*everyone=*/true).make();
}

}  // namespace annulus
