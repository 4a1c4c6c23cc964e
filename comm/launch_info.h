// What the environment says about how this process was started: by mpirun, srun, another MPI's launcher or by hand.
// Read before MPI is touched. Used by bootstrap and by the command line (a rank never sets up or builds).
#pragma once

#include <string>
#include <vector>

namespace annulus {

// What a launcher that is not MPI's, or another MPI's, says of the processes that it started.
struct Announcement {
  std::string launcher;  // "torchrun, or a launcher like it,"; empty where there is none
  std::string variable;  // what says it: "WORLD_SIZE"
  int size = 0;
};

struct LaunchInfo {
  bool launched = false;  // a launcher of ranks started this process
  std::string launcher;   // "Open MPI", "PMIx", "PMI (MPICH, Intel MPI)", "Slurm"; empty when started by hand
  std::string job;        // the same text in all ranks of the job on this host, unlike any other job's
  int rank = 0;
  int size = 1;        // ranks the launcher says it started
  int local_rank = 0;  // on this host
  int local_size = 1;  // -1 unknown
  // ANNULUS_WORLD_SIZE: how many ranks `annulus launch` started; 0 when it did not.
  int annulus_size = 0;
  // The largest number of processes that any launcher says which gives annulus no ranks.
  Announcement announced;
};

// How many tasks each node has, as Slurm writes it in an environment variable: "2(x3),1" is 2, 2, 2, 1. Error(kUsage)
// where the variable holds something else. Thread-safe as launch_info() is.
std::vector<int> slurm_tasks_per_node(const char* variable);

// Error(kUsage) when a variable it reads holds no sensible number. Thread-safe as long as nobody changes the
// environment.
LaunchInfo launch_info();

}  // namespace annulus
