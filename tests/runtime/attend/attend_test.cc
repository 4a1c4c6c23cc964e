// Tests of `annulus attend` with threads as ranks: random inputs and the check against the oracle with every pattern,
// block maps that are written and read back, dropout, and refused options.
#include "runtime/attend/attend.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "attention/plan/choice.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/tensor_files/block_map_file.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/common/exactness.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::attend_test {
namespace {

AttendOptions random_options(const std::string& pattern, const std::string& sizes = "") {
  AttendOptions o;
  o.random = "batch=2,queries=83,heads=4,kv_heads=2,dim=8,seed=3" + (sizes.empty() ? "" : "," + sizes);
  o.pattern = pattern;
  o.backward = true;
  o.check = true;
  return o;
}

void attend(const AttendOptions& options, int ranks) {
  run_ranks(ranks, [&](Communicator& world) { AttendJob(options, {world.hosts(), 0, world.rank()}).run(world); });
}

// Runs the job, which raises an error if its results are not those of the oracle, and says what it has compared.
void expect_checked(const AttendOptions& options, int ranks, const std::string& more = "; allowed ") {
  ::testing::internal::CaptureStdout();
  try {
    attend(options, ranks);
  } catch (const Error& e) {
    ADD_FAILURE() << e.what();
  }
  const std::string said = ::testing::internal::GetCapturedStdout();
  for (const std::string word : {"check: out ", ", lse ", ", dq ", ", dk ", ", dv ", more.c_str()}) {
    EXPECT_NE(said.find(word), std::string::npos) << word << " is not in: " << said;
  }
}

void expect_refused(const AttendOptions& options, int ranks, ErrorKind kind, const std::string& word) {
  expect_error(kind, {word}, [&] { attend(options, ranks); });
}

TEST(Attend, ChecksEveryPatternAgainstTheOracle) {
  const char* const patterns[] = {
      "{ kind = 'full' }",
      "{ kind = 'causal', documents = [[40, 43], [83]] }",
      "{ kind = 'window', left = 9, right = 4 }",
      "{ kind = 'dilated', segment_lengths = [20, 50], dilation_rates = [1, 3] }",
      "{ kind = 'dilated', segment_lengths = [20, 50, 100], dilation_rates = [1, 3, 4], combine = 'mean', causal = "
      "true }",
      "{ kind = 'blocks', map = 'local', block = 16, window_blocks = 1 }",
      "{ kind = 'blocks', map = 'dilated', block = 16, window_blocks = 4, rate = 2 }",
      "{ kind = 'blocks', map = 'global-local', block = 16, global_blocks = 1, window_blocks = 0, causal = true }",
      "{ kind = 'blocks', map = 'bigbird', block = 16, window_blocks = 0, global_blocks = 1, random_blocks = 1 }",
      "{ kind = 'blocks', map = 'strided', block = 16, window_blocks = 0, stride = 2, causal = true }",
      "{ kind = 'blocks', map = 'hierarchical', block = 16, levels = [[1, 1], [2, 4]] }",
      "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2 }",
      "{ kind = 'slices', slices = [{ queries = [1, 2, 41], keys = [0, 1, 83], lo = -20 }, "
      "{ queries = [0, 1, 83], keys = [3, 5, 10], heads = [1, 1, 2], batch = [1, 1, 1] }] }",
      "{ kind = 'union', of = [{ kind = 'causal' }, { kind = 'blocks', map = 'adaptive', block = 32, keep = 2 }] }"};
  for (const char* const pattern : patterns) {
    SCOPED_TRACE(pattern);
    for (const int ranks : {1, 3}) {
      AttendOptions o = random_options(pattern);
      if (ranks == 3) o.layout = "zigzag";
      expect_checked(o, ranks);
      o.check_rows = "rows=100000";
      expect_checked(o, ranks,
                     "checked: all 664 rows (out, lse, dq) and all 332 keys (dk, dv)\nnot checked: dk and dv were");
    }
  }
}

TEST(Attend, ChecksEveryDtypeAndScheduleWithUnevenLengths) {
  for (const std::string dtype : {"f32", "f64", "bf16", "f16"}) {
    for (const std::string schedule : {"ring", "all-gather", "group-cast", "double-ring", "auto"}) {
      SCOPED_TRACE(dtype + " " + schedule);
      AttendOptions o = random_options("{ kind = 'window', left = 30, right = 0 }", "dtype=" + dtype);
      o.schedule = schedule;
      o.within = schedule == "group-cast" || schedule == "double-ring" ? 2 : 0;
      o.lengths = {10, 0, 40, 33};
      expect_checked(o, 4);
      o.check_rows = "rows=50,seed=3";
      expect_checked(o, 4, "checked: 50 of 664 rows (out, lse, dq) and 50 of 332 keys (dk, dv), drawn with seed 3");
    }
  }
}

TEST(Attend, CheckByRowsNamesWhatItCannotCheck) {
  const auto said = [](AttendOptions o) {
    o.check_rows = "rows=5";
    ::testing::internal::CaptureStdout();
    attend(o, 2);
    return ::testing::internal::GetCapturedStdout();
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  AttendOptions o = random_options("{ kind = 'causal' }");
  expect(said(o),
         "not checked: the other rows and keys; dk and dv were computed from out and lse as reported, which are "
         "checked in the drawn rows alone\n");
  o.backward = false;
  expect(said(o), "not checked: the other rows\n");
  // Lengths for which there are too many pairs to check them all.
  o.random = "queries=100000,dim=16";
  o.pattern = "{ kind = 'window', left = 3, right = 0 }";
  expect(said(o), "checked: 5 of 100,000 rows (out, lse), drawn with seed 1: ");
}

TEST(Attend, CheckByRowsReadsAFileAndRefusesInputsThatAreNotFinite) {
  const TestFolder folder;
  RandomTensors in = make_random(parse_random_input("queries=50,heads=2,dim=4", "test"));
  AttendOptions o;
  o.input = folder.path() + "/in.safetensors";
  o.output = folder.path() + "/out.safetensors";
  o.layout = "striped";
  o.backward = o.check = true;
  o.check_rows = "rows=10";
  const auto write = [&] { write_safetensors(o.input, {{"q", in.q}, {"k", in.k}, {"v", in.v}, {"dout", in.dout}}); };
  write();
  expect_checked(o, 3, "checked: 10 of 100 rows");
  in.v.slice(1, 37, 38).select(2, 1).fill_(std::nan(""));
  write();
  expect_refused(o, 3, ErrorKind::kInput, "in.safetensors, tensor \"v\": the element [0, 37, 1, 0] is nan in F32");
}

TEST(Attend, FailedCheckIsAnErrorThatNamesTheBound) {
  RandomInput input = parse_random_input("queries=20,heads=2", "test");
  const RandomTensors in = make_random(input);
  const Dropout none;
  AttendResults results;
  results.out = at::zeros_like(in.q);
  results.lse = at::zeros({1, 2, 20});
  try {
    check_results(causal_pattern(), input.shape(), in, results, 0.25, none);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_code(), 1);
    EXPECT_NE(std::string(e.what()).find("allowed"), std::string::npos) << e.what();
  }
}

TEST(Attend, MasksOfTokensAreThoseOfTheFile) {
  const std::string path = ::testing::TempDir() + "/attend_mask.safetensors";
  const at::Tensor shown = at::arange(2 * 83 * 83).mul(2654435761).remainder(97).lt(40).view({2, 1, 83, 83});
  write_safetensors(path, {{"mask", shown}});
  AttendOptions o = random_options("{ kind = 'causal', mask = '" + path + "' }");
  expect_checked(o, 1);
  expect_checked(o, 3);
  o.check_rows = "rows=4";
  expect_checked(o, 2, "checked: 4 of 664 rows");
  // A rank holds the bits of its own queries and of those that are drawn: 2 words a plane and query, and a place for
  // each query of a plane. All would take 8 (2 + 1) 2 83 bytes.
  const int64_t limit = mask_limit();
  set_mask_limit(int64_t{8} * (1 + 1) * 2 * 83 + 8 * 2 * 2 * (4 + 4));
  expect_checked(o, 2, "checked: 4 of 664 rows");
  // With a schedule that moves queries it holds those of the queries that it computes, here all.
  o.schedule = "ulysses";
  expect_error(ErrorKind::kResource, {"whose bits would take "}, [&] { AttendJob(o, {RankHosts(2), 0, 1}); });
  set_mask_limit(limit);
  expect_checked(o, 2, "checked: 4 of 664 rows");
  set_mask_limit(int64_t{8} * (1 + 1) * 2 * 83 + 8 * 2 * 2 * (4 + 4));
  o.schedule = "auto";  // takes none whose bits would be too many
  o.check_rows = "";
  AttendJob(o, {RankHosts(2), 0, 1});
  expect_error(ErrorKind::kResource, {"whose bits would take "}, [&] {
    AttendJob(o, {RankHosts(2), 0, 0});
  });  // it compares all
  set_mask_limit(limit);
  o.check = false;
  run_ranks(3, [&](Communicator& world) { AttendJob(o, {world.hosts(), 0, world.rank()}).run(world); });
  o.layout = "auto";  // chosen before a rank knows which bits it needs
  run_ranks(3, [&](Communicator& world) { AttendJob(o, {world.hosts(), 0, world.rank()}).run(world); });
  o.output = path;
  expect_refused(o, 1, ErrorKind::kUsage, "the mask's file of --pattern");
}

// The layout is the one that choose_layout takes on these hosts, and its reason is said.
TEST(Attend, LayoutAutoIsTheOneOfTheLeastPredictedTime) {
  AttendOptions o = random_options("{ kind = 'causal' }");
  o.random = "batch=2,queries=4096,heads=4,kv_heads=2,dim=8,seed=3";
  o.backward = o.check = false;
  o.layout = "auto";
  PlanRequest request;
  request.shape = parse_random_input(o.random, "test").shape(0);
  request.pattern = causal_pattern();
  request.ranks = 4;
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0, 0}, {0, 0, 1, 1}}) {
    request.terms = on_hosts(terms_of("", "test", "cpu", 8, 4, false), RankHosts(hosts));
    const LayoutChoice expected = choose_layout(request);
    ::testing::internal::CaptureStdout();
    run_ranks(4, [&](Communicator& world) {
      world.set_hosts(hosts);
      AttendJob(o, {world.hosts(), 0, world.rank()}).run(world);
    });
    const std::string said = ::testing::internal::GetCapturedStdout();
    EXPECT_NE(said.find(", " + std::string(to_string(expected.layout)) + ", "), std::string::npos) << said;
    EXPECT_NE(said.find("layout auto: " + expected.reason), std::string::npos) << said << expected.reason;
  }
  o.check = o.backward = true;
  o.random = "queries=83,heads=4,kv_heads=2,dim=8,seed=3";
  expect_checked(o, 3);
  o.layout = "atuo";
  expect_refused(o, 2, ErrorKind::kUsage, "did you mean \"auto\"");
}

