// Implements call.h.
#include "python/ops/call.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include "attention/execution/terms_in_job.h"
#include "attention/modules/sequence.h"
#include "attention/plan/layout.h"
#include "attention/plan/time.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/caches.h"
#include "python/ops/masks.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;

// The label of the collective operations. It leaves out the layer, in which ranks might differ by mistake: ranks learn
// of each other's errors only if their labels are equal.
constexpr const char* kLabel = "torch.ops.annulus.attention";

bool reads_a_file(const PatternSpec& p) {
  return !p.mask.file.empty() || (p.kind == PatternSpec::Kind::kBlocks && p.blocks.map == BlocksSpec::Map::kFile) ||
         std::any_of(p.members.begin(), p.members.end(), reads_a_file);
}

// The pattern with block maps and masks read from files; they are read once for each shape, and these bits, and cached.
PatternSpec with_block_maps(const std::string& text, const PatternSpec& pattern, const AttentionShape& s,
                            const HeldBits& held) {
  static NamedCache<PatternSpec> cache("block maps");
  std::string key =
      c10::str(text, "|", s.batch, "|", s.heads, "|", s.kv_heads, "|", s.q_len, "|", s.k_len, "|", s.query_offset);
  if (has_mask(pattern)) key += "|" + held.text();
  return *cache.get(
      key, [&] { return read_block_maps(pattern, s, held); }, [](const PatternSpec& p) { return p.bytes(); });
}

// The shape as text, such as "[1,16,8,64]"; its sizes may be symbolic.
std::string shape_text(const Tensor& t) {
  std::ostringstream text;
  for (int64_t i = 0; i < t.dim(); ++i) text << (i == 0 ? "[" : ",") << t.sym_size(i);
  return (t.dim() == 0 ? "[" : text.str()) + "]";
}

// The lengths of the documents that these boundaries delimit: [0, 3, 8] gives 3 and 5. Equal boundaries delimit no
// document, because lists of a fixed length are padded with them: [0, 3, 8, 8] gives the same.
std::vector<int64_t> document_lengths(const Tensor& cu_seqlens) {
  const Tensor here = cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const int64_t* const bound = here.const_data_ptr<int64_t>();
  require(here.numel() > 0 && bound[0] == 0,
          "cu_seqlens must begin with 0, but " +
              (here.numel() == 0 ? "is empty" : "begins with " + std::to_string(bound[0])));
  std::vector<int64_t> lengths;
  for (int64_t i = 1; i < here.numel(); ++i) {
    require(bound[i] >= bound[i - 1], "cu_seqlens must not descend, but its element " + std::to_string(i) + " is " +
                                          std::to_string(bound[i]) + ", after " + std::to_string(bound[i - 1]));
    if (bound[i] > bound[i - 1]) lengths.push_back(bound[i] - bound[i - 1]);
  }
  return lengths;
}

void require_end(const std::vector<int64_t>& documents, const AttentionShape& shape) {
  const int64_t end = std::accumulate(documents.begin(), documents.end(), int64_t{0});
  require(end == shape.q_len && end == shape.k_len,
          "cu_seqlens must end with the number of positions that all ranks hold together, " +
              counted(shape.q_len, "query") + " and " + counted(shape.k_len, "key") + ", but ends with " +
              std::to_string(end));
}

PatternSpec within_documents(PatternSpec pattern, const std::vector<int64_t>& lengths) {
  require(pattern.documents.empty(),
          "both cu_seqlens and the pattern name documents: leave them out of one of the two; the pattern "
          "is " +
              pattern.text());
  if (!lengths.empty()) pattern.documents = {lengths};
  return pattern;
}

}  // namespace

void require(bool ok, const std::string& message) {
  if (!ok) throw Error(ErrorKind::kUsage, "torch", message);
}

