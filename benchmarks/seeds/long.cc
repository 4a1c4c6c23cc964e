// Implements long.h.
#include "benchmarks/seeds/long.h"

#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "benchmarks/patterns.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

PatternSpec long_causal(int64_t) { return causal_pattern(); }
PatternSpec long_window(int64_t) { return parse_pattern("{ kind = 'window', left = 1023, right = 0 }", "bench"); }
PatternSpec long_dilated(int64_t) {
  return parse_pattern("{ kind = 'dilated', segment_lengths = [2048, 8192], dilation_rates = [1, 4], causal = true }",
                       "bench");
}
PatternSpec long_sparse(int64_t length) { return random_blocks(128, 1, length, 0.01); }

}  // namespace

const std::vector<LongCase>& long_cases() {
  static const std::vector<LongCase> cases = {
      {"causal", LayoutKind::kZigzag, [](double n) { return n * n / 2; }, long_causal},
      {"blocks, 99 % sparse", LayoutKind::kContiguous, [](double n) { return 0.01 * n * n; }, long_sparse},
      {"blocks, 6 a row", LayoutKind::kContiguous, [](double n) { return 6 * 128 * n; }, six_blocks_a_row},
      {"dilated", LayoutKind::kContiguous, [](double n) { return (2048 + 8192 / 16) / 2 * n; }, long_dilated},
      {"window of 1,024", LayoutKind::kContiguous, [](double n) { return 1024 * n; }, long_window},
  };
  return cases;
}

void run_long(const LongOptions& options, Communicator& world, std::ostream& out, const MeasureCall& measure) {
  const bool prints = world.rank() == 0;
  if (prints) {
    out << line("one head of 64, fp32, one forward and backward, %s; of the rank with the most:\n",
                counted(world.size(), "process"))
        << "MB held: keys, values and their gradients; MB added: all that the process added to its resident memory\n\n"
        << line("  %9s  %-19s  %9s  %8s  %8s  %8s  %8s  %8s\n", "tokens", "pattern", "pairs", "CPU s", "forward",
                "MB held", "MB added", "of bound")
        << std::flush;
  }
  std::vector<std::string> wrong;
  for (const int64_t length : options.lengths) {
    for (const LongCase& c : long_cases()) {
      const double pairs = c.pairs(static_cast<double>(length));
      const std::string name = line("  %9s  %-19s  %9s", with_commas(length), c.name, scientific(pairs, 1));
      if (pairs > options.most_pairs) {
        if (prints) out << name << "  left out: more pairs than --most-pairs\n" << std::flush;
        continue;
      }
      CallWanted wanted;
      wanted.request.shape = {1, 1, 1, length, length, 0};
      wanted.request.pattern = c.pattern(length);
      wanted.request.layout = c.layout;
      wanted.request.ranks = world.size();
      wanted.rounds = 0;
      wanted.backward = wanted.processes = true;
      wanted.check_rows = options.check_rows;
      const CallFigures f = measure(wanted, world);
      if (f.check && !f.check->passed()) {
        wrong.push_back(with_commas(length, "token") + ", " + c.name + ": " + f.check->errors());
      }
      if (!prints) continue;
      out << name
          << line("  %8.2f  %8.2f  %8.1f  %8.1f  %8s\n", f.cpu, f.forward_wall, f.held_bytes / 1e6, f.resident / 1e6,
                  f.check ? significant(100 * f.check->share(), 3) + " %" : "-")
          << std::flush;
    }
  }
  if (prints) {
    out << "\nforward: wall seconds of the forward\nof bound: "
        << (options.check_rows == 0
                ? "no result was checked"
                : line("the largest error of out, lse and dq of %s and of dk and dv of as many keys, and of those at "
                       "the\nborders of ranks' parts, against fp64, over what rounding allows",
                       with_commas(options.check_rows, "drawn row")))
        << "\n"
        << std::flush;
  }
  if (!wrong.empty()) {
    throw Error(ErrorKind::kInternal, "bench",
                "seeds --long: results differ from fp64 attention in drawn rows: " + join(wrong, "; ") +
                    "; please report this command");
  }
}

}  // namespace annulus
