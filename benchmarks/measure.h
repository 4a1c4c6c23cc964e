// Clocks, statistics of costs and formatted lines, which all benchmarks use. CPU seconds are those of this process with
// all its threads: unlike wall time they hardly depend on what else the machine does meanwhile.
#pragma once

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>
#include <type_traits>
#include <vector>

namespace annulus {

inline double seconds_of(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
inline double cpu_seconds() { return seconds_of(CLOCK_PROCESS_CPUTIME_ID); }
inline double thread_cpu_seconds() { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }
inline double wall_seconds() { return seconds_of(CLOCK_MONOTONIC); }

// Of at least one cost.
inline double least(const std::vector<double>& costs) { return *std::min_element(costs.begin(), costs.end()); }
inline double median(std::vector<double> costs) {
  std::sort(costs.begin(), costs.end());
  const size_t n = costs.size();
  return n % 2 ? costs[n / 2] : (costs[n / 2 - 1] + costs[n / 2]) / 2;
}

// Calls `work`, and appends the CPU seconds that this thread spent in it to `costs` if the call is `counted`.
template <typename Work>
void add_cost(std::vector<double>& costs, bool counted, const Work& work) {
  const double begin = thread_cpu_seconds();
  work();
  if (counted) costs.push_back(thread_cpu_seconds() - begin);
}

// The least CPU seconds of this thread in one of a few calls of `work`.
template <typename Work>
double least_seconds(const Work& work) {
  std::vector<double> costs;
  for (int turn = 0; turn < 8; ++turn) add_cost(costs, true, work);
  return least(costs);
}

// Formats as printf does. Whole numbers of every type go with %lld, strings with %s, and a Width with *.
struct Width {
  int value;
};
inline int printed(Width width) { return width.value; }
inline const char* printed(const std::string& text) { return text.c_str(); }
template <typename T>
auto printed(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<long long>(value);
  } else {
    return value;
  }
}
std::string line(const char* format, const auto&... values) {
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, format, printed(values)...)), '\0');
  std::snprintf(text.data(), text.size() + 1, format, printed(values)...);
  return text;
}

inline const char* met_or_missed(bool met) { return met ? "met" : "missed"; }

}  // namespace annulus
