// See rounds.h.
#include "comm/rounds.h"

#include <algorithm>
#include <cstring>

#include "memory/pool/pool_tensor.h"

namespace annulus::comm_internal {
namespace {

// The pieces of an all_reduce differ by one element if the number of ranks does not divide the number of elements.
int64_t begin_of_piece(int64_t elements, int ranks, int rank) { return elements * rank / ranks; }

int64_t width_of_sums(const RankGroups& groups, SumTypes types) {
  return static_cast<int64_t>(c10::elementSize(groups.count() > 1 ? types.sums : types.values));
}

}  // namespace

Rounds::Rounds(int rank, const RankHosts& hosts, int64_t max_message, const Begun& call)
    : rank_(rank),
      hosts_(hosts),
      groups_(hosts_.groups()),
      group_(groups_.of(rank)),
      op_(call.op()),
      types_(call.in.scalar_type()),
      out_(call.out),
      whole_(call.whole()),
      elements_(whole_.numel()),
      width_(whole_.element_size()),
      sum_width_(width_of_sums(groups_, types_)),
      carried_(groups_.carried_by(rank)),
      to_other_hosts_(call.to_other_hosts) {
  if (elements_ == 0) return;
  int64_t longest = 0;
  for (int r = 0; r < groups_.ranks(); ++r) longest = std::max(longest, piece(r).bytes);
  if (call.reduces()) {
    add_reduction(longest, max_message);
  } else {
    in_ = call.in;
  }
  if (call.collective() == Collective::kReduceScatter) return;
  steps_.push_back({Kind::kGather, 0, count()});  // sends pieces that the steps before it have reduced or received
  if (groups_.count() > 1) steps_.push_back({Kind::kGatherInside, 0, count()});
}

void Rounds::begin() {
  if (!in_.defined()) return;
  char* const place = bytes_at(piece(rank_).begin);
  if (place != in_.const_data_ptr()) std::memcpy(place, in_.const_data_ptr(), in_.nbytes());
}

// Two steps are under way at a time, of different rounds: while one round is between the groups, the next is inside
// them.
void Rounds::add_reduction(int64_t longest, int64_t max_message) {
  part_ = std::max<int64_t>(1, std::min(round_bytes(groups_, longest), max_message) / width_) * width_;
  // With several rounds, the memory of two lies one after the other, and each begins with sums, which must be aligned.
  if (part_ < longest) part_ = std::max<int64_t>(1, part_ / sum_width_) * sum_width_;
  const int64_t rounds = (longest + part_ - 1) / part_, others = groups_.size(group_) - 1;
  const auto carried = static_cast<int64_t>(carried_.size());
  const int64_t sums = groups_.count() > 1 ? carried + groups_.count() - 1 : 0;
  const int64_t held = (carried * others * width_ + sums * sum_width_) * (part_ / width_);
  held_ = pool_tensor({std::min(rounds, kRoundsAtOnce), held}, at::kByte, PoolPurpose::kGradients);
  const auto add = [&](Kind kind, int64_t round) {
    const int64_t before = count(), window = before + 1 - kRoundsAtOnce;
    const bool waits = kind == Kind::kReduceBetween && rounds == 1;  // it needs the step just before it
    steps_.push_back({kind, round, waits ? before : std::max<int64_t>(0, window)});
  };
  for (int64_t round = 0; round < rounds; ++round) {
    add(Kind::kReduceInside, round);
    if (groups_.count() > 1 && round > 0) add(Kind::kReduceBetween, round - 1);
  }
  if (groups_.count() > 1) add(Kind::kReduceBetween, rounds - 1);
}

Rounds::Range Rounds::piece(int rank) const {
  const int64_t begin = begin_of_piece(elements_, groups_.ranks(), rank);
  return {begin * width_, (begin_of_piece(elements_, groups_.ranks(), rank + 1) - begin) * width_};
}

// The part of a rank's piece that is moved in a round.
Rounds::Range Rounds::part(int rank, int64_t round) const {
  const Range all = piece(rank);
  const int64_t from = std::min(all.bytes, round * part_);
  return {all.begin + from, std::min(part_, all.bytes - from)};
}

// ---- The memory of a round. With several groups it begins with sums, because they need a larger alignment than bf16:
// first those of the pieces that this rank carries, then the other groups' sums of its own piece. After these come, for
// each piece that it carries, the values of the other ranks of its group.

char* Rounds::slot(int64_t round) const {
  return static_cast<char*>(held_.mutable_data_ptr()) + round % kRoundsAtOnce * held_.size(1);
}

char* Rounds::value_of(int64_t round, size_t carried, int peer) const {
  const int64_t others = groups_.size(group_) - 1, place = peer - groups_.first(group_) - (peer > rank_ ? 1 : 0);
  const auto sums = groups_.count() > 1 ? carried_.size() + static_cast<size_t>(groups_.count()) - 1 : size_t{0};
  return sum_of(round, sums) + (static_cast<int64_t>(carried) * others + place) * part_;
}

char* Rounds::sum_of(int64_t round, size_t row) const {
  return slot(round) + static_cast<int64_t>(row) * (part_ / width_ * sum_width_);
}

// The messages of a step between this rank and a peer.
void Rounds::add_messages(const Step& step, int peer, bool is_send, std::vector<Message>& to) const {
  const int theirs = groups_.of(peer);
  const bool inside = theirs == group_;
  const auto add = [&](char* data, int64_t bytes) {
    if (bytes > 0) to.push_back({peer, data, bytes});
  };
  const auto gathered = [&](int rank) { add(bytes_at(piece(rank).begin), piece(rank).bytes); };
  const auto widened = [&](Range range) { return range.bytes / width_ * sum_width_; };
  switch (step.kind) {
    case Kind::kReduceInside: {
      if (!inside) return;
      const std::vector<int> carried = is_send ? groups_.carried_by(peer) : carried_;
      for (size_t i = 0; i < carried.size(); ++i) {
        const Range range = part(carried[i], step.round);
        add(is_send ? bytes_at(range.begin) : value_of(step.round, i, peer), range.bytes);
      }
      return;
    }
    case Kind::kReduceBetween: {
      if (inside) return;
      if (is_send && groups_.carrier(group_, peer) == rank_) {
        const auto row = std::find(carried_.begin(), carried_.end(), peer) - carried_.begin();
        add(sum_of(step.round, static_cast<size_t>(row)), widened(part(peer, step.round)));
      }
      if (!is_send && groups_.carrier(theirs, rank_) == peer) {
        const size_t row = carried_.size() + static_cast<size_t>(theirs - (theirs > group_ ? 1 : 0));
        add(sum_of(step.round, row), widened(part(rank_, step.round)));
      }
      return;
    }
    case Kind::kGather:
      if (is_send && (inside || groups_.carrier(theirs, rank_) == peer)) gathered(rank_);
      if (!is_send && (inside || groups_.carrier(group_, peer) == rank_)) gathered(peer);
      return;
    case Kind::kGatherInside:
      if (!inside) return;
      for (const int piece : is_send ? carried_ : groups_.carried_by(peer)) {
        if (groups_.of(piece) != group_) gathered(piece);
      }
  }
}

std::vector<Rounds::Message> Rounds::sends(int64_t step) {
  std::vector<Message> messages;
  const int ranks = groups_.ranks();
  for (int i = 1; i < ranks; ++i) add_messages(steps_[static_cast<size_t>(step)], (rank_ + i) % ranks, true, messages);
  for (const Message& message : messages) {
    if (hosts_.of(message.peer) != hosts_.of(rank_)) *to_other_hosts_ += message.bytes;
  }
  return messages;
}

std::vector<Rounds::Message> Rounds::receives(int64_t step) const {
  std::vector<Message> messages;
  const int ranks = groups_.ranks();
  for (int i = 1; i < ranks; ++i) {
    add_messages(steps_[static_cast<size_t>(step)], (rank_ + ranks - i) % ranks, false, messages);
  }
  return messages;
}

void Rounds::finish(int64_t number) {
  const auto [kind, round, needs] = steps_[static_cast<size_t>(number)];
  if (kind == Kind::kGather || kind == Kind::kGatherInside) return;
  const Range mine = part(rank_, round);
  // The result of a reduce_scatter goes to a separate tensor, that of an all_reduce to the place of the piece.
  char* const out = out_.is_same(whole_)
                        ? bytes_at(mine.begin)
                        : static_cast<char*>(out_.mutable_data_ptr()) + (mine.begin - piece(rank_).begin);
  std::vector<const void*> from;
  if (kind == Kind::kReduceBetween) {
    const auto own = std::find(carried_.begin(), carried_.end(), rank_) - carried_.begin();
    for (int group = 0; group < groups_.count(); ++group) {
      const size_t row = group == group_ ? static_cast<size_t>(own)
                                         : carried_.size() + static_cast<size_t>(group - (group > group_ ? 1 : 0));
      from.push_back(sum_of(round, row));
    }
    return reduce_sums(types_, op_, out, from, mine.bytes / width_);
  }
  for (size_t i = 0; i < carried_.size(); ++i) {
    const Range range = part(carried_[i], round);
    from.clear();
    for (int r = groups_.first(group_); r < groups_.first(group_ + 1); ++r) {
      from.push_back(r == rank_ ? bytes_at(range.begin) : value_of(round, i, r));
    }
    const int64_t count = range.bytes / width_;
    if (groups_.count() == 1) {
      reduce_in_rank_order(types_.values, op_, out, from, count, groups_);
    } else {
      reduce_to_sums(types_, op_, sum_of(round, i), from, count);
    }
  }
}

int64_t bytes_to_other_hosts(int rank, const RankHosts& hosts, const Begun& call) {
  const RankGroups& groups = hosts.groups();
  const int64_t elements = call.whole().numel(), width = call.whole().element_size();
  const auto elements_of = [&](int r) {
    return begin_of_piece(elements, groups.ranks(), r + 1) - begin_of_piece(elements, groups.ranks(), r);
  };
  const int64_t sum_width = width_of_sums(groups, SumTypes(call.in.scalar_type()));
  int64_t bytes = 0;
  for (int r = 0; r < hosts.ranks(); ++r) {
    if (hosts.of(r) == hosts.of(rank)) continue;
    const bool several = groups.count() > 1;
    const bool sums = !several || groups.carrier(groups.of(rank), r) == rank;
    const bool gathers = !several || groups.carrier(groups.of(r), rank) == r;
    if (call.reduces() && sums) bytes += elements_of(r) * sum_width;
    if (call.collective() != Collective::kReduceScatter && gathers) bytes += elements_of(rank) * width;
  }
  return bytes;
}

}  // namespace annulus::comm_internal
