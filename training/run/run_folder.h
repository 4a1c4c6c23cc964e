// RunFolder: where a run keeps its configuration, metrics and checkpoints, and the lock that says a live process owns
// it. Rank 0 of a training job creates or opens it and tells the others the path. Layout in docs/formats.md:
//   runs/quickstart-001/{config.toml, metrics.jsonl, checkpoints/, tokenizer/, huggingface/, lock}
#pragma once

#include <string>

namespace annulus {

// Owned from construction to destruction (flock: the kernel releases it however the process ends; on NFS that needs a
// lock service, as every Linux server of the last decade has).
class RunFolder {
 public:
  // A new folder ROOT/NAME-001, -002, ...: the number after the highest one there. Raises Error(kResource).
  static RunFolder create(const std::string& root, const std::string& name);
  // Takes over a folder that is there, to resume it. Raises Error(kBusy), naming process and host, when a live process
  // owns it; Error(kInput) when it is no run folder.
  static RunFolder open(const std::string& path);

  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&&) = delete;
  ~RunFolder();

  const std::string& path() const { return path_; }
  std::string config_path() const { return path_ + "/config.toml"; }
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }

 private:
  RunFolder(std::string path, bool fresh);
  std::string path_;
  int lock_ = -1;
};

// The run folder that is meant: `which` is a path of one, or the name of one below `root` ("quickstart-002"), or a
// run's name ("quickstart"): its newest that has a checkpoint, or where none has, its newest; or "": of all runs in
// `root` the one whose newest checkpoint was written last. The result always contains a "/", so that it is never read
// as a name again. Changes and locks nothing. Raises Error(kInput) naming what is there.
std::string find_run(const std::string& root, const std::string& which);

// Where a run on shards of tokens keeps what lay beside them of their tokenizer: tokens.table, tokenization.json and
// the tokenizer itself, as far as they were there.
inline std::string tokenizer_folder(const std::string& run) { return run + "/tokenizer"; }

// Where a run whose weights began as a model of Hugging Face's keeps what export passes through: config.json, tokenizer
// and generation files.
inline std::string huggingface_folder(const std::string& run) { return run + "/huggingface"; }

}  // namespace annulus
