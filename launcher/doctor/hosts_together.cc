// The checks of several hosts together, and the table of their differences. See host_checks.h.
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <functional>
#include <set>

#include "common/text.h"
#include "launcher/doctor/host_checks.h"

namespace annulus {
namespace {

using Reports = std::vector<HostReport>;

std::string series_of_mpi(const HostReport& r) {  // "Open MPI v4.1" of "Open MPI v4.1.4"
  const size_t dot = r.mpi_library.find('.');
  return r.mpi_library.substr(0, dot == std::string::npos ? dot : r.mpi_library.find('.', dot + 1));
}

// The distinct values, each with up to four of its hosts: "AVX-512 on a, b; AVX2 on c".
std::string values_text(const Reports& reports, const std::function<std::string(const HostReport&)>& value) {
  std::vector<std::pair<std::string, std::vector<std::string>>> groups;
  for (const HostReport& r : reports) {
    const std::string own = value(r);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == own; });
    if (group == groups.end()) group = groups.insert(groups.end(), {own, {}});
    group->second.push_back(label_of(r));
  }
  std::vector<std::string> parts;
  for (const auto& [text, hosts] : groups) parts.push_back((text.empty() ? "none" : text) + " on " + some_of(hosts));
  return join(parts, "; ");
}

// The environment or the files of a report, by name.
using Named = std::map<std::string, std::string> HostReport::*;

std::set<std::string> names_of(const Reports& reports, Named values) {
  std::set<std::string> names;
  for (const HostReport& r : reports) {
    for (const auto& [name, value] : r.*values) names.insert(name);
  }
  return names;
}

std::string value_of(const HostReport& r, Named values, const std::string& name, const char* missing) {
  const auto found = (r.*values).find(name);
  return found == (r.*values).end() ? missing : found->second;
}

bool all_alike(const Reports& reports, const std::function<std::string(const HostReport&)>& value) {
  const std::string first = value(reports.front());
  return std::all_of(reports.begin(), reports.end(), [&](const HostReport& r) { return value(r) == first; });
}

// The value of ANNULUS_ISA for the vector instructions that all hosts have, or "" if a host has none
// (common/simd/instruction_set.h).
std::string common_instructions(const Reports& reports) {
  const auto any = [&](std::string_view isa) {
    return std::any_of(reports.begin(), reports.end(), [&](const HostReport& r) { return r.isa == isa; });
  };
  return any("scalar") ? "" : any("SSE4") ? "baseline" : any("AVX2") ? "avx2" : "avx512";
}

// An address of a network, as interfaces list it: "10.0.0.1/24".
struct Address {
  int family = AF_INET;
  std::array<unsigned char, 16> bytes{};
  int prefix = 0;
  std::string text;  // without the prefix
};

// Parses an address with its prefix. Returns nothing if `text` is malformed or the address is link-local (169.254/16,
// fe80::/10), because such an address does not lead to other networks.
std::optional<Address> parse_address(const std::string& text) {
  Address a;
  const size_t slash = text.find('/');
  if (slash == std::string::npos) return std::nullopt;
  a.text = text.substr(0, slash);
  a.family = a.text.find(':') == std::string::npos ? AF_INET : AF_INET6;
  const char* const begin = text.data() + slash + 1;
  if (std::from_chars(begin, text.data() + text.size(), a.prefix).ec != std::errc() || a.prefix < 0 ||
      a.prefix > (a.family == AF_INET ? 32 : 128) || inet_pton(a.family, a.text.c_str(), a.bytes.data()) != 1) {
    return std::nullopt;
  }
  const bool link =
      a.family == AF_INET ? a.bytes[0] == 169 && a.bytes[1] == 254 : a.bytes[0] == 0xfe && (a.bytes[1] & 0xc0) == 0x80;
  return link ? std::nullopt : std::optional(a);
}

bool same_network(const Address& a, const Address& b) {
  if (a.family != b.family || a.prefix != b.prefix) return false;
  const int whole = a.prefix / 8, rest = a.prefix % 8;
  if (std::memcmp(a.bytes.data(), b.bytes.data(), whole) != 0) return false;
  return rest == 0 || (a.bytes[whole] ^ b.bytes[whole]) >> (8 - rest) == 0;
}

