// The names in the JSON form of plans (plan_form.h), which its writer and its reader share. Internal to the form.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
#include "attention/proof/plan_form.h"

namespace annulus {

// In the order of BufferKind.
inline constexpr std::array<std::string_view, 9> kBufferKinds = {
    "own-kv", "kv", "saved-kv", "grad", "own-grad", "own-queries", "queries", "results", "own-results"};

inline bool is_own(BufferKind kind) {
  return kind == BufferKind::kOwnKV || kind == BufferKind::kOwnGrad || kind == BufferKind::kOwnQueries ||
         kind == BufferKind::kOwnResults;
}

struct DirectionKey {
  const char* key;
  std::vector<Step> Program::*steps;
  HeldRows::Peaks HeldRows::*held;
};
inline constexpr DirectionKey kDirectionKeys[] = {{"forward", &Program::forward, &HeldRows::forward},
                                                  {"backward", &Program::backward, &HeldRows::backward}};

// What a rank's part of the form says that it holds at most in a direction.
struct HeldKey {
  const char* key;
  std::optional<int64_t> HeldRows::Peaks::*said;
  int64_t Traffic::*peak;
  const char* of;  // in messages
};
inline constexpr HeldKey kHeldKeys[] = {
    {"kv", &HeldRows::Peaks::kv, &Traffic::peak_kv_rows, "keys and values"},
    {"grad", &HeldRows::Peaks::grad, &Traffic::peak_grad_rows, "gradients"},
    {"queries", &HeldRows::Peaks::queries, &Traffic::peak_query_rows, "queries of other ranks"},
    {"results", &HeldRows::Peaks::results, &Traffic::peak_result_rows, "partial results"},
};

// All of 0, ..., count - 1: the default of batch rows and heads.
inline Span every(int64_t count) { return Span::range(0, count); }

// The rows of a buffer that holds a rank's own: those of its queries or of its keys.
inline RowSet own_rows(const Program& program, BufferKind kind) {
  const AttentionShape& shape = program.request.shape;
  const bool of_keys = Buffer{kind, {}}.of_keys();
  return {{{every(shape.batch), every(of_keys ? shape.kv_heads : shape.heads),
            of_keys ? program.key_spans : program.query_spans}}};
}

}  // namespace annulus
