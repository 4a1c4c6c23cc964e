// See plan_memory.h.
#include "launcher/subcommands/plan_memory.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/text.h"
#include "launcher/subcommands/live_line.h"
#include "runtime/huggingface/model_config.h"

namespace annulus {
namespace {

using Names = std::vector<std::string>;

// The default number of ranks of a host: most servers have 8 GPUs.
constexpr int kRanksOfAHost = 8;

const Names& own_options() {
  static const Names names{"--ranks-per-host", "--device-memory", "--cpu", "--set"};
  return names;
}

bool among(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, "launcher", "plan: " + message); }

// The kinds of memory in the order of the table, with their names there and in JSON.
struct Kind {
  const char* name;
  int64_t MemoryKinds::*bytes;
};
constexpr std::array<Kind, 5> kKinds{{{"weights", &MemoryKinds::weights},
                                      {"gradients", &MemoryKinds::gradients},
                                      {"optimizer", &MemoryKinds::optimizer},
                                      {"activations", &MemoryKinds::activations},
                                      {"working", &MemoryKinds::working}}};

std::string rows_text(const DataConfig& data) {
  std::string text;
  for (const ContextSchedule::Stage& stage : data.context.stages) {
    text += (text.empty() ? "" : ", from step " + with_commas(stage.step + 1) + " on ") +
            counted(data.batch_of(stage), "row") + " of " + with_commas(stage.context, "token");
  }
  return text;
}

std::string longest_text(const Fit& fit, int64_t multiple) {
  if (!fit.longest) return "only these";
  if (*fit.longest == 0) return "none";
  // If the next length is beyond the longest that is planned, it may fit as well.
  return (*fit.longest + multiple > kLongestPlanned ? "at least " : "") + with_commas(*fit.longest);
}

void print_table(const Config& c, const FitRanks& ranks, const FitTable& table, const NearestFit& nearest) {
  int64_t most = 0;
  for (const Fit& fit : table.fits) most = std::max(most, fit.bytes.total());
  const bool large = most >= 1'000'000'000;
  const double unit = large ? 1e9 : 1e6;
  const char* const name = large ? "GB" : "MB";
  const auto shown = [&](double bytes) { return bytes / unit; };

  std::printf("%s parameters in %s; %s in a batch; %s: data %d x context %d, state over %s%s\n",
              with_commas(table.parameters).c_str(), c.model.dtype.c_str(), rows_text(c.data).c_str(),
              counted(ranks.ranks, "rank").c_str(), table.data, table.context, counted(table.shards, "rank").c_str(),
              table.replicas > 1 ? (", " + std::to_string(table.replicas) + " times").c_str() : "");
  const bool gpu = ranks.are == RanksAre::kGpus;
  std::printf("%s has %s; in addition, caches take at most %s of it%s; the plan is for rank %d of the context axis\n\n",
              gpu ? "a GPU" : "a rank", bytes_text(ranks.memory).c_str(),
              bytes_text(static_cast<double>(gpu ? table.caches_on_device : table.caches)).c_str(),
              table.selects_what_travels ? "; keys and values sent for selected blocks are not counted" : "",
              table.planned);
  std::printf("%5s %9s", "shard", "recompute");
  for (const Kind& kind : kKinds) std::printf(" %11s", kind.name);
  std::printf(" %11s  %-4s %15s\n", ("total, " + std::string(name)).c_str(), "fits", "longest rows");
  for (const Fit& fit : table.fits) {
    std::printf("%5d %9s", fit.level, fit.recompute ? "yes" : "no");
    for (const Kind& kind : kKinds) std::printf(" %11.1f", shown(static_cast<double>(fit.bytes.*kind.bytes)));
    std::printf(" %11.1f  %-4s %15s\n", shown(static_cast<double>(fit.bytes.total())), fit.fits ? "yes" : "no",
                longest_text(fit, 2 * table.context).c_str());
  }
  std::printf("\na rank sends in a step for the state, %s:\n%5s %15s %15s\n", name, "shard", "reduce-scatter",
              "all-gather");
  for (const FitTraffic& level : table.traffic) {
    std::printf("%5d %15.1f %15.1f\n", level.level, shown(level.reduced), shown(level.gathered));
  }
  std::printf("\nnearest: %s\n", nearest.text.c_str());
}

void print_json(const std::string& model, const FitRanks& ranks, const FitTable& table, const NearestFit& nearest) {
  using Json = nlohmann::ordered_json;
  Json fits = Json::array(), traffic = Json::array();
  for (const Fit& fit : table.fits) {
    Json bytes;
    for (const Kind& kind : kKinds) bytes[kind.name] = fit.bytes.*kind.bytes;
    bytes["total"] = fit.bytes.total();
    fits.push_back({{"shard", fit.level},
                    {"recompute", fit.recompute},
                    {"bytes", bytes},
                    {"fits", fit.fits},
                    {"longest_context", fit.longest ? Json(*fit.longest) : Json()}});
  }
  for (const FitTraffic& level : table.traffic) {
    traffic.push_back(
        {{"shard", level.level}, {"reduce_scatter_bytes", level.reduced}, {"all_gather_bytes", level.gathered}});
  }
  const Json all = {{"model", model},
                    {"parameters", table.parameters},
                    {"ranks", ranks.ranks},
                    {"data", table.data},
                    {"context", table.context},
                    {"shards", table.shards},
                    {"replicas", table.replicas},
                    {"planned_rank", table.planned},
                    {"memory", ranks.memory},
                    {"caches", {{"bytes", table.caches}, {"on_device", table.caches_on_device}}},
                    {"longest_planned", kLongestPlanned},
                    {"fits", fits},
                    {"traffic", traffic},
                    {"nearest", {{"found", nearest.found}, {"text", nearest.text}}}};
  std::printf("%s\n", all.dump(2).c_str());
}

}  // namespace