TEST(Attend, SelectedBlocksAreThoseOfTheDefinition) {
  const RandomInput input = parse_random_input("queries=64,heads=1,dim=4,dtype=f64", "test");
  const RandomTensors in = make_random(input);
  const PatternSpec asked = parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 1 }", "test");
  const auto with = [&](const std::vector<uint8_t>& active) {
    PatternSpec used = asked;
    used.blocks = given_map(std::make_shared<const BlockMap>(block_map_from_dense(active.data(), 16, 1, 1, 4, 4)));
    return used;
  };
  const std::vector<uint8_t> own{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  EXPECT_NO_THROW(check_selection(asked, with(own), input.shape(), in));
  std::vector<uint8_t> other = own;
  std::swap(other[0], other[1]);
  try {
    check_selection(asked, with(other), input.shape(), in);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_code(), 1);
    EXPECT_NE(std::string(e.what()).find("query block 0: the own block 0 is not selected"), std::string::npos)
        << e.what();
  }
}

// Each query sees one key, so that dq and dk are 0. Their terms, about 1e6, cancel but for their rounding, and a
// thousandth of a term is an error.
TEST(Attend, CheckKnowsWhatCancels) {
  const RandomInput input = parse_random_input("queries=20,heads=2", "test");
  RandomTensors in = make_random(input);
  in.v.mul_(1e3), in.dout.mul_(1e3);
  const at::Tensor lse = (in.q * in.k).sum(-1).mul(0.25).transpose(1, 2);
  const double terms = testing::largest((in.dout * in.v).abs().sum(-1)) * 0.25;
  for (const double error : {1.0, 1e-3, 2e-7, 0.0}) {
    const at::Tensor gradient = at::full_like(in.q, error * terms);
    const AttendResults results{in.v, lse, gradient, gradient, in.dout};
    const PatternSpec self = parse_pattern("{ kind = 'window', left = 0, right = 0 }", "test");
    const auto check = [&] { check_results(self, input.shape(), in, results, 0.25, {}); };
    if (error < 1e-6) {
      EXPECT_NO_THROW(check()) << error;
    } else {
      EXPECT_THROW(check(), Error) << error;
    }
  }
}

