// See last_operations.h.
#include "common/trace/last_operations.h"

#include <sys/stat.h>

#include <exception>
#include <mutex>

#include "common/files.h"
#include "common/trace/chrome_trace.h"
#include "common/trace/recorder.h"

namespace annulus {
namespace {

std::mutex g_mutex;
std::string& folder() {
  static std::string& path = *new std::string;  // threads may outlive static objects
  return path;
}

}  // namespace

void set_last_operations_folder(const std::string& path) {
  const std::lock_guard lock(g_mutex);
  folder() = path;
}

std::string save_last_operations(int rank, std::string_view why) noexcept try {
  const std::lock_guard lock(g_mutex);
  struct stat found {};
  if (folder().empty() || stat(folder().c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return "";
  const TraceRecord record = last_trace_records(rank);
  const std::string path = folder() + "/last-operations-rank-" + std::to_string(rank) + ".json";
  const ChromeProcess process{.host = "", .offset = 0, .until = trace_clock(), .arrows = false};
  write_atomically(
      FileSystem::real(), path,
      chrome_head(
          {{"rank", std::to_string(rank)}, {"why", std::string(why)}, {"clock", "the monotonic clock of the host"}}) +
          chrome_events(record, process) + chrome_tail());
  return path;
} catch (const std::exception&) {
  return "";
}

}  // namespace annulus
