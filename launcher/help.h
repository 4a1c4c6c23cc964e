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
  // columns: of a line. Lines are wrapped at 100 columns even where a terminal has more, and at 40 where it has fewer.
  explicit HelpPage(int columns);

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_subcommand(const CLI::App* app) const override;

 private:
  std::string entry(const std::string& left, const std::string& right) const;

  size_t columns_;
};

// What stands for a value of CLI11's type in a help page: "INT:POSITIVE" is "N", "UINT:INT in [1 - 64]" is "N (1 to
// 64)", "TEXT:{cpu,cuda}" is "cpu|cuda"; names such as "FOLDER" stay.
std::string kind_in_words(std::string_view type);

// The paragraphs and lists of a help text, wrapped: lines of at most `columns` characters, each but the first preceded
// by `indent` blanks. Words are never cut.
std::string wrapped(std::string_view text, size_t columns, size_t indent);

}  // namespace annulus
