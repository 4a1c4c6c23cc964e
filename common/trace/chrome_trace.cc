// See chrome_trace.h.
#include "common/trace/chrome_trace.h"

#include <algorithm>
#include <array>
#include <climits>
#include <map>
#include <string_view>

#include "common/text.h"

namespace annulus {
namespace {

constexpr std::array<std::string_view, 13> kCategories = {"phase",   "compute",    "wait",      "collective", "data",
                                                          "plan",    "tier",       "file",      "message",    "message",
                                                          "message", "collective", "collective"};

std::string json_text_of(std::string_view text) {
  std::string out = "\"";
  for (const char c : printable(text)) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

// Nanoseconds as the format's microseconds, exactly.
std::string microseconds(int64_t ns) {
  const int64_t whole = ns / 1000, rest = ns < 0 ? -(ns % 1000) : ns % 1000;
  const std::string digits = std::to_string(1000 + rest).substr(1);
  return (ns < 0 && whole == 0 ? "-" : "") + std::to_string(whole) + "." + digits;
}

// Where the end of an operation was noticed.
struct End {
  int64_t time;
  int thread;
};

class Writer {
 public:
  Writer(const TraceRecord& record, const ChromeProcess& process) : record_(record), process_(process) {
    for (const TracedThread& thread : record.threads) {
      for (const TraceEvent& event : thread.events) {
        if (event.kind == TraceKind::kEnded) ends_[event.id] = {event.end, thread.number};
        until_ = std::max({until_, event.begin, event.end});
      }
    }
    if (process.until > 0) until_ = process.until;
  }

  std::string text() {
    const std::string rank = std::to_string(record_.rank);
    name("process_name", 0,
         "\"name\":" + json_text_of("rank " + rank + (process_.host.empty() ? "" : " on " + process_.host)));
    name("process_sort_index", 0, "\"sort_index\":" + rank);
    for (const TracedThread& thread : record_.threads) {
      name("thread_name", thread.number, "\"name\":" + json_text_of(thread.name));
      name("thread_sort_index", thread.number, "\"sort_index\":" + std::to_string(thread.number));
    }
    for (const TracedThread& thread : record_.threads) write(thread);
    return std::move(out_);
  }

 private:
  void begin_event(const char* phase, std::string_view name, std::string_view category, int thread) {
    if (!out_.empty()) out_ += ",\n";
    out_ += "{\"ph\":\"";
    out_ += phase;
    out_ += "\",\"name\":" + json_text_of(name);
    if (!category.empty()) out_.append(",\"cat\":\"").append(category).append("\"");
    out_ += ",\"pid\":" + std::to_string(record_.rank) + ",\"tid\":" + std::to_string(thread);
  }
  void at(int64_t time) { out_ += ",\"ts\":" + microseconds(time + process_.offset); }

  void name(const char* what, int thread, const std::string& argument) {
    begin_event("M", what, {}, thread);
    out_ += ",\"args\":{" + argument + "}}";
  }

  void arguments(const TraceEvent& event, bool unfinished) {
    std::string all;
    const auto add = [&](const char* key, const std::string& value) {
      all.append(all.empty() ? "\"" : ",\"").append(key).append("\":").append(value);
    };
    if (event.detail[0] != 0) add("of", json_text_of(event.detail));
    if (event.layer >= 0) add("layer", std::to_string(event.layer));
    if (event.hop >= 0) add("hop", std::to_string(event.hop));
    if (event.peer >= 0) add("peer", std::to_string(event.peer));
    if (event.bytes >= 0) add("bytes", std::to_string(event.bytes));
    if (event.flow != 0) add("message", json_text_of(number(event.flow)));
    if (unfinished) add("unfinished", "true");
    out_ += ",\"args\":{" + all + "}}";
  }

  static std::string number(uint64_t flow) {
    static constexpr std::string_view kDigits = "0123456789abcdef";
    std::string text = "0x";
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[flow >> shift & 15];
    return text;
  }

  void write(const TracedThread& thread) {
    std::vector<const TraceEvent*> events;
    for (const TraceEvent& event : thread.events) events.push_back(&event);
    const auto end = [](const TraceEvent& e) { return e.end == TraceEvent::kOpen ? INT64_MAX : e.end; };
    // What contains others comes first.
    std::stable_sort(events.begin(), events.end(), [&](const TraceEvent* a, const TraceEvent* b) {
      return a->begin != b->begin ? a->begin < b->begin : end(*a) > end(*b);
    });
    for (const TraceEvent* event : events) {
      if (event->kind < TraceKind::kExchange) {
        span(*event, thread.number);
      } else if (event->kind != TraceKind::kExchange && event->kind != TraceKind::kEnded) {
        operation(*event, thread.number);
      }
    }
  }

  void span(const TraceEvent& event, int thread) {
    const bool open = event.end == TraceEvent::kOpen;
    begin_event("X", event.name, kCategories[static_cast<size_t>(event.kind)], thread);
    at(event.begin);
    out_ += ",\"dur\":" + microseconds(std::max<int64_t>(0, (open ? until_ : event.end) - event.begin));
    arguments(event, open);
  }

  // A message or a begun collective, which may overlap others of the thread.
  void operation(const TraceEvent& event, int thread) {
    const auto found = ends_.find(event.id);
    const bool open = found == ends_.end();
    const End over = open ? End{std::max(until_, event.begin), thread} : found->second;
    const std::string_view category = kCategories[static_cast<size_t>(event.kind)];
    // Local to the process, so that viewers show it there.
    const std::string id = ",\"id2\":{\"local\":" + json_text_of(number(++operations_)) + "}";
    begin_event("b", event.name, category, thread);
    out_ += id;
    at(event.begin);
    arguments(event, open);
    begin_event("e", event.name, category, thread);
    out_ += id;
    at(over.time);
    out_ += "}";
    if (event.flow == 0 || open || !process_.arrows) return;
    const bool sends = event.kind == TraceKind::kSend;
    begin_event(sends ? "s" : "f", "message", category, sends ? thread : over.thread);
    out_ += ",\"id\":" + json_text_of(number(event.flow));
    if (!sends) out_ += ",\"bp\":\"e\"";
    at(sends ? event.begin : over.time);
    out_ += "}";
  }

  const TraceRecord& record_;
  const ChromeProcess& process_;
  std::map<uint64_t, End> ends_;
  int64_t until_ = 0;
  uint64_t operations_ = 0;
  std::string out_;
};

}  // namespace

int64_t first_time(const TraceRecord& record) {
  int64_t first = INT64_MAX;
  for (const TracedThread& thread : record.threads) {
    for (const TraceEvent& event : thread.events) first = std::min(first, event.begin);
  }
  return first;
}

std::string chrome_events(const TraceRecord& record, const ChromeProcess& process) {
  return Writer(record, process).text();
}

std::string chrome_head(const std::vector<std::pair<std::string, std::string>>& about) {
  std::string texts;
  for (const auto& [key, text] : about) {
    texts += (texts.empty() ? "" : ",") + json_text_of(key) + ":" + json_text_of(text);
  }
  return "{\"displayTimeUnit\":\"ms\",\"otherData\":{" + texts + "},\"traceEvents\":[\n";
}

std::string chrome_tail() { return "\n]}\n"; }

}  // namespace annulus
