// The checks of one host. See host_checks.h; docs/how-to/clusters.md lists these checks.
#include "launcher/doctor/host_checks.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "common/text.h"

namespace annulus {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;

// The findings of one host, and values that several checks use.
class Checks {
 public:
  Checks(const HostReport& report, const CheckRequest& request, size_t i) : r_(report), request_(request) {
    ranks_here_ = i < request.ranks.size() ? request.ranks[i] : default_ranks(report);
    ranks_ = 0;
    for (const int ranks : request.ranks) ranks_ += ranks;
    ranks_ = std::max(ranks_, ranks_here_);
  }

  std::vector<Finding> all() {
    mpi();
    root();
    locked_memory();
    open_files();
    processes();
    shared_memory();
    space("temporary-space", r_.tmp, kGiB / 4, Severity::kError,
          "MPI and PyTorch keep files there: free some space, or name another folder with TMPDIR=/path");
    space("free-disk", r_.work, kGiB, Severity::kWarning,
          "runs and their checkpoints are written below the current folder: free some space, or name another folder "
          "with run.folder");
    hwloc_devices();
    cuda_driver();
    cuda_of_libtorch();
    devices();
    nccl();
    peer_access();
    interfaces();
    single_copy();
    for (Finding& finding : check_processors(r_, ranks_here_)) found_.push_back(std::move(finding));
    host_name();
    return std::move(found_);
  }

 private:
  // Whether the ranks of this host compute on GPUs.
  bool on_gpus() const { return r_.host.cuda && request_.device != "cpu" && !r_.host.machine.gpus.empty(); }

  void add(const char* check, Severity severity, std::string found, std::string remedy = "") {
    found_.push_back({check, severity, label_of(r_), std::move(found), std::move(remedy)});
  }
  void good(const char* check, std::string found) { add(check, Severity::kGood, std::move(found)); }

  std::string variable(const char* name) const { return variable_of(r_, name); }

  // "4.1" of "Open MPI v4.1.4" and of "4.1.4".
  static std::string series(const std::string& version) {
    const size_t digit = version.find_first_of("0123456789");
    if (digit == std::string::npos) return "";
    const size_t dot = version.find('.', digit);
    return version.substr(digit, dot == std::string::npos ? dot : version.find('.', dot + 1) - digit);
  }

  void mpi() {
    const char* const kCheck = "mpi";
    if (r_.mpirun_version.empty()) {
      // A host that has been discovered does not need mpirun itself, which runs on the launcher's host.
      add(kCheck, r_.listed.empty() ? Severity::kError : Severity::kWarning,
          r_.mpirun.empty() ? "no mpirun" : r_.mpirun,
          "install Open MPI 4.1 or newer (Debian, Ubuntu: apt-get install openmpi-bin), or name it with "
          "MPIRUN=/path/to/mpirun or MPI_HOME=/path");
    } else if (r_.mpi_library.empty()) {
      add(kCheck, Severity::kUnknown, "mpirun is Open MPI " + r_.mpirun_version + "; no MPI library is loaded",
          "run the program annulus itself, which loads one");
    } else if (!r_.mpi_library.starts_with("Open MPI") || series(r_.mpi_library) != series(r_.mpirun_version)) {
      add(kCheck, Severity::kError,
          "the MPI library of this program is " + r_.mpi_library + ", but " + r_.mpirun + " is Open MPI " +
              r_.mpirun_version,
          "use the mpirun of that library (MPIRUN=/path/to/mpirun, or MPI_HOME=/path), or build with the library of "
          "this mpirun (MPI_HOME=/path ./annulus version); if LD_LIBRARY_PATH names the library's folder, unset it");
    } else {
      good(kCheck, r_.mpi_library + ", " + r_.mpirun);
    }
  }

