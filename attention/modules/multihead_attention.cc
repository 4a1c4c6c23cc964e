// See multihead_attention.h.
#include "attention/modules/multihead_attention.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <cmath>
#include <cstdio>
#include <ostream>
#include <string>

#include "attention/execution/terms_in_job.h"
#include "attention/modules/projected_attention.h"
#include "attention/modules/rotary.h"
#include "attention/plan/time.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int64_t kMostFeatures = int64_t{1} << 24;
constexpr const char* kOptionsKey = "annulus_options";

void require(bool ok, const std::string& message) {
  if (!ok) throw Error(ErrorKind::kPlan, "modules", message);
}

// The file of a block mask that has not been read; empty: there is none.
std::string unread_file(const PatternSpec& p) {
  if (p.kind == PatternSpec::Kind::kBlocks && p.blocks.map == BlocksSpec::Map::kFile && !p.blocks.given) {
    return p.blocks.file;
  }
  for (const PatternSpec& member : p.members) {
    if (const std::string file = unread_file(member); !file.empty()) return file;
  }
  return "";
}

// The options, checked, with zeros replaced by what they stand for.
MultiheadAttentionOptions checked(MultiheadAttentionOptions o) {
  require(o.dim > 0 && o.dim <= kMostFeatures && o.heads > 0 && o.heads <= kMostFeatures,
          "dim and heads must be 1 to " + std::to_string(kMostFeatures) + ", but are " + std::to_string(o.dim) +
              " and " + std::to_string(o.heads));
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (o.memory_dim == 0) o.memory_dim = o.dim;
  require(o.kv_heads > 0 && o.heads % o.kv_heads == 0, std::to_string(o.heads) + " query heads cannot share " +
                                                           std::to_string(o.kv_heads) +
                                                           " kv heads evenly: heads must be a multiple of kv_heads");
  if (o.head_dim == 0) {
    require(o.dim % o.heads == 0, "dim " + std::to_string(o.dim) + " does not give " + counted(o.heads, "head") +
                                      " of one size: make dim a multiple of heads, or give head_dim");
    o.head_dim = o.dim / o.heads;
  }
  require(o.head_dim > 0 && o.head_dim <= kMostFeatures && o.memory_dim > 0 && o.memory_dim <= kMostFeatures,
          "head_dim and memory_dim must be 1 to " + std::to_string(kMostFeatures) + ", but are " +
              std::to_string(o.head_dim) + " and " + std::to_string(o.memory_dim));
  require(std::isfinite(o.rotary_base) && o.rotary_base >= 0,
          "rotary_base must be above 0, or 0 for no rotary embedding, but is " + exact(o.rotary_base));
  require(
      o.rotary_base == 0 || o.head_dim % 2 == 0,
      "the rotary embedding rotates pairs: head_dim " + std::to_string(o.head_dim) + " must be even, or rotary_base 0");
  require(o.dropout >= 0 && o.dropout < 1,
          "dropout must be at least 0 and below 1, but is " + std::to_string(o.dropout));
  const std::string file = unread_file(o.pattern);
  require(file.empty(), "the block mask in " + file +
                            " was not read: a module reads no files. Give it read_block_maps(pattern, shape) of "
                            "runtime/tensor_files/block_map_file.h as the pattern (docs/reference/modules.md)");
  require(o.softcap == 0 || (o.softcap >= 1e-30 && o.softcap <= 1e30),
          "softcap must be positive and finite, from 1e-30 to 1e30, or 0 for none, but is " + exact(o.softcap));
  require(std::isfinite(o.scale) && std::isfinite(o.norm_eps) && o.norm_eps >= 0,
          "scale and norm_eps must be finite, norm_eps not negative, but are " + exact(o.scale) + " and " +
              exact(o.norm_eps));
  return o;
}

// The shortest text that reads back exactly, in steps of three digits. Saved modules hold this form, so it must not
// become that of `exact`.
std::string number(double value) {
  char text[32];
  for (int digits = 6;; digits += 3) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (digits > 15 || std::stod(text) == value) return text;
  }
}

}  // namespace

