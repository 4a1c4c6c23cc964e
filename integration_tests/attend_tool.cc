// A tool of attend_test.py. It makes random inputs for `annulus attend` and compares its output with dense fp64
// attention, which is written from the definitions in docs/explanation/attention.md and uses no slices, plans or
// kernels of annulus. How far results may be from it is decided as in unit tests
// (tests/attention/kernels/plain_attention.h).
//
//   attend_tool make FILE B Sq Sk H Hk D DTYPE SEED [magnitude]     DTYPE: f32, f64 or bf16
//   attend_tool check INPUT OUTPUT KIND LEFT RIGHT OFFSET SCALE     KIND: full, causal or window; SCALE 0: 1/sqrt(D)
//   attend_tool command SEED RANKS     prints what a failing property test prints, for a small random request
//   attend_tool garble FILE truncate|flip|drop-v|shape-k|dtype-k|rank-q    makes a bad copy, FILE.bad
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <rapidcheck.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/oracle/oracle.h"
#include "attention/testing/any_pattern.h"
#include "attention/testing/any_request.h"
#include "runtime/attend/attend.h"
#include "runtime/attend/random_input.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/attention/kernels/plain_attention.h"

namespace {

using annulus::NamedTensor;
using annulus::OracleResult;
using annulus::SafetensorsFile;
using annulus::testing::Expected;
using annulus::testing::expected_from;

at::ScalarType dtype_of(const std::string& name) {
  if (name == "f32") return at::kFloat;
  if (name == "f64") return at::kDouble;
  if (name == "bf16") return at::kBFloat16;
  throw std::runtime_error("dtype " + name);
}

at::Tensor random_tensor(const std::vector<int64_t>& shape, at::ScalarType dtype, double magnitude,
                         std::mt19937_64& rng) {
  at::Tensor t = at::empty(shape, at::kDouble);
  std::normal_distribution<double> normal(0, magnitude);
  for (int64_t i = 0; i < t.numel(); ++i) t.mutable_data_ptr<double>()[i] = normal(rng);
  return t.to(dtype);
}

int make(const std::vector<std::string>& a) {
  const auto n = [&](size_t i) { return std::stoll(a.at(i)); };
  const int64_t B = n(1), Sq = n(2), Sk = n(3), H = n(4), Hk = n(5), D = n(6);
  const at::ScalarType dtype = dtype_of(a.at(7));
  std::mt19937_64 rng(static_cast<uint64_t>(n(8)));
  const double magnitude = a.size() > 9 ? std::stod(a[9]) : 1;
  annulus::write_safetensors(a.at(0), {{"q", random_tensor({B, Sq, H, D}, dtype, magnitude, rng)},
                                       {"k", random_tensor({B, Sk, Hk, D}, dtype, magnitude, rng)},
                                       {"v", random_tensor({B, Sk, Hk, D}, dtype, 1, rng)},
                                       {"dout", random_tensor({B, Sq, H, D}, dtype, 1, rng)}});
  return 0;
}

// A contiguous [a, b, c, d] (or [a, b, c]) tensor in fp64.
struct Dense {
  explicit Dense(const at::Tensor& t) : data(t.to(at::kDouble).contiguous()), sizes(data.sizes().vec()) {}
  double& at(int64_t a, int64_t b, int64_t c, int64_t d = 0) {
    const int64_t last = sizes.size() > 3 ? sizes[3] : 1;
    return data.mutable_data_ptr<double>()[((a * sizes[1] + b) * sizes[2] + c) * last + d];
  }
  at::Tensor data;
  std::vector<int64_t> sizes;
};

int check(const std::vector<std::string>& a) {
  const SafetensorsFile in(a.at(0)), out(a.at(1));
  const std::string kind = a.at(2);
  const int64_t left = std::stoll(a.at(3)), right = std::stoll(a.at(4)), offset = std::stoll(a.at(5));
  const at::ScalarType dtype = in.find("q")->dtype;
  Dense q(in.load("q")), k(in.load("k")), v(in.load("v")), dout(in.load("dout"));
  const int64_t B = q.sizes[0], Sq = q.sizes[1], H = q.sizes[2], D = q.sizes[3], Sk = k.sizes[1], Hk = k.sizes[2];
  const double scale = std::stod(a.at(6)) != 0 ? std::stod(a.at(6)) : 1 / std::sqrt(static_cast<double>(D));
  const auto counted = [&](int64_t i, int64_t j) {
    const int64_t position = i + offset;
    if (kind == "causal") return j <= position;
    if (kind == "window") return position - left <= j && j <= position + right;
    return true;
  };

  const auto zeros = [](const std::vector<int64_t>& shape) { return Dense(at::empty(shape, at::kDouble).zero_()); };
  Dense o = zeros(q.sizes), dq = zeros(q.sizes), dk = zeros(k.sizes), dv = zeros(k.sizes), lse = zeros({B, H, Sq});
  std::vector<double> p(static_cast<size_t>(Sk));
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / (H / Hk);
      for (int64_t i = 0; i < Sq; ++i) {
        const double none = -std::numeric_limits<double>::infinity();
        double top = none, sum = 0;
        for (int64_t j = 0; j < Sk; ++j) {
          double score = none;
          if (counted(i, j)) {
            score = 0;
            for (int64_t d = 0; d < D; ++d) score += q.at(b, i, h, d) * k.at(b, j, g, d);
            score *= scale;
          }
          p[static_cast<size_t>(j)] = score;
          top = std::max(top, score);
        }
        if (top == none) {
          lse.at(b, h, i) = none;
          continue;
        }
        for (double& x : p) sum += std::exp(x - top);
        lse.at(b, h, i) = top + std::log(sum);
        for (double& x : p) x = std::exp(x - lse.at(b, h, i));
        double delta = 0;
        for (int64_t d = 0; d < D; ++d) {
          for (int64_t j = 0; j < Sk; ++j) o.at(b, i, h, d) += p[static_cast<size_t>(j)] * v.at(b, j, g, d);
          delta += o.at(b, i, h, d) * dout.at(b, i, h, d);
        }
        for (int64_t j = 0; j < Sk; ++j) {
          const double w = p[static_cast<size_t>(j)];
          if (w == 0) continue;
          double dp = 0;
          for (int64_t d = 0; d < D; ++d) {
            dp += dout.at(b, i, h, d) * v.at(b, j, g, d);
            dv.at(b, j, g, d) += w * dout.at(b, i, h, d);
          }
          const double ds = scale * w * (dp - delta);
          for (int64_t d = 0; d < D; ++d) {
            dq.at(b, i, h, d) += ds * k.at(b, j, g, d);
            dk.at(b, j, g, d) += ds * q.at(b, i, h, d);
          }
        }
      }
    }
  }
  OracleResult exact{o.data, lse.data, dq.data, dk.data, dv.data};
  at::Tensor shown = at::empty({Sq, Sk}, at::kDouble);
  for (int64_t i = 0; i < Sq; ++i) {
    for (int64_t j = 0; j < Sk; ++j) shown.mutable_data_ptr<double>()[i * Sk + j] = counted(i, j) ? 1 : 0;
  }
  const Expected want = expected_from(exact, q.data.to(dtype), k.data.to(dtype), v.data.to(dtype), dout.data.to(dtype),
                                      shown.log(), scale);
  int problems = 0;
  const auto compare = [&](const char* name, at::Tensor OracleResult::*result, at::ScalarType expected) {
    const at::Tensor got = out.load(name);
    const auto right = as_exact(result, got, want, dtype);
    std::printf("%s, %s: %s\n", name, at::toString(got.scalar_type()), right ? "right" : right.message());
    if (!right || got.scalar_type() != expected) ++problems;
  };
  compare("out", &OracleResult::out, dtype);
  // bf16 inputs are exact in fp32, so lse is as precise as with fp32 inputs.
  compare("lse", &OracleResult::lse, dtype == at::kDouble ? at::kDouble : at::kFloat);
  if (out.find("dq") != nullptr) {
    compare("dq", &OracleResult::dq, dtype);
    compare("dk", &OracleResult::dk, dtype);
    compare("dv", &OracleResult::dv, dtype);
  }
  return problems == 0 ? 0 : 1;
}

