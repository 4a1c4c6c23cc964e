// See run_files.h.
#include "runtime/report/run_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "common/toml.h"
#include "runtime/evaluation/report.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kNewestManifest = 2;  // the newest version that runtime/run/checkpoint_manifest.h reads
constexpr size_t kMostEvaluations = 64;
constexpr size_t kMostCheckpoints = 2000;

// Calls `take` with each entry of a folder, if there is one.
template <typename F>
void each_in(const std::string& folder, F take) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) take(it->path());
}

// A value as it stands in TOML, without the quotes of a text.
std::string text_of(const toml::node_view<const toml::node>& value, const std::string& file) {
  if (!value) return "";
  if (const auto text = value.value_exact<std::string>()) return *text;
  if (const auto whole = value.value_exact<int64_t>()) return with_commas(*whole);
  const toml::source_region& at = value.node()->source();
  if (at.begin.line == at.end.line) {
    std::istringstream lines(file);
    std::string line;
    for (uint32_t i = 0; i < at.begin.line; ++i) std::getline(lines, line);
    const size_t begin = at.begin.column - 1, size = at.end.column - at.begin.column;  // in characters
    const bool ascii = std::all_of(line.begin(), line.end(), [](char c) { return static_cast<signed char>(c) >= 0; });
    if (ascii && begin + size <= line.size()) return line.substr(begin, size);
  }
  std::ostringstream out;
  out << toml::default_formatter{*value.node(), toml::format_flags::none};
  return out.str();
}

// What a manifest says of itself, without its long list of tensors.
struct ManifestHead {
  std::optional<int64_t> version, step, world;
};

ManifestHead read_head(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  ManifestHead head;
  if (!in) return head;
  const auto skip = [](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event != nlohmann::json::parse_event_t::key || depth != 1) return true;
    const std::string& key = value.get_ref<const std::string&>();
    return key == "format" || key == "version" || key == "step" || key == "world";
  };
  const auto json = nlohmann::json::parse(in, skip, /*allow_exceptions=*/false);
  const auto whole = [&](const char* key) -> std::optional<int64_t> {
    if (!json.is_object() || !json.contains(key) || !json[key].is_number_integer()) return std::nullopt;
    return json[key].get<int64_t>();
  };
  return {whole("version"), whole("step"), whole("world")};
}

Json checkpoint_there(const fs::path& folder, Json& notes) {
  const std::string manifest = (folder / "manifest.json").string(), name = folder.filename().string();
  const ManifestHead head = read_head(manifest);
  Json out = {{"name", name}, {"there", true}, {"written", nullptr}};
  if (const double written = seconds_of_file(manifest); std::isfinite(written)) out["written"] = written;
  if (!head.version || !head.step) {
    notes.push_back("the checkpoint " + name + " has no manifest that can be read; `annulus checkpoint` verifies it");
  } else if (*head.version > kNewestManifest) {
    notes.push_back("the checkpoint " + name + " is of version " + std::to_string(*head.version) +
                    ", and this program reads up to " + std::to_string(kNewestManifest) +
                    ": resume or export the run with the version of annulus that wrote it");
  }
  // "step-00000200", "step-00000200-2"
  const auto of_name = number_of_text<int64_t>(std::string_view(name).substr(5, name.find('-', 5) - 5));
  out["step"] = head.step ? *head.step : of_name.value_or(0);
  if (head.world) out["ranks"] = *head.world;
  uintmax_t bytes = 0;
  each_in(folder.string(), [&](const fs::path& file) {
    std::error_code error;
    const uintmax_t size = fs::file_size(file, error);
    if (!error) bytes += size;
  });
  out["bytes"] = bytes;
  return out;
}

Json evaluation_of(const EvaluationResults& results, const std::string& file) {
  Json sources = Json::array(), tasks = Json::array();
  const auto finite = [](double value) { return std::isfinite(value) ? Json(value) : Json(); };
  for (const SourceLosses& source : results.sources) {
    Json buckets = Json::array();
    for (const LossBucket& bucket : source.doubling) {
      if (bucket.targets == 0) continue;
      buckets.push_back({bucket.end, finite(bucket.mean()), bucket.error ? finite(*bucket.error) : Json()});
    }
    sources.push_back({{"name", source.name},
                       {"loss", finite(source.all.mean())},
                       {"targets", source.all.targets},
                       {"buckets", std::move(buckets)}});
  }
  for (const TaskCell& cell : results.cells) {
    tasks.push_back({{"task", cell.task},
                     {"length", cell.length},
                     {"depth", cell.depth ? finite(*cell.depth) : Json()},
                     {"trials", cell.trials},
                     {"exact", cell.exact}});
  }
  return {{"file", file},
          {"step", results.step < 0 ? Json() : Json(results.step)},
          {"sources", std::move(sources)},
          {"tasks", std::move(tasks)}};
}

}  // namespace

