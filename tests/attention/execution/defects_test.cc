// Tests against defects that were found in another library and that no other test here rules out.
// defects.md lists all of these defects with their tests.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/kernels/detect.h"
#include "attention/pattern/block_map.h"
#include "attention/plan/layout.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/common/exactness.h"

namespace annulus::defects_test {
namespace {

using testing::as_exact;
using testing::Expected;
using testing::expected_of;
using testing::Inputs;
using testing::random_inputs;
using testing::rows_of;
using testing::run_everywhere;

PlanRequest request_of(const std::string& pattern, const AttentionShape& shape, int ranks = 1) {
  PlanRequest request;
  request.shape = shape;
  request.pattern = parse_pattern(pattern, "test");
  request.ranks = ranks;
  return request;
}

// Runs the forward and the backward on one rank.
OracleResult run_alone(const PlanRequest& request, const Inputs& in) {
  const std::shared_ptr<Communicator> self = make_self_communicator();
  AttentionCall call;
  call.request = request;
  call.comm = self.get();
  const AttentionOutput out = attention_forward(in.q, in.k, in.v, call);
  const AttentionGradients grads = attention_backward(in.dout, in.q, in.k, in.v, out);
  return {out.out, out.lse, grads.dq, grads.dk, grads.dv};
}

TEST(Defects, ConcurrentCallsGiveIdenticalResults) {
  constexpr int kThreads = 6;
  for (const char* pattern :
       {"{ kind = 'causal' }", "{ kind = 'dilated', segment_lengths = [16, 90], dilation_rates = [1, 3] }",
        "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2 }"}) {
    const PlanRequest request = request_of(pattern, {2, 4, 2, 131, 131, 0});
    const Inputs in = random_inputs(request.shape, 8, at::kFloat);  // shared by all threads
    std::vector<OracleResult> got(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] { got[static_cast<size_t>(i)] = run_alone(request, in); });
    }
    for (std::thread& t : threads) t.join();
    const OracleResult want = run_alone(request, in);
    for (const OracleResult& result : got) {
      EXPECT_TRUE(result.out.equal(want.out)) << pattern;
      EXPECT_TRUE(result.lse.equal(want.lse)) << pattern;
      EXPECT_TRUE(result.dq.equal(want.dq)) << pattern;
      EXPECT_TRUE(result.dk.equal(want.dk)) << pattern;
      EXPECT_TRUE(result.dv.equal(want.dv)) << pattern;
    }
  }
}

// There is no pool and no reference cycle: afterwards the caller holds the only reference to each input, and a returned
// tensor that the caller has dropped is freed.
TEST(Defects, CallsKeepNoReferencesToTensors) {
  for (const int ranks : {1, 3}) {
    const PlanRequest request = request_of("{ kind = 'causal' }", {1, 4, 2, 60, 60, 0}, ranks);
    const Inputs in = random_inputs(request.shape, 8, at::kFloat);
    std::vector<std::array<at::Tensor, 3>> inputs(static_cast<size_t>(ranks));
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> outs;
    std::mutex mutex;
    run_ranks(ranks, [&](Communicator& comm) {
      AttentionCall call;
      call.request = request;
      call.comm = &comm;
      const std::vector<Span> rows = query_layout(request).spans[static_cast<size_t>(comm.rank())];
      auto& [q, k, v] = inputs[static_cast<size_t>(comm.rank())];
      q = rows_of(in.q, 1, rows).requires_grad_(true);
      k = rows_of(in.k, 1, rows).requires_grad_(true);
      v = rows_of(in.v, 1, rows).requires_grad_(true);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor out = attention(q, k, v, call);
        out.sum().backward();
        const std::lock_guard lock(mutex);
        outs.emplace_back(out.getIntrusivePtr());
      }
    });
    for (const auto& of_rank : inputs) {
      for (const at::Tensor& t : of_rank) {
        EXPECT_EQ(t.use_count(), 1u);
        EXPECT_EQ(t.storage().use_count(), 1u);
      }
    }
    for (const auto& out : outs) EXPECT_TRUE(out.expired());
  }
}

