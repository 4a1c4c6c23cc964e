// See plan.h.
#include "attention/plan/plan.h"

#include <array>
#include <list>
#include <mutex>

#include "attention/plan/schedules.h"
#include "common/error.h"
#include "common/names.h"

namespace annulus {
namespace {

struct ScheduleEntry {
  std::string name;
  void (*make)(const ScheduleInput&, Program&);
};

// In the order of ScheduleKind.
const std::vector<ScheduleEntry>& schedules() {
  static const std::vector<ScheduleEntry> table = {{"ring", make_ring}, {"all-gather", make_all_gather}};
  return table;
}

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kPlan, "plan", message); }

Layout layout_of(const PlanRequest& request, int64_t length) {
  return request.uneven_lengths.empty() ? make_layout(request.layout, length, request.ranks)
                                        : make_uneven_layout(request.uneven_lengths, length);
}

int64_t total(const std::vector<Span>& spans) {
  int64_t sum = 0;
  for (const Span& s : spans) sum += s.count;
  return sum;
}

}  // namespace

std::string_view to_string(ScheduleKind kind) { return schedules()[static_cast<size_t>(kind)].name; }

ScheduleKind parse_schedule(std::string_view name, std::string_view where) {
  std::vector<std::string> names;
  for (const ScheduleEntry& entry : schedules()) names.push_back(entry.name);
  return static_cast<ScheduleKind>(index_of_name(name, names, "schedule", where));
}

std::string PlanRequest::text() const {
  std::string text = "batch " + std::to_string(shape.batch) + ", heads " + std::to_string(shape.heads) + ", kv heads " +
                     std::to_string(shape.kv_heads) + ", queries " + std::to_string(shape.q_len) + ", keys " +
                     std::to_string(shape.k_len) + ", query offset " + std::to_string(shape.query_offset) +
                     ", pattern " + pattern.text() + ", ";
  if (uneven_lengths.empty()) {
    text += "layout " + std::string(to_string(layout));
  } else {
    text += "lengths";
    for (const int64_t n : uneven_lengths) text += " " + std::to_string(n);
  }
  return text + ", schedule " + std::string(to_string(schedule)) + ", ranks " + std::to_string(ranks);
}

Layout query_layout(const PlanRequest& request) { return layout_of(request, request.shape.q_len); }
Layout key_layout(const PlanRequest& request) { return layout_of(request, request.shape.k_len); }

int64_t RowSet::positions_count() const { return total(positions); }

int64_t Program::query_count() const { return total(query_spans); }
int64_t Program::key_count() const { return total(key_spans); }

std::vector<Lifetime> lifetimes(const Program& program, const std::vector<Step>& steps) {
  std::vector<Lifetime> lives(program.buffers.size());
  const int end = static_cast<int>(steps.size()) - 1;
  const bool backward = &steps == &program.backward;
  const auto use = [&](int buffer, int step) {
    Lifetime& life = lives[static_cast<size_t>(buffer)];
    if (life.last < life.first) life = {step, step};
    life.last = std::max(life.last, step);
  };
  use(kOwnKVBuffer, 0);
  use(kOwnKVBuffer, end);
  if (backward && program.saved >= 0) use(program.saved, 0);
  for (int s = 0; s <= end; ++s) {
    const Step& step = steps[static_cast<size_t>(s)];
    for (const Transfer& t : step.sends) use(t.buffer, s);
    for (const Transfer& t : step.receives) use(t.buffer, s);
    for (const int buffer : step.zero) use(buffer, s);
    for (const Tile& tile : step.tiles) {
      use(tile.buffer, s);
      if (tile.grad_buffer >= 0) use(tile.grad_buffer, s);
    }
    for (const Add& add : step.adds) {
      use(add.dst, s);
      use(add.src, s);
    }
  }
  if (!backward && program.saved >= 0) use(program.saved, end);
  if (backward) use(kOwnGradBuffer, end);
  return lives;
}

