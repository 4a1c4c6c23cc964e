// Implements operator.h.
#include "benchmarks/operator.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "attention/execution/attention.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"

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

}  // namespace

std::vector<BenchRatio> run_operator_bench(const OperatorBenchOptions& options, std::ostream& out) {
  at::set_num_threads(1);
  const std::shared_ptr<Communicator> self = make_self_communicator();
  std::vector<BenchRatio> ratios;
  std::array<char, 256> text{};
  nlohmann::json json = {{"bench", "operator"}, {"heads", options.heads}, {"head_dim", options.head_dim}};
  out << "torch.ops.annulus.attention compared with the C++ call, causal, fp32, one thread; least CPU seconds, forward "
         "and backward\n\n  length   C++ call   operator   over it   more by   goal\n";
  for (const int64_t length : options.lengths) {
    AttentionCall call;
    call.comm = self.get();
    call.request.shape = {1, options.heads, options.heads, length, length, 0};
    call.request.pattern = parse_pattern(kPattern, "pattern");
    at::Tensor q = at::randn({1, length, options.heads, options.head_dim}), k = at::randn_like(q),
               v = at::randn_like(q);
    const at::Tensor dout = at::randn_like(q);
    for (at::Tensor* t : {&q, &k, &v}) t->requires_grad_(true);
    std::array<std::vector<double>, 2> costs;  // of the C++ call, of the operator
    const auto run = [&](size_t side) {
      for (at::Tensor* t : {&q, &k, &v}) t->mutable_grad() = at::Tensor();
      const double begin = thread_cpu_seconds();
      (side == 0 ? attention(q, k, v, call) : by_operator(q, k, v)).backward(dout);
      costs[side].push_back(thread_cpu_seconds() - begin);
    };
    for (const size_t side : {0, 1}) run(side);
    for (auto& of_side : costs) of_side.clear();  // the first calls plan, prove and allocate
    const double begin = wall_seconds();
    for (size_t turn = 0; turn < kFewestCalls || wall_seconds() - begin < options.seconds; ++turn) {
      for (const size_t side : {turn % 2, 1 - turn % 2}) run(side);
    }
    const double base = *std::min_element(costs[0].begin(), costs[0].end());
    const double most = length < kLong ? kMostSeconds : kMostShare * base;
    std::snprintf(text.data(), text.size(), "%lld tokens, %lld heads of %lld", static_cast<long long>(length),
                  static_cast<long long>(options.heads), static_cast<long long>(options.head_dim));
    const BenchRatio& ratio = ratios.emplace_back(
        ratio_of("operator/" + std::to_string(length), text.data(), costs[1], costs[0], 1 + most / base));
    const double more = (ratio.ratio - 1) * base;
    std::snprintf(text.data(), text.size(), "  %6lld   %8.5f   %8.5f   %7.4f   %4.0f us   %4.0f us%s\n",
                  static_cast<long long>(length), base, base + more, ratio.ratio, 1e6 * more, 1e6 * most,
                  ratio.met() ? "" : "   MISSED");
    out << text.data();
    json["lengths"].push_back({{"length", length},
                               {"cpp_seconds", base},
                               {"operator_seconds", base + more},
                               {"over_cpp", ratio.ratio},
                               {"calls", costs[0].size()}});
  }
  out << "\n" << json.dump() << std::endl;
  return ratios;
}

}  // namespace annulus
