// See find_files.h.
#include "data/shards/find_files.h"

#include <fnmatch.h>
#include <link.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/nearest.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPythonSources = "python-sources";

[[noreturn]] void refuse_source(const std::string& message) {
  throw Error(ErrorKind::kInput, "data", "data.train: " + message);
}

bool is_glob(std::string_view text) { return text.find_first_of("*?[") != std::string_view::npos; }

std::string home_expanded(const std::string& entry) {
  if (entry != "~" && !entry.starts_with("~/")) return entry;
  const char* home = std::getenv("HOME");
  if (!home || !*home) refuse_source("\"" + entry + "\": HOME is not set, write the folder's whole path");
  return home + entry.substr(1);
}

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('/', begin), path.size());
    if (end > begin) parts.push_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// Appends the paths below `base` (which is "" or ends in '/') that match parts[at...]. Hidden names need a pattern that
// begins with a dot, as in a shell. ** does not follow links to folders, which could lead in circles.
void match(const std::string& base, const std::vector<std::string>& parts, size_t at, std::vector<std::string>& found) {
  if (at == parts.size()) return;
  const bool last = at + 1 == parts.size();
  const std::string& part = parts[at];
  std::error_code error;
  if (part == "**") {
    if (last) {
      match(base, {"**", "*"}, 0, found);
      return;
    }
    match(base, parts, at + 1, found);
  } else if (!is_glob(part)) {
    const fs::file_status status = fs::status(base + part, error);
    if (last) {
      if (fs::is_regular_file(status)) found.push_back(base + part);
    } else if (fs::is_directory(status)) {
      match(base + part + "/", parts, at + 1, found);
    }
    return;
  }
  for (fs::directory_iterator it(base.empty() ? "." : base, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    if (part == "**") {
      if (name[0] != '.' && fs::is_directory(it->symlink_status(ignored))) match(base + name + "/", parts, at, found);
      continue;
    }
    if (fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) != 0) continue;
    if (last) {
      if (it->is_regular_file(ignored)) found.push_back(base + name);
    } else if (it->is_directory(ignored)) {
      match(base + name + "/", parts, at + 1, found);
    }
  }
}

// All files below `base` that match, sorted by path. `base` is the same for all, so the machine's own folders do not
// matter. Bytes are compared, whatever the user's language.
std::vector<std::string> files_below(const std::string& base, const std::vector<std::string>& parts) {
  std::vector<std::string> found;
  match(base, parts, 0, found);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

// Whether a file lies beside shards and holds none of their tokens: row indexes, and what `annulus tokenize` writes
// besides shards.
bool is_beside_shards(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  if (name.starts_with("rows-") && name.ends_with(".index")) return true;
  const bool of_tokenizer =
      name == "tokenization.json" || name == "tokens.table" || name == "tokenizer.json" || name == "tokenizer.model";
  std::error_code error;
  return of_tokenizer && fs::is_regular_file(fs::path(path).replace_filename("tokenization.json"), error);
}

std::vector<std::string> glob_files(const std::string& pattern) {
  std::vector<std::string> files = files_below(pattern.starts_with("/") ? "/" : "", split(pattern));
  std::erase_if(files, is_beside_shards);
  return files;
}

// The folder of LibTorch's wheel, from the path of its loaded library: TORCH/lib/libtorch_cpu.so -> TORCH.
std::string loaded_torch() {
  std::string folder;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const std::string_view name = info->dlpi_name ? info->dlpi_name : "";
        const size_t slash = name.rfind('/');
        if (slash == std::string_view::npos || !name.substr(slash + 1).starts_with("libtorch_cpu.so")) return 0;
        *static_cast<std::string*>(out) = fs::path(name).parent_path().parent_path().string();
        return 1;
      },
      &folder);
  return folder;
}

std::vector<std::string> python_files(const std::string& root) {
  if (root.empty()) return {};
  return files_below(root + "/", {"**", "*.py"});
}

std::vector<std::string> python_sources() {
  const char* set = std::getenv("ANNULUS_LIBTORCH");
  const std::string torch = set && *set ? set : loaded_torch();
  // Debian's LibTorch lies in /usr, where the rest is not LibTorch's.
  std::error_code error;
  if (!torch.empty() && (fs::exists(torch + "/__init__.py", error) || (set && *set))) {
    auto files = python_files(torch);
    if (!files.empty()) return files;
  }
  // The newest standard library of the system's Python.
  std::pair<int, std::string> best{-1, ""};
  for (fs::directory_iterator it("/usr/lib", error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    int minor = 0;
    if (!name.starts_with("python3.")) continue;
    const auto [stop, bad] = std::from_chars(name.data() + 8, name.data() + name.size(), minor);
    if (bad != std::errc() || stop != name.data() + name.size()) continue;
    if (fs::exists(it->path() / "os.py", error)) best = std::max(best, {minor, it->path().string()});
  }
  auto files = python_files(best.second);
  if (files.empty()) {
    refuse_source("\"python-sources\": neither LibTorch's folder (" + (torch.empty() ? "not found" : torch) +
                  ") nor /usr/lib/python3.* holds Python sources; name text files of your own");
  }
  return files;
}

}  // namespace

std::vector<std::string> find_files(const std::string& entry) {
  if (entry == kPythonSources) return python_sources();
  const std::string path = home_expanded(entry);
  std::error_code error;
  // A file may have any name, also one that looks like a glob.
  if (fs::is_regular_file(path, error)) return {path};
  if (is_glob(path)) {
    auto files = glob_files(path);
    if (files.empty()) {
      refuse_source("\"" + entry + "\" matches no file (looked from " + fs::current_path(error).string() + ")");
    }
    return files;
  }
  if (fs::is_directory(path, error)) {
    refuse_source(entry + " is a folder; say which files in it, for example \"" + entry +
                  (entry.ends_with("/") ? "" : "/") + "**/*.txt\" or \"" + entry + (entry.ends_with("/") ? "" : "/") +
                  "*.tokens\"");
  }
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status)) refuse_source(entry + " is not a regular file");
  if (status.type() != fs::file_type::not_found) {
    throw Error(kind_of_errno(error.value()), "data",
                "data.train: " + entry + " cannot be read: " + std::strerror(error.value()));
  }
  // A Megatron pair is named by the prefix that its files share.
  if (fs::is_regular_file(path + ".idx", error) && fs::is_regular_file(path + ".bin", error)) return {path + ".idx"};
  const bool meant_python = nearest(entry, {std::string(kPythonSources)}) == kPythonSources;
  refuse_source("there is no file " + entry + " (looked from " + fs::current_path(error).string() + ")" +
                (meant_python ? "; did you mean \"python-sources\"?" : ""));
}

}  // namespace annulus
