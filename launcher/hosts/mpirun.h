// The machine's mpirun: where it is, which version, and the exact command that starts ranks. Used by launch and doctor.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace annulus {

// An Open MPI 4.1 or 5.
struct Mpirun {
  std::string path;
  std::string version;  // "4.1.4"
  int major = 0;
  int minor = 0;
};

// The version in the first line of `mpirun --version`: "mpirun (Open MPI) 4.1.4". Raises Error(kUnavailable) when it is
// another MPI or older than 4.1. `path` is for the message.
Mpirun parse_mpirun_version(const std::string& path, std::string_view output);

// $MPIRUN, else $MPI_HOME/bin/mpirun, else the one found when annulus was built, else the first on PATH. Raises
// Error(kUnavailable) when there is none, or it does not run, saying where it was looked for and how to get one.
Mpirun find_mpirun();

struct MpirunRequest {
  int ranks = 1;
  bool oversubscribe = false;   // more ranks than cores
  bool as_root = false;         // Open MPI wants to be told
  bool shield_daemons = false;  // daemons_need_shield()
  std::string session_dir;      // a folder of this launch on this host, for mpirun's own files; empty: $TMPDIR
  // Hosts in the order of their ranks, and how many each has: exactly those. Empty: this host, or as `extra` says.
  std::vector<std::pair<std::string, int>> hosts;
  std::string hostfile;                 // one that names them (write_hostfile); empty: the command line does
  std::vector<std::string> interfaces;  // that mpirun's daemons reach one another by; empty: all
  std::vector<std::string> forward;     // names of variables handed to every rank, also on other hosts
  std::vector<std::string> extra;       // the user's own, last before the program
  std::vector<std::string> program;     // argv of each rank
};

// What names hosts to mpirun, other than this program: an option among the user's `mpi_args`, such as "--hostfile", or
// a variable of the environment (a default host file). Empty: nothing does.
std::string hosts_named_by(const std::vector<std::string>& mpi_args);

// Takes those variables away from the mpirun that is started next: hosts that are named to annulus come before what a
// site has set for every mpirun.
void forget_default_hosts();

// The command line, argv[0] first. Ranks are not bound by mpirun: each binds itself to its place (docs/user-guide.md).
std::vector<std::string> mpirun_command(const Mpirun& mpirun, const MpirunRequest& request);

// Whether they are more than one argument can name, each once for each of its ranks: Linux takes 128 KiB.
bool need_hostfile(const std::vector<std::pair<std::string, int>>& hosts);
// A file of them for MpirunRequest::hostfile, a rank a line. Error(kResource).
void write_hostfile(const std::string& path, std::vector<std::pair<std::string, int>> hosts);

// Slurm sends SIGTERM to the daemons that start ranks on other hosts when a job is cancelled, and they would end their
// ranks within a second, while the launcher asks these to finish. True inside of an allocation, where the system's
// `env` can keep the signal from them.
bool daemons_need_shield();

// The variables that ranks need, also on other hosts: annulus's own, and what the user says to NCCL and UCX (Open MPI
// carries its own). A host's identity stays there.
std::vector<std::string> forwarded_variables();

// A started mpirun: its process, which ends with this one, and what it prints, to be read without waiting.
struct MpirunProcess {
  pid_t pid = -1;
  int output = -1;  // non-blocking, close-on-exec; the taker closes it
};
// Ctrl-C does not reach it, and it reads nothing. It has no terminal, so that an ssh below it which would ask for a
// password or about a host's key says so and ends, instead of waiting for an answer that nobody can give. `mask`: its
// signal mask. Raises Error(kResource).
MpirunProcess start_mpirun(const std::vector<std::string>& command, const sigset_t& mask);

// Splits as a shell does, with quotes and $VARIABLES but without running commands. Raises Error(kUsage); `where` is the
// option.
std::vector<std::string> shell_split(const std::string& text, std::string_view where);

}  // namespace annulus
