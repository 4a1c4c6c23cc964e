// From the entries of [data] train to file paths. Used by corpus.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The files of one entry, in order: a file, a glob (*, ?, [...] within a name, ** over folders), or "python-sources":
// the Python sources that come inside LibTorch's wheel, or else the system Python's standard library. Within an entry
// paths are sorted below the entry's fixed folder: the machine's own folders do not matter. The prefix of a Megatron
// pair (PREFIX.idx and PREFIX.bin are there, PREFIX is not) gives PREFIX.idx. Raises Error(kInput) for no such file, a
// folder, a glob that matches nothing. A glob leaves out what lies beside shards and holds no tokens: row indexes,
// tokenization.json, and the tokenizer and its table where that is there.
std::vector<std::string> find_files(const std::string& entry);

}  // namespace annulus
