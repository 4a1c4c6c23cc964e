// Where the ranks of a job go on a host: topology's placement of what the job asks for, once for `launch`, for
// `topology` and for the ranks themselves (launcher/launch/rank_place.h), so that what is shown is what is carried out.
//
// Thread safety: no state.
#pragma once

#include <string>
#include <vector>

#include "topology/host.h"
#include "topology/machine.h"
#include "topology/placement.h"

namespace annulus {

// What a job asks of a host.
struct HostRequest {
  int ranks = 1;                       // on this host
  int job_ranks = 0;                   // PlacementOptions::job_ranks
  int context = 0;                     // PlacementOptions::context
  std::string device = "auto";         // "cpu", "cuda" or "auto", as configured
  std::vector<std::string> hcas = {};  // of the job; empty: all
};

// The machine as a job sees it: without the GPUs that CUDA hides, and without HCAs that are not the job's.
Machine machine_for(const Host& host, const std::vector<std::string>& hcas);

// What `ranks` ranks of `hosts` compute on: GPUs where they are not told "cpu" and there is one for each. A job that is
// told "cuda" and lacks GPUs is refused when it chooses its devices (launcher/device.h).
DeviceKind device_for(const std::vector<Host>& hosts, const std::vector<Machine>& machines, int ranks,
                      const std::string& device);

struct PlacedHost {
  Machine machine;  // machine_for
  Placement placement;
};
PlacedHost place_on(const Host& host, const HostRequest& request);

// The ranks of a whole job: those of each host are as place_on has them for that host alone.
struct PlacedHosts {
  std::vector<Machine> machines;  // machine_for
  Placement placement;
};
// Deals `request.ranks` out to the hosts, on none more than its slots (0: not said), and orders these as `place` says.
PlacedHosts place_on(const std::vector<Host>& hosts, const std::vector<int>& slots, const HostRequest& request);

}  // namespace annulus
