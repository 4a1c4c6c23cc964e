// The options of `annulus bench attention`; benchmarks/kernel/ measures.
#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <string>

#include "benchmarks/kernel/attention.h"
#include "benchmarks/program/word.h"
#include "common/text.h"

namespace annulus {
namespace {

class AttentionWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "attention", "attention on one core, compared with the core's peak and with LibTorch's operator");
    const auto add = [&](const char* name, auto& values, const std::string& help) {
      return app->add_option(name, values, help + "; may be given several times")->expected(1)->take_all();
    };
    add("--length", options_.lengths, "tokens")->check(CLI::PositiveNumber);
    add("--dim,--head-dim", options_.dims, "head size")->check(CLI::PositiveNumber);
    add("--mask", options_.masks, "one of " + join(attention_bench_masks(), ", "));
    add("--dtype", options_.dtypes, "fp32, bf16 or fp64");
    app->add_option("--seconds", options_.seconds, "seconds to measure each cell for, for each side (default: 0.5)")
        ->check(CLI::PositiveNumber);
    add_json(app, json_);
    app->footer(
        "Without options it measures a choice of shapes, masks and dtypes. Calls in bf16 take turns with the same\n"
        "calls in fp32. The environment variable ANNULUS_ISA (baseline, avx2, avx512, avx512bf16 or amx) limits the\n"
        "vector instructions of all sides.\n"
        "Example:\n  ./annulus bench attention --length 1024 --dtype bf16");
    return app;
  }

  void check() override {
    annulus::check(options_);
    check_json(json_);
  }

  int run() override {
    refuse_ranks("attention");
    write_json(json_, run_attention_bench(options_, std::cout));
    return 0;
  }

 private:
  AttentionBenchOptions options_;
  std::string json_;
};

}  // namespace

std::unique_ptr<Word> make_attention_word() { return std::make_unique<AttentionWord>(); }

}  // namespace annulus
