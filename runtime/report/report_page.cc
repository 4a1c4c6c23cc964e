// See report_page.h.
#include "runtime/report/report_page.h"

#include <chrono>
#include <string_view>
#include <utility>

#include "common/logging/record.h"
#include "common/version.h"
#include "runtime/report/page_template.h"

namespace annulus {
namespace {

using Json = nlohmann::ordered_json;

// JSON in which no character can begin or end an element of HTML. Such characters stand in texts only.
std::string json_in_html(const Json& json) {
  const std::string text = json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "\\u003c";
        break;
      case '>':
        out += "\\u003e";
        break;
      case '&':
        out += "\\u0026";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace

std::string report_page(const std::vector<nlohmann::ordered_json>& runs, double again) {
  const auto now = std::chrono::system_clock::now();
  const Json all = {{"version", kVersion},
                    {"made", time_text(now).substr(0, 19) + "Z"},
                    {"made_at", std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count()},
                    {"again", again},
                    {"runs", runs}};
  const std::string_view page = page_template();
  const size_t at = page.find(kPageData);
  std::string out(page.substr(0, at));
  out += json_in_html(all);
  out += page.substr(at + kPageData.size());
  return out;
}

}  // namespace annulus