Traffic traffic(const Program& program, const std::vector<Step>& steps) {
  Traffic sum;
  const auto is_gradient = [&](int buffer) { return program.buffers[static_cast<size_t>(buffer)].holds_gradient(); };
  for (const Step& step : steps) {
    for (const Transfer& t : step.sends) {
      (is_gradient(t.buffer) ? sum.grad_messages : sum.kv_messages) += 2;
      (is_gradient(t.buffer) ? sum.grad_rows : sum.kv_rows) += 2 * t.rows.rows();
    }
  }
  // What is alive changes where a life begins and after it ends.
  const std::vector<Lifetime> lives = lifetimes(program, steps);
  std::vector<std::array<int64_t, 2>> change(steps.size() + 1);
  for (size_t b = 0; b < lives.size(); ++b) {
    if (lives[b].last < lives[b].first) continue;
    const size_t which = is_gradient(static_cast<int>(b)) ? 1 : 0;
    const int64_t rows = 2 * program.buffers[b].rows.rows();
    change[static_cast<size_t>(lives[b].first)][which] += rows;
    change[static_cast<size_t>(lives[b].last) + 1][which] -= rows;
  }
  int64_t kv = 0, grad = 0;
  for (const auto& [kv_change, grad_change] : change) {
    kv += kv_change;
    grad += grad_change;
    sum.peak_kv_rows = std::max(sum.peak_kv_rows, kv);
    sum.peak_grad_rows = std::max(sum.peak_grad_rows, grad);
  }
  return sum;
}

void validate(const PlanRequest& request) {
  if (request.ranks < 1) refuse("expected at least one rank, got " + std::to_string(request.ranks));
  validate(request.shape);
  if (!request.uneven_lengths.empty()) {
    if (static_cast<int>(request.uneven_lengths.size()) != request.ranks) {
      refuse("expected one length for each of the " + std::to_string(request.ranks) + " ranks, got " +
             std::to_string(request.uneven_lengths.size()) + " lengths");
    }
    if (request.shape.q_len != request.shape.k_len) {
      refuse("lengths by rank need as many queries as keys, got " + std::to_string(request.shape.q_len) + " and " +
             std::to_string(request.shape.k_len) + "; use a named layout");
    }
    if (request.even) refuse("lengths by rank were given, and even = true as well; leave one of them out");
    make_uneven_layout(request.uneven_lengths, request.shape.q_len);
  } else if (request.even) {
    require_even(request.layout, request.shape.q_len, request.ranks, "a sequence");
    if (request.shape.k_len != request.shape.q_len) {
      require_even(request.layout, request.shape.k_len, request.ranks, "a key sequence");
    }
  }
}

Program make_program(const PlanRequest& request, int rank) {
  return make_program(request, make_pattern(request.pattern, request.shape), rank);
}

Program make_program(const PlanRequest& request, const Pattern& pattern, int rank) {
  validate(request);
  if (rank < 0 || rank >= request.ranks) {
    refuse("rank " + std::to_string(rank) + " is not one of the plan's " + std::to_string(request.ranks) + " ranks");
  }
  const Layout queries = query_layout(request), keys = key_layout(request);
  const ScheduleInput input{pattern, keys};
  Program program;
  program.request = request;
  program.rank = rank;
  program.query_spans = queries.spans[static_cast<size_t>(rank)];
  program.key_spans = keys.spans[static_cast<size_t>(rank)];
  program.buffers = {{BufferKind::kOwnKV, input.rows_of(rank)}, {BufferKind::kOwnGrad, input.rows_of(rank)}};
  schedules()[static_cast<size_t>(request.schedule)].make(input, program);
  return program;
}

std::shared_ptr<const Program> cached_program(const PlanRequest& request, int rank) {
  constexpr size_t kMaxCached = 256;
  using Entry = std::pair<std::string, std::shared_ptr<const Program>>;
  static std::mutex mutex;
  static std::list<Entry> entries;  // the most recently used first
  const std::string key = request.text() + (request.even ? ", even" : "") + ", rank " + std::to_string(rank);
  {
    const std::lock_guard lock(mutex);
    for (auto it = entries.begin(); it != entries.end(); ++it) {
      if (it->first != key) continue;
      entries.splice(entries.begin(), entries, it);
      return entries.front().second;
    }
  }
  auto program = std::make_shared<const Program>(make_program(request, rank));
  const std::lock_guard lock(mutex);
  entries.emplace_front(key, program);
  if (entries.size() > kMaxCached) entries.pop_back();
  return program;
}

}  // namespace annulus
