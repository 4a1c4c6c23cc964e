// Tests of generation: cached decoding over several numbers of ranks against a forward over the whole sequence, and
// every pattern.
#include "runtime/inference/generator.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>
#include <memory>
#include <optional>

#include "attention/oracle/oracle.h"
#include "attention/plan/layout.h"
#include "attention/testing/any_pattern.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "memory/peak_bytes.h"
#include "tests/common/exactness.h"
#include "tests/runtime/model/flat_parameters.h"

namespace annulus::generator_test {
namespace {

ModelShape tiny() { return {.layers = 2, .dim = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64}; }

// In fp64, in which the same logits must come from cached keys as from all tokens at once.
Model lively_model() {
  Model model(tiny(), 3, at::kDouble);
  scale_matrices(model.parameters(), 5);
  return model;
}

// With a soft cap that scores come near to, and sinks.
Model model_with_sinks() {
  ModelShape shape = tiny();
  shape.softcap = 0.8, shape.attention_sinks = true;
  Model model(shape, 3, at::kDouble);
  scale_matrices(model.parameters(), 5);
  for (const NamedTensor& p : model.parameters().value_views()) {
    if (p.name.ends_with("sinks")) at::Tensor(p.tensor).copy_(at::arange(4).sub(1));
  }
  return model;
}

std::vector<int64_t> some_tokens(int64_t n) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back((i * i * 7 + 3 * i) % 64);
  return out;
}

std::vector<int64_t> first(const std::vector<int64_t>& tokens, int64_t n) {
  return {tokens.begin(), tokens.begin() + n};
}

CacheSettings cache_of(int64_t context) { return {.context = context, .positions = context}; }

// Generation on one rank.
struct Alone {
  Alone(const Model& model, const std::vector<PatternSpec>& patterns, const CacheSettings& settings)
      : self(make_self_communicator()), generator(model, patterns, settings, *self) {}
  Alone(const Model& model, const std::vector<PatternSpec>& patterns, int64_t context)
      : Alone(model, patterns, cache_of(context)) {}

  std::shared_ptr<Communicator> self;
  Generator generator;
};

// Feeds the first `prompt` tokens at once and the others one by one, and returns what feed() returns after each call.
// All ranks must get the same bits.
std::vector<at::Tensor> logits_over(int ranks, const Model& model, const std::vector<PatternSpec>& patterns,
                                    const CacheSettings& settings, const std::vector<int64_t>& tokens, int64_t prompt) {
  std::vector<std::vector<at::Tensor>> logits(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& comm) {
    Generator generator(model, patterns, settings, comm);
    std::vector<at::Tensor>& own = logits[static_cast<size_t>(comm.rank())];
    own.push_back(generator.feed(first(tokens, prompt)));
    for (size_t i = static_cast<size_t>(prompt); i < tokens.size(); ++i) own.push_back(generator.feed({tokens[i]}));
  });
  for (const std::vector<at::Tensor>& of_rank : logits) {
    for (size_t i = 0; i < of_rank.size(); ++i) EXPECT_TRUE(of_rank[i].equal(logits[0][i])) << "call " << i;
  }
  return logits[0];
}

// Returns the logits after the last token from all tokens at once. A query sees itself and `left` keys before it, whose
// keys and values have been rounded to `stored`.
at::Tensor whole(const Model& model, std::vector<int64_t> tokens, int64_t left,
                 std::optional<at::ScalarType> stored = {}) {
  const auto n = static_cast<int64_t>(tokens.size());
  const at::Tensor row = at::from_blob(tokens.data(), {1, n}, at::kLong).clone();
  const at::Tensor i = at::arange(n).unsqueeze(1);
  const at::Tensor j = at::arange(n).unsqueeze(0);
  const at::Tensor mask = j.le(i).logical_and(j.ge(i.sub(left)));
  const Attend attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t, const at::Tensor&) {
    const auto heads_first = [](const at::Tensor& t, int64_t repeat) {
      return t.transpose(1, 2).repeat_interleave(repeat, 1);
    };
    const auto cached = [&](const at::Tensor& t) { return stored ? t.to(*stored).to(t.scalar_type()) : t; };
    return Attended{
        {at::scaled_dot_product_attention(heads_first(q, 1), heads_first(cached(k), 2), heads_first(cached(v), 2), mask)
             .transpose(1, 2)
             .contiguous()}};
  };
  return model.logits(row, model.rotary(at::arange(n)), attend, /*last_only=*/true)[0].detach();
}