TEST(Defects, InputsMayHaveAnyStrides) {
  const PlanRequest request = request_of("{ kind = 'window', left = 20, right = 3 }", {2, 4, 2, 70, 70, 0});
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const Expected want = expected_of(request, in);
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> others = {
      [](const at::Tensor& t) { return t.transpose(1, 2).contiguous().transpose(1, 2); },  // heads first
      [](const at::Tensor& t) { return t.transpose(2, 3).contiguous().transpose(2, 3); },  // channels apart
      [](const at::Tensor& t) {                                                            // part of something wider
        const at::Tensor wide = at::randn({t.size(0), t.size(1) + 5, t.size(2), t.size(3) + 3}, t.options());
        const at::Tensor part = wide.narrow(1, 2, t.size(1)).narrow(3, 1, t.size(3));
        part.copy_(t);
        return part;
      },
  };
  for (const auto& other : others) {
    EXPECT_TRUE(
        as_exact(run_alone(request, {other(in.q), other(in.k), other(in.v), other(in.dout)}), want, at::kDouble));
  }
}

TEST(Defects, EmptyAndTinySequencesInEverySchedule) {
  for (const auto& [schedule, within] : {std::pair{ScheduleKind::kRing, 0},
                                         {ScheduleKind::kAllGather, 0},
                                         {ScheduleKind::kGroupCast, 0},
                                         {ScheduleKind::kGroupCast, 2},
                                         {ScheduleKind::kDoubleRing, 2},
                                         {ScheduleKind::kAuto, 0}}) {
    for (const LayoutKind layout : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (const auto& [queries, keys] : {std::pair{0, 0}, {1, 1}, {3, 3}, {0, 5}, {5, 0}}) {
        for (const char* pattern : {"{ kind = 'full' }", "{ kind = 'causal' }",
                                    "{ kind = 'blocks', map = 'local', block = 16, window_blocks = 0 }",
                                    "{ kind = 'dilated', segment_lengths = [2, 8], dilation_rates = [1, 2] }"}) {
          PlanRequest request = request_of(pattern, {2, 4, 2, queries, keys, 0}, 4);
          request.schedule = schedule;
          request.within = within;
          request.layout = layout;
          const Inputs in = random_inputs(request.shape, 4, at::kDouble);
          const OracleResult got = run_everywhere(request, in, KernelKind::kAuto).result;
          EXPECT_TRUE(as_exact(got, expected_of(request, in), at::kDouble)) << request.text();
        }
      }
    }
  }
}

TEST(Defects, EmptyBatchesAndEmptySequencesGiveEmptyResults) {
  for (const char* pattern : {"{ kind = 'causal' }", "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 1 }"}) {
    for (const auto& [batch, length] : {std::pair{0, 8}, {2, 0}}) {
      const PlanRequest request = request_of(pattern, {batch, 4, 2, length, length, 0}, 2);
      run_ranks(2, [&](Communicator& comm) {
        AttentionCall call;
        call.request = request;
        call.comm = &comm;
        const at::Tensor q = at::zeros({batch, length / 2, 4, 8}), k = at::zeros({batch, length / 2, 2, 8});
        const AttentionOutput out = attention_forward(q, k, k, call);
        EXPECT_EQ(out.out.sizes(), q.sizes());
        const AttentionGradients grads = attention_backward(q, q, k, k, out);
        EXPECT_EQ(grads.dq.sizes(), q.sizes());
        EXPECT_EQ(grads.dk.sizes(), k.sizes());
        EXPECT_EQ(grads.dv.sizes(), k.sizes());
      });
    }
  }
}

