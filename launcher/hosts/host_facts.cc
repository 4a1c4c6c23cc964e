// See host_facts.h.
#include "launcher/hosts/host_facts.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pwd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#ifdef ANNULUS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include "comm/nccl/nccl_communicator.h"
#include "common/checksum.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "common/simd/instruction_set.h"
#include "common/version.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/network/network.h"
#include "launcher/topology/nvidia_driver.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

std::string link_target(const std::string& path) {
  std::error_code error;
  const fs::path target = fs::read_symlink(path, error);
  return error ? "" : target.string();
}

std::string user_name() {
  const passwd* const entry = getpwuid(geteuid());
  return entry != nullptr ? entry->pw_name : "user " + std::to_string(geteuid());
}

int64_t limit_of(__rlimit_resource resource, rlim_t rlimit::*which) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.*which == RLIM_INFINITY) return -1;
  return static_cast<int64_t>(limit.*which);
}

Space space_of(const std::string& path) {
  Space space{path};
  struct statvfs found {};
  if (statvfs(path.c_str(), &found) != 0) return space;
  space.free_bytes = static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_frsize);
  space.total_bytes = static_cast<int64_t>(found.f_blocks) * static_cast<int64_t>(found.f_frsize);
  space.writable = access(path.c_str(), W_OK | X_OK) == 0;
  return space;
}

// Whether the limit on locked memory does not apply to this process. That is so if it has the capability CAP_IPC_LOCK
// in the first user namespace; the kernel ignores one in a container's own user namespace.
bool locks_any_memory() {
  constexpr const char* kFirstUsers = "user:[4026531837]";  // PROC_USER_INIT_INO of Linux
  constexpr uint64_t kIpcLock = uint64_t{1} << 14;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("CapEff:")) continue;
    return (std::strtoull(line.c_str() + 7, nullptr, 16) & kIpcLock) != 0 &&
           link_target("/proc/self/ns/user") == kFirstUsers;
  }
  return false;
}

// The path of a library that this process has loaded and whose file name begins with `name`, or "" if there is none.
std::string loaded_library(std::string_view name) {
  struct Search {
    std::string_view name;
    std::string path;
  } search{name, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        const std::string_view path = info->dlpi_name;
        const size_t slash = path.rfind('/');
        if (!path.substr(slash == std::string_view::npos ? 0 : slash + 1).starts_with(search.name)) return 0;
        search.path = path;
        return 1;
      },
      &search);
  std::error_code error;
  const fs::path real = fs::weakly_canonical(search.path, error);
  return error || search.path.empty() ? search.path : real.string();
}

// The version in the files beside the library, in a wheel or an unpacked LibTorch; without such a file, the version
// that this program was compiled with.
std::string libtorch_version(const std::string& library) {
  const fs::path root = fs::path(library).parent_path().parent_path();
  std::ifstream python(root / "version.py");
  for (std::string line; std::getline(python, line);) {
    constexpr std::string_view kMark = "__version__ = '";
    if (line.starts_with(kMark)) return line.substr(kMark.size(), line.find('\'', kMark.size()) - kMark.size());
  }
  const std::string version = first_line(root / "build-version");
  return version.empty() ? TORCH_VERSION : version;
}

// The major version of the CUDA runtime that this LibTorch is linked to, "13"; "" for a LibTorch without CUDA. The
// files beside the library, which also say it, are missing in a copy of the libraries alone.
std::string cuda_of_libtorch(const std::string& libtorch) {
  if (libtorch.empty()) return "";
  std::ifstream in(fs::path(libtorch).parent_path() / "libc10_cuda.so", std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), {}};
  constexpr std::string_view kName = "libcudart.so.";
  const size_t at = content.find(kName);
  if (at == std::string::npos) return "";
  const size_t begin = at + kName.size();
  return content.substr(begin, content.find_first_not_of("0123456789", begin) - begin);
}

