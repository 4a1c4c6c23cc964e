// See host_list.h.
#include "launcher/hosts/host_list.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "comm/bootstrap/launch_info.h"
#include "comm/hosts.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/topology/host.h"
#include "launcher/topology/placement.h"

namespace annulus {
namespace {

constexpr int kMostSlots = 65536;  // the most slots of a host, which is also the most ranks of a job
constexpr size_t kMostHosts = 16384;

[[noreturn]] void refuse(ErrorKind kind, std::string_view where, const std::string& what) {
  throw Error(kind, "launcher", std::string(where) + ": " + what);
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= 253 && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return c < 128 && (std::isalnum(c) != 0 || c == '-' || c == '.' || c == '_');
         });
}

std::optional<int> whole_number(std::string_view text, int low, int high) {
  const std::optional<int> value = number_of_text<int>(text);
  return value && *value >= low && *value <= high ? value : std::nullopt;
}

// Builds a HostList from names one by one, of which one may occur several times, as in the file of a PBS job, which has
// a line for each slot. Throws for a malformed name.
class ListMaker {
 public:
  ListMaker(ErrorKind kind, std::string source) : kind_(kind) { list_.source = std::move(source); }

  // `slots`: 0 if they are not given.
  void add(std::string_view where, std::string_view name, int slots) {
    if (name.find(':') != std::string_view::npos || name.starts_with('[')) {
      refuse(kind_, where,
             "\"" + std::string(name) +
                 "\" looks like an IPv6 address, which mpirun does not accept; give that host a name");
    }
    if (!is_name(name)) {
      refuse(kind_, where,
             "\"" + std::string(name) +
                 "\" is not the name of a host: letters, digits and -._ were expected, as in node1 or 10.0.0.1");
    }
    const auto [at, fresh] = places_.emplace(lower_case(name), list_.hosts.size());
    if (fresh) {
      if (list_.hosts.size() >= kMostHosts) refuse(kind_, where, "more than " + std::to_string(kMostHosts) + " hosts");
      list_.hosts.push_back({std::string(name), slots});
      unsaid_.push_back(slots == 0 ? 1 : 0);
      return;
    }
    HostSlots& host = list_.hosts[at->second];
    if (host.name != name) {
      refuse(kind_, where,
             "host " + std::string(name) + " is named twice, as " + host.name + " before; write one name alike");
    }
    repeated_ = true;
    host.slots += slots;
    unsaid_[at->second] += slots == 0 ? 1 : 0;
    if (host.slots + unsaid_[at->second] > kMostSlots) {
      refuse(kind_, where, "host " + host.name + " has more than " + std::to_string(kMostSlots) + " slots");
    }
  }

  // Splits "a:8" into a name and slots, which are 0 if they are not given. An IPv6 address is all name.
  std::pair<std::string, int> name_and_slots(std::string_view where, const std::string& text) const {
    const size_t colon = text.find(':');
    if (colon == std::string::npos || text.find(':', colon + 1) != std::string::npos) return {text, 0};
    const std::string name = text.substr(0, colon);
    return {name, slots(where, name, text.substr(colon + 1))};
  }

  int slots(std::string_view where, std::string_view name, std::string_view text) const {
    const std::optional<int> slots = whole_number(text, 1, kMostSlots);
    if (slots) return *slots;
    refuse(kind_, where,
           "host " + std::string(name) + " has the slots \"" + std::string(text) + "\"; a whole number from 1 to " +
               std::to_string(kMostSlots) + " was expected");
  }

  HostList finish() {
    if (list_.hosts.empty()) refuse(kind_, list_.source, "no host is named");
    // A list that repeats a host has an entry for each slot, where it gives no number.
    for (size_t i = 0; repeated_ && i < unsaid_.size(); ++i) list_.hosts[i].slots += unsaid_[i];
    return std::move(list_);
  }

 private:
  ErrorKind kind_;
  HostList list_;
  std::map<std::string, size_t> places_;  // of the names, in lower case
  std::vector<int> unsaid_;               // for each host, how many of its entries give no slots
  bool repeated_ = false;
};

// The words of one line of a host file, without its comment. "=" is a word of its own, with or without blanks around
// it.
std::vector<std::string> words_in(std::string line) {
  line.resize(std::min(line.find('#'), line.size()));
  for (size_t at = 0; (at = line.find('=', at)) != std::string::npos; at += 3) line.replace(at, 1, " = ");
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return std::isspace(c) != 0; }, ' ');
  std::vector<std::string> words = split(line, ' ');
  std::erase(words, "");
  return words;
}

