// Keeps several hosts in a file, so that ranks can be placed on a cluster, and the cluster drawn, from another machine.
// `topology --save` writes the file and `topology --load` reads it; the reports of hosts (launcher/hosts/host_report.h)
// contain hosts in the same form.
//
// Format (docs/formats.md): JSON, {"format": "annulus cluster", "version": 1, "hosts": [...]}.
// Thread safety: functions without state.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launcher/topology/host.h"

namespace annulus {

// Nothing is lost: host_from_json(host_to_json(h), ...) equals h, except for machine.is_this_system, which is false.
nlohmann::json host_to_json(const Host& host);
// `source` is named in errors. The JSON is not trusted: Error(kInput) names the member that is missing or wrong.
Host host_from_json(const nlohmann::json& json, const std::string& source);

// Replaces the file atomically. Throws Error(kResource).
void write_cluster(const std::string& path, const std::vector<Host>& hosts);
// Throws Error(kInput), which names the file, for one that is invalid or larger than 64 MiB.
std::vector<Host> read_cluster(const std::string& path);

}  // namespace annulus
