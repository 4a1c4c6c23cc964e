// Compares MultiheadAttention over 1 to 4 ranks with a plain LibTorch implementation in fp64, forward and backward, and
// tests saving and several threads in one module. cost_test.cc tests the cost, refusals_test.cc what is refused.
#include "attention/modules/multihead_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "attention/oracle/oracle.h"
#include "attention/tiles/kernel.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/tensor_files/block_map_file.h"
#include "tests/attention/modules/operator_counter.h"
#include "tests/attention/modules/positions.h"
#include "tests/attention/modules/small_module.h"
#include "tests/common/exactness.h"

namespace annulus::multihead_attention_test {
namespace {

using testing::made;
using testing::OperatorCounter;
using testing::small;

// Rotates pairs (i, i + D/2) by position / base^(2i/D).
at::Tensor turned(const at::Tensor& x, int64_t offset, double base) {
  const int64_t half = x.size(3) / 2;
  const at::Tensor position = at::arange(x.size(1), at::kDouble) + static_cast<double>(offset);
  at::Tensor out = x.clone();
  for (int64_t i = 0; i < half; ++i) {
    const at::Tensor angle =
        (position / std::pow(base, 2.0 * static_cast<double>(i) / static_cast<double>(2 * half))).view({1, -1, 1});
    const at::Tensor a = x.select(3, i), b = x.select(3, i + half);
    out.select(3, i).copy_(a * angle.cos() - b * angle.sin());
    out.select(3, i + half).copy_(a * angle.sin() + b * angle.cos());
  }
  return out;
}

// Computes on the whole sequence what the module should compute.
at::Tensor plain(const MultiheadAttentionImpl& m, const at::Tensor& x, const at::Tensor& memory, int64_t offset = 0) {
  const MultiheadAttentionOptions& o = m.options();
  const int64_t B = x.size(0), n = x.size(1), keys = memory.size(1), H = o.heads, Hk = o.kv_heads, D = o.head_dim;
  const auto linear = [](const at::Tensor& t, const torch::nn::Linear& l) {
    const at::Tensor y = at::matmul(t, l->weight.t());
    return l->bias.defined() ? y + l->bias : y;
  };
  at::Tensor q = linear(x, m.q_proj).view({B, n, H, D});
  at::Tensor k = linear(memory, m.k_proj).view({B, keys, Hk, D});
  at::Tensor v = linear(memory, m.v_proj).view({B, keys, Hk, D});
  if (o.rotary_base > 0) q = turned(q, offset, o.rotary_base), k = turned(k, 0, o.rotary_base);
  k = k.repeat_interleave(H / Hk, 2), v = v.repeat_interleave(H / Hk, 2);
  const Count count = count_of(o.pattern, {B, H, Hk, n, keys, offset});
  at::Tensor bias = at::zeros({B, H, n, keys}, at::kDouble);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < keys; ++j) {
          bias.index_put_({at::tensor(b), at::tensor(h), at::tensor(i), at::tensor(j)},
                          at::tensor(std::log(static_cast<double>(count(b, h, i, j)))));
        }
      }
    }
  }
  const double scale = o.scale != 0 ? o.scale : 1 / std::sqrt(static_cast<double>(D));
  at::Tensor scores = at::matmul(q.transpose(1, 2), k.permute({0, 2, 3, 1})) * scale;
  if (o.softcap > 0) scores = (scores / o.softcap).tanh() * o.softcap;
  scores = scores + bias;
  if (o.learned_sinks) scores = at::cat({scores, m.sinks.view({1, H, 1, 1}).expand({B, H, n, 1})}, -1);
  const at::Tensor p = scores.softmax(-1).narrow(-1, 0, keys);
  at::Tensor out = at::matmul(p, v.transpose(1, 2)).transpose(1, 2).reshape({B, n, H * D});
  out = out / static_cast<double>(output_divisor(o.pattern));
  if (o.norm) {
    const at::Tensor centred = out - out.mean(-1, true);
    out = centred / (centred.square().mean(-1, true) + o.norm_eps).sqrt() * m.norm->weight + m.norm->bias;
  }
  return linear(out, m.out_proj);
}

