// See cudnn_workaround.h.
#include "attention/execution/cudnn_workaround.h"

#include <c10/util/env.h>

namespace annulus {

bool avoid_wrong_gradients() {
  constexpr const char* kVariable = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE";
  if (c10::utils::get_env(kVariable) != "1") return false;
  c10::utils::set_env(kVariable, "0", /*overwrite=*/true);  // under the lock with which LibTorch reads it
  return true;
}

}  // namespace annulus
