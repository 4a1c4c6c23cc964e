// Records what threads do, as spans with a begin and an end: computing, sending, receiving, waiting, reading, writing.
// Each thread has a ring of its last operations, which is always written, and which last_operations.h saves when a rank
// fails; while a TraceWindow exists, everything of its rank is kept as well, for `--trace` (comm/gather_trace.h). Used
// by the communicators, the executor of attention, layers, training, data, tiers and checkpoints.
//
// Every record is a beat of its rank as well (beat.h). It takes no lock, allocates nothing and calls nothing but the
// clock (`annulus bench trace` measures what it costs); only while a window exists it takes the lock of its own thread.
// Times are nanoseconds of steady_clock. Thread safety: a TraceSpan belongs to the thread that made it; all functions
// may be called by any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "common/trace/beat.h"

namespace annulus {

// What a rank does while a record lasts; the category of an event in a file.
enum class TraceKind : uint8_t {
  kPhase,       // a part of a step, which contains others: a forward, a layer, a hop
  kCompute,     // kernels and updates
  kWait,        // for something that is under way
  kCollective,  // a collective of all ranks of a communicator
  kData,        // reading of tokens
  kPlanning,    // of calls of attention
  kTier,        // transfers to and from offload
  kFile,        // files of a run
  // Those below are not spans of a thread: they begin, and end later, wherever that is noticed.
  kExchange,  // a group of messages; not written itself
  kSend,      // a message of an exchange
  kReceive,
  kBegun,  // a collective that was begun
  kEnded,  // the end of an exchange or of a begun collective; not written itself
};

// The name of a record: a literal.
class TraceName {
 public:
  consteval TraceName(const char* literal) : TraceName(literal, 0) {}  // NOLINT(google-explicit-constructor)
  // For a literal that a function chooses; it must live as long as the process.
  static TraceName of_literal(const char* literal) { return {literal, 0}; }
  const char* text;

 private:
  constexpr TraceName(const char* literal, int) : text(literal) {}
};

struct TraceEvent {
  static constexpr int64_t kOpen = -1;

  const char* name = "";
  int64_t begin = 0;
  int64_t end = kOpen;  // kOpen: it has not ended
  int64_t bytes = -1;   // -1: it has none
  uint64_t id = 0;      // of an exchange, or of the operation that begins or ends
  uint64_t flow = 0;    // the number that the two ends of a message share
  // -1: none. `layer` and `hop` are those in which the thread was; `peer` is a rank of the job.
  int16_t layer = -1;
  int16_t unused = 0;
  int32_t hop = -1;
  int32_t peer = -1;
  TraceKind kind = TraceKind::kPhase;
  char detail[67] = {};  // a text such as the label of an operation, cut off if it is longer

  void set_detail(std::string_view text) {
    const size_t size = text.size() < sizeof detail ? text.size() : sizeof detail - 1;
    std::memcpy(detail, text.data(), size);
    detail[size] = 0;
  }
};
static_assert(sizeof(TraceEvent) == 128);

inline int64_t trace_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace trace_internal {
class Ring;

// Where a thread is.
struct Here {
  Ring* ring = nullptr;  // null before its first record
  int16_t layer = -1;
  int32_t hop = -1;
};
Here& here();
}  // namespace trace_internal

// Records the time from its construction to its destruction.
class TraceSpan {
 public:
  explicit TraceSpan(TraceKind kind, TraceName name, std::string_view detail = {}, int64_t bytes = -1);
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceEvent event_;
  trace_internal::Ring* ring_;  // null while nothing is recorded
  BeatPage* const beat_;        // null without one
  uint64_t place_ = 0;
};

// While it exists, records of this thread belong to a layer, and to none of its hops.
class TraceLayer {
 public:
  explicit TraceLayer(int64_t layer) : before_(trace_internal::here()) {
    trace_internal::here().layer = static_cast<int16_t>(layer);
    trace_internal::here().hop = -1;
  }
  ~TraceLayer() {
    trace_internal::here().layer = before_.layer;
    trace_internal::here().hop = before_.hop;
  }
  TraceLayer(const TraceLayer&) = delete;
  TraceLayer& operator=(const TraceLayer&) = delete;

 private:
  const trace_internal::Here before_;
};

// While it exists, records of this thread belong to a hop (a step of a plan).
class TraceHop {
 public:
  explicit TraceHop(int64_t hop) : before_(trace_internal::here().hop) {
    trace_internal::here().hop = static_cast<int32_t>(hop);
  }
  ~TraceHop() { trace_internal::here().hop = before_; }
  TraceHop(const TraceHop&) = delete;
  TraceHop& operator=(const TraceHop&) = delete;

 private:
  const int32_t before_;
};

// Records that an operation has begun, and that it has ended; trace_begin returns the number by which trace_end names
// it, 0 if nothing is recorded. trace_message records one message of the exchange `exchange`, `peer` being a rank of
// the job and `flow` a number that both ends of the message know.
uint64_t trace_begin(TraceKind kind, TraceName name, std::string_view detail, int64_t bytes);
void trace_message(TraceKind kind, int peer, int64_t bytes, uint64_t exchange, uint64_t flow);
void trace_end(uint64_t id);

// ---- Which rank and thread a record belongs to.

// While it exists, records of this thread are those of the thread `name` of a rank. Threads without one belong to the
// rank of set_main_trace_thread. A thread that works for the one that starts it is given that one's trace_rank().
class TraceThread {
 public:
  TraceThread(int rank, TraceName name);
  ~TraceThread();
  TraceThread(const TraceThread&) = delete;
  TraceThread& operator=(const TraceThread&) = delete;

 private:
  trace_internal::Ring *before_, *taken_;
};

// The rank whose records this thread makes.
int trace_rank();

// The thread that runs a rank's program.
inline constexpr TraceName kMainThread = "main";
// Makes the calling thread that of a rank, the only one of this process, until it is called again. Before, records of
// threads without a name are those of rank 0.
void set_main_trace_thread(int rank);

// ---- What was recorded.

struct TracedThread {
  std::string name;
  int number = 1;  // of the thread in its rank: 1 is the main thread
  std::vector<TraceEvent> events;
};

// The records of one rank. Their spans nest within a thread.
struct TraceRecord {
  int rank = 0;
  std::vector<TracedThread> threads;
  int64_t dropped = 0;  // records that no room was left for
};

// Keeps all records of a rank that end while it exists, up to `most` of each thread. One window a rank at a time.
class TraceWindow {
 public:
  static constexpr size_t kMost = size_t{1} << 18;  // 32 MiB

  explicit TraceWindow(int rank, size_t most = kMost);
  ~TraceWindow();
  TraceWindow(const TraceWindow&) = delete;
  TraceWindow& operator=(const TraceWindow&) = delete;

  // Ends the window and returns its records.
  TraceRecord finish();

 private:
  const int rank_;
  bool ended_ = false;
};

// Returns the last records of a rank, at most kTraceRing of each thread. It may be called while threads record.
inline constexpr size_t kTraceRing = 4096;
TraceRecord last_trace_records(int rank);

// Turns all recording off or on, for the benchmark of what it costs.
void set_tracing(bool on);

}  // namespace annulus
