// See mpirun.h.
#include "launcher/hosts/mpirun.h"

#include <unistd.h>
#include <wordexp.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "comm/hosts.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "launcher/hosts/host_list.h"

namespace annulus {
namespace {

bool is_program(const std::string& path) { return !path.empty() && access(path.c_str(), X_OK) == 0; }

std::string search_path(const std::string& name) {
  const char* value = std::getenv("PATH");
  const std::string path = value ? value : "/usr/bin:/bin";
  for (const std::string& folder : split(path, ':')) {
    const std::string candidate = folder + "/" + name;
    if (is_program(candidate)) return candidate;
  }
  return "";
}

}  // namespace

std::string own_program() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorKind::kResource, "launcher", "cannot read /proc/self/exe: " + error.message());
  return self.string();
}

Mpirun parse_mpirun_version(const std::string& path, std::string_view output) {
  const std::string_view mark = "(Open MPI) ";
  Mpirun found{path, "", 0, 0};
  // Other lines may come first: of a wrapper, or of the dynamic linker about a library that LD_PRELOAD names.
  for (const std::string& line : split(output, '\n')) {
    const size_t at = line.find(mark);
    if (at == std::string::npos) continue;
    found.version = line.substr(at + mark.size());
    const char* const end = found.version.data() + found.version.size();
    const auto major = std::from_chars(found.version.data(), end, found.major);
    if (major.ec == std::errc() && major.ptr != end) std::from_chars(major.ptr + 1, end, found.minor);
    if (found.major > 4 || (found.major == 4 && found.minor >= 1)) return found;
    break;
  }
  const std::string said = found.version.empty() ? printable(output.substr(0, output.find('\n')), 200)
                                                 : std::string(mark) + printable(found.version, 100);
  throw Error(ErrorKind::kUnavailable, "launcher",
              path + " should be Open MPI 4.1 or newer, but `mpirun --version` says \"" + said +
                  "\"; name another one with MPIRUN=/path/to/mpirun or MPI_HOME=/path");
}

Mpirun find_mpirun() {
  std::string path;
  std::string looked;
  const char* const variable = std::getenv("MPIRUN");
  const char* const home = std::getenv("MPI_HOME");
  if (variable != nullptr && *variable != '\0') {
    path = variable;  // an mpirun that the user named is not searched for elsewhere
    if (path.find('/') == std::string::npos) path = search_path(path);
    looked = "MPIRUN=" + std::string(variable);
  } else if (home != nullptr && *home != '\0') {
    path = std::string(home) + "/bin/mpirun";
    looked = path + " (from MPI_HOME)";
  } else {
    path = ANNULUS_MPIRUN;
    looked = path.empty() ? "PATH" : path + " and PATH";
    if (!is_program(path)) path = search_path("mpirun");
  }
  if (!is_program(path)) {
    throw Error(ErrorKind::kUnavailable, "launcher",
                "mpirun not found (looked at " + looked +
                    "): install Open MPI (Debian, Ubuntu: apt-get install openmpi-bin), or name it with "
                    "MPIRUN=/path/to/mpirun or MPI_HOME=/path");
  }
  // From a full path, mpirun also derives where Open MPI is installed. It fails for /bin/mpirun, for which it derives
  // "/", although /bin is a link to /usr/bin. Hence the canonical folder.
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::canonical(std::filesystem::path(path).parent_path(), error);
  if (!error) path = folder / std::filesystem::path(path).filename();
  const std::string command = shell_quote({path, "--version"}) + " 2>&1";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "re"), pclose);
  std::string output(size_t{1} << 16, '\0');
  output.resize(pipe ? fread(output.data(), 1, output.size(), pipe.get()) : 0);
  return parse_mpirun_version(path, output);
}

