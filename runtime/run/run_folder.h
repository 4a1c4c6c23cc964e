// RunFolder: the folder in which a run keeps its configuration, metrics and checkpoints, with the lock of the process
// that uses it. Rank 0 of a training job creates or opens it and sends the path to the others; other subcommands find
// runs with find_run. docs/reference/formats.md describes the layout:
//   runs/quickstart-001/{config.toml, metrics.jsonl, checkpoints/, tokenizer/, huggingface/, lock}
#pragma once

#include <string>

#include "common/descriptor.h"

namespace annulus {

// Holds the lock from construction to destruction. It is a flock, which the kernel releases when the process ends for
// any reason; on NFS this needs a lock service. Not thread safe.
class RunFolder {
 public:
  // Makes a new folder ROOT/NAME-001, -002, ..., with the number after the highest existing one. Raises
  // Error(kResource) for I/O errors.
  static RunFolder create(const std::string& root, const std::string& name);
  // Opens an existing folder to resume its run. Raises Error(kBusy), which names process and host, if another process
  // uses it; Error(kInput) if it is not a run folder.
  static RunFolder open(const std::string& path);

  const std::string& path() const { return path_; }
  std::string config_path() const { return path_ + "/config.toml"; }
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }

 private:
  RunFolder(std::string path, bool fresh);
  std::string path_;
  // The lock's file is not removed: otherwise two processes could lock two different files of this name.
  Descriptor lock_;
};

// Finds a run folder without changing or locking anything. `which` is
// - the path of one,
// - the name of one in `root` ("quickstart-002"),
// - a run's name ("quickstart"), for its newest folder with a checkpoint, or its newest if none has one,
// - or "", for the run in `root` whose newest checkpoint was written last.
// The result always contains a "/", so that it is a path, not a name, for a later call. Raises Error(kInput), which
// names the existing runs, if there is none.
std::string find_run(const std::string& root, const std::string& which);

// Returns the folder with a run's copies of the tokenizer files found beside its token shards: tokens.table,
// tokenization.json and the tokenizer itself.
inline std::string tokenizer_folder(const std::string& run) { return run + "/tokenizer"; }

// Returns the folder in which a run that began with the weights of a Hugging Face model keeps the files that export
// copies: config.json, tokenizer and generation files.
inline std::string huggingface_folder(const std::string& run) { return run + "/huggingface"; }

}  // namespace annulus
