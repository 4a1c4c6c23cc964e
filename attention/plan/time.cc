// Predicts the time of a plan; see time.h.
#include "attention/plan/time.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "attention/pattern/pattern.h"
#include "attention/plan/traffic.h"
#include "common/environment.h"
#include "common/text.h"

namespace annulus {
namespace {

// The pairs that a kernel computes for a tile, with those in vain at the sides of its band.
double pairs_of(const Tile& tile, double edge) {
  const auto planes = static_cast<double>(tile.batch.count * tile.heads.count);
  const double all = planes * static_cast<double>(tile.query_rows.count) * static_cast<double>(tile.key_rows.count);
  if (tile.band.unbounded_below() && tile.band.unbounded_above()) return all;
  const Span &queries = tile.query_positions, &keys = tile.key_positions;
  const Slice slice{tile.batch, tile.heads, queries, keys, tile.band};
  int64_t cut = 0;  // queries at a side of the band that lies among the keys
  for (const int64_t side : {tile.band.lo, tile.band.hi}) {
    if (side > -Band::kUnbounded && side < Band::kUnbounded) {
      cut += queries.clip(keys.begin - side, keys.last() - side).count;
    }
  }
  return std::min(all, static_cast<double>(count_pairs({.shape = {}, .slices = {slice}})) +
                           planes * edge * static_cast<double>(cut));
}

bool of_one_call(const Tile& a, const Tile& b) {
  return a.buffer == b.buffer && a.block == b.block && a.grad_buffer == b.grad_buffer && a.grad_block == b.grad_block &&
         a.queries == b.queries;
}

double compute_of(const std::vector<Tile>& tiles, const KernelRate& kernel, int64_t head_dim) {
  double seconds = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    if (i == 0 || !of_one_call(tiles[i - 1], tile)) seconds += kernel.call;
    seconds += kernel.tile + pairs_of(tile, kernel.edge) * static_cast<double>(head_dim) /
                                 kernel.rate(tile.query_rows.count, tile.key_rows.count);
  }
  return seconds;
}

// The two kinds of links. In each there is a way out of a rank and a way in, which one core does one after the other
// where nothing overlaps.
enum Way { kInside, kBetween, kWays };

struct Load {
  double seconds = 0;  // of bytes and messages
  double latency = 0;  // of the last message
  double from = 0;     // when all peers are ready
  bool any = false;

  void add(double bytes, const LinkProfile& link, int sharers, double peer_ready) {
    seconds += link.message + bytes * sharers / link.bandwidth;
    latency = link.latency;
    from = any ? std::max(from, peer_ready) : peer_ready;
    any = true;
  }
};

// The bytes that pass through a rank's memory once in a direction, whatever is sent. Forward: q is read, sums of out
// are set, and out and lse are made of them. Backward: q, out, dout and lse are read, sums of dq are set and dq is made
// of them, and so are its own dk and dv.
double own_bytes(const Program& program, bool backward, const RowBytes& bytes) {
  const AttentionShape& shape = program.request.shape;
  const int64_t e = bytes.element_bytes, w = bytes.accumulator_bytes(), D = bytes.head_dim;
  const int64_t of_query = backward ? (4 * e + w) * D + w : (2 * e + w) * D + w;
  int64_t keys = 0;
  for (const Span& span : program.key_spans) keys += span.count;
  return static_cast<double>(program.query_count() * shape.batch * shape.heads * of_query +
                             (backward ? keys * shape.batch * shape.kv_heads * 2 * D * (e + w) : 0));
}

}  // namespace

int64_t RowBytes::of(BufferKind kind, bool backward) const {
  return row_content(kind, backward).bytes(head_dim, element_bytes, accumulator_bytes());
}

