// Implements tables.h.
#include "benchmarks/seeds/tables.h"

#include <algorithm>
#include <set>

#include "benchmarks/measure.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {

const std::vector<SeedTable>& seed_tables() {
  static const std::vector<SeedTable> tables = {
      {"rings",
       "2025-06-27, Performance Benchmark Report, \"Scaling Performance at 8,192 tokens\"",
       "Each row has 3,072 / P + 8.5 MiB, which is 12 matrices of 8,192 x 8,192 scores over P ranks: memory grows "
       "with\n"
       "the square of the length. One GPU plays all ranks, so time grows with them. The reductions are 1 - 1 / P,\n"
       "computed. The best reduction is below one in the table. Heads, mask and direction are not given.",
       "8 heads of 64, fp32, no mask; milliseconds of the forward (wall), CPU seconds of all ranks; then of forward "
       "and\n"
       "backward the keys, values and their gradients that a rank holds, counted by the executor, and in parentheses\n"
       "that over S/P + two blocks of S/P (at most 1); for processes what they add to resident memory with all "
       "tensors,\n"
       "and in parentheses that over 8 tensors of S/P and two travelling blocks of keys, values and gradients.",
       {{"Standard Attention, 1", "OOM"},
        {"RingAttentionCorrectV2, 2", "877.1 ms, 1,544.5 MB, 50.0 % less"},
        {"RingAttentionCorrectV2, 4", "1,043.3 ms, 776.5 MB, 75.0 % less"},
        {"RingAttentionCorrectV2, 8", "1,230.9 ms, 392.5 MB, 87.5 % less"},
        {"RingAttentionCorrectV2, 16", "1,396.2 ms, 200.5 MB, 93.8 % less"},
        {"RingDilatedAttentionV2, 8", "1,023.8 ms, 392.5 MB, 87.5 % less"},
        {"best reduction: 4,096 tokens, 16", "89.8 % less"}}},
      {"implementations",
       "2025-06-26, Bug Fix Impact Analysis, \"Results Summary\" and \"Memory Usage\"",
       "Segments, dtype and direction are not given. Times before and after have batches of 4 and 1.",
       "milliseconds of CPU of one forward on one thread, least of the rounds: segments 2,048, 4,096, 8,192 at rates "
       "1,\n"
       "2, 4, 8 heads of 64, fp32. Both names are one function here.",
       {{"2,048 tokens", "1.6 and improved 1.0 ms, 1.51x"},
        {"4,096 tokens", "2.6 and improved 1.9 ms, 1.37x"},
        {"8,192 tokens", "5.8 and improved 6.2 ms, 0.94x"},
        {"16,384 tokens", "11.0 and improved 12.0 ms, 0.92x"},
        {"peak memory", "258 to 280 MB"},
        {"2,048 tokens, before the fixes", "6.16 ms, then 1.6 ms", "not measured: it compares two versions of theirs."},
        {"8,192 tokens, before the fixes", "593 ms (batch 4), then 5.8 ms (batch 1)",
         "not measured: it compares two versions of theirs, at two batch sizes."}}},
      {"throughput",
       "2025-06-28, Phase 1 Summary, \"Throughput at Different Scales\"",
       "The ring takes 33.1 ms for 4,096 tokens, 32.9 ms for 8,192 and 538.5 ms for 16,384: not one cost of one "
       "function.",
       "thousands of tokens per CPU second, forward, 8 heads of 64, fp32: DilatedAttention; RingAttentionCorrectV2\n"
       "without a mask over 4 ranks that are threads; BlockSparseRingDilatedAttention, 5 % of blocks of 64.",
       {{"1,024 tokens", "144, ring 1,818, sparse 115 thousand/s"},
        {"4,096 tokens", "42.7, ring 124, sparse 51.4 thousand/s"},
        {"8,192 tokens", "33.5, ring 249, sparse 53.9 thousand/s"},
        {"16,384 tokens", "31.9, ring 30.4, sparse 88.4 thousand/s"}}},
      {"speedups",
       "2025-06-28, Phase 1 Summary, \"Speed Improvements\"",
       "The means of the table above are 5.98 and 1.59. The ring's most is 40,960 tokens elsewhere in the report,\n"
       "and block-sparse's 483,328. The ring is compared with another function (dilated).",
       "the mean ratio of the rows above; of the last ImprovedDilatedAttentionV2 over DilatedAttention at 2,048 "
       "tokens.",
       {{"Ring Attention", "7.06x, at most 16,384 tokens"},
        {"Block Sparse", "2.15x, at most 65,536 tokens"},
        {"Improved V2", "1.11x, at most 2,048 tokens"}}},
      {"lengths",
       "2025-06-28, Phase 1 Summary, \"Memory Efficiency\" and \"Multi-GPU Extreme Sequence Results\" (two GTX 1080)",
       "0.06 GB at 40K are compared with 64 GB at 128K; at 40,960 one matrix of scores takes 6.7 GB. 0.1 GB do not "
       "hold\n"
       "q, k, v and out of 512K tokens even with one head of 64 in fp16 (0.27 GB), and 512K is above their maximum.",
       "one head of 64, fp32, forward over 2 ranks that are threads: CPU seconds, and the most that LibTorch has\n"
       "allocated for a rank, q, k, v and out among it. Longer ones: `bench seeds --long`.",
       {{"standard attention, 128K", "about 64 GB (theoretical)",
         "not made: no matrix of scores is, which is 68.7 GB for a head in fp32 at 131,072 tokens."},
        {"ring, 40K", "0.06 GB"},
        {"block-sparse, 512K", "below 0.1 GB"},
        {"most of Ring Attention", "40,960 tokens"},
        {"most of Block Sparse (99 %)", "483,328 tokens"}}},
      {"caching",
       "2025-07-01, Ring V2Collective Validation, \"Causal Mask Caching\" and \"Pattern Caching\"",
       "The first run of a GPU costs more whatever it caches: the same report has 1.1x on average. Of pattern caching\n"
       "the difference is below the spread.",
       "milliseconds of CPU of a forward that is planned and proved anew, of one whose plan is cached, and the ratio;\n"
       "8 heads of 64, one thread; causal, in the last row dilated at 8,192 tokens.",
       {{"first and cached run", "48.0 ms, then 2.0 ms, 23.87x"},
        {"512 tokens", "0.99x to 1.18x"},
        {"1,024 tokens", "0.99x to 1.18x"},
        {"2,048 tokens", "1.37x"},
        {"4,096 tokens", "1.01x to 1.03x"},
        {"8,192 tokens", "1.01x to 1.03x"},
        {"pattern caching", "6.3 ms, then 5.9 ms, 1.07x"}}},
      {"time",
       "2025-07-01, Ring V2Collective Validation, \"O(n) Performance\" and \"Ring V2 vs Baseline\"",
       "Their times grow with the power 0.52 of the length, so most of each is not attention; a mean ratio of 0.48 to\n"
       "linear growth does not show that growth is linear.",
       "milliseconds of CPU of a forward of RingDilatedAttentionV2Collective (segments 128 and 512, rates 1 and 4, so\n"
       "that all lengths have whole segments; 8 heads of 64), and over the first. The last row: CPU seconds of one "
       "rank\n"
       "over those of a ring of 4, from the first table.",
       {{"512 tokens", "1.0 ms, 1.00x"},
        {"1,024 tokens", "1.3 ms, 1.29x"},
        {"2,048 tokens", "1.7 ms, 1.68x"},
        {"4,096 tokens", "3.0 ms, 3.01x"},
        {"ring over baseline", "0.97x"}}},
      {"memory",
       "2025-07-01, Ring V2Collective Validation, \"Memory Efficiency\"",
       "2.00 KiB are one fp32 tensor of 8 heads of 64: of q, k, v and out three are not counted.",
       "the most that LibTorch has allocated in that forward, with q, k, v and out.",
       {{"8,192 tokens", "16.00 MB, 2.00 KB a token"}}},
      {"classes",
       "2025-06-27, Performance Benchmark Report, \"Working Implementations\" and \"Cleanup Results\"",
       "The report says that each works, and gives no figure.",
       "by the factory: what it stands for, and milliseconds of CPU of forward and backward with its projections, "
       "2,048\n"
       "tokens, width 512, 8 heads, 2 ranks that are threads.",
       {{"DilatedAttention", "works"},
        {"MultiheadDilatedAttention", "works"},
        {"ImprovedDilatedAttention", "works"},
        {"ImprovedDilatedAttentionV2", "1.11x"},
        {"ImprovedMultiheadDilatedAttention", "works"},
        {"RingAttentionCorrectV2", "works"},
        {"RingDilatedAttentionV2", "works"},
        {"RingDilatedAttention", "removed: broken query division"},
        {"RingMultiheadDilatedAttention", "removed: broken wrapper"},
        {"UnfoldRingDilatedAttention", "removed"},
        {"RingDilatedAttentionV2Collective", "works"},
        {"BlockSparseRingDilatedAttention", "works"},
        {"BlockSparseRingMultiheadDilatedAttention", "works"},
        {"BlockSparseRingDistributedDilatedAttention", "its constructor does not fit its tests"}}},
  };
  return tables;
}