// For models in fp64.
void expect_near(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_EQ(got.scalar_type(), at::kDouble);
  EXPECT_TRUE(testing::agrees(got, want));
}

TEST(Generator, NarrowTypesAreAsExactAsTheFullForward) {
  const Model exact = lively_model();
  const std::vector<PatternSpec> pattern = {causal_pattern()};
  const at::Tensor want = whole(exact, some_tokens(40), 1000);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    Model narrow(exact.shape(), 3, type);
    copy_values(exact.parameters(), narrow.parameters());
    const at::Tensor got = Alone(narrow, pattern, 100).generator.feed(some_tokens(40));
    EXPECT_TRUE(testing::as_exact_as(got, whole(narrow, some_tokens(40), 1000), want)) << type;
  }
}

// The memory that is planned for a prompt is that of the ring.
TEST(Generator, PromptsOverRanksGoByTheRing) {
  run_ranks(3, [&](Communicator& comm) {
    const std::vector<PatternSpec> patterns = {causal_pattern(),
                                               parse_pattern("{ kind = \"window\", left = 5, right = 0 }", "test")};
    KvCache cache(tiny(), patterns, cache_of(400), at::TensorOptions(at::kDouble), comm);
    for (const PlanRequest& request : cache.begin_divided(270).distinct) {
      EXPECT_EQ(request.schedule, ScheduleKind::kRing);
    }
  });
}

TEST(Generator, EqualsTheFullForward) {
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(300);
  struct Case {
    const char* pattern;
    int64_t left;
  };
  for (const Case& c : {Case{"{ kind = \"causal\" }", 1000}, Case{"{ kind = \"window\", left = 5, right = 0 }", 5}}) {
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(std::string(c.pattern) + " over " + std::to_string(ranks));
      const std::vector<at::Tensor> logits =
          logits_over(ranks, model, {parse_pattern(c.pattern, "test")}, cache_of(400), tokens, 270);
      for (size_t i = 0; i < logits.size(); i += 10) {
        expect_near(logits[i], whole(model, first(tokens, 270 + static_cast<int64_t>(i)), c.left));
      }
    }
  }
}

// Returns the logits after the last token from all tokens at once, with the oracle's attention.
at::Tensor whole_by_oracle(const Model& model, std::vector<int64_t> tokens, const std::vector<PatternSpec>& patterns,
                           int64_t context) {
  const auto n = static_cast<int64_t>(tokens.size());
  const at::Tensor row = at::from_blob(tokens.data(), {1, n}, at::kLong).clone();
  const AttentionShape shape{.batch = 1, .heads = 4, .kv_heads = 2, .q_len = context, .k_len = context};
  const Attend attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                            const at::Tensor& sinks) {
    const PatternSpec& spec = patterns[static_cast<size_t>(layer) % patterns.size()];
    AttentionShape selecting = shape;  // blocks are selected among the tokens that there are
    selecting.q_len = selecting.k_len = n;
    const Count count = is_adaptive(spec) ? count_of(spec, selecting, q, k) : count_of(spec, shape);
    const OracleSoftmax softmax{model.shape().softcap, sinks};
    const double scale = model.shape().attention_scale();
    return Attended{{oracle(q, k, v, at::zeros_like(q), scale, count, {}, softmax).out}, output_divisor(spec)};
  };
  return model.logits(row, model.rotary(at::arange(n)), attend, /*last_only=*/true)[0].detach();
}

