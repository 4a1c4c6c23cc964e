// The beat of a rank: how far it has come and where its main thread stands, in a page of memory that the watch of its
// host reads from another process (launcher/launch/host_watch.h), even while the rank is stopped. The recorder
// (recorder.h) writes it with every operation; code that works long within one operation calls beat() in between.
//
// Without a page, which a rank has under `annulus launch`, all of this is a read of one variable. `annulus bench
// faults` measures what it costs with one. Thread safety: beat() may be called by any thread, all else belongs to the
// main thread, and does nothing on others.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace annulus {

// The layout of the page. Both processes run the same program.
struct BeatPage {
  static constexpr uint64_t kMark = 0x616e6e756c757301;
  static constexpr uint32_t kDeepest = 16;
  static constexpr int64_t kNoStep = -1;

  // An operation that the main thread is in.
  struct Place {
    char name[24];
    char detail[64];
    int16_t layer;  // -1: none, as in TraceEvent
    bool waits;     // for something that is under way on other threads of the rank
    int32_t hop;
  };

  std::atomic<uint64_t> mark{0};    // kMark once the page is in use
  std::atomic<uint64_t> own{0};     // pieces of work that the main thread has done
  std::atomic<uint64_t> others{0};  // and the other threads of the rank
  std::atomic<int64_t> step{kNoStep};
  std::atomic<int32_t> expected{0};  // > 0: it is to make progress (ExpectProgress)
  std::atomic<int32_t> lasting{0};   // > 0: it is in a phase that may last (LongPhase)
  std::atomic<int32_t> waits{0};     // > 0: the main thread waits for other ranks (RankWait)
  std::atomic<uint32_t> depth{0};    // of the operations, the outermost first; those deeper than kDeepest are not kept
  Place places[kDeepest] = {};
};

namespace beat_internal {
inline std::atomic<BeatPage*> page{nullptr};
inline constinit thread_local bool is_main = false;

inline void count(std::atomic<uint64_t>& number) {  // of one thread
  number.store(number.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// The page of this thread if it is the main one.
inline BeatPage* own_page() { return is_main ? page.load(std::memory_order_relaxed) : nullptr; }

// Begins and ends an operation of any thread of the rank.
void enter(BeatPage& page, const char* name, std::string_view detail, int16_t layer, int32_t hop, bool waits);
void leave(BeatPage& page);

// Adds to a number of the page while it exists.
class Counted {
 public:
  explicit Counted(std::atomic<int32_t> BeatPage::*number) : page_(own_page()), number_(number) {
    if (page_ != nullptr) add(1);
  }
  ~Counted() {
    if (page_ != nullptr) add(-1);
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  // What begins or ends is progress as well.
  void add(int32_t one) {
    std::atomic<int32_t>& number = page_->*number_;
    number.store(number.load(std::memory_order_relaxed) + one, std::memory_order_relaxed);
    count(page_->own);
  }

  BeatPage* const page_;
  std::atomic<int32_t> BeatPage::*const number_;
};
}  // namespace beat_internal

// The page of this process, or null.
inline BeatPage* beat_page() { return beat_internal::page.load(std::memory_order_relaxed); }

// Makes the calling thread the main one and lets this rank write its beat into `page`, which must outlive all threads;
// null: no longer. No operation of the main thread may be under way.
void set_beat_page(BeatPage* page);

// Says that a piece of work is done: a tile, a chunk of a file, a batch.
inline void beat() {
  BeatPage* const page = beat_internal::page.load(std::memory_order_relaxed);
  if (page == nullptr) return;
  if (beat_internal::is_main) return beat_internal::count(page->own);
  page->others.fetch_add(1, std::memory_order_release);
}

// Says which step of a run the rank is in.
void beat_step(int64_t step);

// While it exists, the main thread is expected to make progress or to wait for other ranks.
class ExpectProgress : beat_internal::Counted {
 public:
  ExpectProgress() : Counted(&BeatPage::expected) {}
};

// While it exists, a piece of work may take ten times as long as otherwise: loading, the first step, saving, packing.
class LongPhase : beat_internal::Counted {
 public:
  LongPhase() : Counted(&BeatPage::lasting) {}
};

// While it exists, the main thread waits for other ranks. A deadline of its own ends that wait (comm/deadline.h).
class RankWait : beat_internal::Counted {
 public:
  RankWait() : Counted(&BeatPage::waits) {}
};

// Where the main thread stands: "step 12: forward, layer forward, attention forward (step 12, attention), hop, tiles
// (layer 3, hop 2)". Empty if it is in no operation and no step. Call it for a page that does not change meanwhile, or
// for a copy: it may otherwise name operations that do not belong together.
std::string place_of_beat(const BeatPage& page);

}  // namespace annulus
