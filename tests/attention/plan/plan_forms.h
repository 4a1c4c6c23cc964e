// Plans in their JSON form, for its tests.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention/proof/plan_form.h"

namespace annulus::testing {

enum class Held { kSaid, kUnsaid };

// Returns the form of a plan. Programs that may be wrong must not say what they hold.
std::string form_of(const std::vector<Program>& programs, Held held = Held::kSaid);

// Reads a form that is named "plan.json" in messages.
PlanForm read_form(const std::string& text, const PlanFormSource& source = {"plan.json"});

// Gives a mask of tokens in the pattern, which a program has made, the name of a file, so that the form can name it.
PlanRequest with_named_mask(PlanRequest request);

// Returns a source in which that file is the mask of `request`.
PlanFormSource with_mask_of(const PlanRequest& request);

// Two ranks with two positions each, causal, as somebody else would write it by hand: each sends the other its keys, in
// the backward again, and the gradients of the other's keys go home.
inline constexpr std::string_view kForeignForm = R"({
  "annulus_plan": 1,
  "problem": {"heads": 2, "kv_heads": 1, "queries": 4, "ranks": 2, "schedule": "ours",
              "pattern": [{"queries": [0, 1, 4], "keys": [0, 1, 4], "hi": 0}]},
  "programs": [
    {"queries": [[0, 1, 2]],
     "buffers": [{"kind": "own-kv"}, {"kind": "own-grad"}, {"kind": "grad", "rows": [{"positions": [[0, 1, 2]]}]}],
     "held": {"forward": {"kv": 4}, "backward": {"kv": 4, "grad": 8}},
     "forward": [{"sends": [{"peer": 1, "buffer": 0}],
                  "tiles": [{"queries": [0, 1, 2], "query_rows": [0, 1, 2], "keys": [0, 1, 2], "key_rows": [0, 1, 2], "hi": 0}]}],
     "backward": [{"sends": [{"peer": 1, "buffer": 0}], "zero": [1],
                   "tiles": [{"queries": [0, 1, 2], "query_rows": [0, 1, 2], "keys": [0, 1, 2], "key_rows": [0, 1, 2],
                              "grad_buffer": 1, "hi": 0}]},
                  {},
                  {"receives": [{"peer": 1, "buffer": 2}], "adds": [[1, 2]]}]},
    {"queries": [[2, 1, 2]],
     "buffers": [{"kind": "own-kv"}, {"kind": "own-grad"}, {"kind": "kv", "rows": [{"positions": [[0, 1, 2]]}]},
                 {"kind": "kv", "rows": [{"positions": [[0, 1, 2]]}]}, {"kind": "grad", "rows": [{"positions": [[0, 1, 2]]}]}],
     "forward": [{"receives": [{"peer": 0, "buffer": 2}],
                  "tiles": [{"queries": [2, 1, 2], "query_rows": [0, 1, 2], "keys": [2, 1, 2], "key_rows": [0, 1, 2], "hi": 0}]},
                 {"tiles": [{"queries": [2, 1, 2], "query_rows": [0, 1, 2], "buffer": 2, "keys": [0, 1, 2], "key_rows": [0, 1, 2]}]}],
     "backward": [{"receives": [{"peer": 0, "buffer": 3}], "zero": [1],
                   "tiles": [{"queries": [2, 1, 2], "query_rows": [0, 1, 2], "keys": [2, 1, 2], "key_rows": [0, 1, 2],
                              "grad_buffer": 1, "hi": 0}]},
                  {"zero": [4],
                   "tiles": [{"queries": [2, 1, 2], "query_rows": [0, 1, 2], "buffer": 3, "keys": [0, 1, 2], "key_rows": [0, 1, 2],
                              "grad_buffer": 4}]},
                  {"sends": [{"peer": 0, "buffer": 4}]}]}
  ]
})";

}  // namespace annulus::testing
