// Makes a Machine from this system, from an untrusted XML file, or from a synthetic description. See machine.h.
#include <fcntl.h>
#include <hwloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "common/control_groups/control_groups.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "launcher/topology/hwloc_reader.h"
#include "launcher/topology/machine.h"

namespace annulus {
namespace {

constexpr size_t kMaxXmlBytes = size_t{64} << 20;
constexpr char kFine = '\1';  // what the checking child sends if it could read the text

// Returns the processors on which this process may run, or an empty set if the kernel does not say.
CpuSet process_mask(hwloc_topology* topology) {
  std::vector<int> pus;
  hwloc_bitmap_t mask = hwloc_bitmap_alloc();
  if (mask != nullptr && hwloc_get_cpubind(topology, mask, HWLOC_CPUBIND_PROCESS) == 0 &&
      hwloc_bitmap_weight(mask) > 0) {
    for (int pu = hwloc_bitmap_first(mask); pu >= 0 && pu <= CpuSet::kMaxPu; pu = hwloc_bitmap_next(mask, pu)) {
      pus.push_back(pu);
    }
  }
  hwloc_bitmap_free(mask);
  return CpuSet(std::move(pus));
}

[[noreturn]] void fail_xml(const std::string& source, const std::string& why) {
  throw Error(ErrorKind::kInput, "topology",
              source + ": " + why + "; give a file that `lstopo machine.xml` wrote on the machine to describe");
}

// Throws if the text is in a newer format than this hwloc reads, which hwloc refuses without saying so. Its versions
// are those of the library that introduced them; format 1 names none.
void check_format(const std::string& text, const std::string& source) {
  constexpr std::string_view kMark = "<topology version=\"";
  const size_t at = text.find(kMark);
  if (at == std::string::npos) return;
  const auto major = leading_number<unsigned>(std::string_view(text).substr(at + kMark.size()));
  const unsigned own = hwloc_get_api_version() >> 16;
  if (major <= own) return;
  throw Error(ErrorKind::kInput, "topology",
              source + ": it is in the format of hwloc " + std::to_string(major) +
                  ", and the hwloc of this program, version " + std::to_string(own) + ", reads formats 1 to " +
                  std::to_string(own) + "; write the file with `lstopo --export-xml-flags v" + std::to_string(own) +
                  " machine.xml`");
}

Machine read_xml(const std::string& text, const std::string& source) {
  check_format(text, source);
  const HwlocTopology topology = init_hwloc();
  // The length that hwloc expects includes the terminating zero.
  if (hwloc_topology_set_xmlbuffer(topology.get(), text.c_str(), static_cast<int>(text.size()) + 1) != 0) {
    fail_xml(source, "not an hwloc XML description (not XML, or cut off)");
  }
  if (hwloc_topology_load(topology.get()) != 0) {
    fail_xml(source, "no complete description of a machine (not XML, cut off, or without processors or memory)");
  }
  Machine machine = read_machine(topology.get(), source, std::nullopt);
  if (machine.host.empty()) machine.host = std::filesystem::path(source).stem().string();
  return machine;
}

// hwloc trusts XML: objects that contradict one another make it abort on an assertion or crash. So a child process,
// which may crash, reads the text first, and this process reads only what the child has read without an error.
void check_in_child(const std::string& text, const std::string& source) {
  std::array<int, 2> pipe_ends{};
  if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorKind::kResource, "topology",
                source + ": cannot make a pipe to the process that checks it (" + std::strerror(errno) + ")");
  }
  const pid_t child = fork();
  if (child < 0) {
    const int why = errno;
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    throw Error(ErrorKind::kResource, "topology",
                source + ": cannot start a process to check it (" + std::strerror(why) + ")");
  }
  if (child == 0) {
    for (int signal_number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGXCPU}) signal(signal_number, SIG_DFL);
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    const rlimit seconds{20, 20};  // of processor time, far more than a real description takes
    setrlimit(RLIMIT_CPU, &seconds);
    const int nowhere = open("/dev/null", O_WRONLY);
    if (nowhere >= 0) dup2(nowhere, STDERR_FILENO);  // discards what hwloc and the C library print before an abort
    std::string answer(1, kFine);
    try {
      read_xml(text, source);
    } catch (const Error& error) {
      answer = error.message();
    } catch (const std::exception& error) {
      answer = error.what();
    }
    _exit(write_fully(pipe_ends[1], answer) == 0 ? 0 : 1);
  }
  close(pipe_ends[1]);
  // The answer comes through the pipe, not as an exit status: a launcher may reap or ignore its children elsewhere.
  const std::string answer = read_to_end(pipe_ends[0]);
  close(pipe_ends[0]);
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (answer.empty()) fail_xml(source, "not a consistent description of a machine: hwloc itself fails on it");
  if (answer.front() == kFine) return;
  throw Error(ErrorKind::kInput, "topology", answer);
}

}  // namespace

