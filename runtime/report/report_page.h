// Writes the report of runs: one HTML file that needs neither a network nor a server. Its template is page/ (page.html,
// page.css and scripts), which the build embeds; what runs hold is embedded as JSON (run_data.h). A content security
// policy allows the template's own script and style, by their hashes, and nothing else. Used by `annulus report` and
// live_report.h. Needs no LibTorch. Thread safe: functions without state.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace annulus {

// Returns the page of these runs (run_data()), which are laid over each other. `again`: after how many seconds the file
// is written again while the run goes on; 0: it is not. Text from a run cannot end the element that it stands in.
std::string report_page(const std::vector<nlohmann::ordered_json>& runs, double again = 0);

}  // namespace annulus
