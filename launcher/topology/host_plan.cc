// See host_plan.h.
#include "launcher/topology/host_plan.h"

#include <algorithm>

namespace annulus {

Machine machine_for(const Host& host, const std::vector<std::string>& hcas) {
  Machine machine = host.machine;
  if (host.cuda && host.visible_devices) machine.hide_gpus_from_cuda(*host.visible_devices);
  if (!hcas.empty()) machine.keep_hcas(hcas);
  return machine;
}

DeviceKind device_for(const std::vector<Host>& hosts, const std::vector<Machine>& machines, int ranks,
                      const std::string& device) {
  size_t gpus = 0;
  for (const Machine& machine : machines) gpus += machine.gpus.size();
  const bool cuda = std::all_of(hosts.begin(), hosts.end(), [](const Host& host) { return host.cuda; });
  return device != "cpu" && cuda && gpus > 0 && gpus >= static_cast<size_t>(ranks) ? DeviceKind::kCuda
                                                                                   : DeviceKind::kCpu;
}

PlacedHost place_on(const Host& host, const HostRequest& request) {
  Machine machine = machine_for(host, request.hcas);
  const DeviceKind device = device_for({host}, {machine}, request.ranks, request.device);
  Placement placement = place({machine}, std::vector<int>{request.ranks},
                              {.device = device, .context = request.context, .job_ranks = request.job_ranks});
  return {std::move(machine), std::move(placement)};
}

namespace {

std::vector<Machine> machines_for(const std::vector<Host>& hosts, const std::vector<std::string>& hcas) {
  std::vector<Machine> machines;
  for (const Host& host : hosts) machines.push_back(machine_for(host, hcas));
  return machines;
}

}  // namespace

PlacedHosts place_on(const std::vector<Host>& hosts, const std::vector<int>& slots, const HostRequest& request) {
  std::vector<Machine> machines = machines_for(hosts, request.hcas);
  const DeviceKind device = device_for(hosts, machines, request.ranks, request.device);
  Placement placement = place(machines, request.ranks, {.device = device, .context = request.context, .slots = slots});
  return {std::move(machines), std::move(placement)};
}

}  // namespace annulus
