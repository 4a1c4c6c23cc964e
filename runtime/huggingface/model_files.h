// The tokenizer and generation files of a folder in Hugging Face's layout. A run that begins from a folder keeps them,
// export copies them, and the tokenizer is checked against the model and the data. Used by model_import.cc, the trainer
// and export. Thread safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/files.h"

namespace annulus {

// Returns the possible file names: "generation_config.json", "tokenizer.json", "tokenizer_config.json", ...
const std::vector<std::string>& passed_files();

// Copies the files `names` that exist in the folder `from` into the folder `to`, with bounded memory, and syncs them.
// Files that exist in `to` are not changed. Returns the names copied. Raises Error(kResource).
std::vector<std::string> copy_files(const std::vector<std::string>& names, const std::string& from,
                                    const std::string& to, FileSystem& files = FileSystem::real());

// Copies the files of a tokenizer of token shards (tokens.table, tokenization.json and the tokenizer itself) likewise
// to the folder `to`, which it makes. Does nothing if `from` is empty.
void copy_tokenizer(const std::string& from, const std::string& to);

// Checks the folder's tokenizer (tokenizer.json, tokenizer.model) against the model and the data. Raises Error(kInput),
// naming the file, if the tokenizer has ids >= `vocab`, if the data are bytes but its ids are not (byte_tokenizer.h),
// or if the data's tokenizer has another digest (empty: unknown). Accepts a folder without a tokenizer. Returns a line
// for the run's output: "its tokenizer is the data's", ...
std::string check_tokenizer(const std::string& folder, int64_t vocab, bool data_is_text,
                            const std::string& data_tokenizer);

// Returns the number of ids of a tokenizer.json, one more than the largest id. Parses the file as a stream. Raises
// Error(kInput) if it is not a tokenizer.json.
int64_t tokenizer_ids(const std::string& path);

}  // namespace annulus