void require_tensors(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_seqlens,
                     const std::optional<Tensor>& sinks) {
  const auto same = [](const c10::SymInt& a, const c10::SymInt& b) {
    return a.sym_eq(b).expect_true(__FILE__, __LINE__);
  };
  for (const auto& [name, t] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) {
    require(t->defined(), std::string(name) + " must be a tensor, but is None");
    require(t->layout() == at::kStrided, std::string(name) + " must be a dense tensor, but is sparse");
  }
  bool fit = q.dim() == 4 && k.dim() == 4 && v.dim() == 4;
  for (int64_t i = 0; i < 4; ++i) fit = fit && same(k.sym_size(i), v.sym_size(i));
  for (const int64_t i : {0, 3}) fit = fit && same(q.sym_size(i), k.sym_size(i));
  require(fit, "q must be [batch, n, heads, head size], k and v [batch, m, kv heads, head size], but they are " +
                   shape_text(q) + ", " + shape_text(k) + " and " + shape_text(v));
  const auto heads = q.sym_size(2).maybe_as_int(), kv_heads = k.sym_size(2).maybe_as_int();
  require(
      !heads || !kv_heads || (*kv_heads > 0 && *heads % *kv_heads == 0),
      "the heads of q must be a multiple of those of k and v, but q is " + shape_text(q) + " and k " + shape_text(k));
  for (const Tensor* t : {&k, &v}) {
    require(t->scalar_type() == q.scalar_type() && t->device() == q.device(),
            std::string("q, k and v must be of one dtype on one device, but q is ") + c10::toString(q.scalar_type()) +
                " on " + q.device().str() + " and " + (t == &k ? "k " : "v ") + c10::toString(t->scalar_type()) +
                " on " + t->device().str());
  }
  const at::ScalarType type = q.scalar_type();
  require(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
          std::string("q, k and v must be fp32, fp64, bf16 or fp16, but are ") + c10::toString(type));
  if (sinks && sinks->defined()) {
    const Tensor& s = *sinks;
    require(s.layout() == at::kStrided && s.dim() == 1 && s.is_floating_point() && same(s.sym_size(0), q.sym_size(2)) &&
                s.device() == q.device(),
            "sinks must be a dense floating tensor [heads] on the device of q, one number for each head of q, but is " +
                (s.layout() == at::kStrided ? shape_text(s) : "sparse") + " of " + c10::toString(s.scalar_type()) +
                " on " + s.device().str() + ", and q " + shape_text(q) + " on " + q.device().str());
  }
  if (!cu_seqlens || !cu_seqlens->defined()) return;
  const Tensor& bounds = *cu_seqlens;
  require(bounds.is_meta() == q.is_meta(), "q and cu_seqlens must both be on meta or neither, but are on " +
                                               q.device().str() + " and " + bounds.device().str());
  require(bounds.layout() == at::kStrided && bounds.dim() == 1 &&
              (bounds.scalar_type() == at::kInt || bounds.scalar_type() == at::kLong),
          "cu_seqlens must be a dense int32 or int64 tensor of [documents + 1] boundaries, but is " +
              (bounds.layout() == at::kStrided ? shape_text(bounds) : "sparse") + " of " +
              c10::toString(bounds.scalar_type()));
}

std::shared_ptr<const PatternSpec> pattern_of(const std::string& text) {
  static NamedCache<PatternSpec> cache("pattern texts");
  return cache.get(
      text, [&] { return parse_pattern(text, "pattern"); }, [](const PatternSpec& p) { return p.bytes(); });
}

namespace {
constexpr std::string_view kBy = " by ";
}  // namespace

void set_layout(PlanRequest& request, const std::string& text) {
  const size_t name = std::min(text.find(kBy), text.size());
  request.layout = parse_layout(text.substr(0, name), "layout");
  if (name == text.size()) return;
  require(is_dealt(request.layout),
          "the layout " + text.substr(0, name) + " is dealt by no pattern, got '" + text + "'");
  const std::shared_ptr<const PatternSpec> by = pattern_of(text.substr(name + kBy.size()));
  require(
      !reads_a_file(*by),
      "the pattern of a layout that is dealt by one, or of auto, must not name a file, whose content the ranks would "
      "have to read "
      "before they cut rows: give the lengths of its documents, or a pattern with about the same work for each token");
  request.balance_by = *by;
}

void require_dealt(const PlanRequest& request) {
  if (!is_dealt(request.layout) || request.balance_by) return;
  const std::string name(to_string(request.layout));
  require(false, "the layout " + name +
                     " is dealt by a pattern, which its name does not say: make annulus.Sharding(\"" + name +
                     "\", group, pattern=...), cut by that, and call its attention");
}

