// See timeline.h.
#include "attention/plan/timeline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "attention/plan/traffic.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

TraceEvent span_of(TraceKind kind, TraceName name, double begin, double end, int hop) {
  TraceEvent event;
  event.name = name.text;
  event.kind = kind;
  event.begin = nanoseconds(begin);
  event.end = nanoseconds(end);
  event.hop = hop;
  return event;
}

}  // namespace

void PlanTimeline::add(const Program& program) {
  add(forward_, program, false);
  add(backward_, program, true);
}

void PlanTimeline::add(Direction& direction, const Program& program, bool backward) {
  direction.ranks.push_back({program.rank, step_costs(program, backward, machine_, bytes_)});
  std::vector<StepMessages>& steps = direction.messages.emplace_back();
  for (const Step& step : backward ? program.backward : program.forward) {
    StepMessages& messages = steps.emplace_back();
    const auto take = [&](const std::vector<Transfer>& transfers, std::vector<MessageCost>& into) {
      for (const Transfer& t : transfers) {
        const RowContent content = row_content(program.buffers[static_cast<size_t>(t.buffer)].kind, backward);
        const int64_t rows = t.rows.rows(), wide = bytes_.accumulator_bytes();
        const auto add_tensors = [&](int64_t tensors, int64_t of_row) {
          for (int64_t i = 0; i < tensors; ++i) into.push_back({t.peer, rows * of_row});
        };
        if (rows == 0) continue;
        add_tensors(content.vectors, bytes_.head_dim * bytes_.element_bytes);
        add_tensors(content.wide_vectors, bytes_.head_dim * wide);
        add_tensors(content.wide_elements, wide);
      }
    };
    take(step.sends, messages.sends);
    take(step.receives, messages.receives);
    // A hop, its tiles, wait and additions; an exchange and its end; the messages.
    events_ += 6 + static_cast<int64_t>(messages.sends.size() + messages.receives.size());
  }
}

std::vector<TraceRecord> PlanTimeline::records() const {
  std::vector<TraceRecord> records;
  for (const RankSteps& of : forward_.ranks) {
    records.push_back({.rank = of.rank, .threads = {{kMainThread.text, 1, {}}}});
  }
  const double middle = trace(forward_, false, 0, records);
  trace(backward_, true, middle, records);
  return records;
}

// Appends a direction, in which all ranks begin at `from`. Returns when the last one ends.
double PlanTimeline::trace(const Direction& direction, bool backward, double from,
                           std::vector<TraceRecord>& records) const {
  std::map<std::pair<int, int>, uint64_t> sent, received;  // messages so far, by both ends
  std::vector<size_t> whole;                               // where the event of the whole direction is
  for (TraceRecord& record : records) {
    whole.push_back(record.threads[0].events.size());
    record.threads[0].events.push_back(
        span_of(TraceKind::kPhase, backward ? TraceName("attention backward") : TraceName("attention forward"), from,
                from, -1));
  }
  std::vector<std::vector<StepClock>> clocks;
  sweep(direction.ranks, static_cast<int>(direction.ranks.size()), machine_, &clocks);
  const auto ready = [&](size_t rank, size_t step) {
    return machine_.overlap ? clocks[rank][step].begin : clocks[rank][step].computed;
  };
  double last = from;
  for (size_t i = 0; i < clocks.size(); ++i) {
    std::vector<TraceEvent>& events = records[i].threads[0].events;
    for (size_t step = 0; step < clocks[i].size(); ++step) {
      const StepClock& clock = clocks[i][step];
      const StepMessages& messages = direction.messages[i][step];
      const int rank = direction.ranks[i].rank, hop = static_cast<int>(step) + 1;
      const auto add = [&](TraceKind kind, TraceName name, double begin, double end) {
        events.push_back(span_of(kind, name, from + begin, from + end, hop));
      };
      add(TraceKind::kPhase, "hop", clock.begin, clock.end);
      if (clock.computed > clock.begin) add(TraceKind::kCompute, "tiles", clock.begin, clock.computed);
      if (!messages.sends.empty() || !messages.receives.empty()) {
        add(TraceKind::kWait, "wait", clock.computed, clock.waited);
      }
      for (const bool sends : {true, false}) {
        const std::vector<MessageCost>& all = sends ? messages.sends : messages.receives;
        if (all.empty()) continue;
        // Each way of a step is an exchange of its own, because each ends at a time of its own.
        const uint64_t exchange = 1 + 4 * step + (backward ? 2 : 0) + (sends ? 1 : 0);
        for (const MessageCost& m : all) {
          const auto ends = sends ? std::pair(rank, m.peer) : std::pair(m.peer, rank);
          const uint64_t nth = (sends ? sent : received)[ends]++;
          const uint64_t key = static_cast<uint64_t>(ends.first) << 32 | static_cast<uint64_t>(ends.second);
          const double begin = std::max(ready(i, step), ready(static_cast<size_t>(m.peer), step));
          TraceEvent event = span_of(sends ? TraceKind::kSend : TraceKind::kReceive,
                                     sends ? TraceName("send") : TraceName("receive"), from + begin, 0, hop);
          event.end = TraceEvent::kOpen;
          event.id = exchange;
          event.peer = m.peer;
          event.bytes = m.bytes;
          event.flow = splitmix64(splitmix64(key ^ (backward ? uint64_t{1} << 63 : 0)) ^ nth) | 1;
          events.push_back(event);
        }
        const double over = from + (sends ? clock.sent : clock.received);
        TraceEvent event = span_of(TraceKind::kEnded, "", over, over, hop);
        event.id = exchange;
        events.push_back(event);
      }
      if (clock.end > clock.waited) add(TraceKind::kCompute, "add", clock.waited, clock.end);
      last = std::max(last, from + clock.end);
      events[whole[i]].end = nanoseconds(from + clock.end);
    }
  }
  return last;
}

}  // namespace annulus
