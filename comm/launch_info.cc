// Reads the variables that launchers set for their ranks.
#include "comm/launch_info.h"

#include <unistd.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

const char* text_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

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
    const char* const text = text_of(other.size);
    if (text == nullptr || text_of(other.rank) == nullptr) continue;
    int size = 0;
    const char* const end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, size);
    if (error == std::errc() && rest == end && size > most.size) most = {other.name, other.size, size};
  }
  return most;
}

}  // namespace

namespace {

// Whole numbers without an exponent.
std::string plain(double value) {
  return value == std::floor(value) && std::abs(value) < 1e15 ? std::to_string(static_cast<int64_t>(value))
                                                              : exact(value);
}

}  // namespace

double number_from_environment(const char* name, double fallback, double low, double high) {
  const char* text = text_of(name);
  if (text == nullptr) return fallback;
  double value = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error == std::errc() && rest == end && std::isfinite(value) && value >= low && value <= high) return value;
  throw Error(ErrorKind::kUsage, "comm",
              std::string("environment variable ") + name + " is \"" + text + "\": expected a number from " +
                  plain(low) + " to " + plain(high) + "; correct or unset it");
}

bool switch_from_environment(const char* name, bool fallback) {
  const char* const text = text_of(name);
  if (text == nullptr) return fallback;
  const std::string_view given = text;
  if (given == "1" || given == "0") return given == "1";
  throw Error(
      ErrorKind::kUsage, "comm",
      std::string("environment variable ") + name + " is \"" + text + "\": expected 1 or 0; correct or unset it");
}

LaunchInfo launch_info() {
  LaunchInfo info;
  info.annulus_size = int_of("ANNULUS_WORLD_SIZE", 0, 0);
  if (const char* space = text_of("PMIX_NAMESPACE")) {
    info.job = space;
    // Jobs in different PID namespaces may share the name, but not the port of their server.
    for (const char* name : {"PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI2"}) {
      if (const char* uri = text_of(name)) {
        info.job += std::string(" ") + uri;
        break;
      }
    }
  } else if (const char* job = text_of("SLURM_JOB_ID")) {
    info.job = std::string(job) + "." + (text_of("SLURM_STEP_ID") ? text_of("SLURM_STEP_ID") : "");
  } else {
    info.job = "children of " + std::to_string(getppid());
  }
  if (text_of("OMPI_COMM_WORLD_SIZE")) {
    info.launcher = "Open MPI";
    info.rank = int_of("OMPI_COMM_WORLD_RANK", 0, 0);
    info.size = int_of("OMPI_COMM_WORLD_SIZE", 1, 1);
    info.local_rank = int_of("OMPI_COMM_WORLD_LOCAL_RANK", 0, 0);
    info.local_size = int_of("OMPI_COMM_WORLD_LOCAL_SIZE", -1, -1);
  } else if (text_of("SLURM_STEP_NUM_TASKS") && text_of("SLURM_PROCID")) {
    info.launcher = "Slurm";
    info.rank = int_of("SLURM_PROCID", 0, 0);
    info.size = int_of("SLURM_STEP_NUM_TASKS", 1, 1);
    info.local_rank = int_of("SLURM_LOCALID", 0, 0);
    info.local_size = info.size == 1 ? 1 : -1;
  } else if (text_of("PMI_SIZE")) {
    info.launcher = "PMI (MPICH, Intel MPI)";
    info.rank = int_of("PMI_RANK", 0, 0);
    info.size = int_of("PMI_SIZE", 1, 1);
    info.local_rank = int_of("MPI_LOCALRANKID", 0, 0);
    info.local_size = int_of("MPI_LOCALNRANKS", -1, -1);
  } else if (text_of("PMIX_RANK")) {
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