// Each head group equals its branch alone, divided by the number of groups, forward and backward, with the same pairs
// dropped.
TEST(Defects, MeanCombineIgnoresDropout) {
  const AttentionShape shape{2, 4, 4, 40, 40, 0};
  const Inputs in = random_inputs(shape, 8, at::kDouble);
  const std::shared_ptr<Communicator> self = make_self_communicator();
  const auto run = [&](const std::string& pattern, double rate) {
    AttentionCall call;
    call.request = request_of(pattern, shape);
    call.comm = self.get();
    call.dropout = {.rate = rate, .seed = 5, .step = 2, .layer = 1, .first_row = 0};
    const auto leaf = [](const at::Tensor& t) { return t.clone().requires_grad_(true); };
    const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v), out = attention(q, k, v, call);
    out.backward(in.dout);
    return std::vector<at::Tensor>{out.detach(), q.grad(), k.grad(), v.grad()};
  };
  const auto branches = [](const std::string& lengths, const std::string& rates, const std::string& combine) {
    return "{ kind = 'dilated', segment_lengths = [" + lengths + "], dilation_rates = [" + rates + "], combine = '" +
           combine + "' }";
  };
  const auto mean = run(branches("8, 40", "1, 3", "mean"), 0.3);
  const auto kept = run(branches("8, 40", "1, 3", "mean"), 0);
  EXPECT_GT((mean[0] - kept[0]).abs().max().item<double>(), 1e-3) << "nothing was dropped";
  const std::vector<std::vector<at::Tensor>> alone = {run(branches("8", "1", "lse"), 0.3),
                                                      run(branches("40", "3", "lse"), 0.3)};
  for (const int64_t group : {0, 1}) {
    for (size_t i = 0; i < mean.size(); ++i) {
      const at::Tensor got = mean[i].narrow(2, 2 * group, 2);
      const at::Tensor want = alone[static_cast<size_t>(group)][i].narrow(2, 2 * group, 2) / 2.0;
      // Sums of products of 8 elements, which are normally distributed, times an element: less than 100 in sum.
      EXPECT_TRUE(testing::agrees(got, want, 100)) << "group " << group << ", result " << i;
    }
  }
}

PatternSpec with_map(const std::vector<uint8_t>& active, int64_t batch, int64_t heads, int64_t blocks) {
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.blocks = given_map(
      std::make_shared<const BlockMap>(block_map_from_dense(active.data(), 16, batch, heads, blocks, blocks)));
  return spec;
}

TEST(Defects, BlockMasksBroadcastOverBatchRowsAndHeads) {
  constexpr int64_t kBatch = 3, kHeads = 4, kBlocks = 6;
  PlanRequest request = request_of("{ kind = 'full' }", {kBatch, kHeads, 2, 90, 90, 0}, 2);
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const auto run = [&](const PatternSpec& pattern) {
    request.pattern = pattern;
    return run_everywhere(request, in, KernelKind::kAuto).result;
  };
  std::mt19937 random(1);
  const auto draw = [&](int64_t maps) {
    std::vector<uint8_t> active(static_cast<size_t>(maps * kBlocks * kBlocks));
    for (uint8_t& a : active) a = random() % 2;
    return active;
  };
  // [1, 1] and [1, heads] apply to all batch rows, [batch, 1] to all heads. Each is compared with the full mask.
  for (const auto& [batch, heads] : {std::pair{int64_t{1}, int64_t{1}}, {1, kHeads}, {kBatch, 1}}) {
    const std::vector<uint8_t> active = draw(batch * heads);
    std::vector<uint8_t> full;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t map = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
        const auto begin = active.begin() + map * kBlocks * kBlocks;
        full.insert(full.end(), begin, begin + kBlocks * kBlocks);
      }
    }
    const OracleResult got = run(with_map(active, batch, heads, kBlocks));
    const Expected want = expected_of(request, in);
    EXPECT_TRUE(as_exact(got, want, at::kDouble)) << request.text();
    EXPECT_TRUE(as_exact(run(with_map(full, kBatch, kHeads, kBlocks)), want, at::kDouble)) << request.text();
  }
  PatternSpec documents = causal_pattern();
  documents.documents = {{33, 57}};
  const OracleResult shared = run(documents);
  documents.documents = {{33, 57}, {33, 57}, {33, 57}};
  const OracleResult of_each = run(documents);
  const Expected want = expected_of(request, in);
  EXPECT_TRUE(as_exact(shared, want, at::kDouble));
  EXPECT_TRUE(as_exact(of_each, want, at::kDouble));
}

