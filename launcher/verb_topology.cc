// annulus topology: what the machine is made of, and where ranks would go.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/topology/machine.h"
#include "comm/topology/placement.h"
#include "comm/topology/report.h"
#include "common/error.h"
#include "launcher/verb.h"

namespace annulus {
namespace {

class TopologyVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--xml", xml_, "a machine described by an hwloc XML file (`lstopo machine.xml` writes one)")
        ->type_name("FILE");
    app.add_option("-n,--np", ranks_, "place N ranks (default: one per GPU, without GPUs one per NUMA node)")
        ->type_name("N");
    app.add_option("--device", device_, "cpu or cuda: what the ranks run on (default: cuda where there are GPUs)");
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.footer("Example:\n  ./annulus topology -n 2");
  }

  void check() override {
    if (ranks_ && (*ranks_ < 1 || *ranks_ > 65536)) {
      throw Error(ErrorKind::kUsage, "launcher",
                  "topology -n takes a number of ranks from 1 to 65536, not " + std::to_string(*ranks_));
    }
    if (!device_.empty() && device_ != "cpu" && device_ != "cuda") {
      throw Error(ErrorKind::kUsage, "launcher", "topology --device is cpu or cuda, not \"" + device_ + "\"");
    }
  }

  int run() override {
    std::vector<Machine> hosts = {xml_.empty() ? Machine::this_machine() : Machine::from_xml(xml_)};
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (xml_.empty() && visible != nullptr) hosts.front().hide_gpus_from_cuda(visible);
    const Machine& machine = hosts.front();
    const bool fits = !machine.gpus.empty() && ranks_.value_or(1) <= static_cast<int64_t>(machine.gpus.size());
    const bool cuda = device_.empty() ? fits : device_ == "cuda";
    const auto ranks = static_cast<int>(ranks_.value_or(
        static_cast<int64_t>(cuda ? std::max<size_t>(1, machine.gpus.size()) : machine.numa_nodes.size())));
    const Placement placement = place(hosts, std::vector<int>{ranks}, {cuda ? DeviceKind::kCuda : DeviceKind::kCpu});
    const std::string text = json_ ? topology_json(hosts, placement).dump(2) + "\n" : topology_table(hosts, placement);
    std::fputs(text.c_str(), stdout);
    return 0;
  }

 private:
  std::string xml_;
  std::optional<int64_t> ranks_;
  std::string device_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_topology_verb() { return std::make_unique<TopologyVerb>(); }

}  // namespace annulus