struct Outcome {
  at::Tensor out;
  std::vector<at::Tensor> gradients;  // of x, memory (if it is another tensor) and the parameters
};

std::vector<at::Tensor> leaves(const MultiheadAttention& m, const at::Tensor& x, const at::Tensor& memory) {
  std::vector<at::Tensor> all = {x};
  if (memory.defined()) all.push_back(memory);
  for (const at::Tensor& p : m->parameters()) all.push_back(p);
  return all;
}

Outcome plain_outcome(const MultiheadAttention& m, const at::Tensor& x, const at::Tensor& memory,
                      const at::Tensor& dout, int64_t offset = 0) {
  const at::Tensor a = x.detach().clone().requires_grad_();
  const at::Tensor b = memory.defined() ? memory.detach().clone().requires_grad_() : at::Tensor();
  const at::Tensor out = plain(*m, a, b.defined() ? b : a, offset);
  return {out.detach(), torch::autograd::grad({out}, leaves(m, a, b), {dout})};
}

// Runs the module on all ranks, each with its rows, puts the results together and adds the gradients of parameters.
Outcome outcome_over(int ranks, const MultiheadAttention& m, const at::Tensor& x, const at::Tensor& memory,
                     const at::Tensor& dout, int64_t offset = 0) {
  Outcome all;
  all.out = at::full(dout.sizes(), NAN, at::kDouble);
  std::mutex mutex;
  run_ranks(ranks, [&](Communicator& comm) {
    const auto rows_of = [&](const at::Tensor& t) {
      return positions_of(make_layout(m->options().layout, t.size(1), ranks), comm.rank());
    };
    const at::Tensor rows = rows_of(x);
    const at::Tensor a = x.index_select(1, rows).requires_grad_();
    at::Tensor b, memory_rows;
    if (memory.defined()) memory_rows = rows_of(memory), b = memory.index_select(1, memory_rows).requires_grad_();
    const AttentionScope scope{.comm = comm, .query_offset = offset};
    const at::Tensor out = b.defined() ? m->forward(a, b, scope) : m->forward(a, scope);
    const auto grads = torch::autograd::grad({out}, leaves(m, a, b), {dout.index_select(1, rows)});
    const std::lock_guard lock(mutex);
    all.out.index_copy_(1, rows, out.detach());
    if (all.gradients.empty()) {
      all.gradients.push_back(at::zeros_like(x));
      if (b.defined()) all.gradients.push_back(at::zeros_like(memory));
      for (const auto& p : m->parameters()) all.gradients.push_back(at::zeros_like(p).detach());
    }
    size_t i = 0;
    all.gradients[i].index_copy_(1, rows, grads[i]), ++i;
    if (b.defined()) all.gradients[i].index_copy_(1, memory_rows, grads[i]), ++i;
    for (; i < grads.size(); ++i) all.gradients[i].add_(grads[i]);
  });
  return all;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

// Compares with another implementation or number of ranks. Gradients of weights are sums over all positions, and that
// of the keys' bias is 0 because its terms cancel, so that all are compared relative to the largest result.
void expect_alike(const Outcome& got, const Outcome& want) {
  double terms = testing::largest(want.out);
  for (const at::Tensor& g : want.gradients) terms = std::max(terms, testing::largest(g));
  EXPECT_TRUE(testing::agrees(got.out, want.out, terms));
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    EXPECT_TRUE(testing::agrees(got.gradients[i], want.gradients[i], terms)) << "gradient " << i;
  }
}