void PlanMemory::declare(CLI::App& app) {
  app.add_option("--model", model_,
                 "a configuration of `train`: plan the memory of its training step on --ranks ranks instead")
      ->type_name("CONFIG");
  app.add_option("--device-memory", memory_text_,
                 "with --model: the memory of a GPU, or with --cpu of a rank: 141GB, 80GiB")
      ->type_name("BYTES");
  app.add_option("--ranks-per-host", ranks_per_host_,
                 "with --model: ranks on each host, for optimizer.shard_within (default: 8, or all if fewer)")
      ->check(CLI::PositiveNumber);
  app.add_flag("--cpu", cpu_, "with --model: ranks compute on CPUs");
  app.add_option("--set", sets_, "with --model: override one key of the configuration (may be repeated)")
      ->expected(1)
      ->take_all()
      ->type_name("KEY=VALUE");
}

void PlanMemory::check(const Names& given, std::optional<int> ranks) {
  if (!asked()) {
    for (const std::string& option : given) {
      if (!among(own_options(), option)) continue;
      refuse(option + " is for the memory of a training step: give its configuration with --model CONFIG");
    }
    return;
  }
  for (const std::string& option : given) {
    if (option == "--model" || option == "--ranks" || option == "--json" || among(own_options(), option)) continue;
    refuse(option + " is for a plan of attention; with --model the configuration decides: leave " + option +
           " out, or override a key with --set KEY=VALUE");
  }
  if (!ranks) refuse("--model needs --ranks, the number of ranks that train");
  if (*ranks < 1) refuse("--ranks must be at least 1, got " + std::to_string(*ranks));
  if (memory_text_.empty()) {
    refuse("--model needs --device-memory, the memory of a GPU, or with --cpu of a rank: 141GB, 80GiB");
  }
  const std::optional<int64_t> memory = bytes_of_text(memory_text_);
  if (!memory) refuse("--device-memory must be a number of bytes such as 141GB or 80GiB, got \"" + memory_text_ + "\"");
  config_ = load_config(model_, sets_, read_model_from);
  if (config_.model.dtype == "fp64" && !cpu_) {
    refuse(
        "model.dtype = \"fp64\" computes on CPUs only: plan it with --cpu, or another dtype with --set "
        "model.dtype=...");
  }
  ranks_ = {.ranks = *ranks,
            .ranks_of_a_host = ranks_per_host_.value_or(std::min(*ranks, kRanksOfAHost)),
            .are = cpu_ ? RanksAre::kProcesses : RanksAre::kGpus,
            .memory = static_cast<double>(*memory)};
}

int PlanMemory::run(bool json) const {
  FitRanks ranks = ranks_;
  FitTable table;
  {
    LiveLine line;
    table = what_fits(config_, ranks, [&](const std::string& text) { line.say(text); });
  }
  ranks.planned = table.planned;
  const NearestFit nearest = nearest_fit(config_, ranks);
  if (json) {
    print_json(model_, ranks, table, nearest);
  } else {
    print_table(config_, ranks, table, nearest);
  }
  return 0;
}

}  // namespace annulus