std::string MultiheadAttentionOptions::text() const {
  return "dim = " + std::to_string(dim) + ", heads = " + std::to_string(heads) +
         ", kv_heads = " + std::to_string(kv_heads) + ", head_dim = " + std::to_string(head_dim) +
         ", memory_dim = " + std::to_string(memory_dim) + ", bias = " + (bias ? "true" : "false") +
         ", norm = " + (norm ? "true, norm_eps = " + number(norm_eps) : "false") +
         ", rotary_base = " + number(rotary_base) + ", scale = " + number(scale) +
         (softcap == 0 ? "" : ", softcap = " + number(softcap)) + (learned_sinks ? ", learned_sinks = true" : "") +
         ", pattern = " + pattern.text();
}

bool MultiheadAttentionOptions::same_as(const std::string& saved) const {
  const std::string own = text();
  if (saved == own) return true;
  const std::string before_pattern = own.substr(0, own.size() - pattern.text().size());
  if (!saved.starts_with(before_pattern)) return false;
  try {  // a pattern that was written in another way
    return parse_pattern(saved.substr(before_pattern.size()), "pattern").text() == pattern.text();
  } catch (const Error&) {
    return false;
  }
}

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options) : options_(checked(options)) {
  reset();
}

void MultiheadAttentionImpl::reset() {
  const MultiheadAttentionOptions& o = options_;
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    auto layer = register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(o.bias)));
    torch::nn::init::xavier_uniform_(layer->weight);
    if (o.bias) torch::nn::init::zeros_(layer->bias);
    return layer;
  };
  q_proj = linear("q_proj", o.dim, o.heads * o.head_dim);
  k_proj = linear("k_proj", o.memory_dim, o.kv_heads * o.head_dim);
  v_proj = linear("v_proj", o.memory_dim, o.kv_heads * o.head_dim);
  if (o.norm) {
    norm = register_module("norm",
                           torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.heads * o.head_dim}).eps(o.norm_eps)));
  }
  out_proj = linear("out_proj", o.heads * o.head_dim, o.dim);
  if (o.learned_sinks) sinks = register_parameter("sinks", at::zeros({o.heads}));
}

at::Tensor MultiheadAttentionImpl::forward(const at::Tensor& x, const AttentionScope& scope) const {
  return attend(x, x, scope);
}

at::Tensor MultiheadAttentionImpl::forward(const at::Tensor& x, const at::Tensor& memory,
                                           const AttentionScope& scope) const {
  return attend(x, memory, scope);
}

void MultiheadAttentionImpl::check_inputs(const at::Tensor& x, const at::Tensor& memory) const {
  const MultiheadAttentionOptions& o = options_;
  const at::Tensor& weight = q_proj->weight;
  const auto check = [&](const at::Tensor& t, const char* name, int64_t features) {
    require(t.defined(), std::string(name) + " is an undefined tensor");
    require(t.dim() == 3 && t.size(2) == features, std::string(name) + " must be [batch, positions, " +
                                                       std::to_string(features) + "], but is " + list_text(t.sizes()));
    require(t.scalar_type() == weight.scalar_type() && t.device() == weight.device(),
            std::string(name) + " is " + c10::str(t.scalar_type(), " on ", t.device()) + ", but the module is " +
                c10::str(weight.scalar_type(), " on ", weight.device()) + ": move one of them with to()");
  };
  require(!memory.is_same(x) || o.memory_dim == o.dim, "this module attends to a memory of " +
                                                           std::to_string(o.memory_dim) + " features, not to x with " +
                                                           std::to_string(o.dim) + ": pass the memory to forward, too");
  check(x, "x", o.dim);
  check(memory, "memory", o.memory_dim);
  require(x.size(0) == memory.size(0),
          "x has " + std::to_string(x.size(0)) + " batch rows, but memory has " + std::to_string(memory.size(0)));
}

