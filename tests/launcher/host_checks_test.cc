// Plants each fault that occurs in practice in the report of a healthy host, and tests what the checks report.
#include "launcher/doctor/host_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "common/version.h"

namespace annulus::host_checks_test {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

HostReport well(const std::string& name, int number) {
  HostReport r;
  r.name = r.listed = name;
  r.boot_id = "boot of " + name;
  r.user = "ada";
  r.program = "/opt/annulus/bin/annulus";
  r.program_digest = "0123456789abcdef";
  r.version = kVersion;
  r.architecture = "x86_64";
  r.isa = "AVX-512";
  r.libtorch = "2.11.0";
  r.mpi_library = "Open MPI v4.1.4";
  r.mpirun = "/usr/bin/mpirun";
  r.mpirun_version = "4.1.6";
  r.limits = {-1, 1048576, -1};
  r.shm = {"/dev/shm", 100 * kGiB, 100 * kGiB, true};
  r.tmp = {"/tmp", 100 * kGiB, 100 * kGiB, true};
  r.work = {"/home/ada", 100 * kGiB, 100 * kGiB, true};
  r.cma = true;
  r.host.machine = Machine::from_synthetic("pack:2 [numa] core:4 pu:2", name);
  r.host.interfaces = {{"eth0", true, false, 10000, {"10.0.0." + std::to_string(number) + "/24", "fe80::1/64"}, ""},
                       {"eth1", false, false, 0, {}, ""},
                       {"lo", true, true, 0, {"127.0.0.1/8"}, ""}};
  r.driver_gpus = -1;
  r.environment = {{"NCCL_DEBUG", "WARN"}};
  r.files = {{"a.toml", "00112233445566778899"}};
  return r;
}

// Returns the report of a healthy host with two GPUs and an RDMA device.
HostReport well_with_gpus(const std::string& name, int number) {
  HostReport r = well(name, number);
  for (const char* pci : {"0000:1b:00.0", "0000:1c:00.0"}) {
    Gpu gpu;
    gpu.pci = pci;
    gpu.model = "NVIDIA H200";
    r.host.machine.gpus.push_back(gpu);
  }
  Nic nic;
  nic.name = "mlx5_0";
  nic.rdma = true;
  r.host.machine.nics = {nic};
  r.host.cuda = true;
  r.hwloc_gpus = r.driver_gpus = 2;
  r.driver = "580.65.06";
  r.driver_cuda = r.build_cuda = "13.0";
  r.torch_cuda = "13";
  r.nccl = r.nccl_loaded = "2.28.9";
  r.nccl_path = r.nccl_of_torch = "/opt/annulus/lib/libnccl.so.2";
  r.peer_access = {{true, true}, {true, true}};
  return r;
}

const Finding& finding(const std::vector<Finding>& findings, const std::string& check) {
  const auto it = std::find_if(findings.begin(), findings.end(), [&](const Finding& f) { return f.check == check; });
  if (it == findings.end()) throw std::runtime_error("no finding of " + check);
  return *it;
}

void expect_all_good(const std::vector<Finding>& findings) {
  for (const Finding& f : findings) {
    EXPECT_EQ(f.severity, Severity::kGood) << f.check << ": " << f.found;
    EXPECT_TRUE(f.remedy.empty()) << f.check << ": " << f.remedy;
  }
}

struct Fault {
  std::string check;
  Severity severity;
  std::function<void(HostReport&, CheckRequest&)> plant;
  std::string found, remedy;  // parts of the finding's texts
};

TEST(HostChecks, HealthyHostsPass) {
  expect_all_good(check_host(well("a", 1), {}, 0));
  expect_all_good(check_host(well_with_gpus("a", 1), {{2}, {"eth0"}, "cuda"}, 0));
  expect_all_good(check_together({well("a", 1), well("b", 2), well("c", 3)}, {{2, 2, 2}}));
  EXPECT_TRUE(check_together({well("a", 1)}, {}).empty());
}

TEST(HostChecks, FindsEachFaultOfAHostAndItsRemedy) {
  const auto e = Severity::kError, w = Severity::kWarning, u = Severity::kUnknown;
  using R = HostReport;
  using Q = CheckRequest;
  const std::vector<Fault> faults = {
      {"mpi", e, [](R& r, Q&) { r.listed = r.mpirun_version = "", r.mpirun = "mpirun not found (looked at PATH)"; },
       "looked at PATH", "apt-get install openmpi-bin"},
      // A host that mpirun has reached.
      {"mpi", w, [](R& r, Q&) { r.mpirun_version = ""; }, "/usr/bin/mpirun", "MPIRUN="},
      {"mpi", e, [](R& r, Q&) { r.mpirun_version = "5.0.3"; }, "4.1.4, but /usr/bin/mpirun is Open MPI 5.0.3",
       "MPI_HOME="},
      {"mpi", e, [](R& r, Q&) { r.mpi_library = "MPICH Version: 4.1.4"; }, "MPICH", "LD_LIBRARY_PATH"},
      {"mpi", u, [](R& r, Q&) { r.mpi_library = ""; }, "no MPI library", "annulus"},
      {"root", w, [](R& r, Q&) { r.root = true; }, "plain mpirun refuses", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
      {"root", w, [](R& r, Q&) { r.root = true, r.environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"; },
       "only one of its two variables", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
      {"locked-memory", e, [](R& r, Q&) { r.limits.locked_bytes = 65536; }, "64 KiB, but mlx5_0",
       "ulimit -l unlimited"},
      {"locked-memory", w, [](R& r, Q&) { r.limits.locked_bytes = 4 * kGiB; }, "4,096 MiB", "LimitMEMLOCK=infinity"},
      {"locked-memory", w, [](R& r, Q& q) { r.limits.locked_bytes = 65536, q.by_launch = true; }, "64 KiB, but mlx5_0",
       "ulimit -l unlimited"},
      {"open-files", e, [](R& r, Q&) { r.limits.open_files = 100; }, "100 for each process", "ulimit -n"},
      {"open-files", w,
       [](R& r, Q& q) {
         r.limits.open_files = 1024, q.ranks = {2, 200};
       },
       "202 ranks", "ulimit -n 4096"},
      {"processes", w, [](R& r, Q&) { r.limits.processes = 100; }, "100 processes and threads", "ulimit -u"},
      // Docker's default size.
      {"shared-memory", e, [](R& r, Q&) { r.shm.free_bytes = r.shm.total_bytes = 64 << 20; },
       "64 MiB of 64 MiB free in /dev/shm; 2 ranks need about 160 MiB", "--shm-size"},
      {"shared-memory", w, [](R& r, Q& q) { r.shm.free_bytes = 40 << 20, q.device = "cpu"; }, "32 MiB", "remount"},
      {"shared-memory", w, [](R& r, Q&) { r.shm.writable = false; }, "/dev/shm is missing", "1777"},
      {"temporary-space", e, [](R& r, Q&) { r.tmp.writable = false; }, "/tmp is missing or cannot be written",
       "TMPDIR"},
      {"temporary-space", w, [](R& r, Q&) { r.tmp.free_bytes = 1000000; }, "1.0 MB free in /tmp", "TMPDIR"},
      {"free-disk", w, [](R& r, Q&) { r.work.free_bytes = 1000000; }, "1.0 MB free in /home/ada", "run.folder"},
      {"free-disk", w, [](R& r, Q&) { r.work.writable = false; }, "/home/ada is missing", "run.folder"},
      {"hwloc-devices", w, [](R& r, Q&) { r.hwloc_gpus = 0; }, "hwloc shows 0 GPUs, but the driver has 2", "/sys"},
      {"hwloc-devices", w, [](R& r, Q&) { r.driver_gpus = -1; }, "hwloc shows 2 GPUs, but there is no NVIDIA driver",
       "--gpus all"},
      {"hwloc-devices", w, [](R& r, Q&) { r.driver_gpus = 0; }, "gives this process none", "--gpus-per-node"},
      {"cuda-driver", e, [](R& r, Q&) { r.driver_cuda = "12.4"; }, "supports CUDA 12.4, built for CUDA 13.0",
       "install a driver for CUDA 13"},
      {"cuda-driver", u, [](R& r, Q&) { r.driver_cuda = ""; }, "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES"},
      {"cuda-driver", w, [](R& r, Q&) { r.build_cuda = ""; }, "a build without CUDA", "ANNULUS_CUDA=1"},
      {"libtorch-cuda", e, [](R& r, Q&) { r.libtorch = "2.11.0+cu126", r.torch_cuda = "12"; },
       "LibTorch 2.11.0+cu126 is for CUDA 12, built for CUDA 13.0", "LIBTORCH"},
      {"libtorch-cuda", e, [](R& r, Q&) { r.torch_cuda = ""; }, "is for CPUs only", "a LibTorch for CUDA 13"},
      {"devices", e, [](R&, Q& q) { q.device = "cuda", q.ranks = {3}; }, "2 GPUs cannot serve 3 ranks", "fewer ranks"},
      {"devices", e, [](R& r, Q& q) { q.device = "cuda", r.host.cuda = false; }, "cannot compute on GPUs here",
       "annulus doctor"},
      {"nccl", e, [](R& r, Q&) { r.nccl_loaded = "2.18.3"; }, "built for 2.28.9, loaded 2.18.3", "LD_LIBRARY_PATH"},
      {"nccl", w, [](R& r, Q&) { r.nccl_path = "/usr/lib/libnccl.so.2"; },
       "/usr/lib/libnccl.so.2), which is not LibTorch's own, /opt/annulus/lib/libnccl.so.2", "LD_PRELOAD"},
      {"nccl", u, [](R& r, Q&) { r.nccl_loaded = ""; }, "built for 2.28.9", "LD_LIBRARY_PATH"},
      {"peer-access", w, [](R& r, Q&) { r.peer_access[0][1] = r.peer_access[1][0] = false; }, "none between GPUs 0-1",
       "IOMMU"},
      {"peer-access", u, [](R& r, Q&) { r.peer_access.clear(); }, "libnvidia-ml.so.1", "NVIDIA_DRIVER_CAPABILITIES"},
      {"interfaces", e, [](R&, Q& q) { q.interfaces = {"ib0"}; }, "ib0 does not exist; eth0, lo are up",
       "--interfaces"},
      {"interfaces", e,
       [](R&, Q& q) {
         q.interfaces = {"eth0", "eth1"};
       },
       "eth1 is down", "--interfaces"},
      {"interfaces", e, [](R& r, Q&) { r.environment["NCCL_SOCKET_IFNAME"] = "=eth"; },
       "eth (NCCL_SOCKET_IFNAME) does not exist", "ip address"},
      {"interfaces", e, [](R& r, Q&) { r.environment["OMPI_MCA_btl_tcp_if_include"] = "eth0,wlan0"; },
       "wlan0 (OMPI_MCA_btl_tcp_if_include) does not exist", "ip address"},
      {"interfaces", e,
       [](R& r, Q& q) {
         r.host.interfaces.erase(r.host.interfaces.begin()), q.ranks = {1, 1};
       },
       "no interface but loopback", "--network=host"},
      {"single-copy", w, [](R& r, Q&) { r.cma = false; }, "process_vm_readv", "SYS_PTRACE"},
      {"single-copy", w, [](R& r, Q&) { r.cma = false, r.ptrace_scope = 2; }, "ptrace_scope is 2",
       "sysctl kernel.yama.ptrace_scope=1"},
      {"cores", w, [](R&, Q& q) { q.ranks = {9}; }, "8 cores for 9 ranks: ranks share cores", "taskset"},
      {"cores", w, [](R& r, Q&) { r.environment["OMP_NUM_THREADS"] = "16"; }, "makes 32 threads on 16 hardware threads",
       "unset OMP_NUM_THREADS"},
      {"cores", w, [](R& r, Q&) { r.host.machine.cpu_quota = 1.5; },
       "8 cores, of which the control group allows the time of 1.5, for 2 ranks: ranks share cores", "--cpus"},
      {"cores", w, [](R& r, Q&) { r.host.machine.cpu_quota = 4, r.environment["OMP_NUM_THREADS"] = "4"; },
       "makes 8 threads", "unset OMP_NUM_THREADS"},
      {"thread-waits", w, [](R& r, Q&) { r.environment["OMP_WAIT_POLICY"] = "active"; },
       "OMP_WAIT_POLICY=active: threads that wait keep their cores busy", "unset these"},
      {"thread-waits", w, [](R& r, Q&) { r.environment["GOMP_SPINCOUNT"] = "infinite"; }, "GOMP_SPINCOUNT=infinite",
       "unset these"},
      {"thread-waits", w, [](R& r, Q&) { r.environment["GOMP_SPINCOUNT"] = "100000"; }, "GOMP_SPINCOUNT=100000",
       "unset these"},
      {"cores", w, [](R& r, Q&) { r.host.machine.cpu_quota = 12, r.environment["OMP_NUM_THREADS"] = "8"; },
       "8 cores for 2 ranks, but", "unset OMP_NUM_THREADS"},
      {"host-name", w, [](R& r, Q&) { r.listed = "A.cluster"; }, "its own name is a: ", "write a in the list"},
  };
  for (const Fault& fault : faults) {
    HostReport report = well_with_gpus("a", 1);
    CheckRequest request;
    fault.plant(report, request);
    const std::vector<Finding> findings = check_host(report, request, 0);
    const Finding& found = finding(findings, fault.check);
    EXPECT_EQ(found.severity, fault.severity) << fault.check << ": " << found.found;
    EXPECT_EQ(found.host, label_of(report));
    EXPECT_NE(found.found.find(fault.found), std::string::npos) << fault.check << ": " << found.found;
    EXPECT_NE(found.remedy.find(fault.remedy), std::string::npos) << fault.check << ": " << found.remedy;
    EXPECT_EQ(found.kind, ErrorKind::kUnavailable);
    for (const Finding& f : findings) EXPECT_EQ(f.remedy.empty(), f.severity == Severity::kGood) << f.check;
  }
}

// The values are those that GNU's library takes.
TEST(HostChecks, ReadsSpinCountsWithSuffixes) {
  const auto severity = [](const char* spin_count) {
    HostReport report = well_with_gpus("a", 1);
    report.environment["GOMP_SPINCOUNT"] = spin_count;
    return finding(check_host(report, {}, 0), "thread-waits").severity;
  };
  for (const char* few : {"0", "99999", "1k", "10K", "99 k", " 5k "}) EXPECT_EQ(severity(few), Severity::kGood) << few;
  for (const char* many : {"100000", "100k", "100K", "1m", "1 M", "1g", "1T", "INFINITE", "infinity", "-1", "1000x"}) {
    EXPECT_EQ(severity(many), Severity::kWarning) << many;
  }
}

TEST(HostChecks, AcceptsHarmlessSettings) {
  using R = HostReport;
  using Q = CheckRequest;
  const std::vector<std::pair<std::string, std::function<void(R&, Q&)>>> cases = {
      {"locked-memory", [](R& r, Q&) { r.limits.locked_bytes = 65536, r.host.machine.nics.clear(); }},
      {"cores", [](R& r, Q&) { r.host.machine.cpu_quota = 4, r.environment["OMP_NUM_THREADS"] = "2"; }},
      {"thread-waits",
       [](R& r, Q&) { r.environment["OMP_WAIT_POLICY"] = "passive", r.environment["GOMP_SPINCOUNT"] = "1000"; }},
      {"root", [](R& r, Q& q) { r.root = q.by_launch = true; }},
      {"processes", [](R& r, Q&) { r.root = true, r.limits.processes = 100; }},
      {"cuda-driver", [](R& r, Q&) { r.driver_cuda = "13.1"; }},
      {"cuda-driver", [](R& r, Q&) { r.build_cuda = "13.2"; }},
      {"libtorch-cuda", [](R& r, Q&) { r.build_cuda = "13.2"; }},
      {"libtorch-cuda", [](R& r, Q&) { r.build_cuda = r.torch_cuda = ""; }},
      {"cuda-driver", [](R& r, Q&) { r.driver = r.driver_cuda = "", r.driver_gpus = -1; }},
      {"hwloc-devices", [](R& r, Q&) { r.hwloc_gpus = 8; }},  // a container shows the bus, but only two of its GPUs
      {"nccl", [](R& r, Q&) { r.nccl_loaded = "2.29.0"; }},
      {"interfaces", [](R& r, Q&) { r.environment["NCCL_SOCKET_IFNAME"] = "eth"; }},
      {"interfaces", [](R& r, Q&) { r.environment["NCCL_SOCKET_IFNAME"] = "^docker"; }},
      {"interfaces", [](R& r, Q&) { r.environment["OMPI_MCA_btl_tcp_if_include"] = "10.0.0.0/24"; }},
      {"interfaces", [](R& r, Q& q) { r.host.interfaces.erase(r.host.interfaces.begin()), q.ranks = {2}; }},
      {"host-name", [](R& r, Q&) { r.listed = "a.cluster"; }},
      {"host-name", [](R& r, Q&) { r.listed = "10.0.0.1"; }},
  };
  for (const auto& [check, plant] : cases) {
    HostReport report = well_with_gpus("a", 1);
    CheckRequest request;
    plant(report, request);
    const std::vector<Finding> findings = check_host(report, request, 0);
    EXPECT_EQ(finding(findings, check).severity, Severity::kGood) << check << ": " << finding(findings, check).found;
  }
}

// The fault is planted on the second of three hosts.
TEST(HostChecks, FindsEachFaultAmongHostsAndItsRemedy) {
  const auto e = Severity::kError, w = Severity::kWarning;
  using R = HostReport;
  using Q = CheckRequest;
  struct Together : Fault {
    ErrorKind kind = ErrorKind::kMismatch;
  };
  const auto lacking = ErrorKind::kUnavailable, plan = ErrorKind::kPlan;
  const std::vector<Together> faults = {
      {{"different-machines", e, [](R& r, Q&) { r.boot_id = "boot of a"; }, "a and b are names of one machine",
        "each machine once"},
       plan},
      {{"different-names", e, [](R& r, Q&) { r.name = "A"; }, "a and b both have the name A", "hostnamectl"}, plan},
      {{"same-version", e, [](R& r, Q&) { r.version = "9"; }, "annulus 9 on b", "annulus install"}},
      {{"same-architecture", e, [](R& r, Q&) { r.architecture = "aarch64"; }, "x86_64 on a, c; aarch64 on b",
        "leave out"}},
      {{"same-program", e, [](R& r, Q&) { r.program_digest = "ffff"; }, "ffff on b", "annulus install"}},
      {{"same-program", e, [](R& r, Q&) { r.folder_digest = "eeee"; }, "eeee on b", "annulus install"}},
      {{"same-libtorch", e, [](R& r, Q&) { r.libtorch = "2.10.0"; }, "2.10.0 on b", "LD_LIBRARY_PATH"}},
      {{"same-mpi", e, [](R& r, Q&) { r.mpi_library = "Open MPI v5.0.3"; }, "Open MPI v5.0 on b", "same series"}},
      {{"same-nccl", e, [](R& r, Q&) { r.nccl_loaded = "2.27.1"; }, "2.27.1 on b", "LD_LIBRARY_PATH"}},
      {{"same-driver", w, [](R& r, Q&) { r.driver = "535.1"; }, "535.1 on b", "same driver"}},
      {{"same-instructions", w, [](R& r, Q&) { r.isa = "AVX2"; }, "AVX2 on b", "ANNULUS_ISA=avx2,"}},
      {{"same-instructions", w, [](R& r, Q&) { r.isa = "AVX-512 BF16"; }, "BF16 on b", "ANNULUS_ISA=avx512,"}},
      {{"same-instructions", w, [](R& r, Q&) { r.isa = "AMX"; }, "AMX on b", "ANNULUS_ISA=avx512,"}},
      {{"same-instructions", w, [](R& r, Q&) { r.isa = "SSE4"; }, "SSE4 on b", "ANNULUS_ISA=baseline,"}},
      {{"same-instructions", w, [](R& r, Q&) { r.isa = "scalar"; }, "scalar on b", "no vector instructions in common"}},
      {{"same-devices", e, [](R& r, Q&) { r.host.cuda = false; }, "no GPUs that ranks can compute on on b",
        "device \"cpu\""}},
      {{"same-user", w, [](R& r, Q&) { r.user = "bob"; }, "bob on b", "same user"}},
      {{"same-environment", w, [](R& r, Q&) { r.environment["NCCL_DEBUG"] = "INFO"; }, "NCCL_DEBUG=INFO on b",
        "shell start-up files"}},
      {{"same-environment", w, [](R& r, Q&) { r.environment["NCCL_IB_HCA"] = "x"; }, "unset on a, c", "launch passes"},
       lacking},
      {{"same-files", e, [](R& r, Q&) { r.files["a.toml"] = "ff"; }, "a.toml: 001122334455 on a, c; ff on b",
        "shared file system"}},
      {{"same-files", e, [](R& r, Q&) { r.files["a.toml"] = "missing: No such file or directory"; },
        "missing: No such file or directory on b", "copy them"}},
      {{"clocks", w, [](R& r, Q&) { r.clock_offset = -90.5; }, "that of b is 90.5 s behind that of a", "chrony"}},
      {{"common-network", w,
        [](R& r, Q&) {
          r.host.interfaces[0].addresses = {"10.0.1.2/24", "fe80::1/64"};
        },
        "a and b, b and c have no network in common", "--interfaces"}},
      {{"common-network", w, [](R& r, Q& q) { q.interfaces = {"eth0"}, r.host.interfaces[0].name = "eth7"; },
        "have no network in common by eth0", "--interfaces"}},
      {{"different-addresses", w, [](R& r, Q&) { r.host.interfaces[0].addresses.push_back("10.0.0.1/24"); },
        "10.0.0.1 on a (eth0), b (eth0)", "--interfaces"}},
      {{"reachable", e, [](R& r, Q&) { r.unreachable = {"c at 10.0.0.3:5: Connection timed out"}; },
        "b does not reach c at 10.0.0.3:5: Connection timed out", "firewall"},
       lacking},
  };
  std::set<std::string> planted;
  for (const Together& fault : faults) {
    std::vector<HostReport> reports = {well_with_gpus("a", 1), well_with_gpus("b", 2), well_with_gpus("c", 3)};
    CheckRequest request;
    fault.plant(reports[1], request);
    const std::vector<Finding> findings = check_together(reports, request);
    const Finding& found = finding(findings, fault.check);
    EXPECT_EQ(found.severity, fault.severity) << fault.check << ": " << found.found;
    EXPECT_NE(found.found.find(fault.found), std::string::npos) << fault.check << ": " << found.found;
    EXPECT_NE(found.remedy.find(fault.remedy), std::string::npos) << fault.check << ": " << found.remedy;
    if (fault.severity == e) {
      EXPECT_EQ(found.kind, fault.kind) << fault.check;
    }
    planted.insert(fault.check);
  }
  for (const Finding& f : check_together({well("a", 1), well("b", 2)}, {}))
    EXPECT_TRUE(planted.count(f.check)) << f.check;
}

TEST(HostChecks, AcceptsHarmlessDifferencesButNoMissingFile) {
  std::vector<HostReport> reports = {well_with_gpus("a", 1), well_with_gpus("b", 2)};
  reports[1].program = "/elsewhere/annulus";
  reports[1].mpi_library = "Open MPI v4.1.6";
  reports[1].environment["CUDA_VISIBLE_DEVICES"] = "0,1";
  reports[1].clock_offset = 1.5;
  reports[1].clock_accuracy = 0.8;  // a slow network: the true offset may be less than 1 s
  reports[1].host.machine.gpus.pop_back();
  expect_all_good(check_together(reports, {}));
  reports[1].host.cuda = false;
  expect_all_good(check_together(reports, {{}, {}, "cpu"}));
  // A file that no host can read is an error, although the hosts do not differ.
  for (HostReport& r : reports) r.files["b"] = "missing: Permission denied";
  EXPECT_EQ(finding(check_together(reports, {}), "same-files").severity, Severity::kError);
}

// The clocks of the hosts are compared with each other, not with that of the launcher.
TEST(HostChecks, ComparesClocksOfHostsWithEachOther) {
  std::vector<HostReport> reports = {well("a", 1), well("b", 2), well("c", 3)};
  for (HostReport& r : reports) r.clock_offset = 40;
  EXPECT_EQ(finding(check_together(reports, {}), "clocks").severity, Severity::kGood);
  reports[0].clock_offset = 0.7;
  reports[1].clock_offset = 0;
  reports[2].clock_offset = -0.7;
  EXPECT_EQ(finding(check_together(reports, {}), "clocks").found, "that of c is 1.4 s behind that of a");
  reports[2].clock_accuracy = 0.5;
  EXPECT_EQ(finding(check_together(reports, {}), "clocks").severity, Severity::kGood);
}

// Networks are compared bit by bit: 10.0.0.70 and 10.0.0.130 share a network with the prefix /24, but not with /26.
TEST(HostChecks, ComparesNetworksByPrefix) {
  const auto severity = [](const std::string& a, const std::string& b) {
    std::vector<HostReport> reports = {well("a", 1), well("b", 2)};
    reports[0].host.interfaces[0].addresses = {a};
    reports[1].host.interfaces[0].addresses = {b};
    return finding(check_together(reports, {}), "common-network").severity;
  };
  EXPECT_EQ(severity("10.0.0.70/24", "10.0.0.130/24"), Severity::kGood);
  EXPECT_EQ(severity("10.0.0.70/26", "10.0.0.130/26"), Severity::kWarning);
  EXPECT_EQ(severity("2001:db8::1/64", "2001:db8::2/64"), Severity::kGood);
  EXPECT_EQ(severity("2001:db8::1/64", "2001:db8:1::2/64"), Severity::kWarning);
  EXPECT_EQ(severity("fe80::1/64", "fe80::2/64"), Severity::kWarning);
  EXPECT_EQ(severity("10.0.0.1/999", "nonsense"), Severity::kWarning);
}

TEST(HostChecks, FormatsDifferencesAsTable) {
  std::vector<HostReport> reports = {well("a", 1), well("b", 2), well("c", 3)};
  EXPECT_EQ(difference_table(reports), "");
  reports[1].libtorch = "2.10.0";
  reports[2].environment.clear();
  EXPECT_EQ(difference_table(reports),
            "              a       b       c\n"
            "  LibTorch    2.11.0  2.10.0  2.11.0\n"
            "  NCCL_DEBUG  WARN    WARN    unset\n");
  for (int i = 4; i < 40; ++i) reports.push_back(well("node" + std::to_string(i), i));
  EXPECT_EQ(difference_table(reports),
            "  LibTorch    2.11.0 on a, c, node4, node5 and 34 more; 2.10.0 on b\n"
            "  NCCL_DEBUG  WARN on a, b, node4, node5 and 34 more; unset on c\n");
}

TEST(HostChecks, FormatsFindingsAsTableAndJson) {
  const std::vector<Finding> findings = {
      {"mpi", Severity::kGood, "a", "fine", ""},
      {"cores", Severity::kWarning, "a", "2 for 3", "do it"},
      {"cores", Severity::kWarning, "b", "2 for 3", "do it"},
      {"shared-memory", Severity::kError, "b", "none", "mount it"},
      {"clocks", Severity::kGood, "", "less", ""},
  };
  EXPECT_EQ(findings_table(findings, false),
            "  error    shared-memory  b: none\n"
            "                          -> mount it\n"
            "  warning  cores          a, b: 2 for 3\n"
            "                          -> do it\n");
  EXPECT_NE(findings_table(findings, true).find("  good     clocks         less\n"), std::string::npos);
  const nlohmann::json json = findings_json(findings);
  ASSERT_EQ(json.size(), findings.size());
  EXPECT_EQ(json[3], nlohmann::json({{"check", "shared-memory"},
                                     {"severity", "error"},
                                     {"host", "b"},
                                     {"found", "none"},
                                     {"remedy", "mount it"}}));
}

}  // namespace
}  // namespace annulus::host_checks_test
