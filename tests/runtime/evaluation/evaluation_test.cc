// Tests of runtime/evaluation/evaluation.h: losses and answers over ranks, layouts and shards, held against a run's own
// validation and against logits that are computed apart.
#include "runtime/evaluation/evaluation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_softmax.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/plan/layout.h"
#include "attention/plan/machine.h"
#include "comm/agreement.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/inference/logits.h"
#include "runtime/inference/row_forward.h"
#include "runtime/model/model.h"
#include "runtime/model/token_scores.h"
#include "runtime/tasks/task.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::evaluation_test {
namespace {

EvaluationResults evaluate(EvaluationOptions options, int ranks) {
  EvaluationResults results;
  run_ranks(ranks, [&](Communicator& world) {
    EvaluationJob job(options, world.size());
    require_agreement(world, job.fields(), {"comparing"});
    EvaluationResults own;
    job.run(world, world.size(), at::kCPU, own);
    if (world.rank() == 0) results = std::move(own);
  });
  return results;
}

// A run of fp64, in which all rank counts agree to rounding.
Config exact_config(const TestFolder& folder) {
  Config c = tiny_config(folder);
  c.model.dtype = "fp64";
  c.run.steps = 30;
  c.validation = {.every = 30, .batches = 100};
  return c;
}

EvaluationOptions options_of(const TestFolder& folder) {
  EvaluationOptions o;
  o.model = "tiny-001";
  o.root = folder.path() + "/runs";
  o.dtype = "fp64";
  return o;
}

void expect_near(const std::vector<LossBucket>& a, const std::vector<LossBucket>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].begin, b[i].begin);
    EXPECT_EQ(a[i].end, b[i].end);
    EXPECT_EQ(a[i].targets, b[i].targets);
    EXPECT_NEAR(a[i].nats, b[i].nats, 1e-11 * static_cast<double>(1 + a[i].targets));
  }
}

// What is held out has the loss of the run's last validation, whatever rows are made of.
TEST(Evaluation, HeldOutRowsHaveTheLossOfTheValidation) {
  for (const char* packing : {"stream", "best-fit", "document"}) {
    for (const bool documents : {false, true}) {
      for (const char* positions : {"running", "restart"}) {
        const TestFolder folder;
        Config c = exact_config(folder);
        c.data.train = {folder.path() + "/*.txt"};
        for (int i = 0; i < 40; ++i) {
          std::ofstream(folder.path() + "/" + std::to_string(i) + ".txt")
              << std::string(static_cast<size_t>(1 + 7 * i), static_cast<char>('a' + i % 26)) + "def x = None\n";
        }
        c.data.validation_fraction = 0.3;
        c.data.packing = packing;
        c.data.documents = documents;
        c.data.positions = positions;
        train(c, 1);
        double validation = 0;
        for (const nlohmann::json& line : metrics(folder.path() + "/runs/tiny-001")) {
          if (line.contains("validation_loss")) validation = line["validation_loss"];
        }
        ASSERT_GT(validation, 0);
        EvaluationOptions o = options_of(folder);
        o.data = {"held-out"};
        for (const int ranks : {1, 2}) {
          const EvaluationResults results = evaluate(o, ranks);
          ASSERT_EQ(results.sources.size(), 1U);
          EXPECT_NEAR(results.sources[0].all.mean(), validation, 1e-11)
              << packing << " " << documents << " " << positions << " " << ranks;
          EXPECT_GT(results.sources[0].documents, 1);
          EXPECT_TRUE(results.sources[0].all.error.has_value());
        }
      }
    }
  }
}