std::vector<StepCost> step_costs(const Program& program, bool backward, const MachineProfile& machine,
                                 const RowBytes& bytes) {
  const KernelRates rates = machine.kernel(bytes.element_bytes);
  const KernelRate& kernel = backward ? rates.backward : rates.forward;
  const auto bytes_of = [&](int buffer, const RowSet& rows) {
    return static_cast<double>(rows.rows() * bytes.of(program.buffers[static_cast<size_t>(buffer)].kind, backward));
  };
  std::vector<StepCost> costs;
  for (const Step& step : backward ? program.backward : program.forward) {
    StepCost& cost = costs.emplace_back();
    cost.compute = compute_of(step.tiles, kernel, bytes.head_dim);
    for (const Transfer& t : step.sends) {
      cost.sends.push_back({t.peer, bytes_of(t.buffer, t.rows)});
      if (!consecutive_rows(program.buffers[static_cast<size_t>(t.buffer)].rows, t.rows)) {
        cost.add += cost.sends.back().bytes / machine.copy;
      }
    }
    for (const Transfer& t : step.receives) cost.receives.push_back({t.peer, bytes_of(t.buffer, t.rows)});
    for (const Add& add : step.adds) {
      cost.add += bytes_of(add.src, program.buffers[static_cast<size_t>(add.src)].rows) / machine.copy;
    }
  }
  if (!costs.empty()) costs.back().add += own_bytes(program, backward, bytes) / machine.copy;
  return costs;
}

double bytes_held(const Program& program, bool backward, const RowBytes& bytes) {
  const auto e = bytes.head_dim * bytes.element_bytes, w = bytes.accumulator_bytes(), dw = bytes.head_dim * w;
  std::array<int64_t, kStoragePools> weights = pool_bytes(backward, bytes.head_dim, bytes.element_bytes, w);
  weights[kGivenKV] = e;
  const AttentionShape& shape = program.request.shape;
  const int64_t queries = program.query_count() * shape.batch * shape.heads;
  // Forward: q, out and its sums, lse. Backward: q, out, dout, lse, dq.
  const int64_t of_query = backward ? 3 * e + w + dw : 2 * e + w + dw;
  return static_cast<double>(storage_of(program, backward ? program.backward : program.forward).peak(weights)) +
         static_cast<double>(queries) * static_cast<double>(of_query);
}

std::vector<RankTime> sweep(const std::vector<RankSteps>& some, int ranks, const MachineProfile& machine,
                            std::vector<std::vector<StepClock>>* clocks) {
  if (clocks != nullptr) clocks->assign(some.size(), {});
  std::vector<int> index(static_cast<size_t>(ranks), -1);
  size_t steps = 0;
  for (size_t i = 0; i < some.size(); ++i) {
    index[static_cast<size_t>(some[i].rank)] = static_cast<int>(i);
    steps = std::max(steps, some[i].steps.size());
  }
  std::vector<RankTime> times(some.size());
  std::vector<double> ready(some.size());
  // How many ranks that share a NIC with `rank` use it in a step. Ranks that are not known are assumed to.
  const auto sharers = [&](int rank, const LinkProfile& link, size_t step, auto parts_of) {
    if (link.shared_by == 1) return 1;
    const int first = rank / link.shared_by * link.shared_by, past = std::min(ranks, first + link.shared_by);
    int users = 0;
    for (int other = first; other < past; ++other) {
      const int known = index[static_cast<size_t>(other)];
      if (known < 0) {
        ++users;
        continue;
      }
      const RankSteps& its = some[static_cast<size_t>(known)];
      if (step >= its.steps.size()) continue;
      const auto& parts = parts_of(its.steps[step]);
      users += std::any_of(parts.begin(), parts.end(),
                           [&](const StepCost::Part& p) { return &machine.link(other, p.peer) == &link; });
    }
    return std::max(1, users);
  };
  for (size_t s = 0; s < steps; ++s) {
    for (size_t i = 0; i < some.size(); ++i) {
      ready[i] = times[i].seconds;
      if (!machine.overlap && s < some[i].steps.size()) ready[i] += some[i].steps[s].compute;
    }
    std::vector<double> end(some.size());
    for (size_t i = 0; i < some.size(); ++i) {
      end[i] = times[i].seconds;
      if (s >= some[i].steps.size()) continue;
      const StepCost& step = some[i].steps[s];
      const int rank = some[i].rank;
      RankTime& time = times[i];
      std::array<Load, kWays> out, in;
      const auto load = [&](std::array<Load, kWays>& loads, const auto& parts_of) {
        std::array<int, kWays> sharing = {0, 0};
        for (const StepCost::Part& part : parts_of(step)) {
          const LinkProfile& link = machine.link(rank, part.peer);
          const Way way = &link == &machine.inside ? kInside : kBetween;
          if (sharing[way] == 0) sharing[way] = sharers(rank, link, s, parts_of);
          const int peer = index[static_cast<size_t>(part.peer)];
          loads[way].add(part.bytes, link, sharing[way], peer < 0 ? ready[i] : ready[static_cast<size_t>(peer)]);
        }
      };
      load(out, [](const StepCost& c) -> const std::vector<StepCost::Part>& { return c.sends; });
      load(in, [](const StepCost& c) -> const std::vector<StepCost::Part>& { return c.receives; });
      for (const StepCost::Part& part : step.sends) time.bytes += part.bytes;

      StepClock clock{.begin = time.seconds};
      double arrived = ready[i], bare = ready[i];  // `bare`: if bytes and messages took no time
      double work = 0;                             // of one core for all of its transfers
      for (const auto* loads : {&out, &in}) {
        for (const Load& l : *loads) work += l.seconds;
      }
      time.busy += work;
      for (const auto* loads : {&out, &in}) {
        for (const Load& l : *loads) {
          if (!l.any) continue;
          const double from = std::max(ready[i], l.from);
          const double until = from + (machine.overlap ? l.seconds : work) + l.latency;
          arrived = std::max(arrived, until);
          double& first = loads == &out ? clock.sent_from : clock.received_from;
          double& last = loads == &out ? clock.sent : clock.received;
          first = last > 0 ? std::min(first, from) : from;
          last = std::max(last, until);
          bare = std::max(bare, from + l.latency);
        }
      }
      const double computed = times[i].seconds + step.compute;
      const double waited = std::max(computed, arrived);
      time.compute += step.compute;
      time.add += step.add;
      time.exposed += waited - computed;
      time.latency += std::min(waited - computed, std::max(0.0, bare - computed));
      end[i] = waited + step.add;
      if (clocks == nullptr) continue;
      clock.computed = computed;
      clock.waited = waited;
      clock.end = end[i];
      (*clocks)[i].push_back(clock);
    }
    for (size_t i = 0; i < some.size(); ++i) times[i].seconds = end[i];
  }
  return times;
}

