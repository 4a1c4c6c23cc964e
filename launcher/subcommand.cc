// See subcommand.h.
#include "launcher/subcommand.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/logging/log_setup.h"
#include "common/names.h"
#include "common/terminal.h"
#include "common/text.h"
#include "launcher/command_line.h"
#include "launcher/help.h"

namespace annulus {

const SubcommandEntry& find_subcommand(std::string_view name) {
  std::vector<std::string> names;
  for (const SubcommandEntry& entry : subcommands()) {
    if (entry.name == name) return entry;
    if (!entry.hidden) names.emplace_back(entry.name);
  }
  refuse_usage("unknown subcommand \"" + std::string(name) + "\"" + suggestion(name, names) + "; `" +
               shell_quote({typed_program(), "--help"}) + "` lists them");
}

namespace {

[[noreturn]] void refuse_arguments(std::string_view subcommand, const std::string& message) {
  refuse_usage(std::string(subcommand) + ": " + message + "; `" + shell_quote({typed_program()}) + " " +
               std::string(subcommand) + " --help` shows the options and an example");
}

}  // namespace

void refuse_option(std::string_view subcommand, const CLI::App& app, const std::string& option) {
  std::vector<std::string> known;
  for (const CLI::Option* o : app.get_options()) {
    for (const std::string& name : o->get_lnames()) known.push_back("--" + name);
    for (const std::string& name : o->get_snames()) known.push_back("-" + name);
  }
  refuse_arguments(subcommand, "unknown option " + option + suggestion(option.substr(0, option.find('=')), known));
}

namespace {

// If `option` is the number of ranks of `launch` (-n 4, -n4, -np 4, --np=4), that number, or "N" if there is none.
// Otherwise nothing.
std::optional<std::string> number_of_ranks(const std::string& option, const std::vector<std::string>& args) {
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  };
  for (const std::string name : {"--np", "-np", "-n"}) {
    if (!option.starts_with(name)) continue;
    std::string rest = option.substr(name.size());
    if (rest.starts_with("=")) rest.erase(0, 1);
    if (is_number(rest)) return rest;
    if (!rest.empty()) continue;
    const auto next = std::find(args.begin(), args.end(), option) + 1;
    return next < args.end() && is_number(*next) ? *next : "N";
  }
  return std::nullopt;
}

// Throws Error(kUsage) with CLI11's message, or with a better one for unknown options and arguments.
[[noreturn]] void refuse(const SubcommandEntry& entry, const CLI::App& app, const CLI::ParseError& error,
                         const std::vector<std::string>& args) {
  // If it has subcommands of its own (`bench ring`), the options are those of the inner one.
  const std::vector<CLI::App*> words = app.get_subcommands();
  const CLI::App& meant = words.empty() ? app : *words.front();
  const std::string name = std::string(entry.name) + (words.empty() ? "" : " " + meant.get_name());
  std::string message = error.what();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    const std::vector<std::string> extras = app.remaining(/*recurse=*/true);
    const std::string first = extras.empty() ? "" : extras.front();
    if (const std::optional<std::string> ranks = number_of_ranks(first, args); ranks && entry.ranks) {
      refuse_arguments(name, "unknown option " + first + ": ranks are started by `" +
                                 shell_quote({typed_program(), "launch", "-n", *ranks}) + " " + name + " ...`");
    }
    if (first.starts_with("-")) refuse_option(name, meant, first);
    message = "unexpected argument \"" + first + "\"";
    if (words.empty()) {
      std::vector<std::string> known;
      for (const CLI::App* word : app.get_subcommands([](const CLI::App*) { return true; })) {
        known.push_back(word->get_name());
      }
      if (!known.empty()) message += suggestion(first, known);
    }
  } else {
    // Errors are one line, but some of CLI11's messages contain line breaks.
    for (char& c : message) {
      if (c == '\n') c = ' ';
    }
  }
  refuse_arguments(name, message);
}