// The loss of each position is that of logits which are computed apart.
TEST(Evaluation, LossesByPositionAreThoseOfTheLogits) {
  const TestFolder folder;
  train(exact_config(folder), 1);
  const std::string file = folder.path() + "/other.txt", in = folder.path() + "/in.safetensors",
                    out = folder.path() + "/out.safetensors";
  std::string text;
  for (int i = 0; i < 300; ++i) text += "return self.x" + std::to_string(i * i % 97);
  std::ofstream(file) << text;
  constexpr int64_t kLength = 48;
  const int64_t rows = (static_cast<int64_t>(text.size()) - 1 + kLength - 1) / kLength;
  const at::Tensor tokens = at::zeros({rows, kLength}, at::kLong), targets = at::full({rows, kLength}, -1, at::kLong);
  for (int64_t i = 0; i + 1 < static_cast<int64_t>(text.size()); ++i) {
    tokens[i / kLength][i % kLength] = static_cast<unsigned char>(text[static_cast<size_t>(i)]);
    targets[i / kLength][i % kLength] = static_cast<unsigned char>(text[static_cast<size_t>(i) + 1]);
  }
  write_safetensors(in, {{"tokens", tokens}});
  LogitsOptions logits{.model = "tiny-001", .root = folder.path() + "/runs", .input = in, .output = out};
  logits.dtype = "fp64";
  run_ranks(1, [&](Communicator& world) { LogitsJob(logits, 1).run(world, 1); });
  const at::Tensor losses = -SafetensorsFile(out)
                                 .load("logits")
                                 .log_softmax(2)
                                 .gather(2, targets.clamp_min(0).unsqueeze(2))
                                 .squeeze(2)
                                 .mul(targets.ge(0));
  EvaluationOptions o = options_of(folder);
  o.data = {file};
  o.length = kLength;
  const EvaluationResults one = evaluate(o, 1);
  const SourceLosses& source = one.sources.at(0);
  EXPECT_EQ(source.name, file);
  EXPECT_EQ(source.rows, rows);
  EXPECT_EQ(source.all.targets, static_cast<int64_t>(text.size()) - 1);
  EXPECT_NEAR(source.all.nats, losses.sum().item<double>(), 1e-8);
  EXPECT_NEAR(*source.bits_per_byte, source.all.mean() / std::log(2.0), 1e-12);
  EXPECT_EQ(source.doubling.size(), 7U) << "0, 1, 2-3, 4-7, 8-15, 16-31, 32-47";
  for (const std::vector<LossBucket>* buckets : {&source.doubling, &source.even}) {
    int64_t before = 0;
    for (const LossBucket& bucket : *buckets) {
      EXPECT_EQ(bucket.begin, before);
      before = bucket.end;
      EXPECT_NEAR(bucket.nats, losses.narrow(1, bucket.begin, bucket.end - bucket.begin).sum().item<double>(), 1e-9);
    }
    EXPECT_EQ(before, kLength);
  }
  for (const int ranks : {2, 3, 4}) {
    for (const char* layout : {"zigzag", "contiguous", "striped", "balanced", "per-document", "auto"}) {
      for (const bool sharded : {false, true}) {
        o.attention.layout = layout;
        o.sharded = sharded;
        const EvaluationResults many = evaluate(o, ranks);
        EXPECT_EQ(many.layout.starts_with("auto: "), o.attention.layout == "auto") << many.layout;
        expect_near(one.sources[0].doubling, many.sources.at(0).doubling);
        expect_near(one.sources[0].document_even, many.sources[0].document_even);
        EXPECT_NEAR(*one.sources[0].bits_per_byte, *many.sources[0].bits_per_byte, 1e-11);
      }
    }
  }
  // In fp32 the goal is 1e-6 at every position, beside the rounding of the model, which on one rank is as large as the
  // greatest difference from fp64.
  o.dtype = "fp32";
  const EvaluationResults single = evaluate(o, 1);
  for (const int ranks : {2, 4}) {
    const EvaluationResults many = evaluate(o, ranks);
    for (const auto buckets : {&SourceLosses::doubling, &SourceLosses::even, &SourceLosses::document_doubling,
                               &SourceLosses::document_even}) {
      const std::vector<LossBucket>&in_fp64 = one.sources[0].*buckets, &a = single.sources[0].*buckets,
            &b = many.sources.at(0).*buckets;
      ASSERT_EQ(a.size(), in_fp64.size());
      ASSERT_EQ(b.size(), in_fp64.size());
      double rounding = 0;
      for (size_t i = 0; i < a.size(); ++i) {
        if (a[i].targets > 0) rounding = std::max(rounding, std::abs(a[i].mean() - in_fp64[i].mean()));
      }
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_EQ(a[i].targets, b[i].targets);
        if (a[i].targets == 0) continue;
        EXPECT_NEAR(a[i].mean(), b[i].mean(), 4 * rounding + 1e-6) << ranks << " " << i;
      }
    }
  }
}