TEST(MultiheadAttention, SelfAttentionEqualsPlainLibTorchOnAnyNumberOfRanks) {
  for (const int variant : {0, 1, 2, 3, 4, 5}) {
    MultiheadAttentionOptions o = small();
    if (variant >= 4) {
      o.softcap = 0.8, o.learned_sinks = true, o.recompute = variant == 5;
      o.pattern = parse_pattern("{ kind = 'window', left = 3, right = 0 }", "test");
    }
    if (variant == 1) o.rotary_base = 100, o.layout = LayoutKind::kZigzag, o.schedule = ScheduleKind::kRing;
    if (variant == 2) {
      o.norm = true, o.bias = false, o.scale = 0.7, o.rotary_base = 10, o.layout = LayoutKind::kStriped;
      o.pattern = parse_pattern("{ kind = 'window', left = 5, right = 2 }", "test");
    }
    if (variant == 3) {
      o.norm = true;
      o.pattern = parse_pattern(
          "{ kind = 'dilated', segment_lengths = [4, 8], dilation_rates = [1, 1], combine = 'mean' }", "test");
    }
    MultiheadAttention m = made(o);
    if (o.learned_sinks) m->sinks.set_data(at::randn({o.heads}, at::kDouble));
    const at::Tensor x = at::randn({2, 17, 12}, at::kDouble), dout = at::randn({2, 17, 12}, at::kDouble);
    const Outcome want = plain_outcome(m, x, {}, dout);
    for (const int ranks : {1, 2, 3, 4}) {
      SCOPED_TRACE("variant " + std::to_string(variant) + ", ranks " + std::to_string(ranks));
      expect_alike(outcome_over(ranks, m, x, {}, dout), want);
    }
  }
}

TEST(MultiheadAttention, CrossAttentionEqualsPlainLibTorch) {
  MultiheadAttentionOptions o = small();
  o.memory_dim = 10, o.pattern = {}, o.rotary_base = 50;
  const MultiheadAttention full = made(o);
  o.pattern = causal_pattern(), o.recompute = true;
  const MultiheadAttention causal = made(o);
  const at::Tensor x = at::randn({2, 9, 12}, at::kDouble), memory = at::randn({2, 14, 10}, at::kDouble);
  const at::Tensor dout = at::randn({2, 9, 12}, at::kDouble);
  for (const int ranks : {1, 2, 4}) {
    expect_alike(outcome_over(ranks, full, x, memory, dout), plain_outcome(full, x, memory, dout));
    expect_alike(outcome_over(ranks, causal, x, memory, dout, 5), plain_outcome(causal, x, memory, dout, 5));
    expect_alike(outcome_over(ranks, causal, x, memory, dout, kBottomRight), plain_outcome(causal, x, memory, dout, 5));
  }
  EXPECT_THROW(outcome_over(1, full, x, {}, dout), Error);
}

TEST(MultiheadAttention, RecomputesProjectionsButNeverAttention) {
  MultiheadAttentionOptions o = small();
  o.rotary_base = 100, o.norm = true, o.dropout = 0.3, o.seed = 9;
  o.kernel = KernelKind::kCpu;
  const MultiheadAttention kept = made(o);
  o.recompute = true;
  MultiheadAttention recomputed(o);
  recomputed->to(at::kDouble);
  {
    const at::NoGradGuard no_gradients;
    for (size_t i = 0; i < kept->parameters().size(); ++i) recomputed->parameters()[i].copy_(kept->parameters()[i]);
  }
  const at::Tensor x = at::randn({2, 17, 12}, at::kDouble), dout = at::randn({2, 17, 12}, at::kDouble);
  for (const int ranks : {1, 3}) {
    const Outcome a = outcome_over(ranks, kept, x, {}, dout), b = outcome_over(ranks, recomputed, x, {}, dout);
    expect_alike(b, a);
  }

  o.dropout = 0;
  for (const bool recompute : {false, true}) {
    o.recompute = recompute;
    MultiheadAttention m = made(o);
    const auto comm = make_self_communicator();
    const at::Tensor a = x.clone().requires_grad_();
    int forwards = 0, products = 0;
    at::Tensor out;
    {
      const OperatorCounter counter(kForwardRecord);
      out = m->forward(a, {.comm = *comm});
      forwards = counter.count();
    }
    EXPECT_GT(forwards, 0);
    {
      const OperatorCounter counter(kForwardRecord);
      torch::autograd::grad({out}, {a}, {dout}, /*retain_graph=*/true);
      EXPECT_EQ(counter.count(), 0) << "attention ran again";
    }
    {
      const OperatorCounter counter("aten::linear");
      torch::autograd::grad({out}, {a}, {dout});
      products = counter.count();
    }
    EXPECT_EQ(products, recompute ? 3 : 0);
  }
}

