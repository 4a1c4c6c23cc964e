// annulus fit: computes whether a model fits into the memory of so many devices when it is trained, at each level of
// optimizer.shard, with and without recomputation and offload, where what is offloaded lies, and what a rank then
// sends. It runs nothing and needs neither the devices nor the data; runtime/training/fitting.h does the work.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/svg/stacked_bars.h"
#include "common/text.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/live_line.h"
#include "runtime/config/config.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/training/fitting.h"

namespace annulus {
namespace {

// The default number of ranks of a host: most servers have 8 GPUs.
constexpr int kRanksOfAHost = 8;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, "launcher", "fit: " + message); }

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

std::string longest_text(const std::optional<int64_t>& longest, int64_t multiple) {
  if (!longest) return "only these";
  if (*longest == 0) return "none";
  // If the next length is beyond the longest that is planned, it may fit as well.
  return (*longest + multiple > kLongestPlanned ? "at least " : "") + with_commas(*longest);
}

// The attention that a run would choose; empty if nothing was to be chosen.
std::string attention_name(const Config& c, const FitAttention& attention) {
  const bool chooses = c.attention.schedule == "auto" || c.attention.layout == "auto";
  if (!chooses || attention.text.empty()) return "";
  return attention.text + (attention.leanest ? " (leanest)" : "");
}

// The share of a step's computing that the update may add when the state of the optimizer is offloaded.
constexpr double kUpdateShare = 0.05;

std::string name_of(const FitWay& way) {
  const std::string name = to_string(way.keeps);
  if (way.keeps < Keeps::kOffloaded) return name;
  const auto tier = [](const std::string& of) { return of == "file" ? std::string("files") : of; };
  const Tiers& at = way.tiers;
  return name + ": " + tier(at.memory) +
         (way.keeps == Keeps::kOptimizer && at.memory != at.optimizer ? ", " + tier(at.optimizer) : "");
}

// The ways to train at the highest level, with what is kept away from the device, and how fast it must travel.
void print_ways(const FitRanks& ranks, const FitTable& table, std::optional<double> tflops) {
  double most = 0;
  for (const FitWay& way : table.ways) {
    most = std::max({most, static_cast<double>(way.device), static_cast<double>(way.of_host.host),
                     static_cast<double>(way.of_host.files)});
  }
  const bool large = most >= 1e9;
  const auto shown = [&](int64_t bytes) { return rounded(static_cast<double>(bytes) / (large ? 1e9 : 1e6), 1); };
  const auto bound = [](const std::optional<double>& bytes) { return bytes ? " of " + bytes_text(*bytes) : ""; };
  std::printf(
      "\nways to train at level %d, %s: what a rank holds; what the %s of a host keep in its memory%s and in files%s; "
      "and "
      "what a rank sends there in a step, and has back\n",
      table.fits.back().level, large ? "GB" : "MB", counted(ranks.ranks_of_a_host, "rank").c_str(),
      bound(ranks.host_memory).c_str(), bound(ranks.files).c_str());
  std::printf("%22s %11s %11s %11s %11s", "keeps", "device", "host", "files", "moved");
  if (tflops) std::printf(" %11s %11s", "GB/s out", "GB/s back");
  std::printf("  %-4s %15s\n", "fits", "longest rows");
  const double seconds = tflops ? table.flops / (*tflops * 1e12) : 0;
  for (const FitWay& way : table.ways) {
    std::printf("%22s %11s %11s %11s %11s", name_of(way).c_str(), shown(way.device).c_str(),
                shown(way.of_host.host).c_str(), shown(way.of_host.files).c_str(), shown(way.total_moved()).c_str());
    if (tflops) {
      // What layers keep leaves during the forward, which has a third of the operations, and returns during the
      // backward.
      const double rate = static_cast<double>(way.moved) / seconds / 1e9;
      std::printf(" %11s %11s", rounded(3 * rate, 2).c_str(), rounded(1.5 * rate, 2).c_str());
    }
    std::printf("  %-4s %15s\n", way.fits ? "yes" : "no", longest_text(way.longest, 2 * table.context).c_str());
  }
  if (!tflops) return;
  std::printf("at %s TFLOP/s a rank computes a step in %s s, which hides what layers keep at these rates\n",
              rounded(*tflops, 1).c_str(), rounded(seconds, 1).c_str());
  const auto state = static_cast<double>(table.ways.back().optimizer_moved);
  std::printf("an update is not hidden; with the optimizer's state away, at %s/s each way, it adds %.0f %% to that\n",
              bytes_text(state / (kUpdateShare * seconds)).c_str(), kUpdateShare * 100);
}