struct InterfaceAddress {
  std::string interface;
  Address address;
};

// The addresses that a job may use: those of the named interfaces, or of all interfaces that are up.
std::vector<InterfaceAddress> usable(const HostReport& report, const CheckRequest& request) {
  std::vector<InterfaceAddress> found;
  for (const NetInterface& interface : report.host.interfaces) {
    const auto& named = request.interfaces;
    if (!named.empty() && std::find(named.begin(), named.end(), interface.name) == named.end()) continue;
    if (!interface.up || interface.loopback) continue;
    for (const std::string& text : interface.addresses) {
      if (const auto address = parse_address(text)) found.push_back({interface.name, *address});
    }
  }
  return found;
}

class Together {
 public:
  Together(const Reports& reports, const CheckRequest& request) : reports_(reports), request_(request) {}

  std::vector<Finding> all() {
    const auto same = [&](const char* check, Severity severity, const auto& value, const std::string& remedy) {
      if (all_alike(reports_, value)) {
        add(check, Severity::kGood, value(reports_.front()).empty() ? "none anywhere" : value(reports_.front()));
      } else {
        add(check, severity, values_text(reports_, value), remedy, ErrorKind::kMismatch);
      }
    };
    one_machine();
    names();
    same(
        "same-version", Severity::kError, [](const HostReport& r) { return "annulus " + r.version; },
        "install one version for all: `./annulus install PREFIX` to a folder that all hosts share, or copy it to each");
    same(
        "same-architecture", Severity::kError, [](const HostReport& r) { return r.architecture; },
        "leave out the hosts of the other architecture: the same program must run on all hosts");
    same(
        "same-program", Severity::kError,
        [](const HostReport& r) {
          return r.program_digest.substr(0, 12) +
                 (r.folder_digest.empty() ? "" : ", installed as " + r.folder_digest.substr(0, 12));
        },
        "run the same file everywhere: `./annulus install PREFIX` to a folder that all hosts share, or copy it to "
        "each");
    same(
        "same-libtorch", Severity::kError, [](const HostReport& r) { return r.libtorch; },
        "use one LibTorch: that of `./annulus install`, or the same version on all; LD_LIBRARY_PATH may lead to "
        "another");
    same("same-mpi", Severity::kError, series_of_mpi, "install the same series of Open MPI on all hosts");
    same(
        "same-nccl", request_.device == "cpu" ? Severity::kWarning : Severity::kError,
        [](const HostReport& r) { return r.nccl_loaded; },
        "load the same NCCL on all hosts: that of LibTorch, without another one in LD_LIBRARY_PATH");
    same(
        "same-driver", Severity::kWarning, [](const HostReport& r) { return r.driver; },
        "if something fails only on some hosts, install the same driver on all");
    const std::string common = common_instructions(reports_);
    same(
        "same-instructions", Severity::kWarning, [](const HostReport& r) { return r.isa; },
        common.empty() ? "CPU ranks then round differently, and these processors have no vector instructions in common"
                       : "CPU ranks then round differently; for the same bits everywhere: ANNULUS_ISA=" + common +
                             ", which all hosts support");
    devices();
    same(
        "same-user", Severity::kWarning, [](const HostReport& r) { return r.user; },
        "start as the same user everywhere, so that all ranks may write the same files");
    environment();
    files();
    clocks();
    networks();
    addresses();
    reachable();
    return std::move(found_);
  }

 private:
  void add(const char* check, Severity severity, std::string found, std::string remedy = "",
           ErrorKind kind = ErrorKind::kUnavailable) {
    found_.push_back({check, severity, "", std::move(found), std::move(remedy), kind});
  }

