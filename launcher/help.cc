// See help.h.
#include "launcher/help.h"

#include <algorithm>
#include <regex>

#include "common/text.h"
#include "launcher/command_line.h"

namespace annulus {
namespace {

constexpr size_t kFirst = 28;  // column in which what an option is for begins

// Appends the words of a text to `out`, whose last line has so many columns already. New lines begin in column `first`.
void append_words(std::string& out, size_t at, std::string_view text, size_t first, int columns) {
  const auto last = static_cast<size_t>(std::clamp(columns, 40, 100));
  for (const std::string& word : split(text, ' ')) {
    if (at > first && at + 1 + word.size() > last) {
      out += "\n" + std::string(first, ' ');
      at = first;
    } else if (at > first) {
      out += ' ';
      ++at;
    }
    out += word;
    at += word.size();
  }
}

// Wraps prose. Lines that begin with a blank stay as they are: they are examples, to which a line leads that ends in a
// colon.
std::string wrapped(const std::string& text, int columns) {
  std::string out, paragraph;
  const auto end_paragraph = [&] {
    if (paragraph.empty()) return;
    append_words(out, 0, paragraph, 0, columns);
    out += '\n';
    paragraph.clear();
  };
  for (const std::string& line : split(text, '\n')) {
    const bool prose = !line.empty() && line[0] != ' ';
    if (!prose) {
      end_paragraph();
      out += line + "\n";
    } else {
      if (line.rfind("Example", 0) == 0) end_paragraph();
      paragraph += (paragraph.empty() ? "" : " ") + line;
      if (line.back() == ':') end_paragraph();
    }
  }
  end_paragraph();
  return out;
}

}  // namespace

std::string help_entry(const std::string& name, std::string_view text, size_t first, int columns) {
  std::string out = "  " + name;
  out += out.size() + 1 > first ? "\n" + std::string(first, ' ') : std::string(first - out.size(), ' ');
  append_words(out, first, text, first, columns);
  return out + "\n";
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

HelpPage::HelpPage(int columns) : columns_(columns) { label("Positionals", "Arguments"); }

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
  return help_entry(left, option->get_description(), kFirst, columns_);
}

std::string HelpPage::make_subcommand(const CLI::App* app) const {
  return help_entry(app->get_name(), app->get_description(), kFirst, columns_);
}

std::string HelpPage::make_description(const CLI::App* app) const {
  const std::string text = CLI::Formatter::make_description(app);
  return text.empty() ? text : wrapped(text, columns_);
}

std::string HelpPage::make_footer(const CLI::App* app) const {
  const std::string text = CLI::Formatter::make_footer(app);
  return text.empty() ? text : wrapped(text, columns_);
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
