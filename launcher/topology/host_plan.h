// Where the ranks of a job go on its hosts, computed by launcher/topology/placement.h for what the job requests.
// `launch`, `topology` and the ranks themselves (launcher/launch/rank_place.h) all use it, so that ranks go where these
// show.
//
// Thread safe: functions without state.
#pragma once

#include <string>
#include <vector>

#include "launcher/topology/host.h"
#include "launcher/topology/machine.h"
#include "launcher/topology/placement.h"

namespace annulus {

// What a job requests from a host.
struct HostRequest {
  int ranks = 1;                       // on this host
  int job_ranks = 0;                   // PlacementOptions::job_ranks
  int context = 0;                     // PlacementOptions::context
  std::string device = "auto";         // "cpu", "cuda" or "auto", as configured
  std::vector<std::string> hcas = {};  // the job's HCAs; empty: all
};

// The machine as a job sees it: without the GPUs that CUDA hides, and without HCAs that are not the job's.
Machine machine_for(const Host& host, const std::vector<std::string>& hcas);

// What `ranks` ranks on `hosts` compute on: GPUs unless `device` is "cpu" or there is not one for each rank. A job with
// "cuda" that lacks GPUs is refused later, when it chooses its devices (launcher/device.h).
DeviceKind device_for(const std::vector<Host>& hosts, const std::vector<Machine>& machines, int ranks,
                      const std::string& device);

struct PlacedHost {
  Machine machine;  // from machine_for
  Placement placement;
};
// Places the ranks of one host.
PlacedHost place_on(const Host& host, const HostRequest& request);

struct PlacedHosts {
  std::vector<Machine> machines;  // from machine_for
  Placement placement;
};
// Places the ranks of a whole job. It distributes `request.ranks` over the hosts, at most as many on each as its slots
// (0: no limit given), and orders the hosts as `place` does. On each host, ranks go where place_on for that host puts
// them.
PlacedHosts place_on(const std::vector<Host>& hosts, const std::vector<int>& slots, const HostRequest& request);

}  // namespace annulus