double seconds_of_file(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(status.st_mtim.tv_sec);
}

RunConfiguration read_run_configuration(const std::string& run, Json& notes) {
  RunConfiguration config;
  try {
    config.text = read_small_file("report", run + "/config.toml");
    const toml::table parsed = parse_toml(config.text);
    const toml::node_view<const toml::node> root(parsed);
    const auto at = [&](const char* section, const char* key) { return text_of(root[section][key], config.text); };
    const auto add = [&](const char* name, const std::string& text) {
      if (!text.empty()) config.facts.emplace_back(name, text);
    };
    config.steps = root["run"]["steps"].value_or(0.0);
    const std::string layers = at("model", "layers"), dim = at("model", "dim"), heads = at("model", "heads");
    if (!layers.empty())
      add("model", layers + " layers, dim " + dim + ", " + heads + " heads, " + at("model", "dtype"));
    add("model from", at("model", "from"));
    add("pattern", at("model", "pattern"));
    add("rows", at("data", "batch") + " of " + at("data", "context") + " tokens each in a step" +
                    (at("data", "accumulate") == "1" ? "" : ", times " + at("data", "accumulate")) + ", packing " +
                    at("data", "packing"));
    add("trains on", at("data", "train"));
    add("learning rate", "at most " + at("optimizer", "lr") + ", " + at("optimizer", "schedule") + ", warm-up " +
                             at("optimizer", "warmup"));
    add("schedule", at("attention", "schedule") + ", layout " + at("attention", "layout"));
  } catch (const Error& error) {
    notes.push_back(std::string(error.message()));
  } catch (const TomlFault& error) {
    notes.push_back("config.toml is not TOML (" + std::string(error.what()) + "), so the page shows its text alone");
  }
  return config;
}

Json checkpoints_of(const std::string& run, const MetricsFile& metrics, Json& notes) {
  std::map<std::string, Json> by_name;
  each_in(run + "/checkpoints", [&](const fs::path& folder) {
    const std::string name = folder.filename().string();
    if (name.starts_with("step-") && by_name.size() < kMostCheckpoints) by_name[name] = checkpoint_there(folder, notes);
  });
  for (const auto& [name, line] : metrics.checkpoints) {
    const bool is_there = by_name.count(name) > 0;
    if (!is_there && by_name.size() >= kMostCheckpoints) continue;
    Json& out = by_name[name];
    if (!is_there) out = {{"name", name}, {"there", false}, {"step", line["step"]}};
    const auto take = [&](const char* key, const char* as) {
      if (line.contains(key) && line[key].is_number()) out[as] = line[key];
    };
    take("checkpoint_stopped_seconds", "stopped");
    take("checkpoint_seconds", "durable");
  }
  Json list = Json::array();
  for (auto& [name, checkpoint] : by_name) list.push_back(std::move(checkpoint));
  std::stable_sort(list.begin(), list.end(), [](const Json& a, const Json& b) { return a["step"] < b["step"]; });
  return list;
}

Json evaluations_of(const std::string& run, Json& notes) {
  std::vector<std::string> files;
  for (const char* folder : {"", "/evaluations"}) {
    each_in(run + folder, [&](const fs::path& path) {
      if (path.extension() == ".json" && is_file(path.string())) files.push_back(path.string());
    });
  }
  std::sort(files.begin(), files.end());
  Json list = Json::array();
  for (const std::string& file : files) {
    const std::string shown = file.substr(std::min(file.size(), run.size() + 1));
    if (list.size() == kMostEvaluations) {
      notes.push_back("of the evaluations only the first " + std::to_string(kMostEvaluations) + " are shown");
      break;
    }
    try {
      list.push_back(evaluation_of(results_of_json(read_small_file("report", file), file), shown));
    } catch (const Error& error) {
      notes.push_back(std::string(error.message()));
    }
  }
  return list;
}

bool run_is_locked(const std::string& run) {
  struct stat status;
  if (::stat((run + "/lock").c_str(), &status) != 0) return false;
  // "1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF"; devices of overlays differ from those that stat tells.
  const std::string inode = ":" + std::to_string(status.st_ino) + " ";
  std::ifstream in("/proc/locks");
  for (std::string line; std::getline(in, line);) {
    if (line.find("FLOCK") != std::string::npos && line.find("->") == std::string::npos &&
        line.find(inode) != std::string::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace annulus