  void one_machine() {
    std::vector<std::string> doubles;
    for (size_t a = 0; a < reports_.size(); ++a) {
      for (size_t b = a + 1; b < reports_.size(); ++b) {
        if (!reports_[a].boot_id.empty() && reports_[a].boot_id == reports_[b].boot_id) {
          doubles.push_back(label_of(reports_[a]) + " and " + label_of(reports_[b]));
        }
      }
    }
    if (doubles.empty()) {
      return add("different-machines", Severity::kGood, counted(reports_.size(), "machine"));
    }
    add("different-machines", Severity::kError,
        join(doubles, ", ") + " are names of one machine, whose cores and GPUs would be used twice",
        "name each machine once, with all its ranks", ErrorKind::kPlan);
  }

  void names() {
    std::map<std::string, std::string> seen;
    std::vector<std::string> doubles;
    for (const HostReport& r : reports_) {
      const auto [it, first] = seen.emplace(lower_case(r.name), label_of(r));
      if (!first) doubles.push_back(it->second + " and " + label_of(r) + " both have the name " + r.name);
    }
    if (doubles.empty()) return add("different-names", Severity::kGood, "each host has its own name");
    add("different-names", Severity::kError,
        join(doubles, "; ") + ": MPI and NCCL treat ranks on hosts of the same name as ranks of one host",
        "give each its own name (hostnamectl set-hostname NAME, docker run --hostname NAME); names that differ only in "
        "upper and lower case count as the same",
        ErrorKind::kPlan);
  }

  // All ranks must compute on the same kind of device.
  void devices() {
    if (request_.device == "cpu") return add("same-devices", Severity::kGood, "cpu, as configured");
    const auto kind = [](const HostReport& r) -> std::string {
      return r.host.cuda && !r.host.machine.gpus.empty() ? "GPUs" : "no GPUs that ranks can compute on";
    };
    if (all_alike(reports_, kind)) return add("same-devices", Severity::kGood, kind(reports_.front()));
    add("same-devices", Severity::kError, values_text(reports_, kind),
        "leave out the hosts without GPUs, or compute on CPUs everywhere: device \"cpu\"", ErrorKind::kMismatch);
  }

  void environment() {
    const std::set<std::string> names = names_of(reports_, &HostReport::environment);
    std::vector<std::string> differing;
    for (const std::string& name : names) {
      const auto value = [&](const HostReport& r) {
        return r.environment.contains(name) ? name + "=" + r.environment.at(name) : "unset";
      };
      // These two may differ between hosts: they say which devices a host shows, and which host it is.
      if (name != "CUDA_VISIBLE_DEVICES" && name != "NCCL_HOSTID" && !all_alike(reports_, value)) {
        differing.push_back(values_text(reports_, value) + " (" + name + ")");
      }
    }
    if (differing.empty()) return add("same-environment", Severity::kGood, counted(names.size(), "variable"));
    add("same-environment", Severity::kWarning, join(differing, "; "),
        "set them where the job is started (launch passes them on), and not in the shell start-up files of some hosts");
  }

  void files() {
    const std::set<std::string> names = names_of(reports_, &HostReport::files);
    std::vector<std::string> differing;
    for (const std::string& name : names) {
      const auto whole = [&](const HostReport& r) { return value_of(r, &HostReport::files, name, "not looked at"); };
      const auto value = [&](const HostReport& r) {
        const std::string text = whole(r);
        return text.starts_with("missing") ? text : text.substr(0, 12);
      };
      if (!all_alike(reports_, whole) || whole(reports_.front()).starts_with("missing")) {
        differing.push_back(name + ": " + values_text(reports_, value));
      }
    }
    if (differing.empty()) return add("same-files", Severity::kGood, counted(names.size(), "file"));
    add("same-files", Severity::kError, join(differing, "; "),
        "put the files where all hosts see them (a shared file system), or copy them to each", ErrorKind::kMismatch);
  }