TEST(Attend, CheckRefusesNonFiniteInputs) {
  const TestFolder folder;
  const std::string file = folder.path() + "/in.safetensors";
  const auto refused = [&](const std::string& name, double value, at::ScalarType dtype, const std::string& words) {
    SCOPED_TRACE(name);
    const RandomTensors in = make_random(parse_random_input("queries=20,heads=2,dim=4", "test"));
    std::vector<NamedTensor> tensors = {{"q", in.q}, {"k", in.k}, {"v", in.v}, {"dout", in.dout}};
    for (NamedTensor& t : tensors) {
      t.tensor = t.tensor.to(dtype).contiguous();
      if (t.name == name) t.tensor.slice(1, 7).select(2, 1).fill_(value);
    }
    write_safetensors(file, tensors);
    AttendOptions o;
    o.input = file;
    o.output = folder.path() + "/out.safetensors";
    o.backward = o.check = true;
    expect_refused(o, 2, ErrorKind::kInput, words);
    EXPECT_FALSE(std::filesystem::exists(o.output));
    if (name == "dout") {
      o.backward = false;  // dout is not read then
      attend(o, 2);
    }
  };
  const double inf = std::numeric_limits<double>::infinity();
  refused("q", std::nan(""), at::kFloat, "in.safetensors, tensor \"q\": the element [0, 7, 1, 0] is nan in F32");
  refused("k", -inf, at::kDouble, "\"k\": the element [0, 7, 1, 0] is -inf in F64");
  refused("v", inf, at::kBFloat16, "\"v\": the element [0, 7, 1, 0] is inf in BF16");
  refused("dout", inf, at::kHalf, "\"dout\": the element [0, 7, 1, 0] is inf in F16");
  AttendOptions random = random_options("{ kind = 'causal' }", "dtype=f16,magnitude=1e6");
  expect_refused(random, 1, ErrorKind::kInput, "magnitude=1e+06, tensor \"q\"");
}