int garble(const std::vector<std::string>& a) {
  const std::string path = a.at(0), how = a.at(1), bad = path + ".bad";
  if (how == "truncate" || how == "flip") {
    std::ifstream file(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    if (how == "truncate") bytes.resize(bytes.size() - 100);
    if (how == "flip") bytes[7] = '\x40';  // an absurd length of the header
    std::ofstream(bad, std::ios::binary) << bytes;
    return 0;
  }
  const SafetensorsFile file(path);
  at::Tensor q = file.load("q"), k = file.load("k"), v = file.load("v"), dout = file.load("dout");
  if (how == "shape-k") k = k.narrow(1, 0, k.size(1) - 1);
  if (how == "dtype-k") k = k.to(k.scalar_type() == at::kFloat ? at::kDouble : at::kFloat);
  if (how == "rank-q") q = q.flatten();
  std::vector<NamedTensor> tensors = {{"q", q}, {"k", k}};
  if (how != "drop-v") tensors.push_back({"v", v});
  if (how != "drop-dout") tensors.push_back({"dout", dout});
  annulus::write_safetensors(bad, tensors);
  return 0;
}

int command(const std::vector<std::string>& a) {
  const auto seed = static_cast<uint64_t>(std::stoull(a.at(0)));
  const auto request = rc::gen::exec([&] {
    annulus::PlanRequest any = annulus::testing::any_request();
    while (has_mask(any.pattern)) any = annulus::testing::any_request();  // a command cannot give a mask without a file
    any.ranks = std::stoi(a.at(1));
    if (any.within > 0 && any.ranks % any.within != 0) any.within = any.ranks;
    annulus::testing::fit_heads(any);
    if (!any.uneven_lengths.empty()) {
      any.uneven_lengths = annulus::testing::any_documents(any.shape.q_len, any.ranks);
    }
    return annulus::testing::written_out(any);
  });
  const annulus::PlanRequest any = request(rc::Random(seed), 30).value();
  const annulus::RandomInput input{.dtype = seed % 2 ? at::kFloat : at::kDouble, .seed = static_cast<int64_t>(seed)};
  std::puts(attend_command(any, input, annulus::KernelKind::kAuto, /*backward=*/true).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("attend_tool make|check|command|garble ...");
  const std::string what = argv[1];
  const std::vector<std::string> args(argv + 2, argv + argc);
  if (what == "command") return command(args);
  return what == "make" ? make(args) : what == "check" ? check(args) : garble(args);
} catch (const std::exception& error) {
  std::fprintf(stderr, "attend_tool: %s\n", error.what());
  return 2;
}