std::vector<std::string> missing_rows(const OurFigures& ours) {
  std::vector<std::string> missing;
  std::set<std::pair<std::string, std::string>> known;
  for (const SeedTable& table : seed_tables()) {
    for (const SeedRow& row : table.rows) {
      known.emplace(table.name, row.name);
      if (row.why_not.empty() == (ours.count({table.name, row.name}) == 0))
        missing.push_back(table.name + "/" + row.name);
    }
  }
  for (const auto& [place, figure] : ours) {
    if (known.count(place) == 0) missing.push_back(place.first + "/" + place.second);
  }
  return missing;
}

void print_tables(const OurFigures& ours, std::ostream& out) {
  if (const std::vector<std::string> missing = missing_rows(ours); !missing.empty()) {
    throw Error(ErrorKind::kInternal, "bench",
                "seeds: rows without a figure and without a reason, or figures without a row: " + join(missing, "; "));
  }
  for (const SeedTable& table : seed_tables()) {
    out << "== " << table.source << "\nWrong there: " << table.wrong << "\nOurs: " << table.ours << "\n";
    Width name = {3}, theirs = {6};
    for (const SeedRow& row : table.rows) {
      name.value = std::max(name.value, static_cast<int>(row.name.size()));
      theirs.value = std::max(theirs.value, static_cast<int>(row.theirs.size()));
    }
    out << line("  %-*s  %-*s  %s\n", name, "row", theirs, "theirs", "ours");
    for (const SeedRow& row : table.rows) {
      const std::string& mine = row.why_not.empty() ? ours.at({table.name, row.name}) : row.why_not;
      out << line("  %-*s  %-*s  %s\n", name, row.name, theirs, row.theirs, mine);
    }
    out << "\n";
  }
  out << std::flush;
}

}  // namespace annulus