TEST(MultiheadAttention, DropoutIsIndependentOfRanksAndOffInEvaluation) {
  MultiheadAttentionOptions o = small();
  o.dropout = 0.4, o.seed = 7, o.layer = 3;
  MultiheadAttention m = made(o);
  const at::Tensor x = at::randn({2, 13, 12}, at::kDouble), dout = at::randn({2, 13, 12}, at::kDouble);
  const Outcome one = outcome_over(1, m, x, {}, dout);
  EXPECT_GT(difference(one.out, plain_outcome(m, x, {}, dout).out), 1e-3);
  for (const int ranks : {2, 4}) expect_alike(outcome_over(ranks, m, x, {}, dout), one);
  const auto comm = make_self_communicator();
  EXPECT_GT(difference(m->forward(x, {.comm = *comm, .step = 1}), one.out), 1e-3) << "every step draws its own dropout";
  m->eval();
  expect_alike(outcome_over(2, m, x, {}, dout), plain_outcome(m, x, {}, dout));
}

TEST(MultiheadAttention, DocumentsMayBeGivenPerCall) {
  MultiheadAttention m = made(small());
  MultiheadAttentionOptions o = small();
  o.pattern.documents = {{5, 8}, {13}};
  MultiheadAttention fixed(o);
  fixed->to(at::kDouble);
  {
    const at::NoGradGuard no_gradients;
    for (size_t i = 0; i < m->parameters().size(); ++i) fixed->parameters()[i].copy_(m->parameters()[i]);
  }
  const at::Tensor x = at::randn({2, 13, 12}, at::kDouble);
  run_ranks(2, [&](Communicator& comm) {
    const at::Tensor mine = x.index_select(1, positions_of(make_layout(LayoutKind::kContiguous, 13, 2), comm.rank()));
    const at::Tensor a = m->forward(mine, {.comm = comm, .documents = {{5, 8}, {13}}});
    EXPECT_EQ(difference(a, fixed->forward(mine, {.comm = comm})), 0);
    EXPECT_GT(difference(a, m->forward(mine, {.comm = comm})), 1e-3);
  });
}

TEST(MultiheadAttention, AcceptsUnevenContiguousParts) {
  MultiheadAttentionOptions o = small();
  o.rotary_base = 100;
  MultiheadAttention m = made(o);
  const at::Tensor x = at::randn({1, 11, 12}, at::kDouble);
  const auto self = make_self_communicator();
  const at::Tensor want = m->forward(x, {.comm = *self});
  const std::vector<int64_t> lengths = {7, 0, 4}, begins = {0, 7, 7};
  run_ranks(3, [&](Communicator& comm) {
    const int64_t begin = begins[comm.rank()], n = lengths[comm.rank()];
    const at::Tensor mine = x.narrow(1, begin, n);
    EXPECT_TRUE(testing::agrees(m->forward(mine, {.comm = comm}), want.narrow(1, begin, n), testing::largest(want)));
  });
  o.layout = LayoutKind::kZigzag;
  const MultiheadAttention zigzag = made(o);
  try {
    run_ranks(3, [&](Communicator& comm) {
      zigzag->forward(x.narrow(1, begins[comm.rank()], lengths[comm.rank()]), {.comm = comm});
    });
    FAIL() << "parts that do not fit zigzag were accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kPlan);
    EXPECT_NE(std::string(e.what()).find("7, 0, 4"), std::string::npos) << e.what();
  }
}

