// What a model gives each target of rows: its loss, and whether it is the model's first choice. Logits are computed for
// a part of the targets at a time and never written. Used by runtime/evaluation, and by training for the tasks of
// [validation].
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attention/plan/layout.h"
#include "comm/communicator.h"
#include "runtime/model/model.h"

namespace annulus {

// [B, S] on the CPU; undefined on all ranks but 0.
struct TokenScores {
  at::Tensor nats;   // fp64: -log softmax(logits)[target]; 0 where no target counts
  at::Tensor first;  // bool: no other token has a larger logit, and all are numbers
};

// `hidden` [B * n, dim] is the result of RowForward::hidden for this rank's positions of rows with this layout;
// `targets` int64 [B, S] are those of all positions, on the CPU, -1: does not count. Collective; `host` must carry CPU
// tensors. Of bf16 models the logits are fp32. Raises Error(kComm) as communication does.
TokenScores score_tokens(const Model& model, const at::Tensor& hidden, const at::Tensor& targets, const Layout& layout,
                         Communicator& host, const std::string& label);

}  // namespace annulus