void print_table(const Config& c, const FitRanks& ranks, const FitTable& table, const NearestFit& nearest,
                 std::optional<double> tflops) {
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
  const int rank = table.fits.front().attention.rank;
  const bool one = std::ranges::all_of(table.fits, [&](const Fit& fit) { return fit.attention.rank == rank; });
  std::printf(
      "%s has %s; in addition, caches take at most %s of it%s%s; the plan is for %s\n\n", gpu ? "a GPU" : "a rank",
      bytes_text(ranks.memory).c_str(),
      bytes_text(static_cast<double>(gpu ? table.caches_on_device : table.caches)).c_str(),
      gpu || c.memory.pool == 0
          ? ""
          : (", freed memory that is kept at most " + bytes_text(static_cast<double>(c.memory.pool << 20))).c_str(),
      table.selects_what_travels ? "; keys and values sent for selected blocks are not counted" : "",
      one ? ("rank " + std::to_string(rank) + " of the context axis").c_str()
          : "the rank of the context axis that needs the most");
  std::printf("%5s %9s", "shard", "keeps");
  for (const Kind& kind : kKinds) std::printf(" %11s", kind.name);
  const bool named = !attention_name(c, table.fits.front().attention).empty();
  std::printf(" %11s  %-4s %15s%s\n", ("total, " + std::string(name)).c_str(), "fits", "longest rows",
              named ? "  attention" : "");
  for (const Fit& fit : table.fits) {
    std::printf("%5d %9s", fit.level, to_string(fit.keeps));
    for (const Kind& kind : kKinds) std::printf(" %11.1f", shown(static_cast<double>(fit.bytes.*kind.bytes)));
    std::printf(" %11.1f  %-4s %15s%s\n", shown(static_cast<double>(fit.bytes.total())), fit.fits ? "yes" : "no",
                longest_text(fit.longest, 2 * table.context).c_str(),
                named ? ("  " + attention_name(c, fit.attention)).c_str() : "");
  }
  std::printf("\na rank sends in a step, %s; keys and values are those of the rank that sends the most%s:\n", name,
              c.data.documents ? ", and fewer where documents end within a row" : "");
  std::printf("%5s %15s %15s %15s %15s %15s\n", "shard", "reduce-scatter", "all-gather", "keys, values",
              "their gradients", "total");
  double queries = 0;
  for (const FitTraffic& level : table.traffic) {
    const AttentionTraffic& ring = level.attention;
    queries = std::max(queries, ring.queries);
    std::printf("%5d %15.1f %15.1f %15.1f %15.1f %15.1f\n", level.level, shown(level.reduced), shown(level.gathered),
                shown(ring.keys_and_values), shown(ring.gradients),
                shown(level.reduced + level.gathered + ring.total()));
  }
  if (queries > 0) std::printf("the total includes up to %.1f of queries and their results\n", shown(queries));
  print_ways(ranks, table, tflops);
  if (table.save_copy > 0) {
    const auto copy = static_cast<double>(table.save_copy);
    std::printf(
        "\na checkpoint is copied to %s of the host's memory by each rank, %s by the %s of a host, and written behind "
        "training, if they are free\n",
        bytes_text(copy).c_str(), bytes_text(copy * ranks.ranks_of_a_host).c_str(),
        counted(ranks.ranks_of_a_host, "rank").c_str());
  }
  std::printf("\nnearest: %s\n", nearest.text.c_str());
}