TEST(Attend, DropoutDependsOnSeedStepAndLayerButNotOnLayout) {
  const TestFolder folder;
  const auto out = [&](const std::function<void(AttendOptions&)>& change, int ranks) {
    AttendOptions o = random_options("{ kind = 'causal' }", "dtype=f64");
    o.dropout = {.rate = 0.3, .seed = 5, .step = 2, .layer = 1};
    o.output = folder.path() + "/out.safetensors";
    change(o);
    attend(o, ranks);
    return SafetensorsFile(o.output).load("out");
  };
  const at::Tensor one = out([](AttendOptions&) {}, 1);
  EXPECT_TRUE(testing::agrees(out([](AttendOptions& o) { o.layout = "striped"; }, 3), one));
  EXPECT_GT((out([](AttendOptions& o) { o.dropout.step = 3; }, 1) - one).abs().max().item<double>(), 0.01);
  EXPECT_GT((out([](AttendOptions& o) { o.dropout.layer = 0; }, 1) - one).abs().max().item<double>(), 0.01);
  EXPECT_GT((out([](AttendOptions& o) { o.dropout.seed = 6; }, 1) - one).abs().max().item<double>(), 0.01);
}

TEST(Attend, WrittenBlockMapCanBeReadBack) {
  const TestFolder folder;
  const std::string mask = folder.path() + "/mask.safetensors", first = folder.path() + "/first.safetensors",
                    second = folder.path() + "/second.safetensors";
  AttendOptions o = random_options("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }");
  o.mask_out = mask;
  o.output = first;
  attend(o, 2);
  const at::Tensor written = SafetensorsFile(mask).load("mask");
  EXPECT_EQ(written.sizes(), at::IntArrayRef({2, 4, 6, 6}));
  AttendOptions again =
      random_options("{ kind = 'blocks', map = 'file', block = 16, causal = true, file = '" + mask + "' }");
  again.output = second;
  attend(again, 2);
  EXPECT_TRUE(at::equal(SafetensorsFile(first).load("out"), SafetensorsFile(second).load("out")));
  // A named map can be written as well.
  o.pattern = "{ kind = 'blocks', map = 'local', block = 32, window_blocks = 1 }";
  attend(o, 1);
  EXPECT_EQ(SafetensorsFile(mask).load("mask").sum().item<int64_t>(), 7);
}