// `auto` is the fastest of those that fit beside all else that a rank takes, on the rank with the least; without a
// choice that fits, or if what is free is not known, it is what takes least. Ranks agree once for each shape of rows.
TEST(Evaluation, RowsHaveTheAttentionThatFitsBesideTheRest) {
  const TestFolder folder;
  constexpr int kRanks = 4;
  constexpr double kRest = 1e9;
  const ModelSection model = tiny_config(folder).model;
  // Each step waits, so that the ring, which holds least, is the slowest.
  MachineProfile slow = built_in_machine("h100");
  slow.inside.latency = slow.between.latency = 1;
  const std::string machine = folder.path() + "/slow.toml";
  std::ofstream(machine) << slow.text();
  const RowShape shape{.rows = 2, .length = 1024};
  const auto choose = [&](std::optional<double> free, std::optional<double> of_first, const std::string& layout) {
    std::string chosen;
    double most = 0;
    run_ranks(kRanks, [&](Communicator& world) {
      const auto bytes = [&](const LayerRequests& layers, const RowShape& of) {
        return kRest + static_cast<double>(row_forward_bytes(model, layers, of.rows, world.rank(), KernelKind::kCpu,
                                                             {at::kFloat, /*gpu=*/false}));
      };
      RowOptions options;
      options.layout = layout;
      options.machine = machine;
      RowChoices choices({.model = model,
                          .options = options,
                          .module = "test",
                          .free = world.rank() == 0 ? of_first : free,
                          .bytes = bytes},
                         world);
      const LayerRequests& layers = choices.of(shape);
      const auto of_ranks = agree_together(world, {"test"}, [&]() -> Terms {
        return {{{"chosen", layers.distinct[0].text()}}, {static_cast<int64_t>(bytes(layers, shape))}};
      });
      if (world.rank() != 0) return;
      choices.of(shape);  // alone
      chosen = attention_text({{.layers = layers}}, /*layouts=*/true);
      for (const Terms::Numbers& one : of_ranks) most = std::max(most, static_cast<double>(one[0]));
    });
    return std::make_pair(chosen, most);
  };
  for (const std::string layout : {"zigzag", "auto"}) {
    const auto [fastest, all] = choose(1e15, 1e15, layout);
    const auto [least, few] = choose(1, 1, layout);
    EXPECT_EQ(choose(all, all, layout).first, fastest) << "it fits to the byte";
    EXPECT_NE(least, fastest);
    EXPECT_LT(few, all);
    const auto [less, some] = choose(1e15, all - 1, layout);  // the first rank, which needs the most, lacks a byte
    EXPECT_NE(less, fastest);
    EXPECT_LE(some, all);  // of the rank that then needs the most
    EXPECT_EQ(choose(1e15, std::nullopt, "zigzag").first, choose(std::nullopt, std::nullopt, "zigzag").first);
  }
}

TEST(Evaluation, AnswersAreScoredAsTheLogitsSay) {
  const TestFolder folder;
  train(exact_config(folder), 1);
  EvaluationOptions o = options_of(folder);
  o.tasks = {"kv", "copy"};
  o.lengths = {64, 48};
  o.depths = {0, 1};
  o.trials = 5;
  o.generate = true;
  const EvaluationResults one = evaluate(o, 1);
  ASSERT_FALSE(one.cells.empty());
  for (const TaskCell& cell : one.cells) {
    EXPECT_EQ(cell.trials, 5);
    EXPECT_LE(cell.exact, cell.trials);
    EXPECT_LE(cell.right, cell.tokens);
    int64_t tokens = 0, right = 0, exact = 0;
    double nats = 0;
    for (int64_t i = 0; i < cell.trials; ++i) {
      TaskSettings settings{.name = cell.task, .length = cell.length, .depth = cell.depth.value_or(0.5)};
      const TaskPrompt prompt = make_prompt(settings, i);
      const auto size = static_cast<int64_t>(prompt.tokens.size());
      EXPECT_LE(size, cell.length);
      const std::string in = folder.path() + "/in.safetensors", out = folder.path() + "/out.safetensors";
      write_safetensors(in, {{"tokens", at::tensor(prompt.tokens, at::kLong).unsqueeze(0)}});
      LogitsOptions logits{.model = "tiny-001", .root = folder.path() + "/runs", .input = in, .output = out};
      logits.dtype = "fp64";
      run_ranks(1, [&](Communicator& world) { LogitsJob(logits, 1).run(world, 1); });
      const at::Tensor all = SafetensorsFile(out).load("logits")[0];
      bool whole = true;
      for (int64_t p = prompt.answer; p < size; ++p) {
        const int64_t id = prompt.tokens[static_cast<size_t>(p)];
        nats -= all[p - 1].log_softmax(0)[id].item<double>();
        const bool first = all[p - 1].argmax().item<int64_t>() == id;
        ++tokens;
        right += first ? 1 : 0;
        whole = whole && first;
      }
      exact += whole ? 1 : 0;
    }
    EXPECT_EQ(cell.tokens, tokens);
    EXPECT_EQ(cell.right, right);
    EXPECT_EQ(cell.exact, exact);
    // The most likely tokens are the answer if each is the most likely one after the answer so far.
    EXPECT_DOUBLE_EQ(cell.generated.value(), static_cast<double>(exact) / 5);
    EXPECT_NEAR(cell.nats, nats, 1e-9);
  }
  o.sharded = true;
  const EvaluationResults many = evaluate(o, 3);
  ASSERT_EQ(many.cells.size(), one.cells.size());
  for (size_t i = 0; i < many.cells.size(); ++i) {
    EXPECT_EQ(many.cells[i].exact, one.cells[i].exact);
    EXPECT_EQ(many.cells[i].generated, one.cells[i].generated);
    EXPECT_NEAR(many.cells[i].nats, one.cells[i].nats, 1e-9);
  }
}

