// Several hosts in a file, so that a cluster is planned for, placed on and drawn where it is not: `topology --save`
// writes it, `topology --load` and the reports of hosts (launcher/hosts/host_report.h) read it.
//
// Format (docs/formats.md): JSON, {"format": "annulus cluster", "version": 1, "hosts": [...]}.
// Thread safety: functions without state.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "topology/host.h"

namespace annulus {

// Whole: host_from_json(host_to_json(h), ...) is h, but for machine.is_this_system, which is false.
nlohmann::json host_to_json(const Host& host);
// `source` is named in errors. Nothing of it is trusted: Error(kInput) names the member that is missing or wrong.
Host host_from_json(const nlohmann::json& json, const std::string& source);

// Atomically. Error(kResource).
void write_cluster(const std::string& path, const std::vector<Host>& hosts);
// Error(kInput), naming the file; at most 64 MiB are read.
std::vector<Host> read_cluster(const std::string& path);

}  // namespace annulus