RankTime slowest(const std::vector<RankTime>& times) {
  RankTime most;
  for (const RankTime& time : times) {
    if (time.seconds > most.seconds) most = time;
  }
  return most;
}

TermsPointer terms_of(const std::string& machine, std::string_view where, std::string_view device, int64_t head_dim,
                      int64_t element_bytes, bool backward) {
  const char* const set = machine.empty() ? text_from_environment("ANNULUS_MACHINE") : nullptr;
  const std::string name = set != nullptr ? set : machine;
  static std::mutex mutex;
  static auto& known = *new std::map<std::tuple<std::string, bool, int64_t, int64_t, bool>, TermsPointer>;
  const std::lock_guard lock(mutex);
  TermsPointer& terms = known[{name, name.empty() && device == "cuda", head_dim, element_bytes, backward}];
  if (terms == TermsPointer()) {
    terms = PlanTerms{.machine = find_machine(name, set != nullptr ? "ANNULUS_MACHINE" : where, device),
                      .head_dim = head_dim,
                      .element_bytes = element_bytes,
                      .backward = backward,
                      .memory = 0};
  }
  return terms;
}

TermsPointer on_hosts(const TermsPointer& terms, const RankHosts& hosts) {
  int each = 0;
  while (each < hosts.ranks() && hosts.of(each) == hosts.of(0)) ++each;
  for (int rank = 0; rank < hosts.ranks(); ++rank) {
    if (hosts.of(rank) != rank / each) return terms;
  }
  if (terms->machine.on_a_host(hosts.ranks()) == each) return terms;
  PlanTerms moved = *terms;
  moved.machine.ranks_per_host = each;
  return moved;
}

TermsPointer within_memory(const TermsPointer& terms, double bytes, bool or_leanest) {
  if (terms->memory == kLeanest || (terms->most_bytes() > 0 && terms->most_bytes() <= bytes)) return terms;
  PlanTerms bounded = *terms;
  bounded.memory = bytes;
  bounded.or_leanest = or_leanest && bytes > 0;
  return bounded;
}

std::string seconds_text(double seconds) {
  if (seconds >= 1 || seconds == 0) return significant(seconds, 3) + " s";
  return seconds >= 1e-3 ? significant(seconds * 1e3, 3) + " ms" : significant(seconds * 1e6, 3) + " us";
}

}  // namespace annulus
