// Finds the files that the entries of [data] train name. Used by corpus.cc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// What is added to the name of a file of tokens for that of the file beside it which says which of them are targets.
inline constexpr std::string_view kTargetsEnding = ".targets";

// The files of one entry, in order. An entry is a file, a glob (*, ?, [...] within a name, ** over folders), or
// "python-sources": the Python sources inside LibTorch's wheel, or else the system Python's standard library. Paths of
// an entry are sorted below the entry's fixed folder, so that the machine's own folders do not matter. The prefix of a
// Megatron pair (PREFIX.idx and PREFIX.bin are there, PREFIX is not) gives PREFIX.idx. A glob leaves out files that lie
// beside shards and hold no tokens: row indexes and, if tokenization.json is there, that file, the tokenizer and its
// table. Raises Error(kInput) for a missing file, a folder, a glob that matches nothing, and a glob that matches what
// cannot be read as a file (a link to nothing, a pipe, a device) or would look into a folder that cannot be read.
std::vector<std::string> find_files(const std::string& entry);

}  // namespace annulus