// What a bar of a picture is called; each keeps less on the device than the one before.
std::string name_of(Keeps keeps) {
  switch (keeps) {
    case Keeps::kAll:
      return "all kept";
    case Keeps::kRecomputed:
      return "recompute";
    case Keeps::kOffloaded:
      return "+ offload";
    case Keeps::kOptimizer:
      return "+ optimizer offload";
  }
  return "";
}

// The rows of the table as bars beside the memory of a device.
std::string fit_picture(const std::string& model, const Config& c, const FitRanks& ranks, const FitTable& table,
                        const NearestFit& nearest) {
  StackedBars bars;
  const bool gpu = ranks.are == RanksAre::kGpus;
  bars.title = "Memory of a rank that trains " + model;
  bars.subtitle = with_commas(table.parameters, "parameter") + " in " + c.model.dtype + "; " + rows_text(c.data) +
                  " in a batch; " + counted(ranks.ranks, "rank") + ": data " + std::to_string(table.data) +
                  " x context " + std::to_string(table.context) + "; nearest: " + nearest.text;
  bars.limit = ranks.memory;
  bars.limit_name = std::string(gpu ? "a GPU" : "a rank") + " has " + bytes_text(ranks.memory);
  bars.text = [](double bytes) { return bytes_text(bytes); };
  for (const Kind& kind : kKinds) bars.kinds.push_back(kind.name);
  bars.description = bars.subtitle + ". " + bars.limit_name + ".";
  for (const Fit& fit : table.fits) {
    StackedBar& bar = bars.bars.emplace_back();
    bar.group = "shard " + std::to_string(fit.level);
    bar.name = name_of(fit.keeps);
    for (const Kind& kind : kKinds) bar.parts.push_back(static_cast<double>(fit.bytes.*kind.bytes));
    bar.within = fit.fits;
    const std::string longest = longest_text(fit.longest, 2 * table.context);
    bar.note = bytes_text(static_cast<double>(fit.bytes.total())) + (!fit.longest        ? ""
                                                                     : *fit.longest == 0 ? "; no rows fit"
                                                                                         : "; rows to " + longest);
    bars.description += " " + bar.group + ", " + bar.name + ": " + bar.note + (fit.fits ? "." : "; does not fit.");
  }
  return stacked_bars_svg(bars);
}

