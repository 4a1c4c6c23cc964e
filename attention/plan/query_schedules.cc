// The schedules in which queries travel to keys: ulysses, ulysses-ring and mesh; see schedules.h.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "attention/plan/program_maker.h"

namespace annulus {
namespace {

bool holds(const std::vector<int>& ranks, int rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); }

std::vector<int> every(int first, int step, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

// Builds the parts of a rank's program that all of these schedules share.
class QueryMaker : protected ProgramMaker {
 public:
  QueryMaker(Needs& needs, Program& program) : ProgramMaker(needs, program) {
    for (int r = 0; r < ranks(); ++r) shares_.push_back(query_share(program.request, r));
    const AttentionShape& shape = program.request.shape;
    const RowSet own = queries_of(rank(), Span::range(0, shape.heads));
    program.buffers.push_back({BufferKind::kOwnQueries, own});
    program.buffers.push_back({BufferKind::kOwnResults, own});
    for (const int reader : mine().queries) {
      if (reader != rank()) parts_of_[reader] = needs.parts(reader);
    }
  }

 protected:
  // Queries that this rank computes with: its own (buffer -1) or some heads of another rank's.
  struct Lane {
    int of = 0;
    Span heads;
    int buffer = -1;
  };

  const QueryShare& share(int rank) const { return shares_[static_cast<size_t>(rank)]; }
  const QueryShare& mine() const { return share(rank()); }

  RowSet queries_of(int rank, const Span& heads) const {
    return {{{Span::range(0, program_.request.shape.batch), heads, needs_.query_spans(rank)}}};
  }

  // The kv heads of a rank's share.
  Span kv_heads_of(int rank) const {
    const Span& heads = share(rank).heads;
    return Span::range(heads.begin / heads_per_kv_head_, heads.last() / heads_per_kv_head_ + 1);
  }
  // The rows that are marked, of these kv heads.
  RowSet rows_of_heads(const RowBits& bits, const Span& kv_heads) const {
    if (!bits.any()) return {};
    RowSet rows = needs_.rows(bits);
    for (RowBlock& block : rows.blocks) block.heads = intersect(block.heads, kv_heads);
    std::erase_if(rows.blocks, [](const RowBlock& block) { return block.heads.empty(); });
    return rows;
  }
  // The owner's rows that some of these readers need, of these kv heads.
  RowSet needed(int owner, const std::vector<int>& readers, const Span& kv_heads) const {
    return rows_of_heads(needs_.read_by_any(owner, readers), kv_heads);
  }

  // Cuts heads so that a kernel that counts them from the first one finds their kv heads: whole kv heads, or heads of
  // one.
  std::vector<Span> runs_of(const Span& heads) const {
    const int64_t group = heads_per_kv_head_, past = heads.last() + 1;
    std::vector<Span> runs;
    for (int64_t h = heads.begin; h < past;) {
      const bool aligned = h % group == 0 && past - h >= group;
      const int64_t next = aligned ? past / group * group : std::min(past, (h / group + 1) * group);
      runs.push_back(Span::range(h, next));
      h = next;
    }
    return runs;
  }

  // Sends this rank's queries to those that compute with them, and receives those of others. Returns all queries of
  // this rank's share, its own first.
  std::vector<Lane> exchange_queries(Step& step) {
    std::vector<Lane> lanes;
    if (holds(mine().queries, rank())) lanes.push_back({rank(), mine().heads, -1});
    for (int d = 1; d < ranks(); ++d) {
      const int to = wrap(rank() + d, ranks()), from = wrap(rank() - d, ranks());
      if (holds(share(to).queries, rank())) {
        for (const Span& heads : runs_of(share(to).heads)) {
          RowSet rows = queries_of(rank(), heads);
          if (rows.rows() > 0) send(step, to, kOwnQueriesBuffer, std::move(rows));
        }
      }
      if (!holds(mine().queries, from)) continue;
      for (const Span& heads : runs_of(mine().heads)) {
        RowSet rows = queries_of(from, heads);
        if (rows.rows() == 0) continue;
        lanes.push_back({from, heads, add_buffer(BufferKind::kQueries, std::move(rows))});
        receive(step, from, lanes.back().buffer);
      }
    }
    return lanes;
  }

  // Appends the tiles of a lane with the owner's rows in `buffer` to a step.
  void compute_lane(Step& step, const Lane& lane, int owner, int buffer, int grad_buffer) {
    const std::vector<QueryPart>& parts = lane.of == rank() ? parts_ : parts_of_.at(lane.of);
    const size_t first = step.tiles.size();
    static const RowSet none;
    append_tiles(against(parts, owner), heads_per_kv_head_, rows_of(buffer), buffer,
                 grad_buffer < 0 ? none : rows_of(grad_buffer), grad_buffer, step.tiles);
    const auto begin = step.tiles.begin() + static_cast<std::ptrdiff_t>(first);
    for (auto tile = begin; tile != step.tiles.end(); ++tile) {
      tile->heads = intersect(tile->heads, lane.heads);
      tile->queries = lane.buffer;
      if (lane.buffer >= 0) tile->heads.begin -= lane.heads.begin;
    }
    step.tiles.erase(std::remove_if(begin, step.tiles.end(), [](const Tile& tile) { return tile.heads.empty(); }),
                     step.tiles.end());
  }

  // Ends the queries of other ranks in `step` and sends their results home in the step `home`, in which this rank
  // receives those of its own and merges or adds them in the order of the ranks.
  void return_results(Step& step, Step& home, const std::vector<Lane>& lanes) {
    for (const Lane& lane : lanes) {
      if (lane.buffer < 0) continue;
      const int results = add_buffer(BufferKind::kResults, rows_of(lane.buffer));
      step.finishes.push_back({lane.buffer, results});
      send_all(home, lane.of, results);
    }
    for (int other = 0; other < ranks(); ++other) {
      if (other == rank() || !holds(share(other).queries, rank())) continue;
      for (const Span& heads : runs_of(share(other).heads)) {
        RowSet rows = queries_of(rank(), heads);
        if (rows.rows() == 0) continue;
        const int results = add_buffer(BufferKind::kResults, std::move(rows));
        receive(home, other, results);
        home.adds.push_back({kOwnResultsBuffer, results});
      }
    }
  }

  // Receives these rows of this rank's keys' gradients from `from` and adds them.
  void add_home(Step& step, int from, RowSet rows) {
    if (rows.blocks.empty()) return;
    const int part = add_buffer(BufferKind::kGrad, std::move(rows));
    receive(step, from, part);
    step.adds.push_back({kOwnGradBuffer, part});
  }

 private:
  // The parts that may be paired with the owner's rows.
  std::vector<QueryPart> against(const std::vector<QueryPart>& parts, int owner) {
    const auto [it, fresh] = by_owner_.try_emplace(&parts);
    if (fresh) it->second = needs_.by_owner(parts);
    std::vector<QueryPart> some;
    for (const uint32_t number : it->second.of(static_cast<size_t>(owner))) some.push_back(parts[number]);
    return some;
  }

  std::vector<QueryShare> shares_;  // by rank
  std::map<int, std::vector<QueryPart>> parts_of_;
  std::map<const std::vector<QueryPart>*, Lists> by_owner_;
};

// Keys, values and queries come straight from their owners; results and gradients go straight back.
class Exchange : QueryMaker {
 public:
  using QueryMaker::QueryMaker;

  void make() {
    make_direction(program_.forward, false);
    make_direction(program_.backward, true);
  }

 private:
  struct Block {
    int owner, buffer;
  };

  std::vector<Block> exchange_keys(Step& step) {
    std::vector<Block> blocks;
    for (int d = 1; d < ranks(); ++d) {
      const int to = wrap(rank() + d, ranks()), from = wrap(rank() - d, ranks());
      if (RowSet going = going_to(to); !going.blocks.empty()) send(step, to, kOwnKVBuffer, std::move(going));
      if (!holds(mine().keys, from)) continue;
      RowSet coming = needed(from, mine().queries, kv_heads_of(rank()));
      if (coming.blocks.empty()) continue;
      blocks.push_back({from, add_buffer(BufferKind::kKV, std::move(coming))});
      receive(step, from, blocks.back().buffer);
    }
    return blocks;
  }

  RowSet going_to(int rank) const {
    const QueryShare& theirs = share(rank);
    return holds(theirs.keys, this->rank()) ? needed(this->rank(), theirs.queries, kv_heads_of(rank)) : RowSet{};
  }

  void make_direction(std::vector<Step>& steps, bool backward) {
    steps.resize(ranks() > 1 ? 3 : 1);
    const std::vector<Lane> lanes = exchange_queries(steps[0]);
    const std::vector<Block> blocks = exchange_keys(steps[0]);
    const bool own_keys = holds(mine().keys, rank());
    const int own_grad = backward ? kOwnGradBuffer : -1;
    if (backward) steps[0].zero.push_back(kOwnGradBuffer);
    for (const Lane& lane : lanes) {
      if (own_keys) compute_lane(steps[lane.buffer < 0 ? 0 : 1], lane, rank(), kOwnKVBuffer, own_grad);
    }
    if (ranks() == 1) return;
    for (const Block& block : blocks) {
      int grad = -1;
      if (backward) {
        grad = add_buffer(BufferKind::kGrad, rows_of(block.buffer));
        steps[1].zero.push_back(grad);
        send_all(steps[2], block.owner, grad);
      }
      for (const Lane& lane : lanes) compute_lane(steps[1], lane, block.owner, block.buffer, grad);
    }
    // Between two ranks gradients go before results.
    for (int other = 0; other < ranks() && backward; ++other) {
      if (other != rank()) add_home(steps[2], other, going_to(other));
    }
    return_results(steps[1], steps[2], lanes);
  }
};

// Ulysses inside groups of `within` ranks, and a ring between the groups. The blocks of a group's members visit the
// ranks of one place in the groups one after the other, each with the heads of that place: visit 0 is the rank of that
// place in their own group.
class UlyssesRing : QueryMaker {
 public:
  UlyssesRing(Needs& needs, Program& program, int within)
      : QueryMaker(needs, program), within_(within), groups_(ranks() / within) {}

  void make() {
    make_direction(program_.forward, false);
    make_direction(program_.backward, true);
  }

 private:
  int group() const { return rank() / within_; }
  int place() const { return rank() % within_; }
  int at(int group, int place) const { return wrap(group, groups_) * within_ + place; }

  // The owner's rows, of the kv heads of a place, that the groups of the visits [first, past) need.
  RowSet needed(int owner, int place, int first, int past) const {
    std::vector<int> readers;
    for (int visit = first; visit < past; ++visit) {
      for (int p = 0; p < within_; ++p) readers.push_back(at(owner / within_ + visit, p));
    }
    return QueryMaker::needed(owner, readers, kv_heads_of(place));
  }
  // The last visit in which rows are needed; 0 if there is none after the first.
  int last_visit(int owner, int place) const {
    int last = groups_ - 1;
    while (last > 0 && needed(owner, place, last, last + 1).blocks.empty()) --last;
    return last;
  }

  // Step 0 exchanges inside the group; step v + 1 computes visit v while the blocks of visit v + 1 arrive; the last
  // step brings results home. Gradients of visit v leave in step v + 2.
  void make_direction(std::vector<Step>& steps, bool backward) {
    steps.resize(static_cast<size_t>(groups_) + 2);
    const std::vector<Lane> lanes = exchange_queries(steps[0]);
    std::vector<int> held(static_cast<size_t>(within_), -1);  // by member: the buffer with its rows in this visit
    for (int d = 1; d < within_; ++d) {
      const int to = at(group(), (place() + d) % within_), from = at(group(), (place() + within_ - d) % within_);
      if (RowSet going = needed(rank(), to % within_, 0, groups_); !going.blocks.empty()) {
        send(steps[0], to, kOwnKVBuffer, std::move(going));
      }
      RowSet coming = needed(from, place(), 0, groups_);
      if (coming.blocks.empty()) continue;
      held[static_cast<size_t>(from % within_)] = add_buffer(BufferKind::kKV, std::move(coming));
      receive(steps[0], from, held[static_cast<size_t>(from % within_)]);
    }
    held[static_cast<size_t>(place())] = kOwnKVBuffer;
    if (backward) steps[0].zero.push_back(kOwnGradBuffer);
    compute_lane(steps[0], own_, rank(), kOwnKVBuffer, backward ? kOwnGradBuffer : -1);
    for (int visit = 0; visit < groups_; ++visit) {
      Step& step = steps[static_cast<size_t>(visit) + 1];
      // Between two ranks gradients go before keys and values.
      for (int member = 0; member < within_; ++member) {
        const int buffer = held[static_cast<size_t>(member)], owner = at(group() - visit, member);
        if (buffer >= 0) compute(step, steps[static_cast<size_t>(visit) + 2], lanes, owner, visit, buffer, backward);
      }
      for (int member = 0; member < within_; ++member) {
        int& buffer = held[static_cast<size_t>(member)];
        buffer = pass_on(step, member, visit, buffer);
      }
    }
    if (backward) bring_gradients_home(steps);
    return_results(steps[static_cast<size_t>(groups_)], steps.back(), lanes);
  }

  // The sum of all visits reaches this rank from the last one of each place; the parts of its own group come at once.
  void bring_gradients_home(std::vector<Step>& steps) {
    for (int p = 0; p < within_; ++p) {
      if (p != place()) add_home(steps[2], at(group(), p), needed(rank(), p, 0, 1));
    }
    for (int p = 0; p < within_; ++p) {
      const int last = last_visit(rank(), p);
      if (last == 0) continue;
      add_home(steps[static_cast<size_t>(last) + 2], at(group() + last, p), needed(rank(), p, 1, last + 1));
    }
  }

  // Sends a member's rows of this visit to the next group, as far as it or a later one needs them, and receives those
  // of the next visit. Returns their buffer, or -1.
  int pass_on(Step& step, int member, int visit, int buffer) {
    if (visit + 1 == groups_) return -1;
    RowSet ahead = needed(at(group() - visit, member), place(), visit + 1, groups_);
    if (!ahead.blocks.empty()) send(step, at(group() + 1, place()), buffer, std::move(ahead));
    RowSet coming = needed(at(group() - visit - 1, member), place(), visit + 1, groups_);
    if (coming.blocks.empty()) return -1;
    const int next = add_buffer(BufferKind::kKV, std::move(coming));
    receive(step, at(group() - 1, place()), next);
    return next;
  }

  void compute(Step& step, Step& next, const std::vector<Lane>& lanes, int owner, int visit, int buffer,
               bool backward) {
    int grad = -1;
    if (backward) grad = gradients(step, next, owner, visit);
    if (backward && grad < 0) return;  // none of its rows are needed here
    for (const Lane& lane : lanes) {
      const bool done = lane.of == rank() && owner == rank();  // in step 0
      if (!done) compute_lane(step, lane, owner, buffer, grad);
    }
  }

  // The buffer to which the gradients of the owner's rows in this visit are added, with what becomes of it. The sum of
  // the earlier visits arrives meanwhile.
  int gradients(Step& step, Step& next, int owner, int visit) {
    if (visit == 0 && owner == rank()) return kOwnGradBuffer;
    const int first = visit == 0 ? 0 : 1, last = visit == 0 ? 0 : last_visit(owner, place());
    if (visit > last) return -1;
    RowSet rows = needed(owner, place(), first, visit + 1);
    if (rows.blocks.empty()) return -1;
    const int part = add_buffer(BufferKind::kGrad, std::move(rows));
    step.zero.push_back(part);
    if (RowSet before = needed(owner, place(), first, visit); visit > 0 && !before.blocks.empty()) {
      const int sum = add_buffer(BufferKind::kGrad, std::move(before));
      receive(step, at(group() - 1, place()), sum);
      step.adds.push_back({part, sum});
    }
    send_all(next, visit == last ? owner : at(group() + 1, place()), part);
    return part;
  }

  const int within_, groups_;
  const Lane own_{rank(), mine().heads, -1};
};

int inner_group(const PlanRequest& request) { return request.within > 0 ? request.within : request.ranks; }

}  // namespace

QueryShare query_share(const PlanRequest& request, int rank) {
  if (request.schedule == ScheduleKind::kMesh) {
    const int columns = request.within > 0 ? request.within : mesh_columns(request), column = rank % columns;
    return {every(rank - column, 1, columns), every(column, columns, request.ranks / columns),
            Span::range(0, request.shape.heads)};
  }
  // Ulysses: some heads of the group's queries with all keys.
  const int within = inner_group(request), place = rank % within;
  const int64_t heads = request.shape.heads / within;
  return {every(rank - place, 1, within), every(0, 1, request.ranks), {place * heads, 1, heads}};
}

void make_ulysses(Needs& needs, Program& program) { Exchange(needs, program).make(); }

void make_ulysses_ring(Needs& needs, Program& program) {
  UlyssesRing(needs, program, inner_group(program.request)).make();
}

void make_mesh(Needs& needs, Program& program) { Exchange(needs, program).make(); }

int mesh_columns(const PlanRequest& request) {
  // In vectors of D elements in the inputs' dtype, for each position: queries and partial results, which are twice as
  // wide, to and from the other columns; keys and values from the other rows.
  const auto sent = [&](int columns) {
    return 3 * request.shape.heads * (columns - 1) + 2 * request.shape.kv_heads * (request.ranks / columns - 1);
  };
  int best = 1;
  for (int columns = 1; columns <= request.ranks; ++columns) {
    if (request.ranks % columns == 0 && sent(columns) < sent(best)) best = columns;
  }
  return best;
}

}  // namespace annulus
