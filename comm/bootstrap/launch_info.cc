// See launch_info.h.
#include "comm/bootstrap/launch_info.h"

#include <unistd.h>

#include <string_view>

#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

int int_of(const char* name, int fallback, int low) {
  return static_cast<int>(number_from_environment(name, fallback, low, 10'000'000));
}

// Launchers whose processes do not become ranks by themselves: torchrun does not use MPI, and the others belong to
// another MPI than this program's, whose variables they do not set. Each also sets the variable `rank`. The size counts
// only if that is set, because something else may have left a size in the environment.
struct OtherLauncher {
  const char* name;
  const char* size;
  const char* rank;
};
constexpr OtherLauncher kOthers[] = {
    {"torchrun, or a launcher like it,", "WORLD_SIZE", "RANK"},
    {"MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
    {"MVAPICH", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"},
    {"Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"},
    {"jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"},
    {"Horovod", "HOROVOD_SIZE", "HOROVOD_RANK"},
};

// Other programs use some of these names as well, so a variable that holds no number is ignored.
Announcement announcement() {
  Announcement most;
  for (const OtherLauncher& other : kOthers) {
    const char* const text = text_from_environment(other.size);
    if (text == nullptr || text_from_environment(other.rank) == nullptr) continue;
    const int size = number_of_text<int>(text).value_or(0);
    if (size > most.size) most = {other.name, other.size, size};
  }
  return most;
}

// The number of tasks of this Slurm step on this task's node; -1 if Slurm does not set it.
int slurm_tasks_here() {
  const char* const name = "SLURM_STEP_TASKS_PER_NODE";
  if (text_from_environment(name) == nullptr || text_from_environment("SLURM_NODEID") == nullptr) return -1;
  const std::vector<int> tasks = slurm_tasks_per_node(name);
  const auto node = static_cast<size_t>(int_of("SLURM_NODEID", 0, 0));
  return node < tasks.size() ? tasks[node] : -1;
}

}  // namespace

std::vector<int> slurm_tasks_per_node(const char* variable) {
  const char* const value = text_from_environment(variable);
  const std::string text = value != nullptr ? value : "";
  const auto bad = [&] {
    throw Error(ErrorKind::kUsage, "environment",
                "environment variable " + std::string(variable) + " is \"" + text +
                    "\": expected the number of tasks on each node in Slurm's form, such as 2(x3),1");
  };
  const auto number = [&](std::string_view digits) {
    const int n = number_of_text<int>(digits).value_or(0);
    if (n < 1) bad();
    return n;
  };
  constexpr size_t kMostNodes = 100'000;
  std::vector<int> tasks;
  for (const std::string& part : split(text, ',')) {
    const std::string_view run = part;
    const size_t open = run.find("(x");
    if (open != std::string_view::npos && !run.ends_with(')')) bad();
    const int nodes = open == std::string_view::npos ? 1 : number(run.substr(open + 2, run.size() - open - 3));
    if (tasks.size() + static_cast<size_t>(nodes) > kMostNodes) bad();
    tasks.insert(tasks.end(), static_cast<size_t>(nodes), number(run.substr(0, open)));
  }
  return tasks;
}

LaunchInfo launch_info() {
  LaunchInfo info;
  info.annulus_size = int_of("ANNULUS_WORLD_SIZE", 0, 0);
  if (const char* space = text_from_environment("PMIX_NAMESPACE")) {
    info.job = space;
    // Jobs in different PID namespaces may have the same name, but not the same port of their server.
    for (const char* name : {"PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI2"}) {
      if (const char* uri = text_from_environment(name)) {
        info.job += std::string(" ") + uri;
        break;
      }
    }
  } else if (const char* job = text_from_environment("SLURM_JOB_ID")) {
    info.job =
        std::string(job) + "." + (text_from_environment("SLURM_STEP_ID") ? text_from_environment("SLURM_STEP_ID") : "");
  } else {
    info.job = "children of " + std::to_string(getppid());
  }
  if (text_from_environment("OMPI_COMM_WORLD_SIZE")) {
    info.launcher = "Open MPI";
    info.rank = int_of("OMPI_COMM_WORLD_RANK", 0, 0);
    info.size = int_of("OMPI_COMM_WORLD_SIZE", 1, 1);
    info.local_rank = int_of("OMPI_COMM_WORLD_LOCAL_RANK", 0, 0);
    info.local_size = int_of("OMPI_COMM_WORLD_LOCAL_SIZE", -1, -1);
  } else if (text_from_environment("SLURM_STEP_NUM_TASKS") && text_from_environment("SLURM_PROCID")) {
    info.launcher = "Slurm";
    info.rank = int_of("SLURM_PROCID", 0, 0);
    info.size = int_of("SLURM_STEP_NUM_TASKS", 1, 1);
    info.local_rank = int_of("SLURM_LOCALID", 0, 0);
    info.local_size = info.size == 1 ? 1 : slurm_tasks_here();
  } else if (text_from_environment("PMI_SIZE")) {
    info.launcher = "PMI (MPICH, Intel MPI)";
    info.rank = int_of("PMI_RANK", 0, 0);
    info.size = int_of("PMI_SIZE", 1, 1);
    info.local_rank = int_of("MPI_LOCALRANKID", 0, 0);
    info.local_size = int_of("MPI_LOCALNRANKS", -1, -1);
  } else if (text_from_environment("PMIX_RANK")) {
    info.launcher = "PMIx";
    info.rank = int_of("PMIX_RANK", 0, 0);
    info.size = info.annulus_size > 0 ? info.annulus_size : 0;  // PMIx sets no variable for it
    info.local_size = -1;
  }
  info.launched = !info.launcher.empty();
  info.announced = announcement();
  return info;
}

}  // namespace annulus