// "" if `text` is a whole decimal number that T can hold and that is at least `low`; otherwise what was expected. By
// itself CLI11 reads 010 as 8, -1 as 2^64 - 1 if T is unsigned, and a number that is too large as the largest.
template <typename T>
std::string whole_number_or_complaint(const std::string& text, T low) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string digits = text.starts_with('-') ? text.substr(1) : text;
  const bool plain = digits == "0" || !digits.starts_with('0');
  if (plain && error == std::errc() && rest == end && value >= low) return "";
  const bool whole = plain && error == std::errc::result_out_of_range && rest == end;
  const std::string least =
      low == std::numeric_limits<T>::min() && low != 0 ? "" : " of at least " + std::to_string(low);
  return "expected a whole number" + least + ", got \"" + text + "\"" +
         (whole && !text.starts_with('-') ? ", and the largest is " + std::to_string(std::numeric_limits<T>::max())
                                          : "");
}

std::string number_or_complaint(const std::string& text, bool positive, bool negative) {
  const auto value = number_of_text<double>(text);
  if (value && std::isfinite(*value) && (*value > 0 || (*value == 0 && !positive) || negative)) return "";
  return std::string("expected a finite number") +
         (negative   ? ""
          : positive ? " above 0"
                     : " of at least 0") +
         ", got \"" + text + "\"";
}

// Makes every option that holds a number accept a number and nothing else. The type name of its declaration says which:
// "INT", "UINT" or "FLOAT", followed by further checks (CLI::PositiveNumber, CLI::NonNegativeNumber). This check runs
// before those two, because their messages contain limits of 300 digits.
void check_numbers(CLI::App& app) {
  for (CLI::Option* const option : app.get_options([](CLI::Option*) { return true; })) {
    const std::string type = option->get_type_name();
    const bool positive = type.find(":POSITIVE") != std::string::npos;
    const bool negative = !positive && type.find(":NONNEGATIVE") == std::string::npos;
    const std::string kind = type.substr(0, type.find(':'));
    std::function<std::string(std::string&)> check;
    if (kind == "INT") {
      const int64_t low = negative ? std::numeric_limits<int64_t>::min() : positive ? 1 : 0;
      check = [low](std::string& text) { return whole_number_or_complaint<int64_t>(text, low); };
    } else if (kind == "UINT") {
      const uint64_t low = positive ? 1 : 0;
      check = [low](std::string& text) { return whole_number_or_complaint<uint64_t>(text, low); };
    } else if (kind == "FLOAT") {
      check = [positive, negative](std::string& text) { return number_or_complaint(text, positive, negative); };
    }
    if (check) option->transform(CLI::Validator(std::move(check), ""));
  }
  for (CLI::App* const word : app.get_subcommands([](CLI::App*) { return true; })) check_numbers(*word);
}

}  // namespace

void add_numbers(CLI::App& app, const std::string& name, std::vector<int64_t>& numbers, const std::string& help) {
  CLI::Option* const option = app.add_option_function<std::string>(
      name,
      [&numbers](const std::string& text) {
        numbers.clear();
        for (const std::string& one : split(text, ',')) numbers.push_back(std::strtoll(one.c_str(), nullptr, 10));
      },
      help);
  // CLI11's own lists ignore missing values: they read 1,,3 as two numbers.
  const auto complaint = [](std::string& text) {
    for (const std::string& one : split(text, ',')) {
      std::string wrong = whole_number_or_complaint(one, std::numeric_limits<int64_t>::min());
      if (!wrong.empty()) return wrong + " in \"" + text + "\"";
    }
    return std::string();
  };
  option->type_name("N,N,...")->transform(CLI::Validator(complaint, ""));
}

void refuse_usage(const std::string& message) { throw Error(ErrorKind::kUsage, "launcher", message); }

CLI::Option* add_repeated(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                          const std::string& help, const std::string& type) {
  return app.add_option(name, values, help + " (may be repeated)")->expected(1)->take_all()->type_name(type);
}