namespace {

// Whether mpirun must not cut the names at their first dot. In an allocation of Slurm it compares them with the names
// of the allocation.
bool keeps_full_names(const std::vector<std::pair<std::string, int>>& hosts) {
  const char* const allocated = text_from_environment("SLURM_JOB_NODELIST");
  if (allocated != nullptr && std::strchr(allocated, '.') == nullptr) return false;
  return std::any_of(hosts.begin(), hosts.end(), [](const auto& host) { return is_full_name(host.first); });
}

// The names of the hosts, each repeated once for each of its ranks. `own`: this host goes by the name that mpirun gives
// itself, because it recognizes no other one in a file, and few where it does not cut names.
std::string names_of(const std::vector<std::pair<std::string, int>>& hosts, std::string_view between, bool own) {
  std::vector<std::string> names;
  for (const auto& [name, ranks] : hosts) {
    names.insert(names.end(), ranks, own && is_this_host(name) ? host_name() : name);
  }
  return join(names, between);
}

// The variables that name a default host file for every mpirun: of Open MPI 4 and of Open MPI 5.
constexpr std::array<const char*, 2> kDefaultHosts = {"OMPI_MCA_orte_default_hostfile",
                                                      "PRTE_MCA_prte_default_hostfile"};

}  // namespace

void forget_default_hosts() {
  for (const char* const name : kDefaultHosts) unsetenv(name);
}

std::string hosts_named_by(const std::vector<std::string>& mpi_args) {
  constexpr std::array<std::string_view, 9> kOptions = {
      "H", "host", "hostfile", "machinefile", "default-hostfile", "rankfile", "rf", "app", "add-hostfile"};
  for (const std::string& word : mpi_args) {
    const std::string option = word.substr(0, word.find('='));
    if (option.find("default_hostfile") != std::string::npos) return word;  // --mca orte_default_hostfile FILE
    if (!option.starts_with("-")) continue;
    const std::string_view name =
        std::string_view(option).substr(std::min(option.find_first_not_of('-'), option.size()));
    if (std::find(kOptions.begin(), kOptions.end(), name) != kOptions.end()) return option;
  }
  for (const char* const name : kDefaultHosts) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') return name;
  }
  return "";
}

std::vector<std::string> mpirun_command(const Mpirun& mpirun, const MpirunRequest& request) {
  std::vector<std::string> argv = {mpirun.path, "-np", std::to_string(request.ranks), "--bind-to", "none"};
  const auto mca = [&](const char* option, const char* key, const std::string& value) {
    argv.insert(argv.end(), {option, key, value});
  };
  if (request.as_root) argv.push_back("--allow-run-as-root");
  const bool five = mpirun.major >= 5;
  // "seq" maps rank by rank in the order of the list. With "slot", mpirun would begin with its own host, wherever it is
  // in the list.
  std::string map = request.hosts.empty() ? "" : "seq";
  if (request.oversubscribe) {
    if (five) {
      map += ":OVERSUBSCRIBE";
    } else {
      argv.push_back("--oversubscribe");
    }
    mca("--mca", "mpi_yield_when_idle", "1");
  }
  if (!map.empty()) argv.insert(argv.end(), {"--map-by", map});
  const bool full_names = keeps_full_names(request.hosts);
  if (full_names) {
    // Otherwise mpirun would reach "node1" where "node1.cluster.example" is in the list.
    mca(five ? "--prtemca" : "--mca", five ? "prte_keep_fqdn_hostnames" : "orte_keep_fqdn_hostnames", "1");
  }
  if (!request.hosts.empty()) {
    const bool by_file = !request.hostfile.empty();
    const bool own = full_names && text_from_environment("SLURM_JOB_ID") == nullptr;  // Slurm has its own names
    argv.insert(argv.end(),
                {by_file ? "--hostfile" : "--host", by_file ? request.hostfile : names_of(request.hosts, ",", own)});
  }
  if (!request.session_dir.empty()) {
    mca(five ? "--prtemca" : "--mca", five ? "prte_local_tmpdir_base" : "orte_local_tmpdir_base", request.session_dir);
  }
  mca("--mca", "btl_base_warn_component_unused", "0");
  // With these settings, a cut cable is noticed in about 10 s. By default it might never be.
  const char* const runtime = five ? "--prtemca" : "--mca";
  mca(runtime, "oob_tcp_keepalive_time", "5");
  mca(runtime, "oob_tcp_keepalive_intvl", "2");
  mca(runtime, "oob_tcp_keepalive_probes", "3");
  if (request.shield_daemons) {
    mca(runtime, five ? "prte_launch_agent" : "orte_launch_agent",
        std::string("env --block-signal=TERM ") + (five ? "prted" : "orted"));
  }
  if (!request.interfaces.empty()) {
    mca(runtime, five ? "prte_if_include" : "oob_tcp_if_include", join(request.interfaces, ","));
  }
  for (const std::string& name : request.forward) argv.insert(argv.end(), {"-x", name});
  argv.insert(argv.end(), request.extra.begin(), request.extra.end());
  argv.insert(argv.end(), request.program.begin(), request.program.end());
  return argv;
}

