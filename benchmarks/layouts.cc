// `annulus bench layouts`: how evenly layouts of packed rows give pairs to ranks, and how many rows a group-cast sends,
// over drawn lengths of documents. Counted, not run.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attention/plan/needs.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/dealt_layouts.h"
#include "benchmarks/measure.h"
#include "common/error.h"

namespace annulus {
namespace {

// The goals for each row that has at least 2 P chunks of 128 tokens.
constexpr double kEven = 1.05, kRows = 1.10, kMilliseconds = 50;

struct Column {  // of the table: one layout over all drawn rows
  std::string name;
  double most = 0, rows = 0, over_zigzag = 0, worst_over_zigzag = 0;
};

class LayoutsBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--ranks", ranks_, "ranks");
    add(app, "--length", lengths_, "tokens of a row");
    add(app, "--batches", batches_, "drawn rows of each mixture, length and number of ranks");
    add(app, "--seed", seed_, "of the drawing");
    app.footer("Example:\n  ./annulus bench layouts --ranks 8 --length 131072 --batches 10");
  }

  std::vector<BenchRatio> run(Communicator&, std::ostream& out) override {
    out << "Packed causal rows, " << batches_ << " drawn for each line. \"most\": the most pairs of a rank over the "
        << "mean, in the worst row;\n\"rows\": those that a group-cast sends over those with zigzag, the mean of all "
           "rows "
        << "(and the most, of balanced); \"least\": balanced\nover the least that any layout with at most 1.05 of the "
        << "mean pairs needs; \"below\": rows in which that least alone is above 1.10\ntimes zigzag's.\n\n";
    out << line("%-*s %5s %8s | %-*s | %6s %5s | %5s %5s | %5s %5s | %5s %5s | %8s\n", Width{10}, "mixture", "ranks",
                "tokens", Width{34}, "balanced: most rows (most) least", "zigzag", "below", "cont.", "rows", "PTRR",
                "rows", "Magi", "rows", "ms");
    for (const std::string& mixture : length_mixtures()) {
      for (const int64_t ranks : ranks_) {
        for (const int64_t length : lengths_) out << measured(mixture, static_cast<int>(ranks), length);
      }
    }
    out << "\n"
        << drawn_ << " rows: pairs above " << kEven << " of the mean in " << uneven_ << ", rows above " << kRows
        << " of zigzag's in " << above_ << ", in " << needless_ << " of which that least allows fewer; planned in "
        << line("%.1f", slowest_) << " ms of CPU time at most at up to 64 ranks (goal: " << kMilliseconds << ")\n";
    return {};
  }

 private:
  std::string measured(const std::string& mixture, int ranks, int64_t length) {
    std::vector<Column> columns = {{"balanced"}, {"zigzag"}, {"contiguous"}, {"PTRR"}, {"Magi"}};
    double over_least = 0, slowest = 0;
    int64_t below = 0;
    std::mt19937_64 random(static_cast<uint64_t>(seed_));
    for (int64_t i = 0; i < batches_; ++i) {
      const std::vector<int64_t> lengths = draw_lengths(mixture, length, random);
      const Pattern pattern = packed_row(lengths);
      const std::vector<int64_t> before = position_work(pattern).before;
      const double begin = thread_cpu_seconds();
      const Layout balanced = balanced_layout(pattern, ranks);
      const double ms = 1e3 * (thread_cpu_seconds() - begin);
      slowest = std::max(slowest, ms);
      if (ranks <= 64) slowest_ = std::max(slowest_, ms);
      // MagiAttention's chunks: several for each rank, and at least 128 tokens.
      const int64_t chunk = std::clamp<int64_t>(length / ranks / 8, 128, 2048);
      const std::vector<Layout> layouts = {balanced, make_layout(LayoutKind::kZigzag, length, ranks),
                                           make_layout(LayoutKind::kContiguous, length, ranks),
                                           round_robin_layout(before, ranks), min_heap_layout(before, ranks, chunk)};
      std::vector<double> rows;
      for (const Layout& layout : layouts) rows.push_back(sent(pattern, layout));
      const double least = least_rows(lengths, ranks), zigzag = std::max(1.0, rows[1]);
      for (size_t c = 0; c < columns.size(); ++c) {
        columns[c].most = std::max(columns[c].most, most_over_mean(layouts[c], before));
        columns[c].over_zigzag += rows[c] / zigzag / static_cast<double>(batches_);
        columns[c].worst_over_zigzag = std::max(columns[c].worst_over_zigzag, rows[c] / zigzag);
      }
      over_least += rows[0] / std::max(1.0, least) / static_cast<double>(batches_);
      const bool unattainable = least > kRows * rows[1];
      below += unattainable ? 1 : 0;
      ++drawn_;
      if (length / 128 >= 2 * ranks && most_over_mean(balanced, before) > kEven) ++uneven_;
      if (rows[0] > kRows * rows[1]) ++above_, needless_ += unattainable ? 0 : 1;
    }
    const Column& b = columns[0];
    return line(
        "%-*s %5d %8lld | %11.3f %5.2f (%5.2f) %7.2f | %6.2f %5lld | %5.2f %5.2f | %5.2f %5.2f | %5.2f %5.2f | "
        "%8.1f\n",
        Width{10}, mixture, ranks, length, b.most, b.over_zigzag, b.worst_over_zigzag, over_least, columns[1].most,
        below, columns[2].most, columns[2].over_zigzag, columns[3].most, columns[3].over_zigzag, columns[4].most,
        columns[4].over_zigzag, slowest);
  }

  static double sent(const Pattern& pattern, const Layout& layout) {
    Needs needs(pattern, layout, layout);
    return static_cast<double>(needs.foreign_rows());
  }

  std::vector<int64_t> ranks_ = {8, 64, 256}, lengths_ = {131072, 1048576};
  int64_t batches_ = 10, seed_ = 1;
  int64_t drawn_ = 0, uneven_ = 0, above_ = 0, needless_ = 0;
  double slowest_ = 0;
};

}  // namespace

std::unique_ptr<Benchmark> make_layouts_benchmark() { return std::make_unique<LayoutsBenchmark>(); }

}  // namespace annulus
