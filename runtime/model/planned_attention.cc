// See planned_attention.h.
#include "runtime/model/planned_attention.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus {
namespace {

constexpr size_t kSavedKeys = 2, kSavedValues = 3;  // of Attended::kept

}  // namespace

Attended attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PlannedCall& call,
                  const at::Tensor& sinks) {
  call.require_kept();
  AttentionOutput output = attention_forward(q, k, v, call, sinks);
  TierMemory memory;
  if (lends_saved(output)) {
    memory = [call = output.call](size_t i, at::IntArrayRef sizes, const at::TensorOptions& options) {
      const bool saved = i == kSavedKeys || i == kSavedValues;
      return saved ? call.settings().comm->lendable(sizes, options) : at::Tensor();
    };
  }
  return {.kept = {output.out, output.lse, output.saved_k, output.saved_v, output.sinks},
          .divisor = output_divisor(call.settings().request.pattern),
          .backward =
              [left = output.with({}, {}, {}, {}, {})](const at::Tensor& dout, const Heads& of,
                                                       const std::vector<at::Tensor>& kept) {
                const AttentionGradients d =
                    attention_backward(dout, of.q, of.k, of.v, left.with(kept[0], kept[1], kept[2], kept[3], kept[4]));
                return Heads{d.dq, d.dk, d.dv, d.dsinks};
              },
          .memory = std::move(memory)};
}

}  // namespace annulus
