// Benchmark is a subcommand of `annulus bench`, such as ring or train: it declares its options and measures. Each has a
// file here, in gpu/ or in seeds/. program/bench_subcommand.cc has the table of them, and does what they have in
// common: --json, the ranks and the report.
#pragma once

#include <ATen/ops/tensor.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "benchmarks/report.h"
#include "comm/communicator.h"
#include "common/text.h"

namespace annulus {

class Benchmark {
 public:
  virtual ~Benchmark() = default;
  // Declares the options apart from --json, and with app.footer() an example that works as typed. The values that they
  // have at that time are the defaults, which add() prints.
  virtual void declare(CLI::App& app) = 0;
  // As those of Subcommand (launcher/subcommand.h).
  virtual void check() {}
  virtual std::string device() const { return "cpu"; }
  // If the options ask for something that needs no job of this process: does it, and returns the exit code.
  virtual std::optional<int> run_alone(std::ostream&) { return std::nullopt; }
  // What all ranks must have been told alike.
  virtual std::string request() const { return ""; }
  // Collective over the job's ranks; with one rank `world` needs no launcher. Rank 0 prints tables to `out` and returns
  // the ratios; what other ranks return is not used.
  virtual std::vector<BenchRatio> run(Communicator& world, std::ostream& out) = 0;
  // What was computed wrongly, if anything was. The report is written before this is raised as an Error.
  virtual std::string wrong() const { return ""; }
};

std::unique_ptr<Benchmark> make_attention_benchmark();
std::unique_ptr<Benchmark> make_calibrate_benchmark();
std::unique_ptr<Benchmark> make_comm_benchmark();
std::unique_ptr<Benchmark> make_counts_benchmark();
std::unique_ptr<Benchmark> make_gpu_benchmark();
std::unique_ptr<Benchmark> make_layouts_benchmark();
std::unique_ptr<Benchmark> make_longest_benchmark();
std::unique_ptr<Benchmark> make_operator_benchmark();
std::unique_ptr<Benchmark> make_patterns_benchmark();
std::unique_ptr<Benchmark> make_plan_benchmark();
std::unique_ptr<Benchmark> make_ring_benchmark();
std::unique_ptr<Benchmark> make_save_benchmark();
std::unique_ptr<Benchmark> make_seeds_benchmark();
std::unique_ptr<Benchmark> make_shard_benchmark();
std::unique_ptr<Benchmark> make_trace_benchmark();
std::unique_ptr<Benchmark> make_faults_benchmark();
std::unique_ptr<Benchmark> make_train_benchmark();

// What the option --baseline of train, and so of all, takes.
inline constexpr const char* kBaselineHelp =
    "a command that measures the same training in another program; the last line of its output is a JSON object with "
    "\"cpu_s_per_1k_tok\"";

inline std::string default_text(const std::string& value) { return value; }
inline std::string default_text(double value) { return exact(value); }
inline std::string default_text(int64_t value) { return std::to_string(value); }
inline std::string default_text(int value) { return std::to_string(value); }
template <typename T>
std::string default_text(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += (text.empty() ? "" : " and ") + default_text(value);
  return text;
}

// Declares an option whose default is the value that it has now, which the help shows unless it is empty. Numbers must
// be above 0. A list may be given several times.
template <typename T>
CLI::Option* add(CLI::App& app, const char* names, T& value, std::string help) {
  constexpr bool kList = !std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>;
  if (kList) help += "; may be given several times";
  if (const std::string text = default_text(value); !text.empty()) help += " (default: " + text + ")";
  CLI::Option* const option = app.add_option(names, value, help);
  if constexpr (kList) option->expected(1)->take_all();
  if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::vector<int64_t>>) option->check(CLI::PositiveNumber);
  return option;
}

// The sums or other reductions of these numbers over all ranks. Collective.
inline std::vector<double> over_ranks(Communicator& world, const std::vector<double>& mine, ReduceOp op) {
  at::Tensor all = at::tensor(mine, at::kDouble);
  if (world.size() > 1) world.all_reduce(all, op, {"bench", 0});
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

}  // namespace annulus
