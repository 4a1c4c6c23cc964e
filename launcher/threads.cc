// See threads.h.
#include "launcher/threads.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "common/control_groups/control_groups.h"
#include "common/environment.h"
#include "common/text.h"

namespace annulus {
namespace {

// GNU's library spins so often before a thread sleeps; its default is 300,000. A turn takes 10 to 60 ns, depending on
// the processor's instruction `pause`, so this is about as long as it takes to wake a sleeping thread. Then a wait
// costs at most twice what it would cost with perfect foresight.
constexpr const char* kSpins = "1000";

// With any of these, the user has decided how threads wait.
constexpr std::array<std::string_view, 2> kDecided = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"};

// Adds the variables to the environment and starts the program once more in this process, unless the user has decided
// or has only one thread. If it cannot be started again, it goes on, and threads wait as the library has it.
//
// It is called with the arguments of main before the initializers of all libraries. The C library's is among them, so
// this uses nothing that it sets up, such as getenv.
void limit_waiting(int /*argc*/, char** argv, char** environment) {
  std::vector<char*> variables;
  for (char** entry = environment; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (std::find(kDecided.begin(), kDecided.end(), name) != kDecided.end()) return;
    if (text == "OMP_NUM_THREADS=1") return;
    variables.push_back(*entry);
  }
  std::string policy = "OMP_WAIT_POLICY=passive", spins = std::string("GOMP_SPINCOUNT=") + kSpins;
  variables.insert(variables.end(), {policy.data(), spins.data(), nullptr});
  // By its own path, so that the process keeps its name. The link itself works even if the file has been replaced.
  std::array<char, PATH_MAX> path{};
  if (readlink("/proc/self/exe", path.data(), path.size() - 1) > 0) execve(path.data(), argv, variables.data());
  execve("/proc/self/exe", argv, variables.data());
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // those must be initialized first
[[gnu::used, gnu::section(".preinit_array")]] void (*call_first)(int, char**, char**) = limit_waiting;
#endif

}  // namespace

void set_threads(std::optional<int> placed) {
  if (text_from_environment("OMP_NUM_THREADS") != nullptr) return;
  if (placed) return at::set_num_threads(*placed);
  const std::optional<CpuQuota> quota = cpu_quota();
  if (quota && whole_processors(quota->cpus) < at::get_num_threads())
    at::set_num_threads(whole_processors(quota->cpus));
}

std::string threads_text() {
  std::string text = std::to_string(at::get_num_threads());
  const std::optional<CpuQuota> quota = cpu_quota();
  if (text_from_environment("OMP_NUM_THREADS") != nullptr) {
    text += " (OMP_NUM_THREADS)";
  } else if (quota && whole_processors(quota->cpus) == at::get_num_threads()) {
    text += ", for the time of " + significant(quota->cpus, 4) + " processors that the control group " + quota->group +
            " allows";
  }
  std::vector<std::string> set;
  for (const std::string_view name : kDecided) {
    if (const char* const value = std::getenv(name.data())) set.push_back(std::string(name) + "=" + value);
  }
  return text + (set.empty() ? "" : "; they wait by " + join(set, ", "));
}

}  // namespace annulus
