// Which bits of masks of tokens a rank holds for the attention of its layers. Used by layer_requests.cc, training, the
// memory plan and runtime/inference/row_forward.cc. Thread safety: functions without state.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/pattern/span.h"
#include "attention/plan/plan.h"
#include "runtime/config/config.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

// Raises Error(kResource) if one of the ranks that attend together would hold more bits of a file's mask than
// memory.masks, where `batch` is the global one.
void require_mask_limits(const Config& config, const LayerRequests& layers, int64_t batch, int ranks);

// Lets the masks of tokens in requests hold the bits that this rank needs (needed_bits), whose files are read again,
// and the requests with them have the schedule that `auto` stands for. Raises as read_block_maps and resolve_schedule
// do.
void hold_bits(std::vector<PlanRequest>& requests, int rank);

// The same for training, for a rank of those that attend together and its rows of the global batch. If the layout
// follows the documents of each batch, it may have any queries of its rows in the next step, and reading a file in each
// step would take longer than the step: so it holds the bits of them all.
void hold_bits(const Config& config, LayerRequests& layers, const Span& rows, int rank);

// Returns layers.of_rows(0, rows) with the bits without which the programs of this rank are not planned.
std::vector<PlanRequest> plannable_rows(LayerRequests layers, int64_t rows, int rank);

// Returns the bytes of the masks that a rank then holds, for its first `rows` rows.
int64_t mask_bytes(const Config& config, const LayerRequests& layers, int64_t rows, int rank);

}  // namespace annulus
