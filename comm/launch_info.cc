// Reads the variables that launchers set for their ranks.
#include "comm/launch_info.h"

#include <unistd.h>

#include <charconv>
#include <cstring>

#include "common/environment.h"

namespace annulus {
namespace {

int int_of(const char* name, int fallback, int low) {
  return static_cast<int>(number_from_environment(name, fallback, low, 10'000'000));
}

// Launchers whose processes do not become ranks by themselves: torchrun's know nothing of MPI, others belong to another
// MPI than this program, whose own variables are not there. Each sets the variable `rank` too, so that a size that
// something else left in the environment is not taken for theirs.
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

// Such names are not annulus's alone: what holds no number says nothing.
Announcement announcement() {
  Announcement most;
  for (const OtherLauncher& other : kOthers) {
    const char* const text = text_from_environment(other.size);
    if (text == nullptr || text_from_environment(other.rank) == nullptr) continue;
    int size = 0;
    const char* const end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, size);
    if (error == std::errc() && rest == end && size > most.size) most = {other.name, other.size, size};
  }
  return most;
}

}  // namespace

LaunchInfo launch_info() {
  LaunchInfo info;
  info.annulus_size = int_of("ANNULUS_WORLD_SIZE", 0, 0);
  if (const char* space = text_from_environment("PMIX_NAMESPACE")) {
    info.job = space;
    // Jobs in different PID namespaces may share the name, but not the port of their server.
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
    info.local_size = info.size == 1 ? 1 : -1;
  } else if (text_from_environment("PMI_SIZE")) {
    info.launcher = "PMI (MPICH, Intel MPI)";
    info.rank = int_of("PMI_RANK", 0, 0);
    info.size = int_of("PMI_SIZE", 1, 1);
    info.local_rank = int_of("MPI_LOCALRANKID", 0, 0);
    info.local_size = int_of("MPI_LOCALNRANKS", -1, -1);
  } else if (text_from_environment("PMIX_RANK")) {
    info.launcher = "PMIx";
    info.rank = int_of("PMIX_RANK", 0, 0);
    info.size = info.annulus_size > 0 ? info.annulus_size : 0;  // not in the environment
    info.local_size = -1;
  }
  info.launched = !info.launcher.empty();
  info.announced = announcement();
  return info;
}

}  // namespace annulus
