// Writes records (recorder.h) in Chrome's trace event format, which Perfetto and chrome://tracing show: one process for
// each rank, its threads, spans that nest, messages and begun collectives beside them, and an arrow from each send to
// its receive. Used by comm/gather_trace.h, by `plan --trace` and by last_operations.h. The format: "Trace Event
// Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. docs/reference/formats.md
// says what annulus puts into it. Thread safety: functions without state.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/trace/recorder.h"

namespace annulus {

struct ChromeProcess {
  std::string host;    // empty: not known
  int64_t offset = 0;  // nanoseconds that are added to all times of the record
  // When the record was made, on its own clock: what has not ended is shown until then. 0: the end of the last record.
  int64_t until = 0;
  bool arrows = true;  // false if the other ends of messages may be missing
};

// The least `begin` of a record; nothing earlier is in its file. INT64_MAX if there are no events.
int64_t first_time(const TraceRecord& record);

// Returns the events of one rank, JSON objects divided by ",\n"; those of a thread are in the order of their times.
std::string chrome_events(const TraceRecord& record, const ChromeProcess& process);

// What stands before the events of the first rank and after those of the last; between two ranks stands ",\n".
// `about` are texts that are kept in the file.
std::string chrome_head(const std::vector<std::pair<std::string, std::string>>& about);
std::string chrome_tail();

}  // namespace annulus
