// See recorder.h.
#include "common/trace/recorder.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace annulus {
namespace trace_internal {

// The records of one thread. Its owner writes; everybody may read. An entry is written word by word with atomic stores
// (plain ones on x86), and a reader leaves out those that may have been overwritten meanwhile.
class Ring {
 public:
  // The memory is zero, and the system gives it page by page as the ring fills.
  Ring(int rank, std::string name, int number)
      : rank(rank),
        name(std::move(name)),
        number(number),
        words_(static_cast<uint64_t*>(std::calloc(kTraceRing * kWords, sizeof(uint64_t)))) {
    if (!words_) throw std::bad_alloc();
  }

  // Returns the place of the record.
  uint64_t append(const TraceEvent& event) {
    const uint64_t place = count_.load(std::memory_order_relaxed);
    const auto words = std::bit_cast<Words>(event);
    for (size_t i = 0; i < kWords; ++i) word(place, i).store(words[i], std::memory_order_release);
    count_.store(place + 1, std::memory_order_release);
    return place;
  }

  // Sets the end of a record; appends it again if it has been overwritten.
  void close(uint64_t place, const TraceEvent& event) {
    if (count_.load(std::memory_order_relaxed) - place > kTraceRing) {
      append(event);
    } else {
      word(place, kEndWord).store(static_cast<uint64_t>(event.end), std::memory_order_release);
    }
  }

  void keep(const TraceEvent& event) {
    if (!keeps_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(mutex_);
    try {
      if (kept_.size() < most_) return kept_.push_back(event);
    } catch (const std::bad_alloc&) {  // a trace does not end a run
    }
    ++dropped_;
  }

  void begin_window(size_t most) {
    const std::lock_guard lock(mutex_);
    kept_.clear();
    dropped_ = 0;
    most_ = most;
    keeps_ = true;
  }

  std::pair<std::vector<TraceEvent>, int64_t> end_window() {
    const std::lock_guard lock(mutex_);
    keeps_ = false;
    return {std::exchange(kept_, {}), dropped_};
  }

  std::vector<TraceEvent> last() const {
    const uint64_t past = count_.load(std::memory_order_acquire);
    const uint64_t first = past - std::min<uint64_t>(past, kTraceRing);
    std::vector<TraceEvent> events;
    events.reserve(past - first);
    for (uint64_t place = first; place < past; ++place) {
      Words words;
      for (size_t i = 0; i < kWords; ++i) words[i] = word(place, i).load(std::memory_order_acquire);
      events.push_back(std::bit_cast<TraceEvent>(words));
    }
    // The owner may be writing the record `now` over the one that is a whole ring before it.
    const uint64_t now = count_.load(std::memory_order_acquire);
    const uint64_t gone = now + 1 > kTraceRing + first ? now + 1 - kTraceRing - first : 0;
    events.erase(events.begin(), events.begin() + static_cast<int64_t>(std::min(gone, past - first)));
    return events;
  }

  const int rank;
  const std::string name;
  const int number;
  int users = 0;  // threads that write it: 1 or 0; under the registry's lock

 private:
  static constexpr size_t kWords = sizeof(TraceEvent) / sizeof(uint64_t);
  static constexpr size_t kEndWord = offsetof(TraceEvent, end) / sizeof(uint64_t);
  using Words = std::array<uint64_t, kWords>;

  std::atomic_ref<uint64_t> word(uint64_t place, size_t i) const {
    return std::atomic_ref<uint64_t>(words_.get()[place % kTraceRing * kWords + i]);
  }

  struct Free {
    void operator()(uint64_t* memory) const { std::free(memory); }
  };
  const std::unique_ptr<uint64_t, Free> words_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<bool> keeps_ = false;
  std::mutex mutex_;  // of what is below
  std::vector<TraceEvent> kept_;
  size_t most_ = 0;
  int64_t dropped_ = 0;
};

namespace {

std::atomic<bool> g_on = true;
std::atomic<int> g_rank = 0;
std::atomic<uint64_t> g_numbered = 0;

constexpr TraceName kUnnamed = "thread";

// All rings of the process. A thread that ends leaves its ring, with its records, to the next of the same rank and
// name, so there are never more rings than threads at one time. Never destroyed, because threads may outlive static
// objects.
class Rings {
 public:
  static Rings& all() {
    static Rings& rings = *new Rings;
    return rings;
  }

  Ring* take(int rank, std::string_view name) {
    const std::lock_guard lock(mutex_);
    std::vector<std::unique_ptr<Ring>>& of_rank = rings_[rank];
    for (const std::unique_ptr<Ring>& ring : of_rank) {
      if (ring->users > 0 || ring->name != name) continue;
      ring->users = 1;
      return ring.get();
    }
    const bool main = name == kMainThread.text;
    int number = 2;
    for (const std::unique_ptr<Ring>& ring : of_rank) number = std::max(number, ring->number + 1);
    if (main && std::ranges::none_of(of_rank, [](const auto& ring) { return ring->number == 1; })) {
      number = 1;
    }
    Ring& ring = *of_rank.emplace_back(std::make_unique<Ring>(rank, std::string(name), number));
    ring.users = 1;
    if (const auto window = windows_.find(rank); window != windows_.end()) ring.begin_window(window->second);
    return &ring;
  }

  void leave(Ring* ring) {
    const std::lock_guard lock(mutex_);
    ring->users = 0;
  }

  void begin_window(int rank, size_t most) {
    const std::lock_guard lock(mutex_);
    windows_[rank] = most;
    for (const std::unique_ptr<Ring>& ring : rings_[rank]) ring->begin_window(most);
  }

