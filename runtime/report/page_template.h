// The template of the report (page/, joined by page/embed.py when it is built). Used by report_page.cc.
#pragma once

#include <string_view>

namespace annulus {

// What stands in the template in place of the data.
inline constexpr std::string_view kPageData = "@DATA@";

std::string_view page_template();

}  // namespace annulus