void print_json(const std::string& model, const FitRanks& ranks, const FitTable& table, const NearestFit& nearest) {
  using Json = nlohmann::ordered_json;
  Json fits = Json::array(), traffic = Json::array(), ways = Json::array();
  const auto attention = [](const FitAttention& of) {
    return Json{{"chosen", of.text}, {"leanest", of.leanest}, {"planned_rank", of.rank}};
  };
  for (const FitWay& way : table.ways) {
    ways.push_back({{"keeps", to_string(way.keeps)},
                    {"memory_offload", way.tiers.memory},
                    {"optimizer_offload", way.tiers.optimizer},
                    {"attention", attention(way.attention)},
                    {"device_bytes", way.device},
                    {"host_bytes_of_host", way.of_host.host},
                    {"file_bytes_of_host", way.of_host.files},
                    {"moved_bytes", way.moved},
                    {"optimizer_moved_bytes", way.optimizer_moved},
                    {"fits", way.fits},
                    {"longest_context", way.longest ? Json(*way.longest) : Json()}});
  }
  for (const Fit& fit : table.fits) {
    Json bytes;
    for (const Kind& kind : kKinds) bytes[kind.name] = fit.bytes.*kind.bytes;
    bytes["total"] = fit.bytes.total();
    fits.push_back({{"shard", fit.level},
                    {"keeps", to_string(fit.keeps)},
                    {"attention", attention(fit.attention)},
                    {"bytes", bytes},
                    {"fits", fit.fits},
                    {"longest_context", fit.longest ? Json(*fit.longest) : Json()}});
  }
  for (const FitTraffic& level : table.traffic) {
    traffic.push_back({{"shard", level.level},
                       {"reduce_scatter_bytes", level.reduced},
                       {"all_gather_bytes", level.gathered},
                       {"kv_bytes_sent", level.attention.keys_and_values},
                       {"gradient_bytes_sent", level.attention.gradients},
                       {"query_bytes_sent", level.attention.queries}});
  }
  const Json all = {{"model", model},
                    {"parameters", table.parameters},
                    {"ranks", ranks.ranks},
                    {"data", table.data},
                    {"context", table.context},
                    {"shards", table.shards},
                    {"replicas", table.replicas},
                    {"memory", ranks.memory},
                    {"host_memory", ranks.host_memory ? Json(*ranks.host_memory) : Json()},
                    {"files", ranks.files ? Json(*ranks.files) : Json()},
                    {"caches", {{"bytes", table.caches}, {"on_device", table.caches_on_device}}},
                    {"longest_planned", kLongestPlanned},
                    {"fits", fits},
                    {"traffic", traffic},
                    {"ways", ways},
                    {"flops_of_rank", table.flops},
                    {"save_copy_bytes_of_rank", table.save_copy},
                    {"nearest", {{"found", nearest.found}, {"text", nearest.text}}}};
  std::printf("%s\n", all.dump(2).c_str());
}

class FitSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("CONFIG_OR_FOLDER", model_,
                   "a configuration of `train`, or a folder in Hugging Face's layout, of which config.json is read")
        ->required();
    app.add_flag("--json", json_, "print JSON instead of tables");
    app.add_option("--svg", svg_, "draw memory by kind in FILE, for each row of the table, beside what a device has")
        ->type_name("FILE");
    constexpr const char* kDevices = "Devices";
    app.add_option("--ranks", ranks_, "number of ranks that train, one for each device (required)")->group(kDevices);
    app.add_option("--device-memory", memory_text_, "what a GPU, or with --cpu a rank, has: 141GB, 80GiB (required)")
        ->type_name("BYTES")
        ->group(kDevices);
    app.add_option(
           "--ranks-per-host", ranks_of_a_host_,
           "ranks on each host, for optimizer.shard_within and for what `auto` chooses (default: 8, or all if fewer)")
        ->check(CLI::PositiveNumber)
        ->group(kDevices);
    app.add_flag("--cpu", cpu_, "ranks compute on CPUs")->group(kDevices);
    app.add_option("--host-memory", host_text_,
                   "what a host has for what its ranks offload to its memory (default: any number)")
        ->type_name("BYTES")
        ->group(kDevices);
    app.add_option("--disk", disk_text_, "likewise for files")->type_name("BYTES")->group(kDevices);
    app.add_option("--tflops", tflops_,
                   "the TFLOP/s that a rank reaches, to print how fast what is offloaded must travel")
        ->check(CLI::PositiveNumber)
        ->group(kDevices);
    constexpr const char* kTraining = "Training";
    app.add_option("--context", context_,
                   "tokens in a row; short for --set data.context=N (default: the configuration's, or the "
                   "positions that the folder's model was made for)")
        ->check(CLI::PositiveNumber)
        ->group(kTraining);
    app.add_option("--batch", batch_,
                   "rows that pass through the model together, over all ranks; short for --set data.batch=N (default: "
                   "the configuration's; 1 for a folder)")
        ->check(CLI::PositiveNumber)
        ->group(kTraining);
    add_repeated(app, "--set", sets_, "override one key of the configuration: --set optimizer.shard=3", "KEY=VALUE")
        ->group(kTraining);
    app.footer(
        "Examples:\n"
        "  ./annulus fit configs/plan/8b.toml --ranks 8 --device-memory 141GB\n"
        "  ./annulus fit configs/quickstart.toml --ranks 2 --cpu --device-memory 4GiB --context 65536\n"
        "  ./annulus fit models/Qwen3-8B --ranks 8 --device-memory 80GB --context 131072 \\\n"
        "      --set optimizer.shard=3 --set model.recompute=true");
  }

  void check() override {
    if (!ranks_) refuse("--ranks is needed, the number of ranks that train");
    if (*ranks_ < 1) refuse("--ranks must be at least 1, got " + std::to_string(*ranks_));
    if (memory_text_.empty()) {
      refuse("--device-memory is needed, the memory of a GPU, or with --cpu of a rank: 141GB, 80GiB");
    }
    const auto bytes = [](const char* option, const std::string& text) -> std::optional<double> {
      if (text.empty()) return std::nullopt;
      const std::optional<int64_t> bytes = bytes_of_text(text);
      if (!bytes) {
        refuse(std::string(option) + " must be a number of bytes such as 141GB or 80GiB, got \"" + text + "\"");
      }
      return static_cast<double>(*bytes);
    };
    if (!svg_.empty()) require_output("launcher", "--svg " + svg_, svg_);
    read_model();
    if (config_.model.dtype == "fp64" && !cpu_) {
      refuse(
          "model.dtype = \"fp64\" computes on CPUs only: plan it with --cpu, or another dtype with --set "
          "model.dtype=...");
    }
    on_ = {.ranks = *ranks_,
           .ranks_of_a_host = ranks_of_a_host_.value_or(std::min(*ranks_, kRanksOfAHost)),
           .are = cpu_ ? RanksAre::kProcesses : RanksAre::kGpus,
           .memory = *bytes("--device-memory", memory_text_),
           .host_memory = bytes("--host-memory", host_text_),
           .files = bytes("--disk", disk_text_)};
  }

  int run() override {
    FitTable table;
    {
      LiveLine line;
      table = what_fits(config_, on_, [&](const std::string& text) { line.say(text); });
    }
    const NearestFit nearest = nearest_fit(config_, on_);
    if (!svg_.empty()) write_atomically(FileSystem::real(), svg_, fit_picture(model_, config_, on_, table, nearest));
    if (json_) {
      print_json(model_, on_, table, nearest);
    } else {
      print_table(config_, on_, table, nearest, tflops_);
    }
    return 0;
  }

 private:
  void read_model() {
    std::vector<std::string> sets = sets_;
    if (context_) sets.push_back("data.context=" + std::to_string(*context_));
    if (batch_) sets.push_back("data.batch=" + std::to_string(*batch_));
    std::error_code error;
    if (!std::filesystem::is_directory(model_, error)) {
      config_ = load_config(model_, sets, read_model_from);
      return;
    }
    if (std::filesystem::is_regular_file(model_ + "/config.toml", error)) {
      throw Error(ErrorKind::kInput, "launcher",
                  model_ + " is a run folder: name its configuration, " + model_ + "/config.toml");
    }
    // What a configuration must have and a folder has not. Of these only the context and the batch change what fits.
    const FolderConfig folder = read_folder_config(model_);
    config_ = parse_config("run.steps = 1\ndata.train = [\"tokens\"]\noptimizer.lr = 1.0\ndata.batch = 1\n" +
                               ("data.context = " + std::to_string(folder.context)) +
                               "\nmodel.from = " + toml_string(model_) + "\n",
                           model_, sets, read_model_from);
  }

  std::string model_, memory_text_, host_text_, disk_text_, svg_;
  std::vector<std::string> sets_;
  std::optional<int> ranks_, ranks_of_a_host_;
  std::optional<int64_t> context_, batch_;
  std::optional<double> tflops_;
  bool cpu_ = false, json_ = false;
  Config config_;
  FitRanks on_;
};

}  // namespace

std::unique_ptr<Subcommand> make_fit_subcommand() { return std::make_unique<FitSubcommand>(); }

}  // namespace annulus
