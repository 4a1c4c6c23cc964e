// Tests of runtime/training/state/parameter_groups.h: the rates that groups give to parameters, and groups that are
// refused.
#include "runtime/training/state/parameter_groups.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "runtime/model/model.h"
#include "tests/common/expect_error.h"

namespace annulus::parameter_groups_test {
namespace {

Parameters two_layers() {
  Parameters parameters(described_units({.layers = 2, .dim = 24, .heads = 2, .kv_heads = 1, .ffn = 20, .vocab = 256}));
  parameters.lay_out(2);
  return parameters;
}

ParameterGroup group(const std::string& match, double lr = 1, std::optional<double> weight_decay = std::nullopt) {
  return {.match = match, .lr = lr, .weight_decay = weight_decay};
}

std::map<std::string, Rates> rates_by_name(const ParameterGroups& groups) {
  const Parameters parameters = two_layers();
  const std::vector<Rates> rates = parameter_rates(parameters, 0.1, groups);
  EXPECT_EQ(rates.size(), parameters.list().size());
  std::map<std::string, Rates> of;
  for (size_t i = 0; i < rates.size(); ++i) of[parameters.list()[i].name] = rates[i];
  return of;
}

TEST(ParameterGroups, WithoutGroupsOnlyMatricesDecay) {
  for (const auto& [name, rates] : rates_by_name({})) {
    EXPECT_EQ(rates, (Rates{1, name.ends_with("norm.weight") ? 0 : 0.1})) << name;
  }
}

TEST(ParameterGroups, FirstMatchingGroupApplies) {
  const auto rates = rates_by_name({{group("model.layers.1.*_layernorm.weight", 0.5, 0.2), group("*norm.weight", 0.25),
                                     group("model.layers.?.mlp.up_proj.weight", 0, 0.0), group("lm_head.weight", 3)}});
  EXPECT_EQ(rates.at("model.layers.1.input_layernorm.weight"), (Rates{0.5, 0.2}));
  EXPECT_EQ(rates.at("model.layers.0.input_layernorm.weight"), (Rates{0.25, 0})) << "decay as without the group";
  EXPECT_EQ(rates.at("model.norm.weight"), (Rates{0.25, 0}));
  EXPECT_EQ(rates.at("model.layers.0.mlp.up_proj.weight"), (Rates{0, 0}));
  EXPECT_EQ(rates.at("model.layers.1.mlp.gate_proj.weight"), (Rates{1, 0.1}));
  EXPECT_EQ(rates.at("lm_head.weight"), (Rates{3, 0.1}));
}

TEST(ParameterGroups, RefusesGroupsThatApplyToNoParameter) {
  const auto refused = [](const ParameterGroups& groups, const std::string& words) {
    expect_error(ErrorKind::kUsage, {words}, [&] { rates_by_name(groups); });
  };
  refused({{group("model.embed_token.weight")}}, "did you mean \"model.embed_tokens.weight\"?");
  refused({{group("*norm.weight"), group("model.layers.*.self_atn.q_proj.weight")}},
          "optimizer.groups[1]: match = \"model.layers.*.self_atn.q_proj.weight\" matches no parameter; did you mean "
          "\"model.layers.*.self_attn.q_proj.weight\"?");
  refused({{group("*.bias")}}, "there are model.embed_tokens.weight, ");
  refused({{group("*"), group("lm_head.weight")}}, "optimizer.groups[1]: match = \"lm_head.weight\" matches only");
}

// However ranks cut a unit, the ranges of its parts equal those of the whole and cover all of it.
TEST(ParameterGroups, RangesOfPartsMatchTheWholeUnit) {
  const Parameters parameters = two_layers();
  const std::vector<Rates> rates =
      parameter_rates(parameters, 0.1, {{group("*input_layernorm.weight", 0.5), group("*k_proj*", 2)}});
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    const int64_t elements = parameters.units()[unit].elements;
    std::vector<Rates> whole(static_cast<size_t>(elements));
    for (const RatedRange& r : rated_ranges(parameters, rates, {unit, 0, elements})) {
      for (int64_t i = r.begin; i < r.end; ++i) whole[static_cast<size_t>(i)] = r.rates;
    }
    for (size_t i = parameters.units()[unit].first; i < parameters.units()[unit].last; ++i) {
      const ParameterInfo& p = parameters.list()[i];
      for (int64_t at = p.offset; at < p.offset + p.count(); ++at) ASSERT_EQ(whole[static_cast<size_t>(at)], rates[i]);
    }
    for (const int64_t cut : {int64_t{0}, elements / 2, elements - 16}) {
      int64_t next = 0;
      for (const RatedRange& r : rated_ranges(parameters, rates, {unit, cut, elements})) {
        EXPECT_EQ(r.begin, next);
        for (int64_t i = r.begin; i < r.end; ++i) ASSERT_EQ(r.rates, whole[static_cast<size_t>(cut + i)]);
        next = r.end;
      }
      EXPECT_EQ(next, elements - cut);
    }
  }
}

}  // namespace
}  // namespace annulus::parameter_groups_test