Machine Machine::this_machine(bool respect_affinity) {
  // hwloc would read these variables by itself; this way the file and the text are checked.
  if (const char* xml = std::getenv("HWLOC_XMLFILE"); xml != nullptr && *xml != '\0') return from_xml(xml);
  if (const char* synthetic = std::getenv("HWLOC_SYNTHETIC"); synthetic != nullptr && *synthetic != '\0') {
    return from_synthetic(synthetic);
  }
  const HwlocTopology topology = init_hwloc();
  if (hwloc_topology_load(topology.get()) != 0) {
    throw Error(
        ErrorKind::kUnavailable, "topology",
        std::string("hwloc cannot describe this machine (") + std::strerror(errno) + "); check that /sys is mounted");
  }
  std::optional<CpuSet> only;
  if (respect_affinity && hwloc_topology_is_thissystem(topology.get()) != 0) {
    if (CpuSet mask = process_mask(topology.get()); !mask.empty()) only = std::move(mask);
  }
  Machine machine = read_machine(topology.get(), "this machine", std::move(only));
  const std::optional<CpuQuota> quota = machine.is_this_system ? annulus::cpu_quota() : std::nullopt;
  if (quota && quota->cpus < machine.cpus().size()) machine.cpu_quota = quota->cpus;
  if (machine.host.empty()) {
    std::array<char, 256> name{};
    machine.host = gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
  }
  return machine;
}

Machine Machine::from_xml(const std::string& path) {
  return from_xml_text(read_small_file("topology", path, kMaxXmlBytes), path);
}

Machine Machine::from_xml_text(std::string_view xml, const std::string& source) {
  if (xml.size() > kMaxXmlBytes) fail_xml(source, "it is longer than 64 MiB");
  const std::string text(xml);
  check_in_child(text, source);
  return read_xml(text, source);
}

Machine Machine::from_synthetic(const std::string& description, const std::string& host) {
  const HwlocTopology topology = init_hwloc();
  const auto fail = [&]() {
    throw Error(ErrorKind::kInput, "topology",
                "expected a synthetic machine such as \"pack:2 [numa] l3:1 core:4 pu:2\", got \"" +
                    description.substr(0, 120) + "\"");
  };
  // hwloc would build a machine of any size, so the processors are counted first.
  double pus = 1;
  for (size_t at = 0; (at = description.find(':', at)) != std::string::npos;) {
    const auto count = leading_number<unsigned long long>(std::string_view(description).substr(++at));
    pus *= static_cast<double>(std::max(1ULL, count));
  }
  if (pus > CpuSet::kMaxPu) fail();
  if (hwloc_topology_set_synthetic(topology.get(), description.c_str()) != 0) fail();
  if (hwloc_topology_load(topology.get()) != 0) fail();
  Machine machine = read_machine(topology.get(), "\"" + description + "\"", std::nullopt);
  machine.host = host;
  return machine;
}

}  // namespace annulus
