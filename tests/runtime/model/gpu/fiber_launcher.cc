// See fiber_launcher.h.

// Its longjmp refuses to go to another stack.
#undef _FORTIFY_SOURCE

#include "tests/runtime/model/gpu/fiber_launcher.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <stdexcept>

namespace annulus::testing {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kMostThreads = 1024;  // of a block

// Where a fiber or the scheduler goes on. begin() and go() save where the caller is, which they return to when somebody
// goes there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // they know swapcontext
using Place = ucontext_t;
void begin(Place& from, const ucontext_t& fiber) { swapcontext(&from, &fiber); }
void go(Place& from, const Place& to) { swapcontext(&from, &to); }
#else  // without a system call for the signal mask, which would take most of the time
struct Place {
  jmp_buf at;
};
[[gnu::noinline]] void begin(Place& from, const ucontext_t& fiber) {
  if (_setjmp(from.at) == 0) setcontext(&fiber);
}
[[gnu::noinline]] void go(Place& from, Place& to) {
  if (_setjmp(from.at) == 0) _longjmp(to.at, 1);
}
#endif

// Runs functions that wait for each other, on one thread of the CPU.
class Fibers {
 public:
  // Calls body(i) for i < count, all of which run until they wait or end before one of them goes on.
  void run(int count, bool backwards, const std::function<void(int)>& body) {
    body_ = &body;
    ended_.assign(static_cast<size_t>(count), false);
    while (stacks_.size() < ended_.size()) add();
    for (int ended = 0; ended < count;) {
      for (int i = 0; i < count; ++i) {
        current_ = static_cast<size_t>(backwards ? count - 1 - i : i);
        go(scheduler_, places_[current_]);
      }
      ended = static_cast<int>(std::count(ended_.begin(), ended_.end(), true));
      if (ended != 0 && ended != count) {
        stacks_.clear();  // other fibers take the places of those that wait
        throw std::logic_error(std::to_string(ended) + " of " + std::to_string(count) +
                               " threads of a group have ended while the others wait for them");
      }
    }
  }

  // Called by a function: goes on when all others wait, too.
  void wait() { go(places_[current_], scheduler_); }

  static Fibers& instance() {
    static Fibers fibers;
    return fibers;
  }

 private:
  Fibers() : places_(kMostThreads) {}

  // Adds a fiber that waits for its first function.
  void add() {
    current_ = stacks_.size();
    stacks_.emplace_back(kStackBytes);
    ucontext_t fiber;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = stacks_.back().data();
    fiber.uc_stack.ss_size = stacks_.back().size();
    makecontext(&fiber, &Fibers::enter, 0);
    begin(scheduler_, fiber);
  }

  static void enter() {
    Fibers& f = instance();
    const size_t own = f.current_;
    for (;;) {
      go(f.places_[own], f.scheduler_);
      (*f.body_)(static_cast<int>(own));
      f.ended_[own] = true;
    }
  }

  const std::function<void(int)>* body_ = nullptr;
  Place scheduler_{};
  std::vector<Place> places_;
  std::vector<std::vector<char>> stacks_;
  std::vector<bool> ended_;
  size_t current_ = 0;
};

// What runtime/model/gpu/norm.h says a group is.
template <int kWarps>
class FiberGroup {
 public:
  static constexpr int kThreads = kWarps * gpu::kWarp;
  struct Shared {
    std::array<float, kThreads> values;
    std::array<float, kWarps> of_warps;
  };

  FiberGroup(int thread, int64_t worker, int64_t workers, Shared& shared)
      : thread_(thread), worker_(worker), workers_(workers), shared_(shared) {}

  int thread() const { return thread_; }
  int64_t worker() const { return worker_; }
  int64_t workers() const { return workers_; }
  void sync() const { Fibers::instance().wait(); }

