// Caches patterns and programs by the text of their request, and makes them ahead of their step on another thread:
// cached_pattern, cached_program, plan_ahead and plan_stats of plan.h.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
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

int64_t bytes_of(const Pattern& pattern) {
  return static_cast<int64_t>(sizeof pattern + pattern.slices.size() * sizeof(Slice));
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
      [](const Program& program) { return program_bytes(program); });
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
  // The static objects that the thread uses (caches, tables of names) are made before it, so they are destroyed after
  // it when the process ends.
  caches();
  request.text();
  struct Task {
    PlanRequest request;
    int rank;
    std::function<void(const Program&)> then;
  };
  // One thread plans for all callers. Making a plan is expected to take less time than a step.
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
        } catch (...) {  // cached_program will raise it again
        }
      }
    }
    std::mutex mutex_;
    std::condition_variable more_;
    bool ended_ = false;
    std::deque<Task> todo_;
    std::thread thread_;  // the last member, because it uses the others
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
