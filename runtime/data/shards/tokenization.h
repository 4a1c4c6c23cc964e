// tokenization.json: what `annulus tokenize` writes beside the shards that it makes. Used by token_file.cc for what a
// format cannot store, by export and the sampler, and by `tokenize --inspect` and `--verify`.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace annulus {

struct Tokenization {
  struct Shard {
    int64_t tokens = 0, documents = 0, bytes = 0;
    std::string checksum;  // XXH3-128 of the file, 32 digits; of a Megatron pair, of the .bin and then the .idx
    std::string targets;   // of the file of targets beside it; empty: it has none, or not of `annulus tokenize`
  };

  std::string path;                     // of the file itself
  std::string format;                   // "annulus", "megatron", "llmc", "nanogpt"
  int width = 0;                        // bits of a token
  std::string tokenizer;                // its digest, 32 hexadecimal digits
  std::string name;                     // of the tokenizer
  int64_t vocab = 0;                    // every id is below it
  std::optional<int64_t> begin, end;    // the ids that every document begins and ends with
  std::map<std::string, Shard> shards;  // by file name, of a Megatron pair the .bin's
};

// Reads each folder's tokenization.json once. Thread-safe.
class Tokenizations {
 public:
  // The one in this folder; null if there is none. Raises Error(kInput) if it is damaged.
  std::shared_ptr<const Tokenization> of_folder(const std::string& folder);
  // The same if it lists this file (by its name in its folder), otherwise null.
  std::shared_ptr<const Tokenization> of_file(const std::string& path);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Tokenization>> folders_;
};

}  // namespace annulus