void print_fact(const std::string& name, const std::string& text) {
  std::printf("  %-12s %s\n", name.c_str(), text.c_str());
}

namespace {

// The options for the log, which every subcommand has.
struct LogOptions {
  std::optional<std::string> level;
  bool json = false;

  // Declares them for the subcommand and for its subcommands, so that they may also follow one (`bench ring
  // --log-json`).
  void declare(CLI::App& app) {
    app.add_option("--log-level", level,
                   "the least severe records to print beside the progress: debug, info (default), warn or error")
        ->type_name("LEVEL")
        ->group("Log");
    app.add_flag("--log-json", json, "write the records to standard error and to files as one JSON object a line")
        ->group("Log");
    for (CLI::App* const word : app.get_subcommands([](CLI::App*) { return true; })) declare(*word);
  }

  // The options take precedence over ANNULUS_LOG, which is set accordingly for the processes that this one starts.
  void apply() const {
    LogSettings settings = log_settings();
    if (level) settings.level = parse_log_level(*level, "--log-level");
    settings.json = settings.json || json;
    if (settings == log_settings()) return;
    set_log_settings(settings);
    setenv("ANNULUS_LOG", log_settings_text(settings).c_str(), 1);
  }
};

// The option of `app` or of one of its subcommands that the word names, with or without "=VALUE"; null if there is
// none.
const CLI::Option* named_option(const CLI::App& app, const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  if (!name.starts_with("-")) return nullptr;
  for (const CLI::Option* option : app.get_options()) {
    if (option->check_name(name)) return option;
  }
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (const CLI::Option* option = named_option(*sub, name)) return option;
  }
  return nullptr;
}

// Throws Error(kUsage) for an empty argument, also in --name=. CLI11 and the subcommands would take it for one that was
// not given, but it most often comes from a variable of the shell that is not set.
void refuse_empty_arguments(const SubcommandEntry& entry, const CLI::App& app, const std::vector<std::string>& args) {
  const auto refuse_empty = [&](const std::string& which) {
    refuse_arguments(entry.name,
                     which + " is empty: give it a value, or leave it out (is a variable of the shell not set?)");
  };
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg.empty()) {
      const CLI::Option* const option = i > 0 ? named_option(app, args[i - 1]) : nullptr;
      const bool of_option =
          option && option->get_items_expected_max() > 0 && args[i - 1].find('=') == std::string::npos;
      refuse_empty(of_option ? args[i - 1] : "argument " + std::to_string(i + 1));
    }
    if (arg.find('=') == arg.size() - 1 && named_option(app, arg)) refuse_empty(arg.substr(0, arg.size() - 1));
    // What follows the subcommand that `launch` starts is that subcommand's.
    if (app.get_prefix_command() &&
        std::any_of(subcommands().begin(), subcommands().end(),
                    [&](const SubcommandEntry& subcommand) { return subcommand.name == arg; })) {
      return;
    }
  }
}

}  // namespace

ParsedSubcommand parse_subcommand(const SubcommandEntry& entry, const std::vector<std::string>& args) {
  // Options hold references to members of the subcommand, so the subcommand must outlive the app.
  ParsedSubcommand parsed;
  parsed.subcommand = entry.make();
  CLI::App app{std::string(entry.help), "annulus " + std::string(entry.name)};
  app.formatter(std::make_shared<HelpPage>(terminal_columns(STDOUT_FILENO)));  // subcommands inherit it
  parsed.subcommand->declare(app);
  LogOptions log;
  log.declare(app);
  check_numbers(app);
  refuse_empty_arguments(entry, app, args);
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 expects the last argument first
  } catch (const CLI::CallForHelp&) {
    return {nullptr, app.help()};
  } catch (const CLI::ParseError& error) {
    refuse(entry, app, error, args);
  }
  log.apply();
  parsed.subcommand->check();
  return parsed;
}

}  // namespace annulus
