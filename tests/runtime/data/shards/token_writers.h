// Writes token files byte by byte from the descriptions of their formats, independently of the code that reads them.
// Used by the tests of runtime/data/.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "common/checksum.h"

namespace annulus {

using Ids = std::vector<int64_t>;
using Documents = std::vector<Ids>;

template <typename T>
void put_value(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

inline std::string raw_tokens(const Documents& documents, int width) {
  std::string out;
  for (const Ids& ids : documents) {
    for (const int64_t id : ids) out.append(reinterpret_cast<const char*>(&id), static_cast<size_t>(width));
  }
  return out;
}

// Writes a file with a modification time in the past, so that a change by the test gets a different time.
inline void put_file(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
  const timespec times[2] = {{1000, 0}, {1000, 0}};
  if (utimensat(AT_FDCWD, path.c_str(), times, 0) != 0) throw std::runtime_error("utimensat " + path);
}

inline uint64_t hash_of(const Ids& ids) {
  const std::vector<uint32_t> wide(ids.begin(), ids.end());
  return hash64(wide.data(), wide.size() * 4);
}

// A branch of a prefix tree: its first token, and the token behind which it goes on; kRoot: it begins a tree.
struct WrittenBranch {
  uint64_t begin = 0, after = 0;
};
inline constexpr uint64_t kRoot = ~uint64_t{0};

// With `weights`, one for each token, it is of version 2; with `branches` as well, of version 3.
inline std::string annulus_shard(const Documents& documents, int width, uint64_t vocab,
                                 const std::string& tokenizer = std::string(16, '\x5a'),
                                 const std::optional<std::vector<float>>& weights = std::nullopt,
                                 const std::optional<std::vector<WrittenBranch>>& branches = std::nullopt) {
  std::string body = raw_tokens(documents, width);
  const uint64_t tokens = body.size() / static_cast<size_t>(width);
  body.resize((body.size() + 7) / 8 * 8);
  const uint64_t offsets = 4096 + body.size();
  uint64_t at = 0;
  put_value(body, at);
  for (const Ids& ids : documents) put_value(body, at += ids.size());
  const uint64_t hashes = 4096 + body.size();
  for (const Ids& ids : documents) put_value(body, hash_of(ids));
  const uint64_t ends_at = 4096 + body.size();
  std::vector<uint64_t> ends;  // of runs of equal weights
  std::vector<float> of_runs;
  uint64_t counted = 0;
  for (size_t i = 0; weights && i < weights->size(); ++i) {
    const float weight = (*weights)[i];
    counted += weight > 0 ? 1 : 0;
    if (of_runs.empty() || of_runs.back() != weight) {
      of_runs.push_back(weight);
      ends.push_back(i);
    }
    ends.back() = i + 1;
  }
  for (const uint64_t end : ends) put_value(body, end);
  for (const float weight : of_runs) put_value(body, weight);
  body.resize((body.size() + 7) / 8 * 8);
  const uint64_t begins_at = 4096 + body.size();
  if (branches) {
    for (const WrittenBranch& branch : *branches) put_value(body, branch.begin);
    for (const WrittenBranch& branch : *branches) put_value(body, branch.after);
  }
  std::string header = "ANNTOKEN";
  put_value(header, uint32_t{branches ? 3U : weights ? 2U : 1U});
  put_value(header, static_cast<uint32_t>(width));
  for (const uint64_t number : {tokens, uint64_t{documents.size()}, vocab, offsets, hashes}) put_value(header, number);
  header += tokenizer;
  const std::string sum = checksum(body.data(), body.size());
  for (size_t i = 0; i < 16; ++i) header += static_cast<char>(std::stoi(sum.substr(2 * i, 2), nullptr, 16));
  put_value(header, uint64_t{12345});
  if (weights) {
    for (const uint64_t number : {ends_at, uint64_t{ends.size()}, counted}) put_value(header, number);
    std::erase(of_runs, 0.0F);
    put_value(header, of_runs.empty() ? 0.0F : *std::min_element(of_runs.begin(), of_runs.end()));
    put_value(header, of_runs.empty() ? 0.0F : *std::max_element(of_runs.begin(), of_runs.end()));
  }
  if (branches) {
    put_value(header, begins_at);
    put_value(header, uint64_t{branches->size()});
  }
  header.resize(4096);
  return header + body;
}

// The .idx file of a Megatron pair: `lengths` are those of the sequences, `documents` the number of sequences of each
// document.
inline std::string megatron_index(const std::vector<int32_t>& lengths, const std::vector<int64_t>& documents, int width,
                                  uint8_t type) {
  std::string out("MMIDIDX\0\0", 9);
  put_value(out, uint64_t{1});
  put_value(out, type);
  put_value(out, uint64_t{lengths.size()});
  put_value(out, uint64_t{documents.size() + 1});
  for (const int32_t length : lengths) put_value(out, length);
  int64_t pointer = 0;
  for (const int32_t length : lengths) {
    put_value(out, pointer);
    pointer += int64_t{length} * width;
  }
  int64_t end = 0;
  put_value(out, end);
  for (const int64_t sequences : documents) put_value(out, end += sequences);
  return out;
}

// Writes a Megatron pair with one sequence per document.
inline void put_megatron(const std::string& prefix, const Documents& documents, int width) {
  std::vector<int32_t> lengths;
  for (const Ids& ids : documents) lengths.push_back(static_cast<int32_t>(ids.size()));
  put_file(prefix + ".bin", raw_tokens(documents, width));
  put_file(prefix + ".idx",
           megatron_index(lengths, std::vector<int64_t>(documents.size(), 1), width, width == 2 ? 8 : 4));
}

inline std::string llmc_shard(const Documents& documents, int32_t magic, int32_t version) {
  const int width = magic == 20240801 ? 4 : 2;
  const std::string body = raw_tokens(documents, width);
  std::string out;
  put_value(out, magic);
  put_value(out, version);
  put_value(out, static_cast<int32_t>(body.size() / static_cast<size_t>(width)));
  out.resize(1024);
  return out + body;
}

inline Ids joined(const Documents& documents) {
  Ids all;
  for (const Ids& ids : documents) all.insert(all.end(), ids.begin(), ids.end());
  return all;
}

}  // namespace annulus
