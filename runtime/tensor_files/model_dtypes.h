// The dtypes that a model computes in, by the names that configurations and options have for them. Used by training,
// inference, export and the verbs. Thread safe: functions without state.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// "fp32", "bf16", "fp64".
const std::vector<std::string>& model_dtypes();
// Raises Error(kUsage) for any other name; `where` is the key or option that has it.
at::ScalarType model_dtype(std::string_view name, std::string_view where);

}  // namespace annulus
