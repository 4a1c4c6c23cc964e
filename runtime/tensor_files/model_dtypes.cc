// See model_dtypes.h.
#include "runtime/tensor_files/model_dtypes.h"

#include <array>

#include "common/names.h"

namespace annulus {

const std::vector<std::string>& model_dtypes() {
  static const auto& names = *new std::vector<std::string>{"fp32", "bf16", "fp64"};
  return names;
}

at::ScalarType model_dtype(std::string_view name, std::string_view where) {
  constexpr std::array<at::ScalarType, 3> kTypes = {at::kFloat, at::kBFloat16, at::kDouble};  // as in model_dtypes()
  return kTypes.at(index_of_name(name, model_dtypes(), "dtype", where));
}

}  // namespace annulus