// The NCCL that belongs to this LibTorch, in a separate wheel or in the same folder; "" if there is none.
std::string nccl_beside(const std::string& libtorch) {
  if (libtorch.empty()) return "";
  const fs::path folder = fs::path(libtorch).parent_path();
  std::error_code error;
  for (const fs::path& path : {folder / "../../nvidia/nccl/lib/libnccl.so.2", folder / "libnccl.so.2"}) {
    if (const fs::path real = fs::canonical(path, error); !error) return real.string();
  }
  return "";
}

std::string mpi_library_version() {
  // Looked up by name, so that this folder and its tests need no MPI.
  using Ask = int (*)(char*, int*);
  const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "MPI_Get_library_version"));
  if (ask == nullptr) return "";
  std::array<char, 16384> text{};  // MPICH needs 8 KiB
  int length = 0;
  if (ask(text.data(), &length) != 0) return "";
  const std::string_view version(text.data());
  return std::string(version.substr(0, version.find(',')));  // "Open MPI v4.1.4, package: Debian OpenMPI, ..."
}

void add_mpi(HostReport& report) {
  report.mpi_library = mpi_library_version();
  try {
    const Mpirun mpirun = find_mpirun();
    report.mpirun = mpirun.path;
    report.mpirun_version = mpirun.version;
  } catch (const Error& error) {
    report.mpirun = error.message();
  }
}

void add_devices(HostReport& report) {
  report.hwloc_gpus = static_cast<int>(Machine::this_machine().gpus.size());
#ifdef ANNULUS_CUDA
  report.build_cuda = cuda_version_text(CUDART_VERSION);
#endif
  report.torch_cuda = cuda_of_libtorch(report.libtorch_path);
  report.nccl = nccl_version_built();
  report.nccl_loaded = nccl_version();
  report.nccl_path = loaded_library("libnccl.so");
  report.nccl_of_torch = nccl_beside(report.libtorch_path);
  report.driver = driver_version();
  report.driver_gpus = gpus_of_driver();
  report.driver_cuda = cuda_of_driver();
  report.peer_access = peer_access();
}

// Whether a process of this user may read another's memory with process_vm_readv, tried as Open MPI does it: between
// two processes that a third has started, of which the one that is read has permitted it (PR_SET_PTRACER). The children
// call only functions that are safe after a fork.
bool cma_works() {
  static volatile char word = 'x';  // has the same address in all three processes
  std::array<int, 2> ready{}, done{};
  if (pipe2(ready.data(), O_CLOEXEC) != 0) return false;
  if (pipe2(done.data(), O_CLOEXEC) != 0) {
    close(ready[0]), close(ready[1]);
    return false;
  }
  const pid_t target = fork();
  if (target == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    close(done[1]);
    char byte = 'r';
    if (write(ready[1], &byte, 1) == 1) {
      while (read(done[0], &byte, 1) < 0 && errno == EINTR) {
      }
    }
    _exit(0);
  }
  close(ready[1]), close(done[0]);
  char byte = 0;
  pid_t reader = -1;
  bool works = false;
  if (target > 0 && read(ready[0], &byte, 1) == 1) reader = fork();
  if (reader == 0) {
    char got = 0;
    const iovec local{&got, 1}, remote{const_cast<char*>(&word), 1};
    _exit(process_vm_readv(target, &local, 1, &remote, 1, 0) == 1 && got == 'x' ? 0 : 1);
  }
  const auto reap = [](pid_t child, int& status) {
    pid_t reaped;
    while ((reaped = waitpid(child, &status, 0)) < 0 && errno == EINTR) {
    }
    return reaped == child;
  };
  int status = 0;
  if (reader > 0 && reap(reader, status)) works = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  close(ready[0]), close(done[1]);
  if (target > 0) reap(target, status);
  return works;
}

