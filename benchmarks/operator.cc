// `annulus bench operator`: the cost of torch.ops.annulus.attention compared with the C++ call that it makes, forward
// and backward. The operator is called as Python calls it, by its schema with boxed arguments; the time of Python's
// interpreter is not measured.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "attention/execution/attention.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"

namespace annulus {
namespace {

// The goal: the operator may take this much more than the C++ call, in seconds below kLong tokens, as a share from
// kLong tokens on.
constexpr double kMostSeconds = 100e-6, kMostShare = 0.01;
constexpr int64_t kLong = 4096;
constexpr const char* kPattern = "{ kind = 'causal' }";
constexpr size_t kFewestCalls = 3;

at::Tensor by_operator(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  static const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention", "");
  torch::jit::Stack stack = {q, k, v, std::string(kPattern)};
  const auto& arguments = handle.schema().arguments();
  for (size_t i = stack.size(); i < arguments.size(); ++i) stack.push_back(*arguments[i].default_value());
  handle.callBoxed(&stack);
  return stack[0].toTensor();
}

class OperatorBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--length", lengths_, "tokens");
    add(app, "--seconds", seconds_, "seconds to measure each length for");
    app.footer("Example:\n  ./annulus bench operator");
  }

  // Causal, in fp32, on one thread, with calls of both sides in turn.
  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    constexpr int64_t kHeads = 8, kHeadDim = 64;
    at::set_num_threads(1);
    std::vector<BenchRatio> ratios;
    nlohmann::json json = {{"bench", "operator"}, {"heads", kHeads}, {"head_dim", kHeadDim}};
    out << "torch.ops.annulus.attention compared with the C++ call, causal, fp32, one thread; least CPU seconds, "
           "forward and backward\n\n  length   C++ call   operator   over it   more by   goal\n";
    for (const int64_t length : lengths_) {
      AttentionCall call;
      call.comm = &world;
      call.request.shape = {1, kHeads, kHeads, length, length, 0};
      call.request.pattern = parse_pattern(kPattern, "pattern");
      at::Tensor q = at::randn({1, length, kHeads, kHeadDim}), k = at::randn_like(q), v = at::randn_like(q);
      const at::Tensor dout = at::randn_like(q);
      for (at::Tensor* t : {&q, &k, &v}) t->requires_grad_(true);
      std::array<std::vector<double>, 2> costs;  // of the C++ call, of the operator
      const auto run = [&](size_t side, bool counted) {
        for (at::Tensor* t : {&q, &k, &v}) t->mutable_grad() = at::Tensor();
        add_cost(costs[side], counted,
                 [&] { (side == 0 ? attention(q, k, v, call) : by_operator(q, k, v)).backward(dout); });
      };
      for (const size_t side : {0, 1}) run(side, false);  // the first calls plan, prove and allocate
      const double begin = wall_seconds();
      for (size_t turn = 0; turn < kFewestCalls || wall_seconds() - begin < seconds_; ++turn) {
        for (const size_t side : {turn % 2, 1 - turn % 2}) run(side, true);
      }
      const double base = least(costs[0]);
      const double most = length < kLong ? kMostSeconds : kMostShare * base;
      const BenchRatio& ratio = ratios.emplace_back(
          ratio_of(line("operator/%lld", length), line("%lld tokens, %lld heads of %lld", length, kHeads, kHeadDim),
                   costs[1], costs[0], 1 + most / base));
      const double more = (ratio.ratio - 1) * base;
      out << line("  %6lld   %8.5f   %8.5f   %7.4f   %4.0f us   %4.0f us%s\n", length, base, base + more, ratio.ratio,
                  1e6 * more, 1e6 * most, ratio.met() ? "" : "   MISSED");
      json["lengths"].push_back({{"length", length},
                                 {"cpp_seconds", base},
                                 {"operator_seconds", base + more},
                                 {"over_cpp", ratio.ratio},
                                 {"calls", costs[0].size()}});
    }
    out << "\n" << json.dump() << std::endl;
    return ratios;
  }

 private:
  std::vector<int64_t> lengths_ = {512, 8192};
  double seconds_ = 10;  // wall seconds for each length, both sides together
};

}  // namespace

std::unique_ptr<Benchmark> make_operator_benchmark() { return std::make_unique<OperatorBenchmark>(); }

}  // namespace annulus
