// The files of a folder of Hugging Face's that are neither the configuration nor weights: tokenizer and generation. A
// run that begins from a folder keeps them, export passes them through, and the tokenizer is held against the model and
// the data. Used by the trainer and export. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/files.h"

namespace annulus {

// "generation_config.json", "tokenizer.json", "tokenizer_config.json", ...: those that may be there.
const std::vector<std::string>& passed_files();

// Copies those of `names` that are in the folder `from` into the folder `to`, synced, piece by piece. What is there
// already stays. Returns the names copied. Raises Error(kResource).
std::vector<std::string> copy_files(const std::vector<std::string>& names, const std::string& from,
                                    const std::string& to, FileSystem& files = FileSystem::real());

// Raises Error(kInput), naming the file, where the folder's tokenizer (tokenizer.json, tokenizer.model) and the model
// or the data do not belong together: an id that the model with `vocab` ids does not have; data of bytes; data whose
// tokenizer, by its digest, is another one (empty: nobody knows). Without a tokenizer in the folder all is well.
// Returns what is to be said of it: "its tokenizer is the data's", ...
std::string check_tokenizer(const std::string& folder, int64_t vocab, bool data_is_text,
                            const std::string& data_tokenizer);

// The ids of a tokenizer.json: one more than the largest. Reads it in one pass, without keeping it. Raises
// Error(kInput) for one that is none.
int64_t tokenizer_ids(const std::string& path);

}  // namespace annulus
