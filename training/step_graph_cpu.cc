// See step_graph.h. In a build without CUDA there is nothing to record on.
#include "training/step_graph.h"

namespace annulus {

struct StepGraph::State {};

StepGraph::StepGraph(at::Device /*device*/, bool /*wanted*/) {}
StepGraph::~StepGraph() = default;

void StepGraph::run(const std::function<void()>& work) { work(); }
bool StepGraph::recorded() const { return false; }
std::string StepGraph::take_note() { return {}; }

}  // namespace annulus
