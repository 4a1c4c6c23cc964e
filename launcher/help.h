// The page that --help prints: options in groups, wrapped to the terminal, kinds of values in words. subcommand.cc sets
// it as the formatter of every command line.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>
#include <string_view>

namespace annulus {

class HelpPage : public CLI::Formatter {
 public:
  // columns: as help_entry takes it.
  explicit HelpPage(int columns);

  // The description and the prose of the footer, wrapped; lines that begin with a blank stay as they are.
  std::string make_description(const CLI::App* app) const override;
  std::string make_footer(const CLI::App* app) const override;
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_subcommand(const CLI::App* app) const override;

 private:
  int columns_;
};

// What stands for a value of CLI11's type in a help page: "INT:POSITIVE" is "N", "UINT:INT in [1 - 64]" is "N (1 to
// 64)", "TEXT:{cpu,cuda}" is "cpu|cuda"; names such as "FOLDER" stay.
std::string kind_in_words(std::string_view type);

// Returns the lines of a name and what it is for: `name` after two blanks, `text` from column `first` on, wrapped to a
// terminal of so many columns. Lines have at most 100 columns even where a terminal has more, and 40 where it has
// fewer. Words are never cut. A name that is too long has a line of its own.
std::string help_entry(const std::string& name, std::string_view text, size_t first, int columns);

}  // namespace annulus