TEST(Defects, MixedDtypesAndDevicesAreRefusedBeforeSending) {
  const PlanRequest request = request_of("{ kind = 'full' }", {1, 4, 2, 768, 768, 0}, 3);
  const at::Tensor q = at::zeros({1, 256, 4, 64}), k = at::zeros({1, 256, 2, 64});
  const auto refused = [&](bool everywhere, const at::Tensor& keys, const at::Tensor& values, ErrorKind kind,
                           const std::string& part) {
    testing::expect_refused_everywhere(
        [&](Communicator& comm) {
          const bool wrong = everywhere || comm.rank() == 1;
          AttentionCall call;
          call.request = request;
          call.comm = &comm;
          try {
            attention_forward(q, wrong ? keys : k, wrong ? values : k, call);
          } catch (const Error&) {
            // The ranks exchanged only the texts they compare; no keys or values were sent.
            EXPECT_EQ(comm.stats().bytes_sent, 0);
            EXPECT_LT(comm.stats().collective_payload, static_cast<int64_t>(k.nbytes()) / 4);
            throw;
          }
        },
        kind, part);
  };
  const at::Tensor doubles = k.to(at::kDouble), elsewhere = at::empty(k.sizes(), k.options().device(at::kMeta));
  const std::string expected = "expected q, k, v of one dtype on one device, got Float on cpu and ";
  refused(true, doubles, doubles, ErrorKind::kPlan, "[attention] attention: " + expected + "k Double on cpu");
  refused(true, k, doubles, ErrorKind::kPlan, expected + "v Double on cpu");
  refused(true, elsewhere, k, ErrorKind::kPlan, expected + "k Float on meta");
  refused(false, k, elsewhere, ErrorKind::kPlan, "on rank 1: attention: " + expected + "v Float on meta");
  refused(false, doubles, k, ErrorKind::kPlan, "on rank 1: ");
}

TEST(Defects, RepeatedCallsReuseThePlan) {
  PatternSpec documents = causal_pattern();
  documents.documents = {{50, 27}};
  for (const PatternSpec& pattern :
       {documents, parse_pattern("{ kind = 'dilated', segment_lengths = [19, 70], dilation_rates = [1, 2] }", "test"),
        with_map(std::vector<uint8_t>(25, 1), 1, 1, 5)}) {
    PlanRequest request = request_of("{ kind = 'full' }", {1, 4, 2, 77, 77, 0});
    request.pattern = pattern;
    const Inputs in = random_inputs(request.shape, 8, at::kFloat);
    run_alone(request, in);
    const PlanStats first = plan_stats();
    run_alone(request, in);
    const PlanStats second = plan_stats();
    EXPECT_EQ(second.patterns_made, first.patterns_made);
    EXPECT_EQ(second.programs_made, first.programs_made);
    EXPECT_EQ(second.programs.hits, first.programs.hits + 1) << "the backward does not look for a program";
  }
}

TEST(Defects, SegmentsLongerThanTheSequenceActAsOneSegment) {
  const AttentionShape shape{1, 4, 2, 75, 75, 0};
  const Inputs in = random_inputs(shape, 8, at::kDouble);
  const auto pattern = [](const std::string& length) {
    return "{ kind = 'dilated', segment_lengths = [" + length + "], dilation_rates = [2], causal = true }";
  };
  const PlanRequest whole = request_of(pattern("75"), shape, 3),
                    beyond = request_of(pattern("1099511627776"), shape, 3);
  EXPECT_EQ(cached_pattern(beyond)->slices.size(), cached_pattern(whole)->slices.size());
  EXPECT_EQ(count_pairs(*cached_pattern(beyond)), count_pairs(*cached_pattern(whole)));
  EXPECT_TRUE(as_exact(run_everywhere(beyond, in, KernelKind::kAuto).result, expected_of(whole, in), at::kDouble));
}