  void root() {
    const char* const kCheck = "root";
    const bool allow = variable("OMPI_ALLOW_RUN_AS_ROOT") == "1";
    const bool confirm = variable("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == "1";
    if (!r_.root) {
      good(kCheck, "user " + r_.user);
    } else if ((allow && confirm) || request_.by_launch) {
      good(kCheck, request_.by_launch ? "root: launch gives mpirun --allow-run-as-root"
                                      : "root, which both variables of Open MPI allow");
    } else {
      add(kCheck, Severity::kWarning,
          std::string("root; plain mpirun refuses that") +
              (allow || confirm ? ", and only one of its two variables is set" : ""),
          "work as an ordinary user; if there is only root, as in a container: OMPI_ALLOW_RUN_AS_ROOT=1 "
          "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or mpirun --allow-run-as-root (launch adds it by itself)");
    }
  }

  static std::string limit_text(int64_t limit) { return limit < 0 ? "unlimited" : with_commas(limit); }

  void locked_memory() {
    const char* const kCheck = "locked-memory";
    const int64_t limit = r_.limits.locked_bytes;
    const std::string text = limit < 0 ? "unlimited" : limit < kMiB ? std::to_string(limit >> 10) + " KiB" : mib(limit);
    const auto& nics = r_.host.machine.nics;
    const auto rdma = std::find_if(nics.begin(), nics.end(), [](const Nic& nic) { return nic.rdma && nic.active; });
    if (limit < 0 || rdma == nics.end()) {
      good(kCheck, text + (limit < 0 ? "" : "; no RDMA device needs more"));
      return;
    }
    // For `launch` this is only a warning, because a job may avoid that device with --hcas or use TCP.
    add(kCheck, limit < 64 * kMiB && !request_.by_launch ? Severity::kError : Severity::kWarning,
        text + ", but " + rdma->name + " locks the memory that it sends from and receives into",
        "ulimit -l unlimited before the start; permanently: \"* soft memlock unlimited\" and \"* hard memlock "
        "unlimited\" in /etc/security/limits.conf, LimitMEMLOCK=infinity for slurmd (and "
        "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf), docker run --ulimit memlock=-1");
  }

  void open_files() {
    const char* const kCheck = "open-files";
    const int64_t limit = r_.limits.open_files;
    // A rank may hold a connection to every other rank on several interfaces, and `launch` holds a few for each rank.
    const int64_t least = 128 + int64_t{4} * ranks_, plenty = 256 + int64_t{16} * ranks_;
    const std::string text = limit_text(limit) + " for each process";
    if (limit < 0 || limit >= plenty) return good(kCheck, text);
    add(kCheck, limit < least ? Severity::kError : Severity::kWarning,
        text + "; " + with_commas(plenty) + " are enough for " + counted(ranks_, "rank"),
        "ulimit -n " + std::to_string(std::max<int64_t>(plenty, 4096)) +
            " before the start; permanently: nofile in /etc/security/limits.conf, LimitNOFILE= for slurmd, docker run "
            "--ulimit nofile=65536");
  }

  void processes() {
    const char* const kCheck = "processes";
    const int64_t limit = r_.limits.processes;
    const int64_t plenty = 256 + int64_t{16} * ranks_here_ + r_.host.machine.cpus().size();
    if (limit < 0 || r_.root || limit >= plenty) {
      return good(kCheck, r_.root ? "no limit for root" : limit_text(limit) + " processes and threads of this user");
    }
    add(kCheck, Severity::kWarning,
        limit_text(limit) + " processes and threads of this user; " + counted(ranks_here_, "rank") + " may start " +
            with_commas(plenty),
        "ulimit -u " + std::to_string(std::max<int64_t>(plenty, 16384)) +
            " before the start; permanently: nproc in /etc/security/limits.conf, docker run --pids-limit=-1");
  }

  static std::string mib(int64_t bytes) { return with_commas(bytes / kMiB) + " MiB"; }

  void shared_memory() {
    const char* const kCheck = "shared-memory";
    const char* const kRemedy =
        "make it larger: mount -o remount,size=8G /dev/shm; docker run --shm-size=8g (or --ipc=host); in Kubernetes an "
        "emptyDir of medium Memory at /dev/shm; and remove files that dead jobs have left there";
    if (!r_.shm.writable) {
      return add(kCheck, Severity::kWarning,
                 "/dev/shm is missing or cannot be written: ranks of this host share files in " + r_.tmp.path +
                     " instead, which is slower",
                 "mount a tmpfs at /dev/shm that this user may write (mode 1777)");
    }
    // Open MPI takes 16 MiB for each rank (btl_vader_segment_size), and NCCL a few MiB for each of its channels to each
    // other GPU.
    const int64_t least = ranks_here_ * (on_gpus() ? 80 * kMiB : 16 * kMiB);
    const std::string text = mib(r_.shm.free_bytes) + " of " + mib(r_.shm.total_bytes) + " free in /dev/shm";
    if (r_.shm.free_bytes >= 2 * least) return good(kCheck, text);
    add(kCheck, r_.shm.free_bytes < least ? Severity::kError : Severity::kWarning,
        text + "; " + counted(ranks_here_, "rank") + " need about " + mib(least) +
            ", and end with a bus error if it is full",
        kRemedy);
  }

  void space(const char* check, const Space& space, int64_t least, Severity without, const char* remedy) {
    const std::string text = bytes_text(static_cast<double>(space.free_bytes)) + " free in " + space.path;
    if (!space.writable) {
      add(check, without, space.path + " is missing or cannot be written", remedy);
    } else if (space.free_bytes < least) {
      add(check, Severity::kWarning, text, remedy);
    } else {
      good(check, text);
    }
  }

  void hwloc_devices() {
    const char* const kCheck = "hwloc-devices";
    const std::string shown = "hwloc shows " + counted(r_.hwloc_gpus, "GPU");
    if (r_.driver_gpus < 0) {
      if (r_.hwloc_gpus == 0) return good(kCheck, "no GPU, and no NVIDIA driver");
      return add(kCheck, Severity::kWarning, shown + ", but there is no NVIDIA driver",
                 "install the driver (nvidia-smi shows whether it works); in a container: docker run --gpus all, with "
                 "NVIDIA's container toolkit on the host");
    }
    if (r_.driver_gpus > r_.hwloc_gpus) {
      return add(kCheck, Severity::kWarning,
                 shown + ", but the driver has " + std::to_string(r_.driver_gpus) +
                     ": where the others are connected is not known, and ranks may be placed far from their GPUs",
                 "let the container see /sys, and hwloc its PCI devices (HWLOC_COMPONENTS must not exclude pci; "
                 "`lstopo` should list the GPUs)");
    }
    if (r_.driver_gpus == 0 && r_.hwloc_gpus > 0) {
      return add(kCheck, Severity::kWarning, shown + ", but the driver gives this process none",
                 "docker run --gpus all; with Slurm: --gpus-per-node; otherwise look for a GPU fault with dmesg");
    }
    good(kCheck, shown + ", the driver has " + std::to_string(r_.driver_gpus));
  }

  // The major and minor number of a version: 13 and 0 for "13.0".
  static std::optional<std::pair<int, int>> numbers(const std::string& version) {
    std::pair<int, int> found;
    const char* const end = version.data() + version.size();
    const auto major = std::from_chars(version.data(), end, found.first);
    if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.') return std::nullopt;
    if (std::from_chars(major.ptr + 1, end, found.second).ec != std::errc()) return std::nullopt;
    return found;
  }

  void cuda_driver() {
    const char* const kCheck = "cuda-driver";
    const bool gpus = r_.driver_gpus > 0;
    if (r_.build_cuda.empty()) {
      if (!gpus) return good(kCheck, "neither a GPU's driver nor a build for CUDA");
      return add(kCheck, Severity::kWarning,
                 "a driver " + r_.driver + " with " + counted(r_.driver_gpus, "GPU") + ", but a build without CUDA",
                 "build with CUDA: ANNULUS_CUDA=1 ./annulus version (needs the CUDA toolkit, nvcc)");
    }
    if (!gpus) {
      // This is no fault: a host that only starts jobs may have a build for CUDA and no GPU.
      return good(kCheck, "built for CUDA " + r_.build_cuda + "; no driver shows a GPU");
    }
    const auto driver = numbers(r_.driver_cuda), build = numbers(r_.build_cuda);
    if (!driver || !build) {
      return add(
          kCheck, Severity::kUnknown,
          "driver " + r_.driver + ", whose libcuda.so.1 does not say which CUDA it supports",
          "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise install the driver's libraries");
    }
    const std::string text =
        "driver " + r_.driver + " supports CUDA " + r_.driver_cuda + ", built for CUDA " + r_.build_cuda;
    // Drivers also run programs built for a later minor version of the same major version (CUDA's "minor version
    // compatibility").
    if (driver->first >= build->first) return good(kCheck, text);
    add(kCheck, Severity::kError, text,
        "install a driver for CUDA " + std::to_string(build->first) +
            " or newer, or build against an older toolkit and a LibTorch for it");
  }

  void cuda_of_libtorch() {
    const char* const kCheck = "libtorch-cuda";
    if (r_.build_cuda.empty()) return good(kCheck, "a build without CUDA");
    const std::string text = "LibTorch " + r_.libtorch + " is for " +
                             (r_.torch_cuda.empty() ? "CPUs only" : "CUDA " + r_.torch_cuda) + ", built for CUDA " +
                             r_.build_cuda;
    const std::string major = r_.build_cuda.substr(0, r_.build_cuda.find('.'));
    if (r_.torch_cuda == major) return good(kCheck, text);
    add(kCheck, Severity::kError, text + " (" + r_.libtorch_path + ")",
        "load a LibTorch for CUDA " + major +
            ", without another one in LD_LIBRARY_PATH, or build against this one with a toolkit for its CUDA "
            "(LIBTORCH, "
            "CUDA_HOME)");
  }

  void devices() {
    const char* const kCheck = "devices";
    const size_t gpus = r_.host.machine.gpus.size();
    if (request_.device != "cuda") return good(kCheck, counted(gpus, "GPU"));
    if (r_.host.cuda && gpus >= static_cast<size_t>(ranks_here_)) {
      return good(kCheck, counted(gpus, "GPU") + " for " + counted(ranks_here_, "rank"));
    }
    add(kCheck, Severity::kError,
        "device \"cuda\" is requested, but " +
            (r_.host.cuda
                 ? counted(gpus, "GPU") + " cannot serve " + counted(ranks_here_, "rank") + ", which need one each"
                 : "ranks cannot compute on GPUs here"),
        "give this host fewer ranks, choose other hosts, or use device \"cpu\"; `annulus doctor` on this host shows "
        "what is missing");
  }

  void nccl() {
    const char* const kCheck = "nccl";
    if (r_.nccl.empty()) return good(kCheck, "a build without NCCL");
    const std::string text = "built for " + r_.nccl + ", loaded " + r_.nccl_loaded + " (" + r_.nccl_path + ")";
    const auto built = numbers(r_.nccl), loaded = numbers(r_.nccl_loaded);
    const std::string remedy =
        "remove the other NCCL from LD_LIBRARY_PATH and LD_PRELOAD, so that the NCCL of LibTorch is loaded";
    if (!built || !loaded) {
      add(kCheck, Severity::kUnknown, text, remedy);
    } else if (*loaded < *built || loaded->first != built->first) {
      add(kCheck, Severity::kError, text, remedy);
    } else if (!r_.nccl_of_torch.empty() && r_.nccl_of_torch != r_.nccl_path) {
      add(kCheck, Severity::kWarning, text + ", which is not LibTorch's own, " + r_.nccl_of_torch, remedy);
    } else {
      good(kCheck, text);
    }
  }

  void peer_access() {
    const char* const kCheck = "peer-access";
    if (r_.peer_access.size() < 2) {
      if (r_.driver_gpus > 1 && !r_.build_cuda.empty()) {
        return add(kCheck, Severity::kUnknown, "the driver's libnvidia-ml.so.1 does not say",
                   "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility");
      }
      return good(kCheck, "no two GPUs");
    }
    std::vector<std::string> without;
    for (size_t a = 0; a < r_.peer_access.size(); ++a) {
      for (size_t b = a + 1; b < r_.peer_access[a].size(); ++b) {
        if (!r_.peer_access[a][b]) without.push_back(std::to_string(a) + "-" + std::to_string(b));
      }
    }
    if (without.empty()) return good(kCheck, "between all GPUs");
    constexpr size_t kPairs = 6;
    const size_t count = without.size();
    without.resize(std::min(count, kPairs));
    add(kCheck, Severity::kWarning,
        "none between GPUs " + join(without, ", ") +
            (count > kPairs ? " and " + counted(count - kPairs, "more pair") : "") +
            ": what they send goes through the host's memory",
        "switch off the IOMMU and PCI ACS in the firmware or the kernel (iommu=pt), do not divide GPUs by MIG, and "
        "give a container all GPUs; `nvidia-smi topo -p2p r` shows the same. If NCCL hangs: NCCL_P2P_DISABLE=1");
  }

  const NetInterface* interface(const std::string& name) const {
    const auto& list = r_.host.interfaces;
    const auto it = std::find_if(list.begin(), list.end(), [&](const NetInterface& i) { return i.name == name; });
    return it == list.end() ? nullptr : &*it;
  }
  std::string interface_names() const {
    std::vector<std::string> names;
    for (const NetInterface& i : r_.host.interfaces) {
      if (i.up && !i.addresses.empty()) names.push_back(i.name);
    }
    return names.empty() ? "none with an address is up"
                         : join(names, ", ") + (names.size() == 1 ? " is up" : " are up");
  }

  // The reason why a named interface cannot be used, or "" if it can.
  std::string shortfall(const std::string& name) const {
    const NetInterface* const found = interface(name);
    if (found == nullptr) return "does not exist";
    if (!found->up) return "is down";
    return found->addresses.empty() ? "has no address" : "";
  }

  // The interfaces that a variable of NCCL or MPI lists, such as "=eth0,eth1". Empty if the variable excludes
  // interfaces ("^docker") or lists networks (10.0.0.0/8).
  static std::vector<std::string> names_in(std::string_view value) {
    if (value.starts_with('^') || value.empty()) return {};
    if (value.starts_with('=')) value.remove_prefix(1);
    std::vector<std::string> names;
    for (std::string& name : split(value, ',')) {
      if (!name.empty() && name.find('/') == std::string::npos) names.push_back(std::move(name));
    }
    return names;
  }

  void interfaces() {
    const char* const kCheck = "interfaces";
    std::vector<std::string> faults;
    for (const std::string& name : request_.interfaces) {
      if (const std::string why = shortfall(name); !why.empty()) faults.push_back(name + " " + why);
    }
    for (const char* variable_name :
         {"NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"}) {
      const std::string value = variable(variable_name);
      for (const std::string& name : names_in(value)) {
        // Without "=", NCCL accepts the beginning of a name.
        const bool begins = variable_name[0] == 'N' && value[0] != '=' &&
                            std::any_of(r_.host.interfaces.begin(), r_.host.interfaces.end(),
                                        [&](const NetInterface& i) { return i.name.starts_with(name) && i.up; });
        const std::string why = begins ? "" : shortfall(name);
        if (!why.empty()) faults.push_back(name + " (" + variable_name + ") " + why);
      }
    }
    if (!faults.empty()) {
      return add(kCheck, Severity::kError, join(faults, "; ") + "; " + interface_names(),
                 "name interfaces that all hosts have, with --interfaces, network.interfaces or these variables, or "
                 "name none (`ip address` lists them)");
    }
    const bool reaches = std::any_of(r_.host.interfaces.begin(), r_.host.interfaces.end(),
                                     [](const NetInterface& i) { return i.up && !i.loopback && !i.addresses.empty(); });
    if (!reaches && request_.ranks.size() > 1) {
      return add(kCheck, Severity::kError, "no interface but loopback is up, so no other host can be reached",
                 "bring one up (ip link set eth0 up; ip address add ADDRESS/24 dev eth0); in a container: docker run "
                 "--network=host");
    }
    good(kCheck, interface_names());
  }

  void single_copy() {
    const char* const kCheck = "single-copy";
    if (r_.cma) return good(kCheck, "ranks of this host may copy from one another's memory");
    add(kCheck, Severity::kWarning,
        "the kernel forbids process_vm_readv between processes of this user" +
            std::string(r_.ptrace_scope >= 2 ? " (kernel.yama.ptrace_scope is " + std::to_string(r_.ptrace_scope) + ")"
                                             : "") +
            ": other MPI programs then copy each message twice, as annulus does in any case",
        r_.ptrace_scope >= 2
            ? "sysctl kernel.yama.ptrace_scope=1 (3 lasts until the next boot)"
            : "in a container: docker run --cap-add=SYS_PTRACE, in Kubernetes securityContext.capabilities.add: "
              "[\"SYS_PTRACE\"]; if MPI warns about it: OMPI_MCA_btl_vader_single_copy_mechanism=none");
  }

  void host_name() {
    const char* const kCheck = "host-name";
    const auto first = [](const std::string& name) { return name.substr(0, name.find('.')); };
    if (!r_.listed.empty() && first(r_.listed) != first(r_.name) &&
        lower_case(first(r_.listed)) == lower_case(first(r_.name))) {
      return add(
          kCheck, Severity::kWarning,
          "its own name is " + r_.name + ": mpirun treats names that differ in upper and lower case as two hosts",
          "write " + r_.name + " in the list of hosts");
    }
    good(kCheck, r_.name);
  }

  const HostReport& r_;
  const CheckRequest& request_;
  int ranks_here_ = 1, ranks_ = 1;  // the ranks on this host and those of the job
  std::vector<Finding> found_;
};

}  // namespace

int default_ranks(const HostReport& report) {
  const Machine& machine = report.host.machine;
  const size_t parts = report.host.cuda && !machine.gpus.empty() ? machine.gpus.size() : machine.numa_nodes.size();
  return std::max(1, static_cast<int>(parts));
}

std::vector<Finding> check_host(const HostReport& report, const CheckRequest& request, size_t i) {
  return Checks(report, request, i).all();
}

}  // namespace annulus
