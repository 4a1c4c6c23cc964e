// See verb.h.
#include "launcher/verb.h"

#include <CLI/CLI.hpp>

#include "common/error.h"
#include "common/names.h"

namespace annulus {

const VerbEntry& find_verb(std::string_view name) {
  std::vector<std::string> names;
  for (const VerbEntry& entry : verbs()) {
    if (entry.name == name) return entry;
    names.emplace_back(entry.name);
  }
  throw Error(ErrorKind::kUsage, "launcher",
              "unknown verb \"" + std::string(name) + "\"" + suggestion(name, names) + "; `annulus --help` lists them");
}

namespace {

[[noreturn]] void refuse_usage(std::string_view verb, const std::string& message) {
  throw Error(ErrorKind::kUsage, "launcher",
              std::string(verb) + ": " + message + "; `annulus " + std::string(verb) +
                  " --help` shows the options and an example");
}

}  // namespace

void refuse_option(std::string_view verb, const CLI::App& app, const std::string& option) {
  std::vector<std::string> known;
  for (const CLI::Option* o : app.get_options()) {
    for (const std::string& name : o->get_lnames()) known.push_back("--" + name);
    for (const std::string& name : o->get_snames()) known.push_back("-" + name);
  }
  refuse_usage(verb, "unknown option " + option + suggestion(option.substr(0, option.find('=')), known));
}

namespace {

// CLI11's messages, in our form.
[[noreturn]] void refuse(const VerbEntry& entry, const CLI::App& app, const CLI::ParseError& error) {
  // Of a verb with words of its own (`bench ring`), the word's options are meant.
  const std::vector<CLI::App*> words = app.get_subcommands();
  const CLI::App& meant = words.empty() ? app : *words.front();
  const std::string name = std::string(entry.name) + (words.empty() ? "" : " " + meant.get_name());
  std::string message = error.what();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    const std::vector<std::string> extras = app.remaining(/*recurse=*/true);
    const std::string first = extras.empty() ? "" : extras.front();
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
    // One line each: some of CLI11's texts hold line breaks.
    for (char& c : message) {
      if (c == '\n') c = ' ';
    }
  }
  refuse_usage(name, message);
}

}  // namespace

ParsedVerb parse_verb(const VerbEntry& entry, const std::vector<std::string>& args) {
  // Options hold references into the verb, which therefore outlives the app.
  ParsedVerb parsed;
  parsed.verb = entry.make();
  CLI::App app{std::string(entry.help), "annulus " + std::string(entry.name)};
  parsed.verb->declare(app);
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 takes them last first
  } catch (const CLI::CallForHelp&) {
    return {nullptr, app.help()};
  } catch (const CLI::ParseError& error) {
    refuse(entry, app, error);
  }
  parsed.verb->check();
  return parsed;
}

}  // namespace annulus