  void clocks() {
    constexpr double kMost = 1;  // s
    // Offsets are relative to the launcher's clock, whose host need not be one of these. The difference is taken as the
    // smallest that the accuracy of the two offsets allows.
    const auto least = [](const HostReport& r) { return r.clock_offset - r.clock_accuracy; };
    const auto most = [](const HostReport& r) { return r.clock_offset + r.clock_accuracy; };
    const HostReport& ahead =
        *std::max_element(reports_.begin(), reports_.end(),
                          [&](const HostReport& a, const HostReport& b) { return least(a) < least(b); });
    const HostReport& behind = *std::min_element(
        reports_.begin(), reports_.end(), [&](const HostReport& a, const HostReport& b) { return most(a) < most(b); });
    if (least(ahead) - most(behind) < kMost) return add("clocks", Severity::kGood, "less than 1 s apart");
    const std::string seconds = rounded(ahead.clock_offset - behind.clock_offset, 1);
    add("clocks", Severity::kWarning,
        "that of " + label_of(behind) + " is " + seconds + " s behind that of " + label_of(ahead),
        "let the hosts follow one time server (chrony, systemd-timesyncd: timedatectl set-ntp true): otherwise logs "
        "and the times of files mislead, and tickets and certificates fail");
  }

  void networks() {
    std::vector<std::vector<InterfaceAddress>> own;
    for (const HostReport& r : reports_) own.push_back(usable(r, request_));
    std::vector<std::string> apart;
    for (size_t a = 0; a < own.size(); ++a) {
      for (size_t b = a + 1; b < own.size(); ++b) {
        const bool common = std::any_of(own[a].begin(), own[a].end(), [&](const InterfaceAddress& x) {
          return std::any_of(own[b].begin(), own[b].end(),
                             [&](const InterfaceAddress& y) { return same_network(x.address, y.address); });
        });
        if (!common) apart.push_back(label_of(reports_[a]) + " and " + label_of(reports_[b]));
      }
    }
    if (apart.empty()) return add("common-network", Severity::kGood, "every two hosts have a network in common");
    constexpr size_t kPairs = 3;
    const size_t count = apart.size();
    apart.resize(std::min(count, kPairs));
    add("common-network", Severity::kWarning,
        join(apart, ", ") + (count > kPairs ? " and " + counted(count - kPairs, "more pair") : "") +
            " have no network in common" +
            (request_.interfaces.empty() ? "" : " by " + join(request_.interfaces, ", ")) +
            ": what they send is routed, or does not arrive",
        "name interfaces of one network with --interfaces (`annulus topology --hosts ...` lists them); if a router "
        "connects them on purpose, ignore this");
  }

  // A bridge of docker or libvirt has the same address on every host, so that MPI would connect to its own host.
  void addresses() {
    std::map<std::string, std::vector<std::string>> holders;
    for (const HostReport& r : reports_) {
      for (const InterfaceAddress& a : usable(r, request_)) {
        holders[a.address.text].push_back(label_of(r) + " (" + a.interface + ")");
      }
    }
    std::vector<std::string> doubles;
    for (const auto& [address, hosts] : holders) {
      if (hosts.size() > 1) doubles.push_back(address + " on " + join(hosts, ", "));
    }
    if (doubles.empty()) return add("different-addresses", Severity::kGood, "each address belongs to one host");
    add("different-addresses", Severity::kWarning, join(doubles, "; "),
        "name the interfaces that connect the hosts with --interfaces: otherwise MPI and NCCL may try such an address, "
        "which leads back to the same host");
  }

  void reachable() {
    std::vector<std::string> failed;
    for (const HostReport& r : reports_) {
      for (const std::string& other : r.unreachable) failed.push_back(label_of(r) + " does not reach " + other);
    }
    if (failed.empty()) return add("reachable", Severity::kGood, "each host reaches the others");
    constexpr size_t kShown = 4;
    const size_t count = failed.size();
    failed.resize(std::min(count, kShown));
    add("reachable", Severity::kError,
        join(failed, "; ") + (count > kShown ? "; and " + counted(count - kShown, "more case") : ""),
        "let the firewall (iptables -L, nft list ruleset, ufw status) pass TCP between the hosts on all ports, or name "
        "interfaces on which it does with --interfaces");
  }

  const Reports& reports_;
  const CheckRequest& request_;
  std::vector<Finding> found_;
};

struct Member {
  std::string name;
  std::function<std::string(const HostReport&)> value;
};

