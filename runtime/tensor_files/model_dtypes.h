// The compute dtypes of a model, by their names in configurations and options. Used by training, inference, export and
// the subcommands. Thread safe: functions without state.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Returns "fp32", "bf16" and "fp64".
const std::vector<std::string>& model_dtypes();
// Returns the dtype of a name. Raises Error(kUsage) for another one; `where` is the key or option.
at::ScalarType model_dtype(std::string_view name, std::string_view where);

}  // namespace annulus