TEST(Generator, EveryPatternEqualsTheFullForward) {
  const c10::AutoGradMode no_grad(false);
  at::set_num_threads(1);
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(70);
  const auto spec = [](const char* toml) { return parse_pattern(toml, "test"); };
  const std::vector<std::vector<PatternSpec>> cases = {
      {spec("{ kind = 'dilated', segment_lengths = [16, 50], dilation_rates = [1, 3], causal = true }")},
      {spec(
          "{ kind = 'dilated', segment_lengths = [9, 40], dilation_rates = [1, 2], combine = 'mean', causal = true }")},
      {spec("{ kind = 'blocks', map = 'bigbird', block = 16, window_blocks = 1, global_blocks = 1, random_blocks = 1, "
            "causal = true }")},
      {spec("{ kind = 'causal', documents = [20, 33, 27] }")},
      {spec("{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, { kind = 'causal' }], causal = true }")},
      {spec("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, query = 'first', causal = true }")},
      {spec("{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, { kind = 'blocks', map = 'adaptive', "
            "block = 16, keep = 2, query = 'first', causal = true }] }")},
      {spec("{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, { kind = 'blocks', map = 'adaptive', "
            "block = 16, keep = 2, query = 'first' }], causal = true }")},
      {spec("{ kind = 'window', left = 6, right = 0 }"),
       spec("{ kind = 'blocks', map = 'local', block = 32, window_blocks = 0, causal = true }")}};
  for (const std::vector<PatternSpec>& patterns : cases) {
    std::map<size_t, at::Tensor> want;  // by call
    for (size_t i = 3; i <= 33; i += 10) {
      want[i] = whole_by_oracle(model, first(tokens, 37 + static_cast<int64_t>(i)), patterns, 80);
    }
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(patterns[0].text() + " over " + std::to_string(ranks));
      if (ranks > 1 && is_adaptive(patterns[0])) continue;
      const std::vector<at::Tensor> logits = logits_over(ranks, model, patterns, cache_of(80), tokens, 37);
      for (const auto& [call, logits_then] : want) expect_near(logits[call], logits_then);
    }
  }
}

// Layers that differ in more than their pattern: rotary settings, norms and the scale of scores. The patterns repeat.
TEST(Generator, LayersThatDifferEqualTheFullForward) {
  const c10::AutoGradMode no_grad(false);
  at::set_num_threads(1);
  ModelShape shape = tiny();
  shape.layers = 5;
  shape.post_norms = shape.norm_zero_centered = shape.scale_embeddings = true;
  shape.activation = Activation::kGeluTanh;
  shape.query_pre_attn_scalar = 3;
  shape.rope_layers.cycle = {
      {.own = true, .theta = 300}, {}, {.own = true, .scaling = {.kind = RotaryScaling::Kind::kNone}}};
  Model model(shape, 3, at::kDouble);
  scale_matrices(model.parameters(), 5);
  const std::vector<PatternSpec> patterns = {parse_pattern("{ kind = 'window', left = 6, right = 0 }", "test"),
                                             causal_pattern()};
  const std::vector<int64_t> tokens = some_tokens(70);
  for (const int ranks : {1, 2, 4}) {
    const std::vector<at::Tensor> logits = logits_over(ranks, model, patterns, cache_of(80), tokens, 37);
    expect_near(logits[0], whole_by_oracle(model, first(tokens, 37), patterns, 80));
    expect_near(logits[33], whole_by_oracle(model, tokens, patterns, 80));
  }
}

TEST(Generator, AnyPatternLayoutAndNumberOfRanksGiveTheSame) {
  at::set_num_threads(1);
  const Model plain = lively_model(), with_sinks = model_with_sinks();
  EXPECT_TRUE(rc::check([&] {
    const c10::AutoGradMode no_grad(false);
    const Model& model = *rc::gen::arbitrary<bool>() ? plain : with_sinks;
    const auto context = *rc::gen::inRange<int64_t>(16, 81), length = *rc::gen::inRange<int64_t>(1, context + 1);
    const auto prompt = *rc::gen::inRange<int64_t>(1, length + 1);
    const AttentionShape shape{.batch = 1, .heads = 4, .kv_heads = 2, .q_len = context, .k_len = context};
    PatternSpec pattern = testing::any_pattern(shape);
    pattern.causal = true;
    CacheSettings settings = cache_of(context);
    settings.layout = *rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped,
                                        LayoutKind::kBalanced, LayoutKind::kPerDocument);
    const int ranks = *rc::gen::inRange(1, 5);
    const std::vector<int64_t> tokens = some_tokens(length);
    const std::vector<at::Tensor> logits = logits_over(ranks, model, {pattern}, settings, tokens, prompt);
    RC_ASSERT(testing::agrees(logits.back(), whole_by_oracle(model, tokens, {pattern}, context)));
  }));
}

