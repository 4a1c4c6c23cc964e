// See step_graph.h. This is the implementation for a build without CUDA, which records nothing.
#include "runtime/training/step_graph.h"

namespace annulus {

struct StepGraph::State {};

StepGraph::StepGraph(at::Device /*device*/, bool /*wanted*/) {}
StepGraph::~StepGraph() = default;

void StepGraph::run(const std::function<void()>& work) { work(); }
bool StepGraph::recorded() const { return false; }
std::string StepGraph::take_note() { return {}; }

}  // namespace annulus
