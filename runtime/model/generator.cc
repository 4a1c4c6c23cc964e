// See generator.h.
#include "runtime/model/generator.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

// Queries of one call. It bounds the memory of scores, [heads, kChunk, context].
constexpr int64_t kChunk = 256;

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

Generator::Generator(const Model& model, const std::vector<PatternSpec>& patterns, int64_t context)
    : model_(model),
      context_(context),
      cache_(model.shape(), at::TensorOptions(model.parameters().dtype()).device(model.parameters().device()), patterns,
             context) {}

at::Tensor Generator::feed(const std::vector<int64_t>& tokens) {
  if (tokens.empty()) throw Error(ErrorKind::kInternal, "sample", "feed needs at least one token");
  std::vector<int64_t> next = tokens;
  if (cache_.length() + static_cast<int64_t>(next.size()) > context_) {
    // The text is too long: what is kept begins again at position 0. Half a context leaves room for as much again.
    std::vector<int64_t> all = tokens_;
    all.insert(all.end(), next.begin(), next.end());
    const auto keep = std::max<int64_t>(1, context_ / 2);
    next.assign(all.end() - std::min<int64_t>(keep, static_cast<int64_t>(all.size())), all.end());
    tokens_.clear();
    cache_.clear();
  }
  at::Tensor logits;
  for (size_t i = 0; i < next.size(); i += kChunk) {
    logits = extend(next.data() + i, std::min<int64_t>(kChunk, static_cast<int64_t>(next.size() - i)));
  }
  return logits;
}

at::Tensor Generator::extend(const int64_t* tokens, int64_t n) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor row = at::tensor(at::IntArrayRef(tokens, static_cast<size_t>(n)), at::kLong).view({1, n});
  const int64_t before = cache_.length();
  cache_.begin(n);
  const at::Tensor logits = model_.logits(
      row.to(model_.parameters().device()), model_.rotary(at::arange(before, before + n, at::kLong)),
      [this](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer) {
        return Attended{.kept = {cache_.attend(q, k, v, layer)}};
      },
      /*last_only=*/true);
  cache_.end(n);
  tokens_.insert(tokens_.end(), tokens, tokens + n);
  return logits[0].to(at::kCPU, at::toOpMathType(logits.scalar_type()));
}

int64_t pick(const at::Tensor& logits, int64_t limit, const Choice& choice, int64_t i) {
  const at::Tensor values = logits.to(at::kCPU, at::kDouble).contiguous();
  const double* p = values.const_data_ptr<double>();
  std::vector<int64_t> order(std::min<int64_t>(limit, values.numel()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return p[a] > p[b]; });
  if (choice.temperature <= 0) return order[0];
  if (choice.top_k > 0 && choice.top_k < static_cast<int64_t>(order.size())) order.resize(choice.top_k);
  std::vector<double> sums;
  double sum = 0;
  for (const int64_t token : order) sums.push_back(sum += std::exp((p[token] - p[order[0]]) / choice.temperature));
  if (choice.top_p < 1) {
    const auto last = std::lower_bound(sums.begin(), sums.end(), choice.top_p * sum);
    sums.resize(std::min<size_t>(last - sums.begin() + 1, sums.size()));
    sum = sums.back();
  }
  const uint64_t random = splitmix64(splitmix64(choice.seed) + static_cast<uint64_t>(i) * kSplitmix64Step);
  const double u = static_cast<double>(random >> 11) * 0x1.0p-53 * sum;
  const auto at = std::upper_bound(sums.begin(), sums.end(), u);
  return order[std::min<size_t>(at - sums.begin(), sums.size() - 1)];
}

std::string Utf8Stream::push(unsigned char byte) {
  std::string out;
  const bool continues = (byte & 0xC0) == 0x80;
  if (!pending_.empty()) {
    // The second byte shows overlong forms, surrogates and values beyond U+10FFFF.
    const auto lead = static_cast<unsigned char>(pending_[0]);
    const bool second = pending_.size() == 1;
    const bool valid = continues && !(second && ((lead == 0xE0 && byte < 0xA0) || (lead == 0xED && byte > 0x9F) ||
                                                 (lead == 0xF0 && byte < 0x90) || (lead == 0xF4 && byte > 0x8F)));
    if (valid) {
      pending_ += static_cast<char>(byte);
      // C1 control characters (U+0080 to U+009F) are replaced, too.
      if (pending_.size() == need_) {
        out = lead == 0xC2 && byte < 0xA0 ? std::string(kReplacement) : pending_;
        pending_.clear();
      }
      return out;
    }
    out = kReplacement;
    pending_.clear();
  }
  if (byte < 0x80) {
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F;
    return out + (control ? std::string(kReplacement) : std::string(1, static_cast<char>(byte)));
  }
  need_ = byte >= 0xC2 && byte <= 0xDF ? 2 : (byte & 0xF0) == 0xE0 ? 3 : byte >= 0xF0 && byte <= 0xF4 ? 4 : 0;
  if (need_ == 0) return out + std::string(kReplacement);
  pending_ = static_cast<char>(byte);
  return out;
}

std::string Utf8Stream::finish() {
  const bool any = !pending_.empty();
  pending_.clear();
  return any ? std::string(kReplacement) : "";
}

}  // namespace annulus
