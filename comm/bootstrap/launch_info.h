// Finds out from the environment how this process was started: by mpirun, srun, another MPI's launcher, or by hand. It
// does so before MPI is started. Used by bootstrap, by the operators for PyTorch, and by the programs' command lines
// (launcher/, benchmarks/program/) to decide whether this process is a rank.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The number of processes that a launcher reports to have started, if that launcher gives annulus no ranks: one that
// does not use MPI, or that belongs to another MPI.
struct Announcement {
  std::string launcher;  // "torchrun, or a launcher like it,"; empty if there is none
  std::string variable;  // the variable that holds the number: "WORLD_SIZE"
  int size = 0;
};

struct LaunchInfo {
  bool launched = false;  // a launcher of ranks started this process
  std::string launcher;   // "Open MPI", "PMIx", "PMI (MPICH, Intel MPI)", "Slurm"; empty if started by hand
  std::string job;        // the same text in all ranks of the job on this host, and different in every other job
  int rank = 0;
  int size = 1;        // the number of ranks that the launcher reports to have started; 0 if it reports none
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;  // -1 if it is unknown
  // ANNULUS_WORLD_SIZE: the number of ranks that `annulus launch` started; 0 if it started none.
  int annulus_size = 0;
  // Of several launchers that give annulus no ranks, the one with the most processes.
  Announcement announced;
};

// Reads the number of tasks on each node from an environment variable in Slurm's form: "2(x3),1" is 2, 2, 2, 1. Raises
// Error(kUsage) if the variable holds something else. Thread safe as long as no thread changes the environment.
std::vector<int> slurm_tasks_per_node(const char* variable);

// Raises Error(kUsage) if a variable that it reads holds no number or one that is out of range. Thread safe as long as
// no thread changes the environment.
LaunchInfo launch_info();

}  // namespace annulus
