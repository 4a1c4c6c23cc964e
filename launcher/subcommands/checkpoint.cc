// annulus checkpoint: shows what a run's checkpoints hold, verifies them, and writes their weights as safetensors for
// other programs. This file has the options and prints the results; runtime/run/ does the work.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "launcher/subcommand.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_files.h"
#include "runtime/run/checkpoint_merge.h"
#include "runtime/run/run_folder.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {
namespace {

int64_t file_bytes(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const auto& [name, file] : manifest.files) bytes += static_cast<int64_t>(file.bytes);
  return bytes;
}

std::string files_text(const Manifest& manifest) {
  return with_commas(static_cast<int64_t>(manifest.files.size()), "file") + ", " +
         bytes_text(static_cast<double>(file_bytes(manifest)));
}

// Prints one line for each dtype: "F32: 12 tensors, 1,234 elements, 4.9 MB".
void say_tensors(const std::string& what, const Manifest& manifest, bool optimizer) {
  struct Sum {
    int64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::map<std::string, Sum> by_dtype;
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (is_optimizer(tensor.name) != optimizer) continue;
    Sum& sum = by_dtype[std::string(safetensors_dtype(tensor.dtype))];
    ++sum.tensors;
    sum.elements += tensor.elements();
    sum.bytes += tensor.bytes();
  }
  if (by_dtype.empty()) print_fact(what, "none");
  std::string name = what;
  for (const auto& [dtype, sum] : by_dtype) {
    print_fact(std::exchange(name, ""), dtype + ": " + with_commas(sum.tensors, "tensor") + ", " +
                                            with_commas(sum.elements, "element") + ", " +
                                            bytes_text(static_cast<double>(sum.bytes)));
  }
}

void say_texts(const std::string& what, const std::map<std::string, std::string>& texts) {
  std::string name = what;
  for (const auto& [key, value] : texts) print_fact(std::exchange(name, ""), key + " = " + value);
}

void show(const std::string& path, const Manifest& manifest, const std::vector<std::string>& steps) {
  std::printf("%s\n", path.c_str());
  print_fact("step", with_commas(manifest.step));
  print_fact("written by",
             counted(manifest.world, "rank") + ", in version " + std::to_string(manifest.version) + " of the format" +
                 (manifest.version == 1 ? "" : ", in blocks of " + with_commas(manifest.block_bytes, "byte")));
  print_fact("files", files_text(manifest));
  say_tensors("model", manifest, false);
  say_tensors("optimizer", manifest, true);
  say_texts("described as", manifest.model);
  say_texts("extra", manifest.extra);
  print_fact("steps here", join(steps, ", "));
}

void show_json(const std::string& path, const Manifest& manifest, const std::vector<std::string>& steps) {
  nlohmann::json tensors = nlohmann::json::array();
  for (const ManifestTensor& tensor : manifest.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"dtype", safetensors_dtype(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"bytes", tensor.bytes()},
                       {"slices", tensor.slices.size()}});
  }
  nlohmann::json files = nlohmann::json::object();
  for (const auto& [name, file] : manifest.files) files[name] = file.bytes;
  nlohmann::json numbers = nlohmann::json::array();
  for (const std::string& step : steps) numbers.push_back(std::stoll(step));
  const nlohmann::json all = {{"folder", path},          {"step", manifest.step},   {"version", manifest.version},
                              {"world", manifest.world}, {"files", files},          {"tensors", tensors},
                              {"model", manifest.model}, {"extra", manifest.extra}, {"steps", numbers}};
  std::printf("%s\n", all.dump(1).c_str());
}

class CheckpointSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.require_subcommand(0, 1);
    show_ = word(app, "show", "show what a checkpoint holds, from its manifest alone");
    show_->add_flag("--json", json_, "print JSON, with every tensor");
    show_->footer("Example:\n  ./annulus checkpoint show quickstart");
    verify_ = word(app, "verify", "read all of a checkpoint and compare every checksum");
    verify_->footer(
        "The exit code is 3 if it is damaged; each damaged place is named by file, tensor and range of elements.\n"
        "Example:\n  ./annulus checkpoint verify quickstart");
    merge_ = word(app, "merge", "write a checkpoint's weights as safetensors for other programs");
    merge_->add_option("--out", out_, "a new file, or with --max-file-bytes a new folder")
        ->type_name("PATH")
        ->required();
    merge_
        ->add_option("--max-file-bytes", max_file_text_,
                     "write several files, each with at most this many bytes of tensors (5GB, 500MiB; a larger tensor "
                     "has its own file), and the index that Hugging Face's libraries read")
        ->type_name("BYTES");
    merge_->footer(
        "Without --step, it takes the newest checkpoint whose weights are undamaged. Names, shapes and dtypes are\n"
        "those of the model.\n"
        "Example:\n  ./annulus checkpoint merge quickstart --out /tmp/quickstart.safetensors");
    app.footer(
        "`annulus checkpoint WORD --help` shows the options of each.\n"
        "Example (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus checkpoint show quickstart");
  }

  void check() override {
    // Copied here because CLI11's objects are destroyed after the parsing.
    for (const auto& [app, word] : {std::pair{show_, kShow}, {verify_, kVerify}, {merge_, kMerge}}) {
      if (app->parsed()) word_ = word;
    }
    if (word_ == kNone) {
      refuse_usage("checkpoint needs one of the words show, verify and merge; example: annulus checkpoint show RUN");
    }
    if (max_file_text_.empty()) return;
    max_file_bytes_ = bytes_of_text(max_file_text_);
    if (!max_file_bytes_) {
      refuse_usage("checkpoint merge: --max-file-bytes must be a number of bytes such as 5GB or 500MiB, got \"" +
                   max_file_text_ + "\"");
    }
  }

  int run() override {
    const std::string run = find_run(root_, run_);
    const CheckpointStore store(run, 1);
    const std::vector<CheckpointStore::Entry> meant = store.newest_first(step_);
    if (word_ == kMerge) return merge(meant);
    const CheckpointStore::Entry& entry = meant.front();
    const Manifest manifest = read_manifest(entry.path);
    if (word_ == kVerify) {
      verify(entry.path, manifest);
      return 0;
    }
    std::vector<std::string> steps;
    for (const CheckpointStore::Entry& other : store.newest_first()) {
      const std::string step = std::to_string(other.step);
      if (steps.empty() || steps.front() != step) steps.insert(steps.begin(), step);
    }
    (json_ ? show_json : show)(entry.path, manifest, steps);
    return 0;
  }

 private:
  enum Which { kNone, kShow, kVerify, kMerge };

  CLI::App* word(CLI::App& app, const std::string& name, const std::string& help) {
    CLI::App* const word = app.add_subcommand(name, help);
    word->add_option("RUN", run_, "a run folder, or the name of a run")->required();
    word->add_option("--runs", root_, "folder in which the name of a run is looked up (default: runs)")
        ->type_name("FOLDER");
    word->add_option("--step", step_, "step of the checkpoint (default: the newest)");
    return word;
  }

  static void verify(const std::string& path, const Manifest& manifest) {
    std::vector<std::string> damage;
    CheckpointReader(path, manifest).check(CheckpointPart::kAll, 0, 1, &damage);
    if (damage.empty()) {
      std::printf("%s: whole: %s, %s\n", path.c_str(),
                  with_commas(static_cast<int64_t>(manifest.tensors.size()), "tensor").c_str(),
                  files_text(manifest).c_str());
      return;
    }
    for (const std::string& line : damage) std::printf("%s\n", line.c_str());
    std::fflush(stdout);
    throw Error(ErrorKind::kInput, "checkpoint",
                path + " is damaged in " + counted(damage.size(), "place") +
                    "; training and sampling use the newest undamaged checkpoint");
  }

  // Merges the newest checkpoint whose weights are undamaged.
  int merge(const std::vector<CheckpointStore::Entry>& newest_first) {
    install_interrupt_handlers();
    try {
      use_newest_whole(
          newest_first,
          [&](const CheckpointStore::Entry& entry, const Manifest& manifest) {
            const Merging to{.out = out_, .named = "--out " + out_, .max_file_bytes = max_file_bytes_};
            for (const std::string& file : merge_checkpoint(entry.path, manifest, to))
              std::printf("%s\n", file.c_str());
          },
          [](const std::string& reason) { log_warn("checkpoint", "skipped a checkpoint: " + reason); });
    } catch (const Error&) {
      if (!interrupted()) throw;
      log_warn("checkpoint", "interrupted; nothing is written");
      return interrupt_exit_code();
    }
    return 0;
  }

  CLI::App *show_ = nullptr, *verify_ = nullptr, *merge_ = nullptr;
  Which word_ = kNone;
  std::string run_, root_ = "runs", out_, max_file_text_;
  std::optional<int64_t> step_, max_file_bytes_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_checkpoint_subcommand() { return std::make_unique<CheckpointSubcommand>(); }

}  // namespace annulus