TEST(MultiheadAttention, EmptySequencesGiveEmptyOutputs) {
  for (const bool recompute : {false, true}) {
    MultiheadAttentionOptions o = small();
    o.rotary_base = 100, o.norm = true, o.recompute = recompute;
    MultiheadAttention m = made(o);
    for (const int ranks : {1, 2}) {
      run_ranks(ranks, [&](Communicator& comm) {
        const at::Tensor x = at::zeros({2, 0, 12}, at::kDouble).requires_grad_();
        const at::Tensor out = m->forward(x, {.comm = comm});
        EXPECT_EQ(out.sizes(), x.sizes());
        const auto grads = torch::autograd::grad({out.sum()}, {x, m->q_proj->weight});
        EXPECT_EQ(grads[0].sizes(), x.sizes());
        EXPECT_EQ(grads[1].abs().max().item<double>(), 0);
      });
    }
  }
}

TEST(MultiheadAttention, ThreadsShareOneModule) {
  MultiheadAttentionOptions o = small();
  o.rotary_base = 100, o.norm = true;
  for (const bool recompute : {false, true}) {
    o.recompute = recompute;
    MultiheadAttention m = made(o);
    constexpr int kThreads = 4, kTimes = 10;
    std::vector<at::Tensor> x, dout;
    std::vector<Outcome> want(kThreads), got(kThreads);
    const auto run = [&](int i) {
      const auto comm = make_self_communicator();
      const at::Tensor a = x[i].detach().clone().requires_grad_();
      const at::Tensor out = m->forward(a, {.comm = *comm});
      return Outcome{out.detach(), torch::autograd::grad({out}, leaves(m, a, {}), {dout[i]})};
    };
    for (int i = 0; i < kThreads; ++i) {
      x.push_back(at::randn({2, 20 + i, 12}, at::kDouble));
      dout.push_back(at::randn({2, 20 + i, 12}, at::kDouble));
      want[i] = run(i);
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        for (int time = 0; time < kTimes; ++time) got[i] = run(i);
      });
    }
    for (std::thread& t : threads) t.join();
    for (int i = 0; i < kThreads; ++i) expect_alike(got[i], want[i]);
  }
}

TEST(MultiheadAttention, LoadRestoresTheSavedModule) {
  MultiheadAttentionOptions o = small();
  o.norm = true, o.rotary_base = 100;
  const MultiheadAttention saved = made(o);
  std::stringstream file;
  torch::save(saved, file);
  MultiheadAttention loaded(o);
  loaded->to(at::kDouble);
  torch::load(loaded, file);
  const at::Tensor x = at::randn({1, 9, 12}, at::kDouble);
  const auto comm = make_self_communicator();
  const AttentionScope scope{.comm = *comm};
  EXPECT_EQ(difference(loaded->forward(x, scope), saved->forward(x, scope)), 0);
  const auto copy = std::dynamic_pointer_cast<MultiheadAttentionImpl>(saved->clone());
  EXPECT_EQ(difference(copy->forward(x, scope), saved->forward(x, scope)), 0);
  EXPECT_FALSE(copy->q_proj->weight.is_same(saved->q_proj->weight));

  // Options of how to compute may differ from the saved ones; options of what to compute may not.
  o.schedule = ScheduleKind::kRing, o.layout = LayoutKind::kZigzag, o.recompute = true;
  MultiheadAttention other(o);
  file.clear(), file.seekg(0);
  EXPECT_NO_THROW(torch::load(other, file));
  const auto refused = [&](const MultiheadAttentionOptions& options, const std::string& text) {
    MultiheadAttention m(options);
    const at::Tensor before = m->q_proj->weight.detach().clone();
    file.clear(), file.seekg(0);
    try {
      torch::load(m, file);
      ADD_FAILURE() << "loaded: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInput);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
    EXPECT_EQ(difference(m->q_proj->weight, before), 0);
  };
  // A pattern may have been written in another way when it was saved.
  MultiheadAttentionOptions window = o;
  window.pattern = parse_pattern("{ kind = \"window\", left = 5, right = 0 }", "");
  std::string before = window.text();
  EXPECT_TRUE(window.same_as(before));
  before.insert(before.size() - 2, ", causal = true");
  EXPECT_TRUE(window.same_as(before));
  EXPECT_FALSE(window.same_as(before + "x"));
  EXPECT_FALSE(o.same_as(before));

  MultiheadAttentionOptions changed = o;
  changed.pattern = {};
  refused(changed, "pattern");
  changed = o, changed.rotary_base = 10000;
  refused(changed, "rotary_base = 10000");
  changed = o, changed.head_dim = 8;
  refused(changed, "head_dim = 8");
  std::stringstream foreign;
  torch::save(torch::nn::Linear(2, 2), foreign);
  EXPECT_THROW(torch::load(other, foreign), Error);
}

TEST(MultiheadAttention, ToConvertsTheWholeModule) {
  MultiheadAttentionOptions o = small();
  o.norm = true, o.rotary_base = 100;
  MultiheadAttention m(o);
  const auto comm = make_self_communicator();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    m->to(type);
    const at::Tensor out = m->forward(at::randn({1, 9, 12}).to(type), {.comm = *comm});
    EXPECT_EQ(out.scalar_type(), type);
  }
  try {
    m->forward(at::randn({1, 9, 12}), {.comm = *comm});
    FAIL() << "a double module accepted a float tensor";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kPlan);
    EXPECT_NE(std::string(e.what()).find("x is Float on cpu, but the module is Double on cpu"), std::string::npos)
        << e.what();
  }
}