at::Tensor MultiheadAttentionImpl::attend(const at::Tensor& x, const at::Tensor& memory,
                                          const AttentionScope& scope) const {
  const MultiheadAttentionOptions& o = options_;
  AttentionCall call;
  call.label = "attention, layer " + std::to_string(o.layer);
  call.request.pattern = o.pattern;
  if (!scope.documents.empty()) {
    call.request.pattern.documents = scope.documents;
    call.request.pattern.key_documents = scope.key_documents;
  }
  call.request.layout = o.layout;
  call.request.balance_by = o.balance_by;
  call.request.schedule = o.schedule;
  call.request.within = o.within;
  const SequenceParts parts = agree_on_call(
      [&]() -> CallTerms {
        check_inputs(x, memory);
        return {.queries = x.size(1),
                .keys = memory.size(1),
                .alike = {{"layout",
                           std::string(to_string(o.layout)) + (o.balance_by ? " by " + o.balance_by->text() : "")},
                          {"module", o.text()}},
                .free_bytes = o.schedule == ScheduleKind::kAuto ? free_bytes(scope.comm, x.device()) : 0};
      },
      scope.comm, {call.label, 0});
  call.request.shape = {.batch = x.size(0),
                        .heads = o.heads,
                        .kv_heads = o.kv_heads,
                        .q_len = 0,
                        .k_len = 0,
                        .query_offset = scope.query_offset};
  place_sequence(call.request, parts);
  call.request.shape = aligned(call.request.shape);
  if (o.schedule == ScheduleKind::kAuto) {
    const TermsPointer terms = terms_of(o.machine, "machine", x.is_cuda() ? "cuda" : "cpu", o.head_dim,
                                        x.element_size(), at::GradMode::is_enabled());
    call.request.terms = terms_in_job(terms, scope.comm, parts.free_bytes);
  }
  call.comm = &scope.comm;
  call.kernel = o.kernel;
  if (o.scale != 0) call.scale = o.scale;
  call.softcap = o.softcap;
  call.sinks = o.learned_sinks;
  if (is_training()) {
    call.dropout = {
        .rate = o.dropout, .seed = o.seed, .step = scope.step, .layer = o.layer, .first_row = scope.first_row};
  }

  ProjectionPlan plan{o.heads, o.kv_heads, o.head_dim, {}, {}};
  if (o.rotary_base > 0) {
    const int rank = scope.comm.rank();
    const auto table = [&](const Layout& layout, int64_t offset) {
      return rotary_table_at(layout.spans[static_cast<size_t>(rank)], offset,
                             {.head_dim = o.head_dim, .theta = o.rotary_base}, x.scalar_type(), x.device());
    };
    plan.query_rotary = table(query_layout(call.request), call.request.shape.query_offset);
    plan.key_rotary = table(key_layout(call.request), 0);
  }
  const ProjectionWeights weights{q_proj->weight, q_proj->bias,   k_proj->weight,
                                  k_proj->bias,   v_proj->weight, v_proj->bias};
  at::Tensor out;
  if (o.recompute && at::GradMode::is_enabled()) {
    out = projected_attention(x, memory, weights, plan, call, sinks);
  } else {
    const Projected p = project(x, memory, weights, plan);
    out = o.learned_sinks ? attention(p.q, p.k, p.v, sinks, call) : attention(p.q, p.k, p.v, call);
  }
  out = out.reshape({x.size(0), x.size(1), o.heads * o.head_dim});
  if (o.norm) out = at::layer_norm(out, {out.size(2)}, norm->weight, norm->bias, o.norm_eps);
  return at::linear(out, out_proj->weight,
                    out_proj->bias.defined() ? std::optional<at::Tensor>(out_proj->bias) : std::nullopt);
}

void MultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "annulus::MultiheadAttention(" << options_.text() << ", layout = \"" << to_string(options_.layout)
         << "\", schedule = \"" << to_string(options_.schedule) << "\"";
  if (options_.within > 0) stream << ", within = " << options_.within;
  if (options_.dropout > 0) stream << ", dropout = " << number(options_.dropout);
  if (options_.recompute) stream << ", recompute = true";
  stream << ")";
}

void MultiheadAttentionImpl::save(torch::serialize::OutputArchive& archive) const {
  torch::nn::Module::save(archive);
  archive.write(kOptionsKey, c10::IValue(options_.text()));
}

void MultiheadAttentionImpl::load(torch::serialize::InputArchive& archive) {
  c10::IValue saved;
  if (!archive.try_read(kOptionsKey, saved) || !saved.isString()) {
    throw Error(ErrorKind::kInput, "modules", "what is loaded was not saved from a MultiheadAttention of annulus");
  }
  if (!options_.same_as(saved.toStringRef())) {
    throw Error(ErrorKind::kInput, "modules",
                "the module that was saved has " + saved.toStringRef() + ", but this one has " + options_.text() +
                    ": make it with the options it was saved with");
  }
  torch::nn::Module::load(archive);
}

}  // namespace annulus