// A prompt that leaves a rank without positions, and the keys that follow, are spread as evenly as any.
TEST(Generator, PromptsMayBeShorterThanRanksAndCachesStayEven) {
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(40);
  const std::vector<PatternSpec> causal = {causal_pattern()};
  for (const int64_t prompt : {1, 2, 3, 5, 9}) {
    for (const int ranks : {2, 3, 4}) {
      SCOPED_TRACE(std::to_string(prompt) + " tokens over " + std::to_string(ranks));
      expect_near(logits_over(ranks, model, causal, cache_of(40), tokens, prompt).back(), whole(model, tokens, 1000));
      std::vector<int64_t> held(static_cast<size_t>(ranks));
      run_ranks(ranks, [&](Communicator& comm) {
        Generator generator(model, causal, cache_of(40), comm);
        generator.feed(first(tokens, prompt));
        for (int64_t i = prompt; i < 35; ++i) generator.feed({tokens[static_cast<size_t>(i)]});
        held[static_cast<size_t>(comm.rank())] = generator.own_length();
        EXPECT_EQ(generator.length(), 35);
      });
      const auto [least, most] = std::minmax_element(held.begin(), held.end());
      EXPECT_LE(*most - *least, 1);
    }
  }
}

// Both a prompt and later tokens attend to keys and values as they are cached. 1,200 keys are converted in two parts.
TEST(Generator, CachesKeysInANarrowerDtype) {
  const Model model = lively_model();
  CacheSettings settings = cache_of(1300);
  settings.stored = at::kBFloat16;
  const std::vector<int64_t> tokens = some_tokens(1203);
  const at::Tensor want = whole(model, tokens, 5000, at::kBFloat16);
  EXPECT_FALSE(testing::agrees(whole(model, tokens, 5000), want));
  for (const int ranks : {1, 2}) {
    expect_near(logits_over(ranks, model, {causal_pattern()}, settings, tokens, 1200).back(), want);
    expect_near(logits_over(ranks, model, {causal_pattern()}, settings, tokens, 1203).back(), want);
  }
}

// Several tokens may also follow a text that is in the cache.
TEST(Generator, TakesSeveralTokensAtATime) {
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(310);
  run_ranks(3, [&](Communicator& comm) {
    Generator generator(model, {causal_pattern()}, cache_of(400), comm);
    generator.feed(first(tokens, 20));
    expect_near(generator.feed({tokens.begin() + 20, tokens.end()}), whole(model, tokens, 1000));
  });
}

// The best tokens, up to the first choice that rounding may have decided, are those of one rank.
TEST(Generator, TokensDoNotDependOnTheNumberOfRanks) {
  at::set_num_threads(1);
  const std::vector<PatternSpec> patterns = {causal_pattern(),
                                             parse_pattern("{ kind = 'window', left = 9, right = 0 }", "test")};
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    Model model(tiny(), 3, type);
    scale_matrices(model.parameters(), 5);
    for (const double temperature : {0.0, 1.0}) {
      std::vector<int64_t> of_one;
      for (const int ranks : {1, 2, 3, 4}) {
        std::vector<std::vector<Picked>> picked(static_cast<size_t>(ranks));
        run_ranks(ranks, [&](Communicator& comm) {
          Generator generator(model, patterns, cache_of(64), comm);
          std::vector<int64_t> tokens = some_tokens(11);
          std::vector<Picked>& own = picked[static_cast<size_t>(comm.rank())];
          for (int64_t i = 0; i < 100; ++i) {  // beyond the context
            const at::Tensor logits = generator.feed(tokens);
            own.push_back(pick(logits, 64, {.temperature = temperature, .top_k = 20, .top_p = 0.9, .seed = 5}, i,
                               generator.rounding(logits)));
            tokens = {own.back().token};
          }
        });
        int64_t near = 0;
        for (size_t i = 0; i < 100 && near == 0; ++i) {
          near += picked[0][i].near;
          if (ranks == 1) {
            of_one.push_back(picked[0][i].token);
          } else if (near == 0 && i < of_one.size()) {
            EXPECT_EQ(picked[0][i].token, of_one[i]) << type << " over " << ranks << ", token " << i;
          }
        }
        EXPECT_EQ(type == at::kDouble ? near : 0, 0);
        for (const std::vector<Picked>& of_rank : picked) {
          for (size_t i = 0; i < 100; ++i) EXPECT_EQ(of_rank[i].token, picked[0][i].token);
        }
      }
      EXPECT_GT(of_one.size(), 10U);
    }
  }
}

