// Makes and caches plans; see plans.h.
#include "attention/proof/plans.h"

#include <bit>
#include <condition_variable>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "attention/plan/traffic.h"
#include "common/clock.h"
#include "common/trace/recorder.h"
#include "memory/caches.h"

namespace annulus {
namespace {

using PlanPointer = std::shared_ptr<const RankPlan>;  // a plan cannot be moved into the cache

// Never destroyed, because the thread that plans ahead may use it until the process ends.
NamedCache<PlanPointer, PlanKey>& plans() {
  static auto& cache = *new NamedCache<PlanPointer, PlanKey>("programs");
  return cache;
}

std::atomic<int64_t> shares_made = 0;
std::atomic<double> seconds_on_path = 0;

// Of a request and what its schedule was resolved to, which must be the same on all ranks.
Digest digest_of(const PlanRequest& request, const PlanRequest& resolved) {
  const std::string text = request.text() + "\n" + resolved.text();
  return digest(text.data(), text.size());
}

PlanPointer find_plan(const PlanRequest& request, int rank) {
  return *plans().get(
      {request, rank},
      [&] {
        const TraceSpan span(TraceKind::kPlanning, "make plan");
        return std::make_shared<const RankPlan>(request, make_program(request, rank));
      },
      [](const PlanPointer& plan) { return plan_bytes(*plan); });
}

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
  void add(PlanKey key, bool prove) {
    const std::lock_guard lock(mutex_);
    todo_.push_back({std::move(key), prove, trace_rank()});
    more_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      more_.wait(lock, [this] { return ended_ || !todo_.empty(); });
      if (ended_) return;
      const auto [key, prove, rank_of_job] = std::move(todo_.front());
      todo_.pop_front();
      lock.unlock();
      const TraceThread thread(rank_of_job, "planner");
      try {
        const PlanPointer plan = find_plan(key.request, key.rank);
        if (prove) plan->share();
      } catch (...) {  // cached_plan or share() will raise it again
      }
    }
  }
  std::mutex mutex_;
  std::condition_variable more_;
  bool ended_ = false;
  struct Task {
    PlanKey key;
    bool prove;
    int rank_of_job;  // for traces
  };
  std::deque<Task> todo_;
  std::thread thread_;  // the last member, because it uses the others
};

}  // namespace

RankPlan::RankPlan(const PlanRequest& request, Program made)
    : digest(digest_of(request, made.request)), program(std::move(made)) {}

const RankShare& RankPlan::share(const Pattern* pattern) const {
  const std::lock_guard lock(mutex_);
  if (!share_) {
    const TraceSpan span(TraceKind::kPlanning, "prove plan");
    share_ = RankShare{verify_rank(program, pattern ? *pattern : *cached_pattern(program.request)),
                       sent_digests(program), received_digests(program)};
    ++shares_made;
  }
  return *share_;
}

uint64_t PlanKey::hash() const {
  return request.shape.hash() ^ request.pattern.hash() ^
         (request.balance_by ? std::rotl(request.balance_by->hash(), 1) : 0) ^
         static_cast<uint64_t>(int64_t{request.ranks} << 24 | rank);
}

int64_t PlanKey::bytes() const {
  return static_cast<int64_t>(sizeof *this + request.uneven_lengths.size() * sizeof(int64_t)) +
         request.pattern.bytes(/*maps=*/false) +  // the plan's own request counts them
         (request.balance_by ? request.balance_by->bytes(/*maps=*/false) : 0);
}

std::shared_ptr<const RankPlan> cached_plan(const PlanRequest& request, int rank) {
  const PlanningTime time;
  return find_plan(request, rank);
}

void plan_ahead(const PlanRequest& request, int rank, bool prove) {
  if (is_adaptive(request.pattern)) return;
  // The static objects that the thread uses (tables of names) are made before it, so they are destroyed after it when
  // the process ends.
  static const std::string uses_them = request.text();
  static Planner planner;
  planner.add({request, rank}, prove);
}

PlanStats plan_stats() {
  PlanStats stats;
  stats.programs = plans().stats();
  stats.programs_made = stats.programs.misses;
  stats.shares_made = shares_made;
  stats.seconds_on_path = seconds_on_path;
  for (const CacheReport& report : cache_reports()) {
    if (report.name == "patterns") stats.patterns_made = report.stats.misses;
  }
  return stats;
}

PlanningTime::PlanningTime() : begin_(steady_seconds()) {}
PlanningTime::~PlanningTime() { seconds_on_path += steady_seconds() - begin_; }

int64_t plan_bytes(const RankPlan& plan) {
  const int64_t shares = 2 * int64_t{plan.program.request.ranks} * static_cast<int64_t>(sizeof(PairDigest));
  const std::optional<PatternSpec>& dealt_by = plan.program.request.balance_by;
  return static_cast<int64_t>(sizeof plan) + program_bytes(plan.program) + shares + (dealt_by ? dealt_by->bytes() : 0);
}

}  // namespace annulus