// Validations score tasks with any mesh.
TEST(Evaluation, ValidationsScoreTasks) {
  std::vector<double> losses;
  for (const int64_t data : {0, 1, 2}) {  // 0: one rank
    for (const int64_t shard : {0, 3}) {
      const TestFolder folder;
      Config c = exact_config(folder);
      c.run.steps = 2;
      c.validation = {.every = 2, .batches = 1, .tasks = {"induction", "copy"}, .trials = 6};
      c.mesh.data = std::max<int64_t>(1, data);
      c.optimizer.shard = shard;
      train(c, data == 0 ? 1 : 2);
      for (const nlohmann::json& line : metrics(folder.path() + "/runs/tiny-001")) {
        if (!line.contains("validation_tasks")) continue;
        losses.push_back(line["validation_tasks"]["induction"]["loss"]);
        EXPECT_GE(line["validation_tasks"]["copy"]["exact"].get<double>(), 0);
      }
    }
  }
  ASSERT_EQ(losses.size(), 6U);
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 1e-10);
}

TEST(Evaluation, ValidationsRefuseTasksThatTheirRowsCannotHave) {
  const TestFolder folder;
  Config c = exact_config(folder);
  c.data.context = 32;
  c.validation.tasks = {"copy"};
  expect_error(ErrorKind::kUsage, {"validation.tasks", "data.context = 32", "copy needs at least 34 tokens"},
               [&] { train(c, 1); });
}

// A model that has diverged has no first choice.
TEST(Evaluation, LogitsThatAreNoNumbersAreNeverRight) {
  ModelShape shape;
  shape.layers = 1, shape.dim = 4, shape.heads = 1, shape.kv_heads = 1, shape.ffn = 4, shape.vocab = 8;
  const Model model(shape, /*seed=*/1);
  const std::shared_ptr<Communicator> self = make_self_communicator();
  at::Tensor hidden = at::ones({3, 4});
  hidden[1].fill_(std::nan(""));
  const TokenScores scores = score_tokens(model, hidden, at::zeros({1, 3}, at::kLong),
                                          make_layout(LayoutKind::kContiguous, 3, 1), *self, "test");
  EXPECT_FALSE(scores.first[0][1].item<bool>());
  EXPECT_TRUE(std::isnan(scores.nats[0][1].item<double>()));
  EXPECT_EQ(scores.first[0][0].item<bool>(), scores.first[0][2].item<bool>());
}

TEST(Evaluation, RefusesWhatCannotBe) {
  const TestFolder folder;
  Config c = tiny_config(folder);
  c.run.steps = 1;
  train(c, 1);
  EvaluationOptions o = options_of(folder);
  o.dtype = "fp32";
  const auto refused = [&](const EvaluationOptions& options, ErrorKind kind, const std::string& part, int ranks = 1) {
    expect_error(kind, {part}, [&] { EvaluationJob(options, ranks); });
  };
  refused(o, ErrorKind::kUsage, "expected --data FILE");
  o.tasks = {"kw"};
  refused(o, ErrorKind::kUsage, "kv");
  o.tasks = {"kv"};
  o.lengths = {3};
  refused(o, ErrorKind::kPlan, "use fewer ranks", 4);
  o.lengths = {64};
  o.depths = {2};
  refused(o, ErrorKind::kUsage, "0 to 100");
  o.depths = {0.5};
  o.data = {"held-out", "x"};
  refused(o, ErrorKind::kUsage, "held-out");
  o.data = {folder.path() + "/none.txt"};
  refused(o, ErrorKind::kInput, "none.txt");
}

}  // namespace
}  // namespace annulus::evaluation_test