TEST(MultiheadAttention, TakesABlockMaskFileOnceItIsRead) {
  MultiheadAttentionOptions o = small();
  o.pattern = parse_pattern(
      "{ kind = 'blocks', map = 'bigbird', block = 16, window_blocks = 0, global_blocks = 1, random_blocks = 1 }",
      "test");
  const AttentionShape shape{.batch = 1, .heads = 4, .kv_heads = 2, .q_len = 70, .k_len = 70};
  const std::string path = ::testing::TempDir() + "/module_mask.safetensors";
  write_block_map(path, make_block_map(o.pattern, shape));
  const MultiheadAttention named = made(o);
  const PatternSpec of_file =
      parse_pattern("{ kind = 'blocks', map = 'file', block = 16, file = '" + path + "' }", "test");
  for (const bool in_union : {false, true}) {
    o.pattern = of_file;
    if (in_union) o.pattern = {}, o.pattern.kind = PatternSpec::Kind::kUnion, o.pattern.members = {of_file};
    try {
      MultiheadAttention m(o);
      ADD_FAILURE() << "made without the file's mask";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPlan);
      const std::string text = e.what();
      EXPECT_NE(text.find("the block mask in " + path + " was not read"), std::string::npos) << text;
      EXPECT_NE(text.find("read_block_maps(pattern, shape)"), std::string::npos) << text;
    }
  }
  o.pattern = read_block_maps(of_file, shape);
  MultiheadAttention m(o);
  m->to(at::kDouble);
  {
    const at::NoGradGuard no_gradients;
    for (size_t i = 0; i < m->parameters().size(); ++i) m->parameters()[i].copy_(named->parameters()[i]);
  }
  const at::Tensor x = at::randn({1, 70, 12}, at::kDouble), dout = at::randn({1, 70, 12}, at::kDouble);
  for (const int ranks : {1, 3}) expect_alike(outcome_over(ranks, m, x, {}, dout), plain_outcome(named, x, {}, dout));
}

TEST(MultiheadAttention, PrintsItsOptions) {
  std::ostringstream text;
  text << MultiheadAttention(small());
  const std::string head =
      "annulus::MultiheadAttention(dim = 12, heads = 4, kv_heads = 2, head_dim = 6, memory_dim = 12, bias = true, norm "
      "= "
      "false, rotary_base = 0, scale = 0, pattern = { kind = \"causal\" }, layout = \"contiguous\", schedule = "
      "\"auto\")";
  EXPECT_EQ(text.str().substr(0, head.size()), head);
  EXPECT_NE(text.str().find("(q_proj): torch::nn::Linear(in_features=12, out_features=24"), std::string::npos);
}

}  // namespace
}  // namespace annulus::multihead_attention_test
