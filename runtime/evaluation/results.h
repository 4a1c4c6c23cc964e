// What `annulus evaluate` measures, as numbers. evaluation.cc fills it; report.h prints it as a table, as JSON and as
// pictures. Needs no LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

// Losses of the targets at positions [begin, end).
struct LossBucket {
  int64_t begin = 0, end = 0;
  int64_t targets = 0;
  double nats = 0;  // their sum, each times the weight of its target
  // The half width of the 95 % confidence interval of mean() over documents; absent if there are fewer than two, or if
  // it was not computed.
  std::optional<double> error{};
  // The sum of the targets' weights; absent if each counts with the weight 1.
  std::optional<double> weight{};

  double mean() const { return nats / weight.value_or(static_cast<double>(targets)); }
};

struct SourceLosses {
  std::string name;
  int64_t rows = 0, documents = 0;
  LossBucket all;
  std::optional<double> bits_per_byte;
  // By position in the row and in the document: buckets [0, 1), [1, 2), [2, 4), [4, 8), ... and even ones.
  std::vector<LossBucket> doubling, even, document_doubling, document_even;
};

// Trials of a task at one length and depth.
struct TaskCell {
  std::string task;
  int64_t length = 0;           // tokens, as asked
  std::optional<double> depth;  // absent: the task has none
  int64_t trials = 0;
  int64_t exact = 0;                // trials whose answer is right to the last token
  int64_t tokens = 0, right = 0;    // of all answers, and how many of them the model ranks first
  double nats = 0;                  // the sum over the answers' tokens
  std::optional<double> generated;  // the mean share of strings that decoded answers contain, with --generate
};

struct EvaluationResults {
  std::string model;  // as the user named it
  int64_t step = -1;  // of a run's checkpoint; -1: a folder in Hugging Face's layout
  int ranks = 1;
  int64_t context = 0;  // the longest rows of its training
  std::string layout, dtype;
  std::vector<SourceLosses> sources;
  std::vector<TaskCell> cells;          // by task, then length, then depth
  double seconds = 0, cpu_seconds = 0;  // of all forwards, on all ranks
  int64_t forward_tokens = 0;
  bool stopped = false;   // whether it was asked to stop, or failed, before all had been measured
  int64_t near_ties = 0;  // choices between candidates that differ by less than rounding may change
};

}  // namespace annulus