// Whether this is a variable with which a user configures annulus, NCCL, UCX or MPI. Variables with which mpirun and
// `launch` identify a rank are excluded, because they differ between ranks, and so is the launcher's secret token.
bool is_of_interest(std::string_view name) {
  for (const std::string_view own : {"ANNULUS_SCRIPT", "ANNULUS_PROGRAM", "ANNULUS_LAUNCH", "ANNULUS_WORLD_SIZE",
                                     "ANNULUS_PROGRESS", "ANNULUS_COLUMNS"}) {
    if (name.starts_with(own)) return false;
  }
  for (const std::string_view word :
       {"CUDA_VISIBLE_DEVICES", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) {
    if (name == word) return true;
  }
  if (name.ends_with("_backing_directory")) return false;
  return name.starts_with("ANNULUS_") || is_of_openmp(name) || is_network_variable(name);
}

}  // namespace

double utc_now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string digest_of_file(const std::string& path) {
  constexpr off_t kWhole = off_t{64} << 20, kPart = off_t{1} << 20;
  const auto missing = [](int error) { return "missing: " + std::string(std::strerror(error)); };
  // O_NONBLOCK, because opening a FIFO without a writer would block.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return missing(errno);
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } const closer{fd};
  struct stat found {};
  if (fstat(fd, &found) != 0) return missing(errno);
  if (S_ISDIR(found.st_mode)) return "folder";
  if (!S_ISREG(found.st_mode)) return "no regular file";
  Checksum sum;
  std::vector<char> buffer(kPart);
  const auto add = [&](off_t from, off_t to) {
    while (from < to) {
      const ssize_t n = pread(fd, buffer.data(), std::min(buffer.size(), static_cast<size_t>(to - from)), from);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return false;
      if (n == 0) break;  // the file has become shorter
      sum.update(buffer.data(), n);
      from += n;
    }
    return true;
  };
  if (found.st_size <= kWhole) return add(0, found.st_size) ? sum.hex() : missing(errno);
  if (!add(0, kPart) || !add(found.st_size - kPart, found.st_size)) return missing(errno);
  return sum.hex() + " of the ends of " + std::to_string(found.st_size) + " bytes";
}

HostReport report_of_this_host(const FactsRequest& request) {
  HostReport report;
  utsname system{};
  uname(&system);
  report.name = system.nodename;
  report.kernel = system.release;
  report.architecture = system.machine;
  report.boot_id = first_line("/proc/sys/kernel/random/boot_id") + " " + link_target("/proc/self/ns/net") + " " +
                   link_target("/proc/self/ns/uts");
  report.user = user_name();
  report.root = geteuid() == 0;
  report.program = link_target("/proc/self/exe");
  report.program_digest = digest_of_file("/proc/self/exe");
  const fs::path manifest = fs::path(report.program).parent_path().parent_path() / "share" / "annulus" / "MANIFEST";
  std::error_code error;
  if (fs::is_regular_file(manifest, error)) report.folder_digest = digest_of_file(manifest);
  report.version = kVersion;
  report.isa = instruction_set_name(instruction_set());
  report.libtorch_path = loaded_library("libtorch_cpu.so");
  report.libtorch = libtorch_version(report.libtorch_path);
  add_mpi(report);
  // Ranks raise their number of files to the hard limit (launcher/launch/rank.cc).
  report.limits = {locks_any_memory() ? -1 : limit_of(RLIMIT_MEMLOCK, &rlimit::rlim_cur),
                   limit_of(RLIMIT_NOFILE, &rlimit::rlim_max), limit_of(RLIMIT_NPROC, &rlimit::rlim_cur)};
  const char* const tmp = std::getenv("TMPDIR");
  report.shm = space_of("/dev/shm");
  report.tmp = space_of(tmp != nullptr && *tmp != '\0' ? tmp : "/tmp");
  report.work = space_of(fs::current_path(error).string());
  if (!(std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> report.ptrace_scope)) report.ptrace_scope = -1;
  report.cma = cma_works();
  report.host = this_host();
  if (request.devices) add_devices(report);
  report.environment = variables_from_environment(is_of_interest);
  for (const std::string& file : request.files) report.files[file] = digest_of_file(file);
  report.clock_seconds = utc_now();
  return report;
}

}  // namespace annulus