std::string dealt_by(std::string layout, std::string pattern, std::optional<Tensor> cu_seqlens) {
  PlanRequest request;
  const std::string text = layout + std::string(kBy) + pattern_with(pattern, cu_seqlens).text();
  set_layout(request, text);  // checks it
  return text;
}

PatternSpec pattern_with(const std::string& text, const std::optional<Tensor>& cu_seqlens) {
  PatternSpec pattern = *pattern_of(text);
  if (!cu_seqlens || !cu_seqlens->defined()) return pattern;
  return within_documents(std::move(pattern), document_lengths(*cu_seqlens));
}

PatternSpec pattern_for(const std::string& text, const std::optional<Tensor>& cu_seqlens, const AttentionShape& shape,
                        const HeldBits& held) {
  const std::shared_ptr<const PatternSpec> given = pattern_of(text);
  PatternSpec pattern =
      with_known_masks(reads_a_file(*given) ? with_block_maps(text, *given, shape, held) : *given, held);
  if (!cu_seqlens || !cu_seqlens->defined()) return pattern;
  const std::vector<int64_t> documents = document_lengths(*cu_seqlens);
  require_end(documents, shape);
  return within_documents(std::move(pattern), documents);
}

void set_schedule(PlanRequest& request, const std::string& schedule, int64_t within) {
  request.schedule = parse_schedule(schedule, "schedule");
  require(within >= 0 && within <= 1 << 20,
          "within must be a number of ranks, or 0 for one group of all ranks, but is " + std::to_string(within));
  request.within = static_cast<int>(within);
}

void place_parts(PlanRequest& request, const std::vector<int64_t>& lengths) {
  require(static_cast<int64_t>(lengths.size()) == request.ranks, "lengths must be one for each of the " +
                                                                     counted(request.ranks, "rank") + ", but are " +
                                                                     std::to_string(lengths.size()));
  const AttentionShape shape = request.shape;
  place_sequence(request, {.queries = lengths, .keys = lengths});
  require(request.shape == shape, "lengths must add up to the " + counted(shape.q_len, "query") + " and the " +
                                      counted(shape.k_len, "key") + ", but add up to " +
                                      std::to_string(request.shape.q_len));
}

// Not by device guards: torch.compile registers one for CUDA where there is no GPU.
bool sees_gpus() { return at::detail::getCUDAHooks().hasCUDA(); }

at::Device usual_device() {
  if (!sees_gpus()) return at::kCPU;
  return {at::kCUDA, at::detail::getCUDAHooks().getCurrentDevice()};
}

TermsPointer usual_terms(bool gpu) { return terms_of("", "ANNULUS_MACHINE", gpu ? "cuda" : "cpu", 128, 2); }

int64_t number_of(const Tensor& number) {
  require(number.defined() && number.scalar_type() == at::kLong && number.numel() == 1,
          "a backward needs the number that its forward returned, int64 without dimensions");
  return number.item<int64_t>();
}

