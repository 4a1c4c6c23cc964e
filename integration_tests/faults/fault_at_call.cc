// Runs a program, and lets it die, or one of its system calls fail, where it writes files. For kills_test.py.
//
//   fault_at_call FROM TEXT NTH FAULT LOG PROGRAM ARGUMENT...
//
// Counted are the calls of all threads and processes of the program that create, write, sync, rename or remove a file
// whose path contains TEXT, from the first one on whose path contains FROM. As the program enters the NTH of them (from
// 1 on; 0: none), FAULT happens: "kill" ends it by SIGKILL before the call has done anything, a number is the errno
// with which the call fails instead. LOG gets a line for each counted call: its name and path. Ends as the program
// does.
//
// The program stops for these calls only (seccomp), so it is hardly slower. Linux on x86-64.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

// Where a call's path is: its argument `fd` is an open file or, with `path`, the folder that the path is relative to.
struct Call {
  const char* name;
  long number;
  int fd, path;  // indices of arguments; -1: none
  int flags;     // of those of open(); -1: none
};

constexpr std::array kCalls = {
    Call{"open", SYS_open, -1, 0, 1},
    Call{"openat", SYS_openat, 0, 1, 2},
    Call{"creat", SYS_creat, -1, 0, -1},
    Call{"write", SYS_write, 0, -1, -1},
    Call{"pwrite", SYS_pwrite64, 0, -1, -1},
    Call{"writev", SYS_writev, 0, -1, -1},
    Call{"fsync", SYS_fsync, 0, -1, -1},
    Call{"fdatasync", SYS_fdatasync, 0, -1, -1},
    Call{"ftruncate", SYS_ftruncate, 0, -1, -1},
    Call{"fallocate", SYS_fallocate, 0, -1, -1},
    Call{"mkdir", SYS_mkdir, -1, 0, -1},
    Call{"mkdirat", SYS_mkdirat, 0, 1, -1},
    Call{"rename", SYS_rename, -1, 0, -1},
    Call{"renameat", SYS_renameat, 0, 1, -1},
    Call{"renameat2", SYS_renameat2, 0, 1, -1},
    Call{"unlink", SYS_unlink, -1, 0, -1},
    Call{"unlinkat", SYS_unlinkat, 0, 1, -1},
    Call{"rmdir", SYS_rmdir, -1, 0, -1},
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fault_at_call: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

// Lets the tracer see these calls of the calling process and all that it starts.
void stop_at_calls() {
  std::vector<sock_filter> filter = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const Call& call : kCalls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call.number), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program = {static_cast<unsigned short>(filter.size()), filter.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    fail("seccomp");
  }
}

std::string file_of(pid_t process, long fd) {
  char path[4096];
  const ssize_t n =
      readlink(("/proc/" + std::to_string(process) + "/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  return n > 0 ? std::string(path, static_cast<size_t>(n)) : "";
}

std::string text_of(pid_t process, unsigned long address) {
  std::string text;
  for (char c = 0; text.size() < 4096; text += c, ++address) {
    iovec to{&c, 1}, from{reinterpret_cast<void*>(address), 1};
    if (process_vm_readv(process, &to, 1, &from, 1, 0) != 1 || c == 0) break;
  }
  return text;
}

// The path of a call; empty if it only reads.
std::string path_of(pid_t process, const Call& call, const std::array<unsigned long, 6>& arguments) {
  if (call.flags >= 0 && (arguments[call.flags] & (O_WRONLY | O_RDWR | O_CREAT)) == 0) return "";
  const auto fd = call.fd < 0 ? AT_FDCWD : static_cast<int>(arguments[call.fd]);
  if (call.path < 0) return file_of(process, fd);
  const std::string path = text_of(process, arguments[call.path]);
  return fd == AT_FDCWD || path.starts_with('/') ? path : file_of(process, fd) + "/" + path;
}

class Tracer {
 public:
  explicit Tracer(char** words)
      : from_(words[0]), text_(words[1]), nth_(std::atol(words[2])), fault_(words[3]), log_(std::fopen(words[4], "w")) {
    if (log_ == nullptr) fail(words[4]);
  }

  // Traces until the program and all that it has started have ended: those that the tracer leaves would end with it.
  void trace() {
    for (int status = 0;;) {
      const pid_t thread = waitpid(-1, &status, __WALL);
      if (thread < 0) return;
      if (WIFEXITED(status) || WIFSIGNALED(status)) continue;
      const int event = status >> 16, number = WSTOPSIG(status);
      if (event == PTRACE_EVENT_SECCOMP) enter(thread);
      if (event == PTRACE_EVENT_STOP && number != SIGTRAP) {  // stopped, as by SIGSTOP: until SIGCONT
        ptrace(PTRACE_LISTEN, thread, 0, 0);
      } else {
        ptrace(PTRACE_CONT, thread, 0, event == 0 ? number : 0);
      }
    }
  }

 private:
  void enter(pid_t thread) {
    user_regs_struct is{};
    if (ptrace(PTRACE_GETREGS, thread, 0, &is) != 0) return;
    for (const Call& call : kCalls) {
      if (static_cast<long>(is.orig_rax) != call.number) continue;
      const std::string path = path_of(thread, call, {is.rdi, is.rsi, is.rdx, is.r10, is.r8, is.r9});
      begun_ = begun_ || path.find(from_) != std::string::npos;
      if (!begun_ || path.find(text_) == std::string::npos) return;
      std::fprintf(log_, "%s %s\n", call.name, path.c_str());
      std::fflush(log_);
      if (++calls_ != nth_) return;
      if (fault_ == "kill") {
        kill(thread, SIGKILL);
        return;
      }
      is.orig_rax = static_cast<unsigned long>(-1L);  // no call
      is.rax = static_cast<unsigned long>(-std::atol(fault_.c_str()));
      ptrace(PTRACE_SETREGS, thread, 0, &is);
    }
  }

  const std::string from_, text_;
  const long nth_;
  const std::string fault_;
  std::FILE* const log_;
  bool begun_ = false;
  long calls_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count < 7) {
    std::fprintf(stderr, "usage: fault_at_call FROM TEXT NTH FAULT LOG PROGRAM ARGUMENT...\n");
    return 2;
  }
  Tracer tracer(words + 1);
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) fail("pipe");
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  // This process becomes the program, because a rank looks at who its parent is, and a child of it is the tracer.
  const pid_t program = getpid(), tracing = fork();
  if (tracing < 0) fail("fork");
  if (tracing > 0) {
    char one = 0;
    close(ready[1]);
    if (read(ready[0], &one, 1) != 1) return 1;
    stop_at_calls();
    execvp(words[6], words + 6);
    fail(words[6]);
  }
  constexpr long kOptions = PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK |
                            PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL;
  if (ptrace(PTRACE_SEIZE, program, 0, kOptions) != 0) fail("ptrace");
  if (write(ready[1], "", 1) != 1) fail("write");
  tracer.trace();
  return 0;
}
