#include "attention/execution/select_blocks.h"
namespace annulus {
PlanRequest select_blocks(const PlanRequest& request, const at::Tensor&, const at::Tensor&, Communicator&, const std::string&) { return request; }
}