bool need_hostfile(const std::vector<std::pair<std::string, int>>& hosts) {
  constexpr size_t kMostBytes = size_t{127} << 10;
  size_t bytes = 0;
  for (const auto& [name, ranks] : hosts) bytes += (name.size() + 1) * static_cast<size_t>(ranks);
  return bytes > kMostBytes;
}

void write_hostfile(const std::string& path, const std::vector<std::pair<std::string, int>>& hosts) {
  write_atomically(FileSystem::real(), path, names_of(hosts, "\n", /*own=*/true) + "\n");
}

bool daemons_need_shield() {
  return text_from_environment("SLURM_JOB_ID") != nullptr &&
         std::system("env --block-signal=TERM true >/dev/null 2>&1") == 0;  // needs GNU coreutils 8.31 or newer
}

bool is_of_openmp(std::string_view name) {
  return name.starts_with("OMP_") || name.starts_with("GOMP_") || name.starts_with("KMP_");
}

std::vector<std::string> forwarded_variables() {
  const auto wanted = [](std::string_view name) {
    // The script ./annulus sets the last four: three pass ANNULUS_ISA on to libraries, and one asks for huge pages.
    const bool ours = name.starts_with("ANNULUS_") || is_of_openmp(name) || name == "ATEN_CPU_CAPABILITY" ||
                      name == "MKL_ENABLE_INSTRUCTIONS" || name == "ONEDNN_MAX_CPU_ISA" || name == "GLIBC_TUNABLES";
    const bool network = name.starts_with("NCCL_") || name.starts_with("UCX_");
    return ours || (network && name != "NCCL_HOSTID");
  };
  std::vector<std::string> names;
  for (const auto& [name, value] : variables_from_environment(wanted)) names.push_back(name);
  return names;
}

std::string mpirun_complaint(std::string_view text) {
  std::vector<std::string> outside, inside, warnings;
  bool frame = false, complete = false;
  for (std::string line : split(text, '\n')) {
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
    line.erase(0, std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.starts_with("-----")) {
      frame = !frame;
      complete = complete || (!frame && !inside.empty());
    } else if (!line.empty() && !frame) {
      // Neither a host that ssh meets for the first time nor mpirun's lost race for a process group is why it failed.
      const bool warning = line.starts_with("Warning: ") || line.find("plm:rsh: Warning: ") != std::string::npos;
      (warning ? warnings : outside).push_back(line);
    } else if (!line.empty() && !complete && !line.starts_with("This usually is caused by")) {
      inside.push_back(line);
      if (line.ends_with("daemons.")) complete = true;  // a list of possible causes follows
    }
  }
  std::vector<std::string> words = !outside.empty() ? outside : !inside.empty() ? inside : warnings;
  words.resize(std::min<size_t>(words.size(), 6));
  return join(words, " ");
}

std::vector<std::string> shell_split(const std::string& text, std::string_view where) {
  wordexp_t words{};
  if (wordexp(text.c_str(), &words, WRDE_NOCMD | WRDE_UNDEF) != 0) {
    throw Error(ErrorKind::kUsage, "launcher",
                std::string(where) + " is not a list of shell words: \"" + text +
                    "\" (an open quote, an unset variable, or one of | & ; < > ( ) { } outside quotes)");
  }
  std::vector<std::string> result(words.we_wordv, words.we_wordv + words.we_wordc);
  wordfree(&words);
  return result;
}

}  // namespace annulus
