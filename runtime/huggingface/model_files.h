// The files of a folder in Hugging Face's layout that are neither config.json nor weights: those of tokenizer and
// generation. A run that begins from a folder keeps them, export copies them, and the tokenizer is compared with the
// model and the data. Used by model_import.cc, the trainer and export. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/files.h"

namespace annulus {

// The names of the files that may be there: "generation_config.json", "tokenizer.json", "tokenizer_config.json", ...
const std::vector<std::string>& passed_files();

// Copies those of `names` that the folder `from` has into the folder `to`, piece by piece, and syncs them. Files that
// `to` already has are left as they are. Returns the names copied. Raises Error(kResource).
std::vector<std::string> copy_files(const std::vector<std::string>& names, const std::string& from,
                                    const std::string& to, FileSystem& files = FileSystem::real());

// Checks that the folder's tokenizer (tokenizer.json, tokenizer.model) fits the model and the data. Raises
// Error(kInput), naming the file, if the tokenizer has ids from `vocab` on, if the data are bytes, or if the data were
// made with a tokenizer of another digest (empty: not known). A folder without a tokenizer is accepted. Returns a line
// for the run's output: "its tokenizer is the data's", ...
std::string check_tokenizer(const std::string& folder, int64_t vocab, bool data_is_text,
                            const std::string& data_tokenizer);

// The number of ids of a tokenizer.json, one more than the largest id. Reads the file in one pass without keeping it.
// Raises Error(kInput) if it is not a tokenizer.json.
int64_t tokenizer_ids(const std::string& path);

}  // namespace annulus
