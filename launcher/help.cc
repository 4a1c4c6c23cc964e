// See help.h.
#include "launcher/help.h"

#include <algorithm>
#include <regex>

#include "common/text.h"
#include "launcher/command_line.h"

namespace annulus {
namespace {

constexpr size_t kLeft = 28;  // columns of the names of options; a longer name has a line of its own

}  // namespace

std::string wrapped(std::string_view text, size_t columns, size_t indent) {
  std::string out;
  size_t used = 0;
  for (const std::string& word : split(text, ' ')) {
    if (used > 0 && used + 1 + word.size() > columns) {
      out += "\n" + std::string(indent, ' ');
      used = 0;
    } else if (used > 0) {
      out += ' ';
      ++used;
    }
    out += word;
    used += word.size();
  }
  return out;
}

std::string kind_in_words(std::string_view type) {
  static const std::regex range(R"(.*\b(?:INT|UINT|FLOAT)? ?in \[(-?[\d.]+) - (-?[\d.]+)\].*)");
  static const std::regex members(R"(.*\{(.*)\}.*)");
  const std::string text(type);
  std::smatch match;
  if (std::regex_match(text, match, range)) {
    return "N (" + match.str(1) + " to " + match.str(2) + ")";
  }
  if (std::regex_match(text, match, members)) {
    std::string names = match.str(1);
    std::replace(names.begin(), names.end(), ',', '|');
    return names;
  }
  const std::string kind = text.substr(0, text.find(':'));
  if (kind == "INT" || kind == "UINT" || kind == "FLOAT") return "N";
  return kind;
}

HelpPage::HelpPage(int columns) : columns_(static_cast<size_t>(std::clamp(columns, 40, 100))) {
  label("Positionals", "Arguments");
}

std::string HelpPage::entry(const std::string& left, const std::string& right) const {
  std::string out = "  " + left;
  if (left.size() + 3 > kLeft) {
    out += "\n" + std::string(kLeft, ' ');
  } else {
    out += std::string(kLeft - out.size(), ' ');
  }
  return out + wrapped(right, columns_ - kLeft, kLeft) + "\n";
}

std::string HelpPage::make_option(const CLI::Option* option, bool positional) const {
  std::string left;
  if (positional) {
    left = option->get_name(true);
  } else {
    for (const std::string& name : option->get_snames()) left += (left.empty() ? "-" : ", -") + name;
    for (const std::string& name : option->get_lnames()) left += (left.empty() ? "--" : ", --") + name;
    if (const std::string kind = kind_in_words(option->get_type_name()); !kind.empty()) {
      left += option->get_expected_min() == 0 ? " [" + kind + "]" : " " + kind;
    }
  }
  return entry(left, option->get_description());
}

std::string HelpPage::make_subcommand(const CLI::App* app) const {
  return entry(app->get_name(), app->get_description());
}

std::string HelpPage::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
  // Examples are written for the script of a clone. An installation is called in another way.
  const std::string typed = shell_quote({typed_program()});
  for (size_t at = 0; (at = text.find("./annulus ", at)) != std::string::npos; at += typed.size()) {
    text.replace(at, std::string_view("./annulus").size(), typed);
  }
  for (size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;) text.erase(at, 1);
  return text;
}

}  // namespace annulus