AttentionCall make_call(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_seqlens,
                        const std::optional<Tensor>& sinks, const Settings& settings, bool keep_last,
                        Direction& direction, Communicator& comm) {
  AttentionCall call;
  call.comm = &comm;
  call.label = kLabel;
  const OpLabel label{call.label, 0};
  PatternSpec given;
  std::vector<int64_t> documents;
  const bool packed = cu_seqlens && cu_seqlens->defined();
  const SequenceParts parts = agree_on_call(
      [&]() -> CallTerms {
        require_tensors(q, k, v, cu_seqlens, sinks);
        require(q.is_cpu() || q.is_cuda(),
                "q, k and v must be on the CPU or a CUDA device, but are on " + q.device().str());
        require(q.is_cpu() || !settings.group.empty() || comm.size() == 1,
                "q, k and v are on " + q.device().str() +
                    ", but the ranks of mpirun exchange tensors on the CPU only: start the processes with torchrun "
                    "and pass the name of their process group as group");
        require(settings.dropout >= 0 && settings.dropout < 1,
                "dropout must be at least 0 and below 1, but is " + std::to_string(settings.dropout));
        const int64_t first_row = settings.first_row.expect_int();
        require(first_row >= 0,
                "first_row must be the global number of batch row 0, but is " + std::to_string(first_row));
        const double scale = settings.scale.value_or(0);
        require(std::isfinite(scale), "scale must be finite; None and 0 stand for 1 / sqrt(head size)");
        if (scale != 0) call.scale = scale;
        require(settings.softcap == 0 || (settings.softcap >= 1e-30 && settings.softcap <= 1e30),
                "softcap must be positive and finite, from 1e-30 to 1e30, or 0 for none, but is " +
                    exact(settings.softcap));
        call.softcap = settings.softcap;
        call.sinks = sinks && sinks->defined();
        call.dropout = {.rate = settings.dropout,
                        .seed = static_cast<uint64_t>(settings.seed.expect_int()),
                        .step = settings.step.expect_int(),
                        .layer = settings.layer,
                        .first_row = first_row};
        // A tensor does not show how its rows were cut, so what was not given cannot be checked.
        require(!settings.layout.empty() || comm.size() == 1,
                "give the layout in which the rows are cut among the " + std::to_string(comm.size()) +
                    " ranks, such as layout=\"zigzag\", or call the attention of an annulus.Sharding");
        if (!settings.layout.empty()) set_layout(call.request, settings.layout);
        const bool dealt = is_dealt(call.request.layout) && comm.size() > 1;
        if (dealt) require_dealt(call.request);
        require(!dealt || q.size(1) == k.size(1),
                "the layout " + std::string(to_string(call.request.layout)) +
                    " deals queries and keys alike, but this rank has " + std::to_string(q.size(1)) + " queries and " +
                    std::to_string(k.size(1)) + " keys: cut both with another layout, such as \"contiguous\"");
        set_schedule(call.request, settings.schedule, settings.within);
        if (call.request.schedule == ScheduleKind::kAuto) call.request.terms = usual_terms(q.is_cuda());
        given = *pattern_of(settings.pattern);
        if (packed) {
          documents = document_lengths(*cu_seqlens);
          given = within_documents(std::move(given), documents);
        }
        std::vector<Field> alike = direction.terms();
        alike.insert(alike.end(), {{"layer", std::to_string(settings.layer)},
                                   {"layout", settings.layout},
                                   {"schedule", settings.schedule + ", within " + std::to_string(settings.within)},
                                   {"machine", call.request.terms.text()},
                                   {"pattern", given.text()},
                                   {"batch, heads, kv heads and head size",
                                    list_text(std::vector<int64_t>{q.size(0), q.size(2), k.size(2), q.size(3)})},
                                   {"sinks", call.sinks ? "given" : "none"},
                                   {"dtype", c10::toString(q.scalar_type())}});
        const bool chooses = call.request.schedule == ScheduleKind::kAuto;
        return {q.size(1),
                k.size(1),
                std::move(alike),
                keep_last,
                direction.lse_gradient,
                chooses ? free_bytes(comm, q.device()) : 0};
      },
      comm, label);
  if (call.request.schedule == ScheduleKind::kAuto) {
    call.request.terms = terms_in_job(call.request.terms, comm, parts.free_bytes);
  }
  call.request.shape = {.batch = q.size(0),
                        .heads = q.size(2),
                        .kv_heads = k.size(2),
                        .q_len = 0,
                        .k_len = 0,
                        .query_offset = settings.query_offset.expect_int()};
  direction.lse_gradient = parts.lse_gradient;
  place_sequence(call.request, parts);
  call.request.shape = aligned(call.request.shape);
  if (packed) require_end(documents, call.request.shape);  // the same on every rank
  call.request.pattern = given;
  if (has_mask(given)) {
    const HeldBits bits = needed_bits(call.request, comm.rank());  // raises the same on every rank
    call.request.pattern = with_known_masks(std::move(given), bits);
  }
  if (!reads_a_file(call.request.pattern)) return call;
  agree_on_call(
      [&]() -> CallTerms {
        const HeldBits bits = needed_bits(call.request, comm.rank());
        call.request.pattern = pattern_for(settings.pattern, cu_seqlens, call.request.shape, bits);
        return {};
      },
      comm, label);
  return call;
}

}  // namespace annulus::torch_ops