  template <int kNeighbours = kThreads>
  float sum(float x) const {
    x = over(x, 1, std::min(kNeighbours, gpu::kWarp), [](float a, float b) { return a + b; });
    return kNeighbours > gpu::kWarp ? over_warps(x, [](float a, float b) { return a + b; }) : x;
  }
  float most(float x) const {
    x = over(x, 1, gpu::kWarp, [](float a, float b) { return fmaxf(a, b); });
    return over_warps(x, [](float a, float b) { return fmaxf(a, b); });
  }
  template <int kApart>
  float sum_across(float x) const {
    return over(x, kApart, gpu::kWarp, [](float a, float b) { return a + b; });
  }
  float sum_of_warps(float x) const {
    shared_.values[static_cast<size_t>(thread_)] = x;
    sync();
    float total = 0;
    if (thread_ < gpu::kWarp) {
      total = x;
      for (int warp = 1; warp < kWarps; ++warp) {
        total += shared_.values[static_cast<size_t>(warp * gpu::kWarp + thread_)];
      }
    }
    sync();
    return total;
  }

 private:
  // Combines what lanes of this thread's warp have whose numbers differ in the bits from `least` to below `end`.
  template <typename Combine>
  float over(float x, int least, int end, const Combine& combine) const {
    shared_.values[static_cast<size_t>(thread_)] = x;
    sync();
    const int lane = thread_ % gpu::kWarp;
    std::array<float, gpu::kWarp> lanes;
    std::copy_n(shared_.values.begin() + (thread_ - lane), gpu::kWarp, lanes.begin());
    for (int distance = end / 2; distance >= least; distance /= 2) {
      const std::array<float, gpu::kWarp> before = lanes;
      for (size_t i = 0; i < lanes.size(); ++i)
        lanes[i] = combine(before[i], before[i ^ static_cast<size_t>(distance)]);
    }
    sync();
    return lanes[static_cast<size_t>(lane)];
  }
  // Combines what the warps have.
  template <typename Combine>
  float over_warps(float x, const Combine& combine) const {
    if (thread_ % gpu::kWarp == 0) shared_.of_warps[static_cast<size_t>(thread_ / gpu::kWarp)] = x;
    sync();
    x = shared_.of_warps[0];
    for (size_t warp = 1; warp < kWarps; ++warp) x = combine(x, shared_.of_warps[warp]);
    sync();
    return x;
  }

  int thread_;
  int64_t worker_, workers_;
  Shared& shared_;
};

template <typename Kernel>
void run_groups(const Kernel& kernel, int64_t workers, bool backwards) {
  using Group = FiberGroup<Kernel::kWarps>;
  typename Group::Shared shared;
  for (int64_t i = 0; i < workers; ++i) {
    const int64_t worker = backwards ? workers - 1 - i : i;
    Fibers::instance().run(Group::kThreads, backwards, [&](int thread) {
      Group group(thread, worker, workers, shared);
      kernel(group);
    });
  }
}

template <typename Arguments>
void run(const FiberLauncher& launcher, const Arguments& a, bool vectors) {
  gpu::choose(a, [&](const auto& kernel, int64_t workers) {
    launcher.started.push_back({vectors, kernel.kWarps, workers});
    run_groups(kernel, workers, launcher.backwards);
  });
}

}  // namespace

void FiberLauncher::start(const gpu::NormArguments& a, c10::Device) const { run(*this, a, a.aligned); }
void FiberLauncher::start(const gpu::NormGradientArguments& a, c10::Device) const { run(*this, a, a.aligned); }
void FiberLauncher::start(const gpu::ColumnArguments& a, c10::Device) const { run(*this, a, false); }
void FiberLauncher::start(const gpu::RotaryArguments& a, c10::Device) const { run(*this, a, a.aligned); }
void FiberLauncher::start(const gpu::SwiGluArguments& a, c10::Device) const { run(*this, a, a.aligned); }
void FiberLauncher::start(const gpu::CrossEntropyArguments& a, c10::Device) const { run(*this, a, a.aligned); }

}  // namespace annulus::testing