bool is_address(const std::string& text) {
  in_addr address{};
  return inet_pton(AF_INET, text.c_str(), &address) == 1;
}

// The addresses of a host of this name, IPv4 and IPv6; none if the name is not known.
std::vector<std::string> addresses_of(const std::string& name) {
  addrinfo* list = nullptr;
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(name.c_str(), nullptr, &wanted, &list) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::vector<std::string> found;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    std::array<char, NI_MAXHOST> text{};
    if (getnameinfo(entry->ai_addr, entry->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      found.emplace_back(text.data());
    }
  }
  return found;
}

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Whether Open MPI takes this key as the most slots of a host: "max_slots", "slots-max", "max-cpu" and so on.
bool is_limit(std::string key) {
  std::replace(key.begin(), key.end(), '-', '_');
  return is_one_of(key, {"max_slots", "slots_max", "max_cpu", "cpu_max", "max_count", "count_max"});
}

// Expands one part of Slurm's short form of names: "n[1-2,07]" gives n1, n2 and n07. What comes before `at` in `text`
// is already expanded.
void expand_names(const std::string& text, size_t at, const std::function<void(const std::string&)>& add) {
  const size_t open = text.find('[', at);
  if (open == std::string::npos) return add(text);
  const size_t close = text.find(']', open);
  const auto bad = [&] { refuse(ErrorKind::kUsage, "SLURM_JOB_NODELIST", "\"" + text + "\" cannot be read"); };
  if (close == std::string::npos) bad();
  for (const std::string& range : split(std::string_view(text).substr(open + 1, close - open - 1), ',')) {
    const std::vector<std::string> ends = split(range, '-');
    const std::optional<int> first = whole_number(ends.front(), 0, 99'999'999);
    const std::optional<int> last = whole_number(ends.back(), 0, 99'999'999);
    if (!first || !last || ends.size() > 2 || *last - *first >= static_cast<int>(kMostHosts)) bad();
    for (int i = *first; i <= *last; ++i) {
      std::string number = std::to_string(i);
      // Slurm pads every number of a range to the width of the first.
      number.insert(0, ends.front().size() - std::min(ends.front().size(), number.size()), '0');
      const std::string head = text.substr(0, open) + number;
      expand_names(head + text.substr(close + 1), head.size(), add);
    }
  }
}

}  // namespace

HostList parse_hosts(std::string_view text, std::string_view where) {
  ListMaker maker(ErrorKind::kUsage, std::string(where));
  for (const std::string& part : split(text, ',')) {
    const auto [name, slots] = maker.name_and_slots(where, part);
    maker.add(where, name, slots);
  }
  return maker.finish();
}

HostList read_hostfile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorKind::kUsage, "launcher", "--hostfile " + path + " cannot be read: " + std::strerror(errno));
  }
  const std::string source = "--hostfile " + path;
  ListMaker maker(ErrorKind::kInput, source);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string where = source + ", line " + std::to_string(++number);
    const std::vector<std::string> words = words_in(line);
    if (words.empty()) continue;
    auto [name, slots] = maker.name_and_slots(where, words.front());
    int most = 0;
    for (size_t i = 1; i < words.size(); i += 3) {
      const bool of_slots = is_one_of(words[i], {"slots", "cpu", "count"});
      if (!(of_slots || is_limit(words[i])) || i + 1 >= words.size() || words[i + 1] != "=") {
        refuse(ErrorKind::kInput, where,
               "\"" + words[i] + "\" is not understood; a line is NAME, NAME:8 or NAME slots=8");
      }
      const int value = maker.slots(where, name, i + 2 < words.size() ? words[i + 2] : "");
      (of_slots ? slots : most) = value;
    }
    if (slots == 0) slots = most;
    maker.add(where, name, slots);
  }
  return maker.finish();
}

