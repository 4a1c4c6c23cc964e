// See find_files.h.
#include "runtime/data/shards/find_files.h"

#include <fnmatch.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/names.h"
#include "common/text.h"

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

std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> parts = split(path, '/');
  std::erase_if(parts, [](const std::string& part) { return part.empty(); });
  return parts;
}

// The paths that match a pattern, without folders.
struct Matches {
  std::vector<std::string> files;
  std::vector<std::pair<std::string, std::string>> others;  // what is neither a file nor a folder, and what it is
};

// Whether the path is a folder. Adds what is neither a folder nor a file to `to.others`, and files if they are wanted.
bool sort_in(const std::string& path, bool files_wanted, Matches& to) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  const auto other = [&](const std::string& what) { to.others.emplace_back(path, what); };
  switch (status.type()) {
    case fs::file_type::directory:
      return true;
    case fs::file_type::regular:
      if (files_wanted) to.files.push_back(path);
      break;
    case fs::file_type::not_found:
      // A file that has been removed since its folder was listed is no match.
      if (fs::is_symlink(fs::symlink_status(path, error))) other("a link to a file that is not there");
      break;
    case fs::file_type::fifo:
      if (files_wanted) other("a pipe (FIFO)");
      break;
    case fs::file_type::none:
      other("about which the system says: " + error.message());
      break;
    default:
      if (files_wanted) other("a device or socket");
  }
  return false;
}

// Adds the paths below `base` (which is "" or ends in '/') that match parts[at...]. Hidden names need a pattern that
// begins with a dot, as in a shell. ** does not follow links to folders, which could lead in circles. A folder that
// cannot be read is one of `to.others`.
void match(const std::string& base, const std::vector<std::string>& parts, size_t at, Matches& to) {
  if (at == parts.size()) return;
  const bool last = at + 1 == parts.size();
  const std::string& part = parts[at];
  if (part == "**") {
    if (last) {
      match(base, {"**", "*"}, 0, to);
      return;
    }
    match(base, parts, at + 1, to);
  } else if (!is_glob(part)) {
    if (sort_in(base + part, last, to) && !last) match(base + part + "/", parts, at + 1, to);
    return;
  }
  std::error_code error;
  fs::directory_iterator it(base.empty() ? "." : base, error);
  for (const fs::directory_iterator end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    if (part == "**") {
      if (name[0] != '.' && fs::is_directory(it->symlink_status(ignored))) match(base + name + "/", parts, at, to);
    } else if (fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) == 0) {
      if (sort_in(base + name, last, to) && !last) match(base + name + "/", parts, at + 1, to);
    }
  }
  if (error) to.others.emplace_back(base.empty() ? "." : base, "a folder that cannot be read: " + error.message());
}

// All that is below `base` and matches, sorted by path. `base` is the same for all, so the machine's own folders do not
// matter. Bytes are compared, whatever the user's language.
Matches matches_below(const std::string& base, const std::vector<std::string>& parts) {
  Matches found;
  match(base, parts, 0, found);
  const auto tidy = [](auto& list) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  };
  tidy(found.files);
  tidy(found.others);
  return found;
}

// Whether a file lies beside shards and holds none of their tokens: row indexes, which tokens count as targets, and
// what `annulus tokenize` writes besides shards.
bool is_beside_shards(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  if (name.starts_with("rows-") && name.ends_with(".index")) return true;
  if (path.ends_with(kTargetsEnding) && is_file(path.substr(0, path.size() - kTargetsEnding.size()))) return true;
  const bool of_tokenizer =
      name == "tokenization.json" || name == "tokens.table" || name == "tokenizer.json" || name == "tokenizer.model";
  return of_tokenizer && is_file(fs::path(path).replace_filename("tokenization.json").string());
}

// `entry`: the pattern as the user wrote it.
std::vector<std::string> glob_files(const std::string& entry, const std::string& pattern) {
  Matches found = matches_below(pattern.starts_with("/") ? "/" : "", parts_of(pattern));
  std::erase_if(found.files, is_beside_shards);
  std::erase_if(found.others, [](const auto& other) { return is_beside_shards(other.first); });
  if (!found.others.empty()) {
    const auto& [path, what] = found.others[0];
    const auto more = static_cast<int64_t>(found.others.size()) - 1;
    refuse_source("\"" + entry + "\" matches " + path + ", " + what +
                  (more > 0 ? ", and " + with_commas(more, "other") + " that cannot be read as files" : "") +
                  ": repair or remove it, or name the files by a pattern that leaves it out");
  }
  if (found.files.empty()) {
    std::error_code error;
    refuse_source("\"" + entry + "\" matches no file (looked from " + fs::current_path(error).string() + ")");
  }
  return found.files;
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
  return matches_below(root + "/", {"**", "*.py"}).files;
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
    if (!name.starts_with("python3.")) continue;
    const std::optional<int> minor = number_of_text<int>(std::string_view(name).substr(8));
    if (minor && fs::exists(it->path() / "os.py", error)) best = std::max(best, {*minor, it->path().string()});
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
  if (is_file(path)) return {path};
  if (is_glob(path)) return glob_files(entry, path);
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
  if (is_file(path + ".idx") && is_file(path + ".bin")) return {path + ".idx"};
  refuse_source("there is no file " + entry + " (looked from " + fs::current_path(error).string() + ")" +
                did_you_mean(entry, {std::string(kPythonSources)}));
}

}  // namespace annulus
