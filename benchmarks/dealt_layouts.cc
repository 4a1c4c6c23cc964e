// See dealt_layouts.h.
#include "benchmarks/dealt_layouts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <numeric>
#include <queue>
#include <utility>

#include "common/error.h"

namespace annulus {
namespace {

// In (0, 1), the same with every standard library.
double uniform(std::mt19937_64& random) { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; }

double log_normal(double log_median, double sigma, std::mt19937_64& random) {
  const double radius = std::sqrt(-2 * std::log(uniform(random)));
  return std::exp(log_median + sigma * radius * std::cos(2 * std::numbers::pi * uniform(random)));
}

double log_uniform(double least, double most, std::mt19937_64& random) {
  return least * std::pow(std::max(1.0, most / least), uniform(random));
}

double draw_length(const std::string& mixture, int64_t row, std::mt19937_64& random) {
  if (mixture == "log-normal") return log_normal(7, 1.5, random);
  if (mixture == "short") return log_normal(6, 0.8, random);
  if (mixture != "long tail") throw Error(ErrorKind::kUsage, "bench", "there is no mixture \"" + mixture + "\"");
  const double kind = uniform(random);
  if (kind < 0.80) return log_normal(6.3, 1, random);
  return kind < 0.95 ? log_uniform(4096, 32768, random) : log_uniform(32768, static_cast<double>(row), random);
}

// The chunks of a sequence, by falling work; equal ones in order.
std::vector<int64_t> by_work(const std::vector<int64_t>& work) {
  std::vector<int64_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return work[static_cast<size_t>(a)] > work[static_cast<size_t>(b)]; });
  return order;
}

std::vector<int64_t> work_of_chunks(const std::vector<int64_t>& before, int64_t chunk) {
  const auto length = static_cast<int64_t>(before.size()) - 1;
  std::vector<int64_t> work;
  for (int64_t begin = 0; begin < length; begin += chunk) {
    work.push_back(before[static_cast<size_t>(std::min(length, begin + chunk))] - before[static_cast<size_t>(begin)]);
  }
  return work;
}

Layout of_chunks(std::vector<std::vector<int64_t>> chunks, int64_t length, int64_t chunk) {
  Layout layout{length, std::vector<std::vector<Span>>(chunks.size())};
  for (size_t r = 0; r < chunks.size(); ++r) {
    std::sort(chunks[r].begin(), chunks[r].end());
    for (const int64_t c : chunks[r]) {
      const Span span = Span::range(c * chunk, std::min(length, (c + 1) * chunk));
      std::vector<Span>& spans = layout.spans[r];
      if (!spans.empty() && spans.back().last() + 1 == span.begin) {
        spans.back().count += span.count;
      } else {
        spans.push_back(span);
      }
    }
  }
  return layout;
}

}  // namespace

const std::vector<std::string>& length_mixtures() {
  static const std::vector<std::string> names = {"log-normal", "long tail", "short"};
  return names;
}

std::vector<int64_t> draw_lengths(const std::string& mixture, int64_t row, std::mt19937_64& random) {
  std::vector<int64_t> lengths;
  for (int64_t left = row; left > 0; left -= lengths.back()) {
    const double drawn = std::min(draw_length(mixture, row, random), static_cast<double>(left));
    lengths.push_back(std::max<int64_t>(1, static_cast<int64_t>(drawn)));
  }
  return lengths;
}

Pattern packed_row(const std::vector<int64_t>& lengths) {
  const int64_t row = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  PatternSpec spec = causal_pattern();
  spec.documents = {lengths};
  return make_pattern(spec, {.batch = 1, .heads = 1, .kv_heads = 1, .q_len = row, .k_len = row, .query_offset = 0});
}

Layout round_robin_layout(const std::vector<int64_t>& before, int ranks) {
  const std::vector<int64_t> order = by_work(work_of_chunks(before, 128));
  std::vector<std::vector<int64_t>> chunks(static_cast<size_t>(ranks));
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t round = i / chunks.size(), place = i % chunks.size();
    chunks[round % 2 == 0 ? place : chunks.size() - 1 - place].push_back(order[i]);
  }
  return of_chunks(std::move(chunks), static_cast<int64_t>(before.size()) - 1, 128);
}

Layout min_heap_layout(const std::vector<int64_t>& before, int ranks, int64_t chunk) {
  const std::vector<int64_t> work = work_of_chunks(before, chunk);
  const size_t share = (work.size() + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks);
  using Bucket = std::pair<int64_t, size_t>;  // area and rank
  std::priority_queue<Bucket, std::vector<Bucket>, std::greater<>> least;
  for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) least.emplace(0, r);
  std::vector<std::vector<int64_t>> chunks(static_cast<size_t>(ranks));
  for (const int64_t c : by_work(work)) {
    const auto [area, rank] = least.top();
    least.pop();
    chunks[rank].push_back(c);
    if (chunks[rank].size() < share) least.emplace(area + work[static_cast<size_t>(c)], rank);
  }
  return of_chunks(std::move(chunks), static_cast<int64_t>(before.size()) - 1, chunk);
}

double most_over_mean(const Layout& layout, const std::vector<int64_t>& before) {
  int64_t most = 0;
  for (const std::vector<Span>& spans : layout.spans) {
    int64_t own = 0;
    for (const Span& s : spans) {
      for (int64_t i = 0; i < (s.stride == 1 ? 1 : s.count); ++i) {
        const int64_t begin = s.at(i), end = s.stride == 1 ? s.last() + 1 : begin + 1;
        own += before[static_cast<size_t>(end)] - before[static_cast<size_t>(begin)];
      }
    }
    most = std::max(most, own);
  }
  return static_cast<double>(most) * layout.ranks() / static_cast<double>(before.back());
}

double least_rows(const std::vector<int64_t>& lengths, int ranks) {
  double pairs = 0;
  int64_t row = 0;
  for (const int64_t n : lengths) pairs += 0.5 * static_cast<double>(n) * static_cast<double>(n + 1), row += n;
  const double most = 1.05 * pairs / ranks, tokens = static_cast<double>((row + ranks - 1) / ranks);
  double rows = 0;
  for (const int64_t n : lengths) {
    const auto length = static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) {
      const auto x = static_cast<double>(i);
      const double behind = 0.5 * (length * (length + 1) - x * (x + 1));  // pairs of the queries from x on
      const double holders = std::max(std::ceil(behind / most), std::ceil((length - x) / tokens));
      rows += std::min<double>(holders, ranks) - 1;  // one of them has the key
    }
  }
  return rows;
}

}  // namespace annulus