std::optional<HostList> hosts_of_slurm() {
  const char* const nodes = text_from_environment("SLURM_JOB_NODELIST");
  if (nodes == nullptr || text_from_environment("SLURM_JOB_ID") == nullptr) return std::nullopt;
  std::vector<std::string> names;
  std::string part;
  int depth = 0;
  for (const char c : std::string(nodes) + ",") {
    if (c == ',' && depth == 0) {
      expand_names(part, 0, [&](const std::string& name) { names.push_back(name); });
      part.clear();
      continue;
    }
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    part += c;
  }
  if (depth != 0) refuse(ErrorKind::kUsage, "SLURM_JOB_NODELIST", "\"" + std::string(nodes) + "\" cannot be read");
  std::vector<int> slots(names.size(), 0);
  const char* const tasks = text_from_environment("SLURM_TASKS_PER_NODE");
  const bool asked = text_from_environment("SLURM_NTASKS") || text_from_environment("SLURM_NTASKS_PER_NODE");
  if (asked && tasks != nullptr) {
    slots = slurm_tasks_per_node("SLURM_TASKS_PER_NODE");
    if (slots.size() != names.size()) {
      refuse(ErrorKind::kUsage, "SLURM_TASKS_PER_NODE",
             "\"" + std::string(tasks) + "\" lists " + counted(slots.size(), "host") + ", but SLURM_JOB_NODELIST, \"" +
                 nodes + "\", lists " + std::to_string(names.size()));
    }
  }
  ListMaker maker(ErrorKind::kUsage, "Slurm's allocation (SLURM_JOB_NODELIST)");
  for (size_t i = 0; i < names.size(); ++i) maker.add("SLURM_JOB_NODELIST", names[i], slots[i]);
  if (std::set<std::string>(names.begin(), names.end()).size() < names.size()) {
    refuse(ErrorKind::kUsage, "SLURM_JOB_NODELIST", "\"" + std::string(nodes) + "\" names a host twice");
  }
  HostList list = maker.finish();
  list.remedy = "ask Slurm for more tasks (--ntasks-per-node=N)";
  return list;
}

std::optional<HostList> hosts_of_options(const std::optional<std::string>& hosts,
                                         const std::optional<std::string>& hostfile) {
  if (hosts && hostfile) refuse(ErrorKind::kUsage, "--hosts and --hostfile", "only one of them may be given, not both");
  return hosts ? parse_hosts(*hosts, "--hosts") : hostfile ? read_hostfile(*hostfile) : hosts_of_slurm();
}

std::vector<int> ranks_of_hosts(const HostList& list, int ranks) {
  std::vector<int> most;
  const HostSlots* unsaid = nullptr;
  for (const HostSlots& host : list.hosts) {
    if (host.slots == 0 && unsaid == nullptr) unsaid = &host;
    most.push_back(host.slots == 0 ? kMostSlots : host.slots);
  }
  if (ranks == 0) {
    if (unsaid == nullptr) return most;
    refuse(ErrorKind::kUsage, list.source,
           "the number of ranks on host " + unsaid->name +
               " is not given; give the number of all ranks with -n N, or that of each host: " + unsaid->name + ":8");
  }
  const int64_t sum = std::accumulate(most.begin(), most.end(), int64_t{0});
  if (ranks > sum) {
    refuse(ErrorKind::kUsage, list.source,
           counted(ranks, "rank") + " do not fit into the " + counted(sum, "slot") + " of the hosts; " + list.remedy);
  }
  return deal_ranks(most, ranks, 0);
}

bool is_this_host(std::string_view name) {
  const std::string own = lower_case(host_name()), asked = lower_case(name);
  if (asked == own || asked == "localhost") return true;
  const auto first = [](const std::string& text) { return text.substr(0, text.find('.')); };
  const bool alike = first(asked) == first(own) && (first(asked) == asked || first(own) == own);
  if (!alike && !is_address(asked)) return false;
  // "node1" and "node1.cluster.example" are one host or two, in different domains; their addresses tell.
  const std::vector<std::string> addresses = addresses_of(asked);
  if (addresses.empty()) return alike;
  for (const NetInterface& interface : network_interfaces()) {
    for (const std::string& address : interface.addresses) {
      const std::string bare = address.substr(0, address.find('/'));
      if (std::find(addresses.begin(), addresses.end(), bare) != addresses.end()) return true;
    }
  }
  // Debian gives a host's own name the address 127.0.1.1, which no interface has.
  return std::all_of(addresses.begin(), addresses.end(), [](const std::string& a) { return a.starts_with("127."); });
}

bool is_full_name(std::string_view name) {
  return name.find('.') != std::string_view::npos && !is_address(std::string(name));
}

}  // namespace annulus