TEST(Attend, RefusesInvalidOptions) {
  const std::string causal = "{ kind = 'causal' }";
  const auto refused = [&](const std::function<void(AttendOptions&)>& change, const std::string& word,
                           ErrorKind kind = ErrorKind::kUsage) {
    AttendOptions o = random_options(causal);
    change(o);
    expect_refused(o, 2, kind, word);
  };
  refused([](AttendOptions& o) { o.random = ""; }, "--input");
  refused([](AttendOptions& o) { o.input = "x"; }, "--input and --random");
  refused([](AttendOptions& o) { o.random = "querys=3"; }, "queries");
  refused([](AttendOptions& o) { o.random = "", o.input = "x"; }, "--output");
  refused([](AttendOptions& o) { o.layout = "zigzag", o.lengths = {40, 43}; }, "--lengths");
  refused([](AttendOptions& o) { o.mask_out = "mask"; }, "--mask-out");
  refused([](AttendOptions& o) { o.dropout.rate = 1; }, "--dropout");
  refused([](AttendOptions& o) { o.dropout.step = -1; }, "--step");
  refused([](AttendOptions& o) { o.random = "queries=100000,dim=16"; }, "check drawn rows (--check rows=64)");
  refused([](AttendOptions& o) { o.check_rows = "rows=0"; }, "--check, rows: expected a whole number of at least 1");
  refused([](AttendOptions& o) { o.scale = 1e30; }, "--check says nothing here");
  refused([](AttendOptions& o) { o.scale = 1e300; }, "--check says nothing here");
  refused([](AttendOptions& o) { o.scale = -1e308, o.random += ",magnitude=1000"; }, "--check says nothing here");
  refused([](AttendOptions& o) { o.random += ",magnitude=1e4"; }, "in F32 allows");
  refused([](AttendOptions& o) { o.random += ",magnitude=1e4"; }, "or dtype=f64");
  refused([](AttendOptions& o) { o.random += ",dtype=f64,magnitude=1e6", o.scale = 100; },
          "smaller --scale or magnitude");
  refused([](AttendOptions& o) { o.pattern = "{ kind = 'causal', documents = [80] }"; }, "83", ErrorKind::kPlan);
  refused([](AttendOptions& o) { o.pattern = "{ kind = 'blocks', map = 'file', file = '/nowhere/m' }"; }, "nowhere",
          ErrorKind::kInput);
  refused(
      [](AttendOptions& o) {
        o.random = "queries=20,keys=30";
        o.pattern = "{ kind = 'tree', lengths = [20], parents = [-1] }";
      },
      "as many keys as queries", ErrorKind::kPlan);
  refused(
      [](AttendOptions& o) {
        o.pattern = "{ kind = 'blocks', map = 'local', window_blocks = 1 }";
        o.mask_out = "/nowhere/mask";
      },
      "mkdir", ErrorKind::kResource);
}

