// Plans kept by content, and made ahead on another thread. See plan.h.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "attention/plan/plan.h"
#include "memory/caches.h"

namespace annulus {
namespace {

std::string pattern_key(const PlanRequest& request) {
  const AttentionShape& s = request.shape;
  std::string key;
  for (const int64_t n : {s.batch, s.heads, s.kv_heads, s.q_len, s.k_len, s.query_offset})
    key += std::to_string(n) + " ";
  return key + request.pattern.text();
}

int64_t bytes_of(const std::vector<Span>& spans) { return static_cast<int64_t>(spans.size() * sizeof(Span)); }
int64_t bytes_of(const RowSet& rows) {
  int64_t bytes = 0;
  for (const RowBlock& block : rows.blocks) bytes += static_cast<int64_t>(sizeof block) + bytes_of(block.positions);
  return bytes;
}
int64_t bytes_of(const Pattern& pattern) {
  return static_cast<int64_t>(sizeof pattern + pattern.slices.size() * sizeof(Slice));
}
int64_t bytes_of(const Program& program) {
  int64_t bytes = static_cast<int64_t>(sizeof program + program.request.uneven_lengths.size() * sizeof(int64_t)) +
                  program.request.pattern.bytes() + bytes_of(program.query_spans) + bytes_of(program.key_spans);
  for (const Buffer& buffer : program.buffers) bytes += static_cast<int64_t>(sizeof buffer) + bytes_of(buffer.rows);
  for (const auto* steps : {&program.forward, &program.backward}) {
    for (const Step& step : *steps) {
      bytes += static_cast<int64_t>(sizeof step + step.tiles.size() * sizeof(Tile) + step.adds.size() * sizeof(Add));
      for (const auto* transfers : {&step.sends, &step.receives}) {
        for (const Transfer& t : *transfers) bytes += static_cast<int64_t>(sizeof t) + bytes_of(t.rows);
      }
    }
  }
  return bytes;
}

struct Caches {
  NamedCache<Pattern> patterns{"patterns"};
  NamedCache<Program> programs{"programs"};
  std::mutex mutex;
  double seconds_on_path = 0;
};
Caches& caches() {
  static Caches all;
  return all;
}

std::shared_ptr<const Program> find_program(const PlanRequest& request, int rank) {
  const std::string key = request.text() + (request.even ? ", even" : "") + ", rank " + std::to_string(rank);
  return caches().programs.get(
      key, [&] { return make_program(request, *cached_pattern(request), rank); },
      [](const Program& program) { return bytes_of(program); });
}

}  // namespace

std::shared_ptr<const Pattern> cached_pattern(const PlanRequest& request) {
  return caches().patterns.get(
      pattern_key(request), [&] { return make_pattern(request.pattern, request.shape); },
      [](const Pattern& pattern) { return bytes_of(pattern); });
}

std::shared_ptr<const Program> cached_program(const PlanRequest& request, int rank) {
  const auto begin = std::chrono::steady_clock::now();
  auto program = find_program(request, rank);
  count_planning(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return program;
}

void count_planning(double seconds) {
  const std::lock_guard lock(caches().mutex);
  caches().seconds_on_path += seconds;
}

void plan_ahead(const PlanRequest& request, int rank, std::function<void(const Program&)> then) {
  // What the thread uses is made before it, and so outlives it when the process ends: caches, tables of names.
  caches();
  request.text();
  struct Task {
    PlanRequest request;
    int rank;
    std::function<void(const Program&)> then;
  };
  // One thread plans for all: a step is longer than its plan takes.
  class Planner {
   public:
    Planner() : thread_([this] { run(); }) {}
    ~Planner() {
      {
        const std::lock_guard lock(mutex_);
        ended_ = true;
        more_.notify_one();
      }
      thread_.join();
    }
    void add(Task task) {
      const std::lock_guard lock(mutex_);
      todo_.push_back(std::move(task));
      more_.notify_one();
    }

   private:
    void run() {
      for (;;) {
        std::unique_lock lock(mutex_);
        more_.wait(lock, [this] { return ended_ || !todo_.empty(); });
        if (ended_) return;
        const Task task = std::move(todo_.front());
        todo_.pop_front();
        lock.unlock();
        try {
          const auto program = find_program(task.request, task.rank);
          if (task.then) task.then(*program);
        } catch (...) {  // whoever asks for the program raises it again
        }
      }
    }
    std::mutex mutex_;
    std::condition_variable more_;
    bool ended_ = false;
    std::deque<Task> todo_;
    std::thread thread_;  // the last: it uses the others
  };
  static Planner planner;
  planner.add({request, rank, std::move(then)});
}

PlanStats plan_stats() {
  PlanStats stats;
  stats.patterns = caches().patterns.stats();
  stats.programs = caches().programs.stats();
  stats.patterns_made = stats.patterns.misses;
  stats.programs_made = stats.programs.misses;
  const std::lock_guard lock(caches().mutex);
  stats.seconds_on_path = caches().seconds_on_path;
  return stats;
}

}  // namespace annulus