std::string limit_text(int64_t limit) { return limit < 0 ? "unlimited" : with_commas(limit); }

std::string gpus_text(const HostReport& r) {
  const auto& gpus = r.host.machine.gpus;
  return gpus.empty() ? "none" : std::to_string(gpus.size()) + " x " + gpus[0].model;
}

std::vector<Member> members(const Reports& reports) {
  std::vector<Member> all = {
      {"version", [](const HostReport& r) { return r.version; }},
      {"program", [](const HostReport& r) { return r.program; }},
      {"its digest", [](const HostReport& r) { return r.program_digest.substr(0, 12); }},
      {"LibTorch", [](const HostReport& r) { return r.libtorch; }},
      {"MPI library", [](const HostReport& r) { return r.mpi_library; }},
      {"mpirun", [](const HostReport& r) { return r.mpirun_version; }},
      {"architecture", [](const HostReport& r) { return r.architecture; }},
      {"instructions", [](const HostReport& r) { return r.isa; }},
      {"kernel", [](const HostReport& r) { return r.kernel; }},
      {"user", [](const HostReport& r) { return r.user; }},
      {"cores", [](const HostReport& r) { return std::to_string(r.host.machine.cores.size()); }},
      {"NUMA nodes", [](const HostReport& r) { return std::to_string(r.host.machine.numa_nodes.size()); }},
      {"memory", [](const HostReport& r) { return std::to_string(r.host.machine.memory_bytes() >> 30) + " GiB"; }},
      {"GPUs", gpus_text},
      {"driver", [](const HostReport& r) { return r.driver; }},
      {"CUDA of it", [](const HostReport& r) { return r.driver_cuda; }},
      {"NCCL", [](const HostReport& r) { return r.nccl_loaded; }},
      {"locked bytes", [](const HostReport& r) { return limit_text(r.limits.locked_bytes); }},
      {"open files", [](const HostReport& r) { return limit_text(r.limits.open_files); }},
      {"/dev/shm", [](const HostReport& r) { return std::to_string(r.shm.total_bytes >> 20) + " MiB"; }},
  };
  const auto add = [&](Named values, const char* missing) {
    for (const std::string& name : names_of(reports, values)) {
      all.push_back({name, [=](const HostReport& r) { return value_of(r, values, name, missing); }});
    }
  };
  add(&HostReport::environment, "unset");
  add(&HostReport::files, "not looked at");
  return all;
}

}  // namespace

std::vector<Finding> check_together(const Reports& reports, const CheckRequest& request) {
  if (reports.size() < 2) return {};
  return Together(reports, request).all();
}

std::string difference_table(const Reports& reports) {
  if (reports.size() < 2) return "";
  constexpr size_t kWidth = 120, kCell = 60, kLine = 2000;
  std::vector<std::vector<std::string>> rows = {{""}};
  for (const HostReport& r : reports) rows[0].push_back(printable(label_of(r), kCell));
  std::vector<Member> differing;
  for (Member& member : members(reports)) {
    if (all_alike(reports, member.value)) continue;
    rows.push_back({printable(member.name, kCell)});
    for (const HostReport& r : reports) rows.back().push_back(printable(member.value(r), kCell));
    differing.push_back(std::move(member));
  }
  if (differing.empty()) return "";
  std::vector<size_t> widths(rows[0].size(), 0);
  size_t total = 0;
  for (size_t c = 0; c < widths.size(); ++c) {
    for (const auto& row : rows) widths[c] = std::max(widths[c], row[c].size());
    total += widths[c] + 2;
  }
  std::string out;
  if (total <= kWidth) {
    for (const auto& row : rows) {
      std::string line = "  ";
      for (size_t c = 0; c < row.size(); ++c) line += row[c] + std::string(widths[c] - row[c].size() + 2, ' ');
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + '\n';
    }
    return out;
  }
  for (const Member& member : differing) {
    const std::string name = printable(member.name, kCell);
    out += "  " + name + std::string(widths[0] - name.size() + 2, ' ') +
           printable(values_text(reports, member.value), kLine) + '\n';
  }
  return out;
}

}  // namespace annulus
