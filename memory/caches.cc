// See caches.h.
#include "memory/caches.h"

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "common/environment.h"
#include "common/error.h"

namespace annulus {
namespace {

struct TableEntry {
  std::string_view name;
  int64_t parts;  // of kAllParts
  bool on_device;
  std::string_view holds;
};

// The shares follow what a long run keeps: the programs of 64 ranks over a million tokens take tens of megabytes, and a
// rotary table of a million positions of head_dim 128 in bf16 takes 256 MiB. One part is 4 MiB of the default total.
constexpr std::array<TableEntry, 9> kTable = {{
    {"programs", 128, false, "a rank's part of each plan, and of its proof"},
    {"choices", 1, false, "what schedule auto stands for, and the times by which it was chosen"},
    {"patterns", 64, false, "slices of patterns"},
    {"layouts", 8, false, "which rank has which positions, dealt by a pattern's pairs"},
    {"compositions", 64, true, "calls of operators that compute tiles, and their rows"},
    {"rotary tables", 128, true, "sines and cosines of positions"},
    {"pattern texts", 1, false, "patterns that the operator for PyTorch was given"},
    {"selected programs", 16, false, "plans of adaptive patterns that the operator for PyTorch has run"},
    {"block maps", 38, false, "block maps that the operator for PyTorch has read from files"},
}};

constexpr int64_t all_parts() {
  int64_t sum = 0;
  for (const TableEntry& entry : kTable) sum += entry.parts;
  return sum;
}
constexpr int64_t kAllParts = all_parts();

const TableEntry& entry_of(std::string_view name) {
  for (const TableEntry& entry : kTable) {
    if (entry.name == name) return entry;
  }
  throw Error(ErrorKind::kInternal, "memory",
              "the table of caches (memory/caches.cc) has no cache \"" + std::string(name) + "\"");
}

// Shares are rounded down, so that they never add up to more than the total.
int64_t share(const TableEntry& entry, int64_t total) {
  return total / kAllParts * entry.parts + total % kAllParts * entry.parts / kAllParts;
}

struct Registry {
  struct Cache {
    CachePlace::Stats stats;
    CachePlace::SetCapacity set_capacity;
  };
  std::mutex mutex;
  std::optional<int64_t> total;
  std::map<std::string_view, Cache> caches;

  int64_t bytes() {
    if (!total) total = memory_from_environment("ANNULUS_CACHES_MIB", kDefaultCacheTotal);
    return *total;
  }
};

// Never destroyed, because caches may be destroyed at any time during the end of the process.
Registry& registry() {
  static Registry& all = *new Registry;
  return all;
}

}  // namespace

std::vector<CacheReport> cache_reports() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<CacheReport> reports;
  for (const TableEntry& entry : kTable) {
    CacheReport report{entry.name, entry.holds, entry.on_device, {}};
    if (const auto found = r.caches.find(entry.name); found != r.caches.end()) {
      report.stats = found->second.stats();
    } else {
      report.stats.capacity = share(entry, r.bytes());
    }
    reports.push_back(report);
  }
  return reports;
}

int64_t cache_total() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.bytes();
}

void set_cache_total(int64_t bytes) {
  if (bytes < 0) {
    throw Error(ErrorKind::kUsage, "memory",
                "all caches together: expected a number of bytes that is not negative, got " + std::to_string(bytes));
  }
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.total = bytes;
  for (const auto& [name, cache] : r.caches) cache.set_capacity(share(entry_of(name), bytes));
}

int64_t cache_total_on_device(int64_t total) {
  int64_t bytes = 0;
  for (const TableEntry& entry : kTable) bytes += entry.on_device ? share(entry, total) : 0;
  return bytes;
}

CachePlace::CachePlace(std::string_view name, Stats stats, SetCapacity set_capacity) : name_(entry_of(name).name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const int64_t bytes = share(entry_of(name_), r.bytes());
  if (!r.caches.emplace(name_, Registry::Cache{std::move(stats), set_capacity}).second) {
    throw Error(ErrorKind::kInternal, "memory", "there are two caches \"" + std::string(name_) + "\"");
  }
  set_capacity(bytes);
}

CachePlace::~CachePlace() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.caches.erase(name_);
}

}  // namespace annulus