  template <typename Read>
  TraceRecord collect(int rank, bool end_window, const Read& read) {
    const std::lock_guard lock(mutex_);
    if (end_window) windows_.erase(rank);
    TraceRecord record{.rank = rank, .threads = {}};
    for (const std::unique_ptr<Ring>& ring : rings_[rank]) {
      TracedThread thread{ring->name, ring->number, {}};
      record.dropped += read(*ring, thread.events);
      if (!thread.events.empty()) record.threads.push_back(std::move(thread));
    }
    std::ranges::sort(record.threads, {}, &TracedThread::number);
    return record;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<Ring>>> rings_;  // by rank
  std::map<int, size_t> windows_;                            // those that exist: the most records of a thread
};

// Leaves the ring of a thread when it ends.
struct Leaving {
  Here where;
  ~Leaving() {
    if (where.ring != nullptr) Rings::all().leave(where.ring);
    where.ring = nullptr;
  }
};
thread_local Leaving t_here;

// The ring of this thread; null while nothing is recorded.
Ring* ring_here() {
  if (!g_on.load(std::memory_order_relaxed)) return nullptr;
  Here& where = t_here.where;
  if (where.ring == nullptr) where.ring = Rings::all().take(g_rank, kUnnamed.text);
  return where.ring;
}

TraceEvent event_here(TraceKind kind, const char* name, int64_t bytes) {
  const Here& where = t_here.where;
  TraceEvent event;
  event.name = name;
  event.bytes = bytes;
  event.layer = where.layer;
  event.hop = where.hop;
  event.kind = kind;
  return event;
}

void add(Ring& ring, const TraceEvent& event) {
  ring.append(event);
  ring.keep(event);
}

}  // namespace

Here& here() { return t_here.where; }

}  // namespace trace_internal

using namespace trace_internal;

TraceSpan::TraceSpan(TraceKind kind, TraceName name, std::string_view detail, int64_t bytes)
    : ring_(ring_here()), beat_(beat_page()) {
  if (beat_ != nullptr) {
    const Here& where = t_here.where;
    beat_internal::enter(*beat_, name.text, detail, where.layer, where.hop, kind == TraceKind::kWait);
  }
  if (ring_ == nullptr) return;
  event_ = event_here(kind, name.text, bytes);
  if (!detail.empty()) event_.set_detail(detail);
  event_.begin = trace_clock();
  place_ = ring_->append(event_);
}

TraceSpan::~TraceSpan() {
  if (beat_ != nullptr) beat_internal::leave(*beat_);
  if (ring_ == nullptr) return;
  event_.end = trace_clock();
  ring_->close(place_, event_);
  ring_->keep(event_);
}

uint64_t trace_begin(TraceKind kind, TraceName name, std::string_view detail, int64_t bytes) {
  beat();
  Ring* const ring = ring_here();
  if (ring == nullptr) return 0;
  TraceEvent event = event_here(kind, name.text, bytes);
  event.set_detail(detail);
  event.id = 1 + g_numbered.fetch_add(1, std::memory_order_relaxed);
  event.begin = trace_clock();
  add(*ring, event);
  return event.id;
}

void trace_message(TraceKind kind, int peer, int64_t bytes, uint64_t exchange, uint64_t flow) {
  beat();
  Ring* const ring = exchange == 0 ? nullptr : ring_here();
  if (ring == nullptr) return;
  TraceEvent event = event_here(kind, kind == TraceKind::kSend ? "send" : "receive", bytes);
  event.peer = peer;
  event.id = exchange;
  event.flow = flow;
  event.begin = trace_clock();
  add(*ring, event);
}

void trace_end(uint64_t id) {
  beat();
  Ring* const ring = id == 0 ? nullptr : ring_here();
  if (ring == nullptr) return;
  TraceEvent event = event_here(TraceKind::kEnded, "", -1);
  event.id = id;
  event.begin = event.end = trace_clock();
  add(*ring, event);
}

TraceThread::TraceThread(int rank, TraceName name) : before_(t_here.where.ring), taken_(nullptr) {
  if (before_ != nullptr && before_->rank == rank && before_->name == name.text) return;
  taken_ = t_here.where.ring = Rings::all().take(rank, name.text);
}

TraceThread::~TraceThread() {
  if (taken_ == nullptr) return;
  Rings::all().leave(taken_);
  t_here.where.ring = before_;
}

int trace_rank() { return t_here.where.ring != nullptr ? t_here.where.ring->rank : g_rank.load(); }

void set_main_trace_thread(int rank) {
  g_rank = rank;
  Ring*& ring = t_here.where.ring;
  if (ring != nullptr && ring->rank == rank && ring->name == kMainThread.text) return;
  if (ring != nullptr) Rings::all().leave(ring);
  ring = Rings::all().take(rank, kMainThread.text);
}

void set_tracing(bool on) { g_on = on; }

TraceWindow::TraceWindow(int rank, size_t most) : rank_(rank) { Rings::all().begin_window(rank, most); }

TraceWindow::~TraceWindow() {
  if (!ended_) finish();
}

TraceRecord TraceWindow::finish() {
  ended_ = true;
  return Rings::all().collect(rank_, /*end_window=*/true, [](Ring& ring, std::vector<TraceEvent>& events) {
    auto [kept, dropped] = ring.end_window();
    events = std::move(kept);
    return dropped;
  });
}

TraceRecord last_trace_records(int rank) {
  return Rings::all().collect(rank, /*end_window=*/false, [](Ring& ring, std::vector<TraceEvent>& events) {
    events = ring.last();
    return int64_t{0};
  });
}

}  // namespace annulus