// What is checked before memory is taken is what is then taken.
TEST(Generator, TakesTheMemoryThatIsPlanned) {
  const ModelShape shape{.layers = 3, .dim = 64, .heads = 4, .kv_heads = 2, .ffn = 96, .vocab = 64};
  const std::vector<int64_t> tokens = some_tokens(2000);
  const std::vector<PatternSpec> causal = {causal_pattern()};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const Model model(shape, 3, type);
    for (const std::optional<at::ScalarType> stored : {std::optional<at::ScalarType>(), {at::kBFloat16}}) {
      CacheSettings settings = cache_of(2010);
      settings.stored = stored;
      for (const int ranks : {1, 2, 4}) {
        const double planned = generation_bytes(shape, causal, settings, {type, /*gpu=*/false}, ranks);
        run_ranks(ranks, [&](Communicator& comm) {
          const auto bytes = std::make_shared<PeakBytes>();
          const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
          Generator generator(model, causal, settings, comm);
          generator.feed(tokens);
          for (int64_t token = 0; token < 10; ++token) generator.feed({token});
          const auto taken = static_cast<double>(bytes->peak());
          EXPECT_LE(taken, planned) << type << ", " << ranks << " ranks";
          EXPECT_GT(taken, planned / 2) << type << ", " << ranks << " ranks";
        });
      }
    }
  }
}

TEST(Generator, RefusesSelectionsOverRanks) {
  const Model model = lively_model();
  const std::vector<PatternSpec> adaptive = {
      parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }", "test")};
  run_ranks(2, [&](Communicator& comm) {
    try {
      Generator(model, adaptive, cache_of(80), comm);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(error.message().find("adaptive"), std::string::npos);
    }
  });
}

TEST(Generator, MeanSelectionUsesTheTokensSoFar) {
  const c10::AutoGradMode no_grad(false);
  at::set_num_threads(1);
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(75);
  const std::vector<PatternSpec> patterns = {
      parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }", "test")};
  // With all tokens at once the means are those of training; token by token they are those of the tokens so far.
  Alone at_once(model, patterns, 80);
  expect_near(at_once.generator.feed(tokens), whole_by_oracle(model, tokens, patterns, 80));
  Alone one_by_one(model, patterns, 80);
  at::Tensor logits;
  for (const int64_t token : tokens) logits = one_by_one.generator.feed({token});
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
}

TEST(Generator, RefusesPatternsThatDoNotFitTheContext) {
  const Model model = lively_model();
  EXPECT_THROW(Alone(model, {parse_pattern("{ kind = 'causal', documents = [20, 30] }", "test")}, 80), Error);
}

TEST(Generator, KeepsTheLaterHalfOfAFullContext) {
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(50);
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](Communicator& comm) {
      Generator generator(model, {causal_pattern()}, cache_of(16), comm);
      for (size_t i = 0; i < 16; ++i) generator.feed({tokens[i]});
      EXPECT_EQ(generator.length(), 16);
      expect_near(generator.feed({tokens[16]}), whole(model, {tokens.begin() + 9, tokens.begin() + 17}, 1000));
      EXPECT_EQ(generator.length(), 8);
      // A prompt longer than the context.
      Generator other(model, {causal_pattern()}, cache_of(16), comm);
      expect_near(other.feed(tokens), whole(model, {tokens.end() - 8, tokens.end()}, 1000));
    });
  }
}

}  // namespace
}  // namespace annulus::generator_test