TEST(Attend, RefusesToOverwriteItsOwnFiles) {
  const TestFolder folder;
  const std::filesystem::path at = folder.path();
  const std::string map = at / "map.safetensors";
  AttendOptions local = random_options("{ kind = 'blocks', map = 'local', block = 16, window_blocks = 1 }");
  local.mask_out = map;
  attend(local, 1);
  const auto kept = [&] { return SafetensorsFile(map).load("mask").sum().item<int64_t>(); };
  const int64_t blocks = kept();
  std::filesystem::create_directory(at / "sub");
  std::filesystem::create_symlink(map, at / "link");
  const auto refused = [&](const std::string& output, const std::string& mask_out, const std::string& pattern,
                           const std::string& word) {
    SCOPED_TRACE(output + " " + mask_out + " " + pattern);
    AttendOptions o = local;
    o.output = output;
    o.mask_out = mask_out;
    if (!pattern.empty()) o.pattern = pattern;
    expect_refused(o, 2, ErrorKind::kUsage, word);
  };
  refused(at / "new", at / "new", "", "--mask-out");
  refused(at / "new", at / "sub" / ".." / "." / "new", "", "--output");
  refused(map, at / "link", "", "same file");
  EXPECT_FALSE(std::filesystem::exists(at / "new"));
  const std::string file = "{ kind = 'blocks', map = 'file', block = 16, file = '" + map + "' }";
  refused(map, "", file, "--output");
  refused(at / "link", "", file, "--pattern");
  refused(at / "new", map, file, "--mask-out");
  refused(map, "", "{ kind = 'union', of = [{ kind = 'causal' }, " + file + "] }", "--pattern");
  EXPECT_EQ(kept(), blocks);
  AttendOptions input = local;
  input.random = "";
  input.input = map;
  input.output = at / "new";
  input.mask_out = at / "link";
  expect_refused(input, 2, ErrorKind::kUsage, "--input");
}

TEST(Attend, CommandReproducesTheRequest) {
  PlanRequest request;
  request.shape = {2, 4, 2, 30, 30, 5};
  request.pattern = parse_pattern("{ kind = 'window', left = 3, right = 0 }", "test");
  request.ranks = 3;
  request.layout = LayoutKind::kZigzag;
  request.schedule = ScheduleKind::kRing;
  EXPECT_EQ(
      attend_command(request, {.dim = 8, .dtype = at::kDouble, .seed = 4}, KernelKind::kCpu, true,
                     {.rate = 0.25, .seed = 7, .step = 1, .layer = 2}, 0.5),
      "./annulus launch -n 3 attend --random batch=2,queries=30,keys=30,heads=4,kv_heads=2,dim=8,dtype=f64,seed=4 "
      "--pattern '{ kind = \"window\", left = 3, right = 0 }' --layout zigzag --schedule ring --kernel cpu "
      "--query-offset 5 --scale 0.5 --dropout 0.25 --seed 7 --step 1 --layer 2 --backward --check");
  request.uneven_lengths = {10, 0, 20};
  request.shape.query_offset = 0;
  request.schedule = ScheduleKind::kDoubleRing;
  request.within = 1;
  const std::string uneven = attend_command(request, {}, KernelKind::kAuto, false);
  EXPECT_NE(uneven.find(" --lengths 10,0,20 --schedule double-ring --within 1 --kernel auto "), std::string::npos);
}

}  // namespace
}  // namespace annulus::attend_test
