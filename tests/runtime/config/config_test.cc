// Tests of runtime/config/config.h: reading, checking, writing and comparing configurations.
#include "runtime/config/config.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/config/small_config.h"

namespace annulus::config_test {
namespace {

using testing::expect_in;
using testing::kSmall;
using testing::refusal;

TEST(Config, FillsInDefaults) {
  const Config c = parse_config(kSmall, "small.toml");
  EXPECT_EQ(c.run.steps, 600);
  EXPECT_EQ(c.data.context, 2048);
  EXPECT_EQ(c.model.kv_heads, 4);
  EXPECT_EQ(c.model.ffn, 192);  // 170.7 rounded up
  EXPECT_EQ(c.model.pattern.text(), "{ kind = \"causal\" }");
  EXPECT_EQ(c.attention.layout, "zigzag");
  EXPECT_TRUE(c.attention.even);
  EXPECT_EQ(c.device, "auto");
}

TEST(Config, SetsOverrideTheFile) {
  const Config c =
      parse_config(kSmall, "small.toml",
                   {"run.steps=5", "model.pattern={ kind = \"window\", left = 7, right = 0 }", "run.name=7",
                    "optimizer.lr=1", "attention.layout=striped", "data.train=[\"a\", \"b\"]",
                    "model.tie_embeddings=true", "device=cpu", "run.folder=\"my runs\"", "run.steps=6"});
  EXPECT_EQ(c.run.steps, 6);
  EXPECT_EQ(c.model.pattern.text(), "{ kind = \"window\", left = 7, right = 0 }");
  EXPECT_EQ(c.run.name, "7");
  EXPECT_EQ(c.run.folder, "my runs");
  EXPECT_EQ(c.optimizer.lr, 1.0);
  EXPECT_EQ(c.attention.layout, "striped");
  EXPECT_EQ(c.data.train, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_EQ(c.device, "cpu");
  EXPECT_EQ(parse_config(kSmall, "s", {"data.train=notes/**/*.md"}).data.train,
            std::vector<std::string>{"notes/**/*.md"});
}

TEST(Config, ReadsAPatternFromASection) {
  const Config c = parse_config(kSmall + "[model.pattern]\nkind = \"window\"\nleft = 3\nright = 0\n", "s");
  EXPECT_EQ(c.model.pattern.text(), "{ kind = \"window\", left = 3, right = 0 }");
}

TEST(Config, ModelFromAFolderHasItsShape) {
  const ModelReader reader = [](const Config& given) {
    EXPECT_EQ(given.model.from, "models/a");
    EXPECT_EQ(given.run.steps, 5);
    ModelSection model;
    model.layers = 3, model.dim = 64, model.heads = model.kv_heads = 4, model.head_size = 32, model.ffn = 96;
    model.vocab = 1000, model.rope_theta = 5e5, model.rope_fp32 = true, model.qk_norm = true;
    return model;
  };
  const std::string toml =
      "[run]\nsteps = 5\n[data]\ntrain = [\"t\"]\n[model]\nfrom = \"models/a\"\n[optimizer]\nlr = 0.1\n";
  const Config c = parse_config(toml, "s", {"model.rope_theta=1e6", "model.dropout=0.1", "model.dim=64"}, reader);
  EXPECT_EQ(c.model.layers, 3);
  EXPECT_EQ(c.model.head_dim(), 32);
  EXPECT_EQ(c.model.rope_theta, 1e6);
  EXPECT_TRUE(c.model.rope_fp32 && c.model.qk_norm);
  EXPECT_EQ(c.model.dropout, 0.1);
  // A run's own configuration holds every key and is read without the folder.
  EXPECT_EQ(parse_config(to_toml(c), "written"), c);
  expect_error(ErrorKind::kUsage, {"model.heads = 8, but the model in models/a has 4"},
               [&] { parse_config(toml, "s", {"model.heads=8"}, reader); });
  EXPECT_THROW(parse_config(toml, "s"), Error);  // the sizes are missing
}

TEST(Config, ReadsSourcesFromFilesOrTables) {
  const Config plain = parse_config(kSmall, "s", {"data.train=[\"a\", \"b/*.bin\"]"});
  ASSERT_EQ(plain.data.train.list.size(), 1U);
  EXPECT_EQ(plain.data.train.list[0].files, (std::vector<std::string>{"a", "b/*.bin"}));
  EXPECT_EQ(plain.data.train.name(0), "train");
  const std::string two =
      "[{ files = [\"a\"], weight = 0.75, name = \"web\" }, { files = [\"b\", \"c\"], weight = 0.25, format = "
      "\"nanogpt\", width = 32, begin = 1, end = 0 }]";
  const Config c = parse_config(kSmall, "s", {"data.train=" + two});
  ASSERT_EQ(c.data.train.list.size(), 2U);
  EXPECT_EQ(c.data.train.name(0), "web");
  EXPECT_EQ(c.data.train.name(1), "source 2");
  EXPECT_EQ(c.data.train.list[1].end, 0);
  EXPECT_EQ(c.data.train.text(), two);
  // A table may name a single file as a string.
  EXPECT_EQ(parse_config(kSmall, "s", {"data.train=[{ files = \"a\", weight = 3 }]"}).data.train.list[0].weight, 3);
  const auto refused = [](const std::string& train, const std::vector<std::string>& words) {
    expect_in(refusal(kSmall, {"data.train=" + train}), words);
  };
  refused("[{ file = \"a\" }]", {"data.train[0]", "unknown key \"file\"", "did you mean \"files\"?"});
  refused("[{ weight = 1 }]", {"data.train[0]", "files"});
  refused("[{ files = \"a\", weight = -1 }]", {"data.train[0].weight", "above 0", "-1"});
  refused("[{ files = \"a\", weight = 0 }]", {"data.train[0].weight", "above 0"});
  refused("[{ files = \"a\", weight = nan }]", {"data.train[0].weight", "above 0"});
  refused("[{ files = \"a\", weight = 1 }, { files = \"b\" }]", {"a weight for every source, or for none"});
  refused("[{ files = \"a\" }, \"b\"]", {"data.train[1]", "a table like the others"});
  refused("[{ files = \"a\", format = \"megtron\" }]", {"data.train[0].format", "did you mean \"megatron\"?"});
  refused("[{ files = \"a\", width = 24 }]", {"data.train[0].width", "16 or 32"});
  refused("[{ files = \"a\", end = -1 }]", {"data.train[0].end", "whole number from 0"});
  refused("[{ files = \"a\", name = \"x\" }, { files = \"b\", name = \"x\" }]", {"two sources", "\"x\""});
  refused("[{ files = [] }]", {"data.train[0].files", "empty list"});
}

TEST(Config, ReadsContextStages) {
  const std::string text = "[[0, 64], [10, 128, 8], [30, 256]]";
  const Config c = parse_config(kSmall, "s", {"data.context=" + text});
  EXPECT_EQ(c.data.context.text(), text);
  EXPECT_EQ(c.data.context.longest(), 256);
  for (const auto& [step, stage] : std::vector<std::pair<int64_t, size_t>>{{0, 0}, {9, 0}, {10, 1}, {29, 1}, {99, 2}}) {
    EXPECT_EQ(stage_at(c.data.context.stages, step), stage) << step;
  }
  EXPECT_EQ(c.data.batch_of(c.data.context.stages[0]), c.data.batch);
  EXPECT_EQ(c.data.batch_of(c.data.context.stages[1]), 8);
  EXPECT_EQ(parse_config(kSmall, "s", {"data.context=64"}).data.context.text(), "64");
  const auto refused = [](const std::string& contexts, const std::vector<std::string>& words) {
    expect_in(refusal(kSmall, {"data.context=" + contexts}), words);
  };
  refused("[]", {"data.context", "empty list"});
  refused("[64, 128]", {"data.context", "[step, context]"});
  refused("[[5, 64]]", {"data.context", "step 0", "got 5"});
  refused("[[0, 64], [0, 128]]", {"data.context", "rising", "0 after 0"});
  refused("[[0, 0]]", {"data.context", "from 1"});
  expect_in(refusal(kSmall, {"data.context=[[0, 64, 3]]", "mesh.data=2"}), {"data.context", "3 rows", "mesh.data = 2"});
}

TEST(Config, Fp64TakesTheCpu) {
  EXPECT_EQ(parse_config(kSmall, "s", {"model.dtype=fp64"}).device, "cpu");
  EXPECT_EQ(parse_config(kSmall, "s", {"model.dtype=fp32"}).device, "auto");
  expect_in(refusal(kSmall, {"model.dtype=fp64", "device=cuda"}), {"model.dtype", "on CPUs only", "device = \"cpu\""});
}

TEST(Config, BatchRampCombinesWithContextStages) {
  const std::string ramp = "[[0, 1], [10, 2], [20, 4]]";
  const Config c = parse_config(kSmall, "s", {"data.accumulate=" + ramp, "data.context=[[0, 64], [15, 128, 2]]"});
  EXPECT_EQ(c.data.accumulate.text(), ramp);
  EXPECT_EQ(c.data.accumulate.most(), 4);
  std::vector<std::vector<int64_t>> stages;
  for (const DataConfig::Stage& s : c.data.stages()) stages.push_back({s.step, s.context, s.batch, s.accumulate});
  EXPECT_EQ(stages,
            (std::vector<std::vector<int64_t>>{{0, 64, 4, 1}, {10, 64, 4, 2}, {15, 128, 2, 2}, {20, 128, 2, 4}}));
  EXPECT_EQ(parse_config(kSmall, "s", {"data.accumulate=3"}).data.accumulate.text(), "3");
  const auto refused = [](const std::string& batches, const std::vector<std::string>& words) {
    expect_in(refusal(kSmall, {"data.accumulate=" + batches}), words);
  };
  refused("0", {"data.accumulate", "from 1"});
  refused("[]", {"data.accumulate", "empty list"});
  refused("[[0, 1, 2]]", {"data.accumulate", "[step, batches]"});
  refused("[[5, 1]]", {"data.accumulate", "step 0", "got 5"});
  refused("[[0, 1], [0, 2]]", {"data.accumulate", "rising"});
}

TEST(Config, ReadsParameterGroups) {
  const std::string text =
      "[{ match = \"*.bias\", lr = 0.5, weight_decay = 0.0 }, { match = \"model.embed*\", lr = 0.1 }]";
  const Config c = parse_config(kSmall, "s", {"optimizer.groups=" + text});
  EXPECT_EQ(c.optimizer.groups.text(), text);
  ASSERT_EQ(c.optimizer.groups.list.size(), 2U);
  EXPECT_EQ(c.optimizer.groups.list[0].weight_decay, 0.0);
  EXPECT_EQ(c.optimizer.groups.list[1].weight_decay, std::nullopt);
  EXPECT_EQ(parse_config(kSmall, "s").optimizer.groups.text(), "[]");
  const auto refused = [](const std::string& groups, const std::vector<std::string>& words) {
    expect_in(refusal(kSmall, {"optimizer.groups=" + groups}), words);
  };
  refused("{ match = 'a' }", {"optimizer.groups", "a list of tables"});
  refused("['a']", {"optimizer.groups[0]", "a list of tables"});
  refused("[{ lr = 1 }]", {"optimizer.groups[0]", "needs match"});
  refused("[{ match = 'a', lr = -1 }]", {"optimizer.groups[0].lr", "from 0 to 1e12"});
  refused("[{ match = 'a', weight_decay = nan }]", {"optimizer.groups[0].weight_decay", "from 0 to 1e12"});
  refused("[{ match = 'a', decay = 1 }]", {"unknown key \"decay\"", "match, lr, weight_decay"});
  refused("[{ mach = 'a' }]", {"did you mean \"match\"?"});
}

TEST(Config, RefusesDocumentsFromBothFilesAndPattern) {
  EXPECT_TRUE(parse_config(kSmall, "s", {"data.documents=true"}).data.documents);
  for (const char* pattern : {"{ kind = \"causal\", documents = [2048] }",
                              "[{ kind = \"causal\" }, { kind = \"documents\", documents = [2048] }]",
                              "{ kind = \"union\", of = [{ kind = \"causal\", documents = [2048] }] }"}) {
    const std::string set = "model.pattern=" + std::string(pattern);
    expect_in(refusal(kSmall, {"data.documents=true", set}), {"data.documents = true", "leave one"});
    EXPECT_FALSE(parse_config(kSmall, "s", {set}).data.documents);
  }
  EXPECT_EQ(parse_config(kSmall, "s", {"model.dropout=0.5"}).model.dropout, 0.5);
  expect_in(refusal(kSmall, {"model.dropout=1"}), {"model.dropout", "below 1"});
}

TEST(Config, ErrorsSuggestTheNearestKey) {
  expect_in(refusal(kSmall + "[validation]\nevry = 3\n"),
            {"[config] small.toml:13", "validation.evry", "did you mean \"validation.every\"?"});
  expect_in(refusal(kSmall + "[checkpoint]\nlr = 3\n"), {"did you mean \"optimizer.lr\"?"});
  expect_in(refusal(kSmall + "[checkpoints]\nkeep = 3\n"), {"unknown section", "[checkpoint]"});
  expect_in(refusal("divice = \"cpu\"\n" + kSmall), {"small.toml:1", "did you mean \"device\"?"});
  expect_in(refusal(kSmall, {"model.dims=3"}), {"--set model.dims=3", "did you mean \"model.dim\"?"});
  expect_in(refusal(kSmall, {"dim=3"}), {"did you mean \"model.dim\"?"});
  expect_in(refusal(kSmall, {"steps"}), {"expected key=value"});
}

TEST(Config, TypeErrorsNameTheKeyAndLine) {
  std::string toml = kSmall;
  toml.replace(toml.find("dim = 64"), 8, "dim = \"wide\"");
  expect_in(refusal(toml), {"small.toml:8: model.dim: expected a whole number, got a string", "wide"});
  expect_in(refusal(kSmall, {"model.layers=2.5"}), {"--set model.layers", "whole number", "2.5"});
  expect_in(refusal(kSmall, {"attention.even=yes"}), {"expected true or false, got a string", "yes"});
  expect_in(refusal(kSmall, {"data.train=[1]"}), {"list of strings", "whole number"});
  expect_in(refusal(kSmall, {"model.pattern=causal"}), {"expected a table such as"});
  expect_in(refusal("model = 3\n"), {"expected a section [model]"});
  expect_in(refusal("device = 3\n" + kSmall), {"small.toml:1: device: expected a string"});
}

TEST(Config, RefusesInvalidValuesAndCombinations) {
  expect_in(refusal(kSmall, {"model.layers=0"}), {"1 to", "got 0"});
  expect_in(refusal(kSmall, {"optimizer.lr=0"}), {"above 0", "got 0"});
  expect_in(refusal(kSmall, {"model.from="}), {"--set model.from=", "expected a value", "'model.from=\"\"'"});
  expect_in(refusal(kSmall, {"run.steps= "}), {"--set run.steps=", "expected a value"});
  EXPECT_EQ(parse_config(kSmall, "s", {"model.from=\"\""}).model.from, "");
  expect_in(refusal(kSmall, {"optimizer.lr=nan"}), {"above 0"});
  expect_in(refusal(kSmall, {"optimizer.lr=inf"}), {"above 0, at most 1000000000000, got inf"});
  expect_in(refusal(kSmall, {"model.norm_eps=1e13"}), {"above 0, at most 1000000000000, got 1"});
  expect_in(refusal(kSmall, {"data.validation_fraction=1.0"}), {"at least 0, below 1"});
  expect_in(refusal(kSmall, {"data.context=0"}), {"data.context"});
  expect_in(refusal(kSmall, {"model.kv_heads=3"}), {"must be a multiple of kv_heads"});
  expect_in(refusal(kSmall, {"model.dim=66"}), {"must be a multiple of heads", "64"});
  expect_in(refusal(kSmall, {"model.dim=12"}), {"must be even"});
  expect_in(refusal(kSmall, {"mesh.data=3"}), {"data.batch = 4", "mesh.data = 3"});
  expect_in(refusal(kSmall, {"device=gpu"}), {"\"auto\", \"cpu\", \"cuda\"", "gpu"});
  expect_in(refusal(kSmall, {"run.name=../x"}), {"run.name"});
  expect_in(refusal(kSmall, {"run.folder=~/runs"}), {"run.folder", "whole path"});
  for (const char* odd : {".5", "5.", "0x"}) {
    const std::string said = refusal(kSmall, {std::string("optimizer.lr=") + odd});
    expect_in(said, {"a number", odd});
    EXPECT_EQ(said.find("64 bits"), std::string::npos) << said;
  }
  expect_in(refusal(kSmall, {"attention.layout=zigzap"}),
            {"\"contiguous\", \"zigzag\", \"striped\"", "did you mean \"zigzag\""});
  expect_in(refusal(kSmall, {"attention.schedule=rung"}), {"did you mean \"ring\""});
  expect_in(refusal(kSmall, {"model.pattern={ kind = \"casual\" }"}), {"causal"});
  expect_in(refusal(kSmall, {"data.train=[]"}), {"at least one"});
  expect_in(refusal(kSmall, {"optimizer.schedule=linar"}), {"did you mean \"linear\""});
  expect_in(refusal(kSmall, {"optimizer.schedule=wsd"}), {"needs optimizer.decay"});
  expect_in(refusal(kSmall, {"optimizer.spike=0.5"}), {"optimizer.spike = 0.5", "more than 1"});
  expect_in(refusal(kSmall, {"optimizer.spike_window=0"}), {"1 to 10000", "got 0"});
  expect_in(refusal(kSmall, {"optimizer.spike_action=back"}), {"\"skip\", \"rewind\""});
  expect_in(refusal("[run]\nsteps = 3\n"), {"missing", "data.train", "model.layers", "optimizer.lr"});
}

TEST(Config, RangeErrorsNameTheBound) {
  const std::string steps = "expected 1 to 1000000000000, got ";
  expect_in(refusal(kSmall, {"run.steps=9223372036854775807"}), {steps + "9223372036854775807"});
  expect_in(refusal(kSmall, {"run.steps=99999999999999999999"}), {steps + "99999999999999999999, which does not fit"});
  expect_in(refusal(kSmall, {"run.steps=0"}), {"expected 1 or more, got 0"});
  expect_in(refusal(kSmall, {"run.seed=9223372036854775807"}), {"expected 0 to 9000000000000000000, got"});
  expect_in(refusal(kSmall, {"run.seed=-99999999999999999999"}), {"expected 0 or more, got -9999"});
  expect_in(refusal(kSmall, {"optimizer.weight_decay=1e13"}), {"at least 0, at most 1000000000000, got 1"});
  expect_in(refusal(kSmall, {"optimizer.lr=1e400"}),
            {"expected above 0, at most 1000000000000, got 1e400, which does not fit in 64 bits"});
}

TEST(Config, ErrorsExplainQuotesRemovedByTheShell) {
  expect_in(refusal(kSmall, {"data.train=[a b.txt, **/c.md]"}),
            {"--set data.train: expected TOML, got [a b.txt", "--set 'data.train=[\"a b.txt\", \"**/c.md\"]'"});
  expect_in(refusal(kSmall, {"model.pattern={ kind = causal }"}), {"--set 'model.pattern={ kind = \"causal\" }'"});
  expect_in(refusal(kSmall, {"model.pattern=[{kind=causal},{kind=full}]"}), {"expected TOML", "single quotes"});
  EXPECT_EQ(parse_config(kSmall, "s", {"data.train=[ab]*.txt"}).data.train, std::vector<std::string>{"[ab]*.txt"});
  EXPECT_EQ(parse_config(kSmall, "s", {"run.folder=[x]"}).run.folder, "[x]");
}

// ChangedKey::of_model marks keys with whose new value the trained weights are meaningless; all other keys may change
// from one start of a run to the next.
TEST(Config, ChangedKeysListEachKey) {
  const Config c = parse_config(kSmall, "s");
  EXPECT_TRUE(changed_keys(c, c).empty());
  const Config other = parse_config(
      kSmall, "s",
      {"run.steps=1200", "model.layers=3", "model.dim=128", "model.heads=8", "model.kv_heads=2", "model.ffn=64",
       "model.vocab=512", "model.rope_theta=5e5", "model.tie_embeddings=true", "model.norm_eps=1e-6",
       "model.dtype=bf16", "model.dropout=0.5", "model.recompute=true", "model.pattern={ kind = 'full' }"});
  std::string model, rest;
  for (const ChangedKey& key : changed_keys(c, other)) {
    (key.of_model ? model : rest) += key.key + "=" + key.was + "->" + key.is + " ";
  }
  EXPECT_EQ(model,
            "model.layers=2->3 model.dim=64->128 model.heads=4->8 model.kv_heads=4->2 model.ffn=192->64 "
            "model.vocab=256->512 model.rope_theta=10000.0->5e+05 model.tie_embeddings=false->true "
            "model.norm_eps=1e-05->1e-06 ");
  EXPECT_EQ(rest,
            "run.steps=600->1200 model.dtype=\"fp32\"->\"bf16\" model.pattern={ kind = \"causal\" }->"
            "{ kind = \"full\" } model.dropout=0.0->0.5 model.recompute=false->true ");
}

TEST(Config, RefusesUnreadableFiles) {
  expect_in(refusal("steps = = 3", {}, ErrorKind::kInput), {"small.toml:1", "not TOML"});
  EXPECT_THROW(load_config("/nonexistent/x.toml"), Error);
  EXPECT_THROW(load_config(::testing::TempDir()), Error);
}

TEST(Config, LoadsAFile) {
  const std::string path = ::testing::TempDir() + "/small.toml";
  std::ofstream(path) << kSmall;
  EXPECT_EQ(load_config(path, {"run.seed=3"}), parse_config(kSmall, "s", {"run.seed=3"}));
}

TEST(Config, ReferenceListsEveryKey) {
  const Config c = parse_config(kSmall, "s");
  const std::string reference = config_reference();
  for (const KeyText& text : flatten(c)) expect_in(reference, {"`" + text.key + "`"});
  EXPECT_EQ(flatten(c).size() + 2, static_cast<size_t>(std::count(reference.begin(), reference.end(), '\n')));
}

rc::Gen<std::string> text() {
  return rc::gen::nonEmpty(rc::gen::container<std::string>(
      rc::gen::oneOf(rc::gen::inRange<char>(1, 127), rc::gen::element('"', '\\', '\n', '\'', '#'))));
}

// Any positive double that a key may have, also with something added to it, including subnormal ones.
rc::Gen<double> positive() {
  return rc::gen::map(rc::gen::arbitrary<uint64_t>(), [](uint64_t bits) {
    double v;
    std::memcpy(&v, &bits, sizeof v);
    v = std::fabs(v);
    return v > 0 && v < 1e11 ? v : 0.125;
  });
}

RC_GTEST_PROP(ConfigProperty, WrittenConfigReadsBackEqual, ()) {
  Config c = parse_config(kSmall, "s");
  c.timeout = *positive();
  c.run.folder = *text();
  c.run.seed = *rc::gen::inRange<int64_t>(0, int64_t{1} << 62);
  const auto files = [] { return *rc::gen::nonEmpty(rc::gen::container<std::vector<std::string>>(text())); };
  c.data.train = files();
  if (*rc::gen::arbitrary<bool>()) {
    const double weight = *rc::gen::element(0.0, 0.25, 3.0);
    c.data.train.list = {{.name = *text(), .files = files(), .format = "nanogpt", .width = 32, .weight = weight},
                         {.files = files(), .begin = 7, .end = 0, .weight = weight}};
    RC_PRE(c.data.train.name(0) != c.data.train.name(1));
  }
  if (*rc::gen::arbitrary<bool>()) {
    c.data.context.stages = {{.step = 0, .context = 64}, {.step = 5, .context = 128, .batch = 4}};
  }
  if (*rc::gen::arbitrary<bool>()) c.data.accumulate.stages = {{.step = 0, .batches = 2}, {.step = 7, .batches = 3}};
  if (*rc::gen::arbitrary<bool>()) {
    c.optimizer.groups.list = {{.match = *text(), .lr = 0.25, .weight_decay = {}},
                               {.match = "b*", .lr = 1, .weight_decay = 0.5}};
  }
  c.data.ignore = *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 1000));
  c.data.validation_fraction = std::fmod(*positive(), 1.0);
  c.model.kv_heads = *rc::gen::element<int64_t>(1, 2, 4);
  c.model.norm_eps = *positive();
  c.model.head_size = 2 * *rc::gen::inRange<int64_t>(1, 200);
  c.model.rope_fp32 = *rc::gen::arbitrary<bool>();
  c.model.qkv_bias = *rc::gen::arbitrary<bool>();
  c.model.qk_norm = *rc::gen::arbitrary<bool>();
  c.model.softcap = *rc::gen::element(0.0, 30.5);
  c.model.attention_sinks = *rc::gen::elementOf(std::vector<LayerSwitch>{false, true, {{true, false}}});
  c.model.post_norms = *rc::gen::arbitrary<bool>();
  c.model.activation = *rc::gen::element(Activation::kSilu, Activation::kGeluTanh);
  c.model.query_pre_attn_scalar = *rc::gen::element(0.0, 0.5, 256.0);
  c.model.from = *text();
  const double factor = *positive();
  using Kind = RotaryScaling::Kind;
  c.model.rope_scaling.kind = *rc::gen::element(Kind::kDefault, Kind::kLinear, Kind::kLlama3, Kind::kYarn);
  if (c.model.rope_scaling.kind != Kind::kDefault) c.model.rope_scaling.factor = 1 + factor;
  if (c.model.rope_scaling.kind == Kind::kLlama3) c.model.rope_scaling.high_freq_factor = 1.5 + factor;
  if (c.model.rope_scaling.kind == Kind::kYarn) c.model.rope_scaling.attention_factor = factor;
  if (c.model.rope_scaling.kind == Kind::kLlama3 || c.model.rope_scaling.kind == Kind::kYarn) {
    c.model.rope_scaling.original_context = 1 + *positive();
  }
  c.model.rope_layers.cycle = *rc::gen::elementOf(
      std::vector<std::vector<LayerRotary>>{{},
                                            {{}},
                                            {{.own = true, .theta = 2.5}, {}},
                                            {{.own = true, .theta = factor + 1, .scaling = c.model.rope_scaling}}});
  c.model.tie_embeddings = *rc::gen::arbitrary<bool>();
  c.model.recompute = *rc::gen::arbitrary<bool>();
  const auto pattern = [] {
    return parse_pattern(*rc::gen::element<std::string>("{ kind = \"full\" }",
                                                        "{ kind = \"window\", left = 5, right = 2, causal = true }"),
                         "test");
  };
  c.model.pattern = pattern();
  if (*rc::gen::arbitrary<bool>()) c.model.pattern = std::vector<PatternSpec>{pattern(), pattern()};
  c.optimizer.lr = *positive();
  c.attention.schedule = *rc::gen::element<std::string>("ring", "all-gather");
  c.attention.within = *rc::gen::inRange<int64_t>(0, 1 << 20);
  c.network.hcas = *rc::gen::element<std::string>("", "mlx5_0:1,mlx5_1");
  c.network.rank_hca = *rc::gen::element<std::string>("auto", "nearest");
  c.network.exchange_ctas = *rc::gen::inRange<int64_t>(0, 65);
  const std::string written = to_toml(c);
  const Config back = parse_config(written, "written");
  RC_ASSERT(back == c);
  RC_ASSERT(to_toml(back) == written);
  RC_ASSERT(flatten(back) == flatten(c));
}

RC_GTEST_PROP(ConfigProperty, AnyTextIsReadOrRefused, (const std::string& toml, const std::string& set)) {
  try {
    parse_config(toml, "any", {});
  } catch (const Error&) {
  }
  for (const std::string prefix : {"run.name=", "data.train=", "model.pattern=", "optimizer.lr=", ""}) {
    try {
      const Config c = parse_config(kSmall, "s", {prefix + set});
      RC_ASSERT(parse_config(to_toml(c), "written") == c);
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace annulus::config_test
