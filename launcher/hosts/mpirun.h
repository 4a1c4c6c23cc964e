// Finds the machine's mpirun and its version, and makes the command that starts ranks. Used by launch,
// doctor and host discovery. Thread safety: these functions read and change the environment; call them from one thread.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace annulus {

// The path of the program that runs. Throws Error(kResource).
std::string own_program();

// An mpirun of Open MPI 4.1 or newer.
struct Mpirun {
  std::string path;
  std::string version;  // "4.1.4"
  int major = 0;
  int minor = 0;
};

// Finds the line "mpirun (Open MPI) 4.1.4" in what `mpirun --version` prints. Throws Error(kUnavailable) if it is
// another MPI or older than 4.1. `path` is used in the message.
Mpirun parse_mpirun_version(const std::string& path, std::string_view output);

// Finds $MPIRUN, else $MPI_HOME/bin/mpirun, else the mpirun found when annulus was built, else the first one on PATH.
// Throws Error(kUnavailable) if there is none or it does not run; the message says where it was looked for and how to
// get one.
Mpirun find_mpirun();

struct MpirunRequest {
  int ranks = 1;
  bool oversubscribe = false;   // more ranks than cores
  bool as_root = false;         // adds --allow-run-as-root
  bool shield_daemons = false;  // daemons_need_shield()
  std::string session_dir;      // this launch's folder on this host, for mpirun's own files; empty: $TMPDIR
  // The hosts in the order of their ranks, and how many ranks each has. Empty: this host, or the hosts that `extra`
  // names.
  std::vector<std::pair<std::string, int>> hosts;
  std::string hostfile;                 // a file that names them (write_hostfile); empty: they are on the command line
  std::vector<std::string> interfaces;  // the interfaces that mpirun's daemons use; empty: all
  std::vector<std::string> forward;     // names of variables that are passed to every rank, also on other hosts
  std::vector<std::string> extra;       // the user's options, which come last before the program
  std::vector<std::string> program;     // argv of each rank
};

// The option among the user's `mpi_args` that names hosts, such as "--hostfile", or else the environment variable that
// names a default host file. "" if there is neither.
std::string hosts_named_by(const std::vector<std::string>& mpi_args);

// Unsets those variables, because hosts that the user names have precedence over a site's default host file.
void forget_default_hosts();

// The command line, argv[0] first. Ranks are not bound by mpirun: each binds itself to its place (rank_place.h).
std::vector<std::string> mpirun_command(const Mpirun& mpirun, const MpirunRequest& request);

// Whether the names of the hosts, repeated for each of their ranks, are too long for one argument, for which Linux
// allows 128 KiB.
bool need_hostfile(const std::vector<std::pair<std::string, int>>& hosts);
// Writes a file for MpirunRequest::hostfile, with one line for each rank. Throws Error(kResource).
void write_hostfile(const std::string& path, const std::vector<std::pair<std::string, int>>& hosts);

// Whether mpirun's daemons need to be protected from SIGTERM. When a job is cancelled, Slurm sends SIGTERM to the
// daemons on other hosts, and they would kill their ranks within a second, while the launcher asks the ranks to finish.
// True inside an allocation whose `env` command can block the signal.
bool daemons_need_shield();

// Whether a variable tells an OpenMP library how many threads there are and how they wait: "OMP_NUM_THREADS".
bool is_of_openmp(std::string_view name);

// The names of the variables that ranks need, also on other hosts: those of annulus, OpenMP, NCCL and UCX. Open MPI
// passes its own. NCCL_HOSTID is left out, because it identifies a host.
std::vector<std::string> forwarded_variables();

// The few lines of mpirun's output that say what went wrong, joined into one line: those outside its frames of dashes,
// which come from ssh or a shell, or else the first frame up to its list of possible causes. Warnings are left out
// unless there is nothing else.
std::string mpirun_complaint(std::string_view output);

// Splits text as a shell does, with quotes and $VARIABLES, but runs no commands. Throws Error(kUsage); `where` is the
// name of the option in the message.
std::vector<std::string> shell_split(const std::string& text, std::string_view where);

}  // namespace annulus
