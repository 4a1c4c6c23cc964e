// annulus topology: what the machine is made of, and where ranks would go.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "launcher/launch/host_plan.h"
#include "launcher/verb.h"
#include "topology/machine.h"
#include "topology/placement.h"
#include "topology/report.h"

namespace annulus {
namespace {

class TopologyVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option(
           "--xml", xml_,
           "a machine described by an hwloc XML file (`lstopo machine.xml` writes one); once for each host of a "
           "job")
        ->allow_extra_args(false)
        ->type_name("FILE");
    app.add_option("-n,--np", ranks_, "place N ranks (default: one per GPU, without GPUs one per NUMA node)")
        ->type_name("N");
    app.add_option("--context", context_,
                   "rings of N ranks each, as mesh.context of a configuration (default: one ring of all ranks)")
        ->type_name("N");
    app.add_option("--device", device_,
                   "cpu or cuda: what the ranks run on (default: as device = \"auto\" decides; of a "
                   "description, cuda where it has GPUs enough)");
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.footer(
        "Examples:\n  ./annulus topology -n 2\n"
        "  ./annulus topology -n 8 --context 4");
  }

  void check() override {
    if (ranks_ && (*ranks_ < 1 || *ranks_ > 65536)) {
      throw Error(ErrorKind::kUsage, "launcher",
                  "topology -n takes a number of ranks from 1 to 65536, not " + std::to_string(*ranks_));
    }
    if (context_ < 0) {
      throw Error(ErrorKind::kUsage, "launcher",
                  "topology --context takes a number of ranks, 1 or more, not " + std::to_string(context_));
    }
    if (!device_.empty() && device_ != "cpu" && device_ != "cuda") {
      throw Error(ErrorKind::kUsage, "launcher", "topology --device is cpu or cuda, not \"" + device_ + "\"");
    }
  }

  int run() override {
    std::vector<Machine> hosts;
    size_t gpus = 0, nodes = 0;
    bool cuda = true;
    if (xml_.empty()) {
      // What ranks of this program would do here.
      const Host host = this_host(static_cast<int>(ranks_.value_or(1)));
      hosts.push_back(host.machine);
      cuda = host.device == DeviceKind::kCuda;
    }
    for (const std::string& file : xml_) hosts.push_back(Machine::from_xml(file));
    for (const Machine& machine : hosts) {
      gpus += machine.gpus.size();
      nodes += machine.numa_nodes.size();
    }
    cuda = device_.empty() ? cuda && gpus > 0 && ranks_.value_or(1) <= static_cast<int64_t>(gpus) : device_ == "cuda";
    const auto ranks =
        static_cast<int>(ranks_.value_or(static_cast<int64_t>(cuda ? std::max<size_t>(1, gpus) : nodes)));
    const Placement placement = place(
        hosts, ranks, {.device = cuda ? DeviceKind::kCuda : DeviceKind::kCpu, .context = static_cast<int>(context_)});
    const std::string text = json_ ? topology_json(hosts, placement).dump(2) + "\n" : topology_table(hosts, placement);
    std::fputs(text.c_str(), stdout);
    return 0;
  }

 private:
  std::vector<std::string> xml_;
  std::optional<int64_t> ranks_;
  int64_t context_ = 0;
  std::string device_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_topology_verb() { return std::make_unique<TopologyVerb>(); }

}  // namespace annulus
