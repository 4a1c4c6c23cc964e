// annulus plan: makes the plan of any problem for any number of ranks, proves it, and says what it costs; runs nothing.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "attention/plan/traffic.h"
#include "attention/plan/verifier.h"
#include "common/error.h"
#include "launcher/verb.h"
#include "tensor_files/block_map_file.h"

namespace annulus {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class PlanVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--ranks", request_.ranks, "ranks to plan for")->required();
    app.add_option("--length", request_.shape.q_len, "tokens of the whole sequence")->required();
    app.add_option("--key-length", key_length_, "keys, where there are not as many as queries");
    app.add_option("--query-offset", request_.shape.query_offset, "query i has the position i + N (default: 0)");
    app.add_option("--batch", request_.shape.batch, "batch rows (default: 1)");
    app.add_option("--heads", request_.shape.heads, "query heads (default: 1)");
    app.add_option("--kv-heads", kv_heads_, "kv heads (default: as many as query heads)");
    app.add_option("--head-dim", head_dim_, "head size, for bytes (default: 128)")->check(CLI::PositiveNumber);
    app.add_option("--element-bytes", element_bytes_, "bytes of a key or value element, 2 for bf16 (default: 2)")
        ->check(CLI::PositiveNumber);
    app.add_option("--pattern", pattern_, "which keys a query sees (default: { kind = \"causal\" })");
    app.add_option("--layout", layout_, "contiguous, zigzag (default) or striped");
    app.add_option("--schedule", schedule_, "auto (default), ring, all-gather or group-cast");
    app.add_flag("--even", request_.even, "refuse lengths that do not give every rank the same share");
    app.add_flag("--no-proof", no_proof_, "only make the plan: for very many ranks");
    app.footer(
        "Examples:\n"
        "  ./annulus plan --ranks 64 --length 1048576 --heads 64 --kv-heads 8\n"
        "  ./annulus plan --ranks 8 --length 65536 --layout contiguous \\\n"
        "      --pattern '{ kind = \"window\", left = 4095, right = 0 }'");
  }

  void check() override {
    request_.shape.k_len = key_length_ < 0 ? request_.shape.q_len : key_length_;
    request_.shape.kv_heads = kv_heads_ > 0 ? kv_heads_ : request_.shape.heads;
    request_.pattern = parse_pattern(pattern_, "--pattern");
    request_.layout = parse_layout(layout_, "--layout");
    request_.schedule = parse_schedule(schedule_, "--schedule");
    validate(request_);
    if (is_adaptive(request_.pattern)) {
      throw Error(
          ErrorKind::kPlan, "plan",
          "an adaptive block map is selected from queries and keys at each call, so there is no plan before one; "
          "`annulus attend --mask-out F` writes the map of a call, which map = \"file\" reads");
    }
  }

  int run() override {
    const auto begin = std::chrono::steady_clock::now();
    request_.pattern = read_block_maps(request_.pattern, request_.shape);
    request_ = resolve_schedule(request_);
    const AttentionShape& s = request_.shape;
    const int64_t pairs = count_pairs(*cached_pattern(request_));
    const double all =
        static_cast<double>(s.batch * s.heads) * static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
    std::printf("%s\npairs counted %lld, %.4f of all\n\n", request_.text().c_str(), static_cast<long long>(pairs),
                all > 0 ? static_cast<double>(pairs) / all : 0);
    std::vector<Program> programs;
    std::vector<Traffic> forward, backward;
    for_each_program(request_, [&](Program program) {
      forward.push_back(traffic(program, program.forward));
      backward.push_back(traffic(program, program.backward));
      if (!no_proof_) programs.push_back(std::move(program));
    });
    const double made = seconds_since(begin);
    print_cost("forward", forward);
    print_cost("backward", backward);
    std::printf("\nmade in %.3f s, %.2f ms a rank\n", made, 1e3 * made / request_.ranks);
    if (no_proof_) return 0;
    const auto proving = std::chrono::steady_clock::now();
    const Proof proof = verify(programs);
    for (const std::string& fault : proof.faults) std::printf("wrong: %s\n", fault.c_str());
    if (!proof.holds()) throw Error(ErrorKind::kInternal, "plan", "the plan is wrong, as said above; please report it");
    std::printf(
        "proved in %.3f s: each of %lld pairs is computed once, %lld transfers have both ends, gradients get home\n",
        seconds_since(proving), static_cast<long long>(proof.pairs), static_cast<long long>(proof.transfers / 2));
    return 0;
  }

 private:
  // Of one rank: the least and the most of all ranks.
  void print_cost(const char* direction, const std::vector<Traffic>& ranks) const {
    const int64_t accumulator_bytes = element_bytes_ == 8 ? 8 : 4;
    std::printf("%-10s %-28s %14s %14s\n", direction, "of one rank", "least", "most");
    const auto row = [&](const char* name, int digits, double scale, auto value) {
      const auto less = [&](const Traffic& a, const Traffic& b) { return value(a) < value(b); };
      const auto [least, most] = std::minmax_element(ranks.begin(), ranks.end(), less);
      std::printf("%-10s %-28s %14.*f %14.*f\n", "", name, digits, scale * static_cast<double>(value(*least)), digits,
                  scale * static_cast<double>(value(*most)));
    };
    const double kv = static_cast<double>(head_dim_ * element_bytes_) / (1 << 20);
    const double grad = static_cast<double>(head_dim_ * accumulator_bytes) / (1 << 20);
    row("messages sent", 0, 1, [](const Traffic& t) { return t.kv_messages + t.grad_messages; });
    row("keys and values sent, MiB", 2, kv, [](const Traffic& t) { return t.kv_rows; });
    row("gradients sent, MiB", 2, grad, [](const Traffic& t) { return t.grad_rows; });
    row("keys and values held, MiB", 2, kv, [](const Traffic& t) { return t.peak_kv_rows; });
    row("gradients held, MiB", 2, grad, [](const Traffic& t) { return t.peak_grad_rows; });
  }

  PlanRequest request_;
  int64_t key_length_ = -1, kv_heads_ = 0, head_dim_ = 128, element_bytes_ = 2;
  std::string pattern_ = "{ kind = \"causal\" }", layout_ = "zigzag", schedule_ = "auto";
  bool no_proof_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_plan_verb() { return std::make_unique<PlanVerb>(); }

}  // namespace annulus
