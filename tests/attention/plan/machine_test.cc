// Tests of machine profiles: those that are built in, reading and writing, refusals, and the interpolation of rates.
#include "attention/plan/machine.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/error.h"

namespace annulus::machine_test {
namespace {

const std::string kProfile = R"(name = "two"
source = "a test"
overlap = true
ranks_per_host = 2
memory = "1GB"
copy = 1e9
[inside]
latency = 1e-6
bandwidth = 2e9
[between]
latency = 1e-5
message = 1e-6
bandwidth = 1e9
shared_by = 2
[kernel.fp32.forward]
call = 1e-5
tile = 1e-6
edge = 8
rows = [16, 64]
keys = [16, 256]
rates = [[1e9, 4e9], [2e9, 8e9]]
[kernel.fp32.backward]
rows = [16]
keys = [16]
rates = [[5e8]]
)";

std::string with(const std::string& from, const std::string& to) {
  std::string text = kProfile;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Machine, ReadsWhatItWrites) {
  const MachineProfile machine = parse_machine(kProfile, "test");
  EXPECT_EQ(machine.name, "two");
  EXPECT_EQ(machine.memory, 1e9);
  EXPECT_EQ(machine.between.shared_by, 2);
  EXPECT_EQ(machine.inside.message, 0);
  EXPECT_EQ(machine.fp32->forward.edge, 8);
  EXPECT_EQ(machine.fp32->backward.edge, 0);
  EXPECT_FALSE(machine.bf16.has_value());
  EXPECT_EQ(parse_machine(machine.text(), "again"), machine);
  EXPECT_EQ(machine.link(0, 1), machine.inside);
  EXPECT_EQ(machine.link(1, 2), machine.between);
}

TEST(Machine, BuiltInProfilesLoadAndRoundTrip) {
  EXPECT_EQ(built_in_machines(), (std::vector<std::string>{"a100", "b200", "cpu", "h100", "h200"}));
  for (const std::string& name : built_in_machines()) {
    const MachineProfile machine = built_in_machine(name);
    EXPECT_EQ(machine.name, name);
    EXPECT_EQ(parse_machine(machine.text(), name), machine);
    EXPECT_EQ(find_machine(name, "test"), machine);
  }
  EXPECT_EQ(find_machine("", "test").name, "cpu");
  EXPECT_EQ(find_machine("", "test", "cuda").name, "h100");
}

TEST(Machine, InterpolatesSecondsInOneOverLengths) {
  const KernelRate rate = parse_machine(kProfile, "test").fp32->forward;
  EXPECT_DOUBLE_EQ(rate.rate(16, 16), 1e9);
  EXPECT_DOUBLE_EQ(rate.rate(1, 1), 1e9);
  EXPECT_DOUBLE_EQ(rate.rate(64, 256), 8e9);
  EXPECT_DOUBLE_EQ(rate.rate(1 << 20, 1 << 20), 8e9);
  // 1/64 is 4/5 of the way from 1/16 to 1/256, and 1/32 is 2/3 of that to 1/64.
  EXPECT_DOUBLE_EQ(rate.rate(16, 64), 1 / (0.2 / 1e9 + 0.8 / 4e9));
  EXPECT_DOUBLE_EQ(rate.rate(32, 16), 1 / (1.0 / 3 / 1e9 + 2.0 / 3 / 2e9));
  EXPECT_DOUBLE_EQ(parse_machine(kProfile, "test").fp32->backward.rate(7, 1000), 5e8);
}

TEST(Machine, DerivesTheRatesOfOtherDtypes) {
  const MachineProfile machine = parse_machine(kProfile, "test");
  EXPECT_EQ(machine.kernel(4), *machine.fp32);
  EXPECT_DOUBLE_EQ(machine.kernel(8).forward.rate(16, 16), 5e8);
  EXPECT_DOUBLE_EQ(machine.kernel(2).forward.rate(16, 16), 2e9);
}

TEST(Machine, RefusesAbsurdAndMissingFiguresByTheirKeys) {
  const auto refused = [](const std::string& text, const std::string& expected) {
    try {
      parse_machine(text, "my.toml");
      ADD_FAILURE() << "accepted, expected: " << expected;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_EQ(std::string(error.message()).rfind("my.toml", 0), 0u) << error.what();
      EXPECT_NE(std::string(error.message()).find(expected), std::string::npos) << error.what();
    }
  };
  refused(with("bandwidth = 2e9", "bandwidth = 0"), "\"inside.bandwidth\" should be bytes a second, from 1e3 to 1e15");
  refused(with("bandwidth = 2e9", "bandwidth = nan"), "\"inside.bandwidth\" should be");
  refused(with("bandwidth = 2e9", "bandwidth = \"2e9\""), "\"inside.bandwidth\" should be");
  refused(with("bandwidth = 2e9\n", ""), "\"inside.bandwidth\" is missing: expected bytes a second");
  refused(with("latency = 1e-5", "latency = -1.0"), "\"between.latency\" should be seconds");
  refused(with("latency = 1e-5", "latenzy = 1e-5"), "\"between.latency\" is missing");
  refused(with("message = 1e-6", "mesage = 1e-6"), "did you mean \"message\"?");
  refused(with("rows = [16, 64]", "rows = [64, 16]"), "\"kernel.fp32.forward.rows\" should be ascending lengths");
  refused(with("[[1e9, 4e9], [2e9, 8e9]]", "[[1e9, 4e9]]"),
          "\"kernel.fp32.forward.rates\" should be 2 lists of 2 rates");
  refused(with("[[1e9, 4e9], [2e9, 8e9]]", "[[1e9, 4e9], [2e9, 1e30]]"),
          "\"kernel.fp32.forward.rates\" should be pairs");
  refused(with("memory = \"1GB\"", "memory = \"1kB\""), "\"memory\" should be an amount of memory of at least 1MiB");
  refused(with("overlap = true", "overlap = 1"), "\"overlap\" should be true or false, but is 1");
  refused(with("[kernel.fp32.backward]", "[kernel.fp32.other]"), "\"kernel.fp32.backward\" is missing");
  refused(kProfile.substr(0, kProfile.find("[kernel")), "\"kernel\" is missing");
  refused("name = ", "line 1: a machine's profile should be TOML");
  try {
    find_machine("h1000", "--machine");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(
        std::string(error.what()).find("--machine: unknown machine \"h1000\"; did you mean \"h100\"? (known: a100,"),
        std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace annulus::machine_test
