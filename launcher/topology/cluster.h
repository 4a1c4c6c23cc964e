// Stores hosts in a file, to place ranks on a cluster, or draw it, from another machine. `topology --save` writes the
// file and `topology --load` reads it; the reports of hosts (launcher/hosts/host_report.h) use the same format.
//
// Format (docs/reference/formats.md): JSON, {"format": "annulus cluster", "version": 1, "hosts": [...]}.
// Thread safety: functions without state.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launcher/topology/host.h"

namespace annulus {

// Serializes a host: host_from_json(host_to_json(h), ...) equals h, except for machine.is_this_system, which is false.
nlohmann::json host_to_json(const Host& host);
// Parses an untrusted host. Raises Error(kInput), which names `source` and the missing or invalid member.
Host host_from_json(const nlohmann::json& json, const std::string& source);

// Replaces the file atomically. Raises Error(kResource) for I/O errors.
void write_cluster(const std::string& path, const std::vector<Host>& hosts);
// Raises Error(kInput), which names the file, if it is invalid or larger than 64 MiB.
std::vector<Host> read_cluster(const std::string& path);

}  // namespace annulus
