// Tests of the values of [model] that are lists and tables: patterns and rotary settings by layer, and rotary scaling.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "tests/runtime/config/small_config.h"

namespace annulus::model_values_test {
namespace {

using testing::expect_in;
using testing::kSmall;
using testing::refusal;

TEST(Config, ReadsAPatternPerLayer) {
  const std::string window = "{ kind = \"window\", left = 3, right = 0 }";
  const std::string list = "[{ kind = \"causal\" }, " + window + "]";
  const Config c = parse_config(kSmall, "s", {"model.pattern=" + list});
  EXPECT_EQ(c.model.pattern.text(), list);
  EXPECT_EQ(c.model.pattern.of(1).text(), window);
  EXPECT_EQ(parse_config(kSmall + "[[model.pattern]]\nkind = \"causal\"\n[[model.pattern]]\nkind = \"window\"\n"
                                  "left = 3\nright = 0\n",
                         "s"),
            c);
  EXPECT_EQ(parse_config(to_toml(c), "written"), c);
  const Config one = parse_config(kSmall, "s", {"model.pattern=" + window});
  EXPECT_EQ(one.model.pattern.of(0).text(), window);
  EXPECT_EQ(one.model.pattern.of(1).text(), window);
  expect_in(refusal(kSmall, {"model.pattern=[" + window + ", " + window + ", " + window + "]"}),
            {"3 patterns for", "model.layers = 2", "one for each layer"});
  expect_in(refusal(kSmall, {"model.pattern=[]"}), {"model.pattern", "empty list"});
  expect_in(refusal(kSmall, {"model.pattern=[1, 2]"}), {"model.pattern[0]", "expected a table"});
  expect_in(refusal(kSmall, {"model.pattern=[" + window + ", { kind = \"windw\" }]"}), {"model.pattern[1]", "window"});
}

TEST(Config, PatternsIsAnotherNameOfPattern) {
  const std::string list = "[{ kind = \"window\", left = 3, right = 0 }, { kind = \"causal\" }]";
  const Config c = parse_config(kSmall, "s", {"model.patterns=" + list});
  EXPECT_EQ(c.model.pattern.text(), list);
  EXPECT_NE(to_toml(c).find("\npattern = "), std::string::npos);
  const std::string file = "[model]\npatterns = " + list + "\n";
  EXPECT_EQ(
      parse_config(file, "s",
                   {"run.steps=1", "model.layers=2", "model.dim=64", "model.heads=4", "optimizer.lr=1", "data.train=a"})
          .model.pattern.text(),
      list);
  expect_in(refusal(file + "pattern = { kind = \"causal\" }\n"), {"model.pattern", "both given"});
  // --set overrides the file by either name.
  EXPECT_EQ(parse_config(file + "layers = 2\ndim = 64\nheads = 4\n", "s",
                         {"run.steps=1", "optimizer.lr=1", "data.train=a", "model.pattern={ kind = \"full\" }"})
                .model.pattern.text(),
            "{ kind = \"full\" }");
}

// A shorter list than there are layers repeats.
TEST(Config, PatternsAndRotarySettingsRepeat) {
  const std::string window = "{ kind = \"window\", left = 3, right = 0 }";
  const Config c = parse_config(kSmall, "s",
                                {"model.layers=5", "model.pattern=[" + window + ", { kind = \"causal\" }]",
                                 "model.rope_layers=[{ theta = 1e4 }, {}, { kind = \"none\" }]", "model.rope_theta=1e6",
                                 "model.rope_scaling={ kind = \"linear\", factor = 8 }"});
  for (int64_t layer = 0; layer < 5; ++layer) {
    EXPECT_EQ(c.model.pattern.of(layer).text(), layer % 2 == 0 ? window : "{ kind = \"causal\" }") << layer;
  }
  EXPECT_EQ(c.model.rotary(3).theta, 1e4);
  EXPECT_EQ(c.model.rotary(3).scaling, RotaryScaling());
  EXPECT_EQ(c.model.rotary(4), c.model.rotary());
  EXPECT_EQ(c.model.rotary(2).scaling.kind, RotaryScaling::Kind::kNone);
  EXPECT_EQ(parse_config(to_toml(c), "written"), c);
  const auto layers = [](const std::string& value) { return std::vector<std::string>{"model.rope_layers=" + value}; };
  const Config own =
      parse_config(kSmall, "s", layers("[{ kind = 'yarn', factor = 4, original_context = 64, theta = 5 }]"));
  EXPECT_EQ(own.model.rotary(1).scaling.kind, RotaryScaling::Kind::kYarn);
  EXPECT_EQ(own.model.rotary(1).theta, 5);
  EXPECT_EQ(parse_config(to_toml(own), "written"), own);
  expect_in(refusal(kSmall, layers("[{}, {}, {}]")), {"model.rope_layers lists 3 rotary settings", "model.layers = 2"});
  expect_in(refusal(kSmall, layers("{}")), {"model.rope_layers", "a list of tables"});
  expect_in(refusal(kSmall, layers("[1]")), {"model.rope_layers[0]", "a table"});
  expect_in(refusal(kSmall, layers("[{}, { theta = 0 }]")), {"model.rope_layers[1].theta", "above 0"});
  expect_in(refusal(kSmall, layers("[{ kind = 'none', theta = 1 }]")), {"model.rope_layers[0].theta", "unknown key"});
  expect_in(refusal(kSmall, layers("[{ theta = 1, factor = 2 }]")), {"model.rope_layers[0].factor", "unknown key"});
  expect_in(refusal(kSmall, {"model.rope_scaling={ kind = 'none', factor = 2 }"}), {"model.rope_scaling.factor"});
}

TEST(Config, SinksMayDifferByLayer) {
  const auto sinks = [](const std::string& value) {
    return std::vector<std::string>{"model.layers=5", "model.attention_sinks=" + value};
  };
  EXPECT_TRUE(parse_config(kSmall, "s", sinks("true")).model.attention_sinks.of(4));
  EXPECT_FALSE(parse_config(kSmall, "s").model.attention_sinks.any());
  const Config c = parse_config(kSmall, "s", sinks("[true, false]"));
  for (int64_t layer = 0; layer < 5; ++layer) EXPECT_EQ(c.model.attention_sinks.of(layer), layer % 2 == 0) << layer;
  EXPECT_EQ(parse_config(to_toml(c), "written"), c);
  expect_in(refusal(kSmall, sinks("[]")), {"model.attention_sinks", "got an empty list"});
  expect_in(refusal(kSmall, sinks("[true, 1]")), {"model.attention_sinks[1]", "true or false"});
  expect_in(refusal(kSmall, sinks("1")), {"model.attention_sinks", "or a list of them"});
  expect_in(refusal(kSmall, sinks("[true, true, true, true, true, false]")),
            {"model.attention_sinks lists 6 values", "model.layers = 5"});
}

TEST(Config, ReadsTheActivation) {
  EXPECT_EQ(parse_config(kSmall, "s").model.activation, Activation::kSilu);
  EXPECT_EQ(parse_config(kSmall, "s", {"model.activation=gelu_tanh"}).model.activation, Activation::kGeluTanh);
  expect_in(refusal(kSmall, {"model.activation=gelu"}), {"\"silu\", \"gelu_tanh\"", "got \"gelu\""});
  expect_in(refusal(kSmall, {"model.activation=3"}), {"model.activation"});
}

TEST(Config, ReadsRotaryScalingByKind) {
  const auto scaling = [](const std::string& value) {
    return parse_config(kSmall, "s", {"model.rope_scaling=" + value}).model.rope_scaling;
  };
  EXPECT_EQ(scaling("{ kind = \"default\" }"), RotaryScaling());
  const RotaryScaling yarn = scaling("{ kind = \"yarn\", factor = 4, original_context = 8192, truncate = false }");
  EXPECT_EQ(yarn.kind, RotaryScaling::Kind::kYarn);
  EXPECT_EQ(yarn.factor, 4);
  EXPECT_EQ(yarn.original_context, 8192);
  EXPECT_EQ(yarn.beta_fast, 32);
  EXPECT_FALSE(yarn.truncate);
  EXPECT_EQ(scaling("{ kind = \"llama3\", factor = 8.0, original_context = 8192 }").high_freq_factor, 4);
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"{ kind = \"yarm\" }", "did you mean \"yarn\""},
      {"{ factor = 4.0 }", "kind must be one of"},
      {"{ kind = \"yarn\", factor = 4.0 }", "original_context"},
      {"{ kind = \"linear\", factor = 0.5 }", "factor must be at least 1"},
      {"{ kind = \"linear\", facto = 2.0 }", "did you mean \"factor\""},
      {"{ kind = \"linear\", truncate = true }", "unknown key"},
      {"{ kind = \"linear\", factor = \"2\" }", "expected a number"},
      {"{ kind = \"llama3\", factor = 2, original_context = 64, low_freq_factor = 4 }", "high_freq_factor"},
      {"\"yarn\"", "expected a table"},
  };
  for (const auto& [value, says] : wrong) {
    expect_error(ErrorKind::kUsage, {says}, [&] { scaling(value); });
  }
}

}  // namespace
}  // namespace annulus::model_values_test