TEST(Defects, ErrorsHaveOneForm) {
  const PlanRequest causal = request_of("{ kind = 'causal' }", {1, 4, 2, 30, 30, 0}, 4);
  const at::Tensor q = at::zeros({1, 30, 4, 8});
  const std::vector<std::function<void()>> wrong = {
      [] { parse_pattern("{ kind = 'casual' }", "--pattern"); },
      [] { parse_schedule("rung", "--schedule"); },
      [] { parse_kernel("attn", "--kernel"); },
      [] {
        validate(AttentionShape{1, 4, 3, 8, 8, 0});
      },
      [&] { make_program(causal, 4); },
      [&] {
        PlanRequest even = causal;
        even.even = true;
        validate(even);
      },
      [&] {
        PlanRequest documents = causal;
        documents.pattern.documents = {{31}};
        cached_plan(documents, 0);
      },
      [&] { attention_forward(q, q, q, {}); },
      [&] {
        const std::shared_ptr<Communicator> self = make_self_communicator();
        AttentionCall call;
        call.request = causal;
        call.request.ranks = 1;
        call.comm = self.get();
        attention_forward(q, q.narrow(2, 0, 2), q.narrow(1, 0, 29).narrow(2, 0, 2), call);
      },
      [] { run_ranks(0, [](Communicator&) {}); },
  };
  const std::regex form("\\[[a-z]+\\] [^\\s][^\n]{10,}");  // [module] one line
  for (size_t i = 0; i < wrong.size(); ++i) {
    try {
      wrong[i]();
      ADD_FAILURE() << "case " << i << " was accepted";
    } catch (const Error& error) {
      EXPECT_TRUE(std::regex_match(error.what(), form)) << error.what();
      EXPECT_TRUE(error.kind() == ErrorKind::kUsage || error.kind() == ErrorKind::kPlan) << error.what();
    }
  }
}

// Every caller gets the same answer: the fastest kernel that fits, or an error that lists all kernels that were looked
// for and why none fits.
TEST(Defects, KernelChoicesAndErrorsNameTheDetectedKernels) {
  std::vector<std::string> names;
  for (const DetectedKernel& kernel : detected_kernels()) names.push_back(kernel.name);
  EXPECT_EQ(names, (std::vector<std::string>{"FlashAttention 3", "cuDNN", "FlashAttention 2", "efficient", "CPU"}));
  EXPECT_TRUE(detected_kernels().back().found);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const KernelChoice choice = choose_kernel(KernelKind::kAuto, at::kCPU, type, 64, false);
    EXPECT_EQ(choice.kind, KernelKind::kCpu);
    EXPECT_NE(choice.reason.find("flash attention on CPU"), std::string::npos) << choice.reason;
  }
  const std::shared_ptr<Communicator> self = make_self_communicator();
  AttentionCall call;
  call.request = request_of("{ kind = 'full' }", {1, 2, 1, 9, 9, 0});
  call.comm = self.get();
  const at::TensorOptions elsewhere = at::TensorOptions().device(at::kMeta);
  const at::Tensor q = at::empty({1, 9, 2, 8}, elsewhere), k = at::empty({1, 9, 1, 8}, elsewhere);
  try {
    attention_forward(q, k, k, call);
    FAIL() << "a kernel for the device meta was found";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    names.pop_back();  // the CPU's
    for (const std::string& name : names) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST(Defects, HugeLogitsStayFiniteInEveryPrecision) {
  const PlanRequest request = request_of("{ kind = 'causal' }", {1, 4, 2, 65, 65, 0}, 3);
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double shift : {1e4, -1e4}) {
      const Inputs in = random_inputs(request.shape, 8, type);
      // One channel gives every pair a score near `shift`.
      in.q.select(3, 0).fill_(1);
      in.k.select(3, 0).fill_(shift);
      const OracleResult got = run_everywhere(request, in, KernelKind::kAuto, 1.0).result;
      for (const at::Tensor& t : {got.out, got.lse, got.dq, got.dk, got.dv}) {
        EXPECT_TRUE(t.isfinite().all().item<bool>()) << toString(type) << " " << shift;
      }
      // A mean of values does not exceed the largest value.
      EXPECT_LE(got.out.abs().max().item<double>(), in.v.abs().max().item<double>() * 1.01);
      EXPECT_LT((got.lse - in.k[0][0][0][0].item<double>()).abs().max().item<double>(), 100);
    }
  }
}

}  // namespace
}  // namespace annulus::defects_test
