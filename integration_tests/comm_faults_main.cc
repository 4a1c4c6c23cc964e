// A rank of a job that fails on purpose. comm_tests.bzl runs it under mpi_test, which checks the exit code and the one
// message of bootstrap or the communicator. --fault=NAME and --rank=R choose the fault and its rank. --backend=nccl
// sends over GPUs, or reports why it cannot.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "comm/bootstrap/bootstrap.h"
#include "comm/bootstrap/presence.h"
#include "comm/nccl/nccl_communicator.h"
#include "tests/comm/gpu_count.h"

namespace annulus {
namespace {

std::string argument(int argc, char** argv, const std::string& name) {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.rfind("--" + name + "=", 0) == 0) return text.substr(name.size() + 3);
  }
  return "";
}

// Whether a rank of this host has arrived, as seen by an observer with a rank number that no rank has.
bool has_come(int rank) {
  LaunchInfo info = launch_info();
  info.rank = info.size;
  const comm_internal::Presence eye(info);
  info.rank = rank;
  for (const int here : eye.seen().here) {
    if (here == rank) return true;
  }
  return false;
}

// A process that must end before this one, because mpirun's exit code is that of the first rank that failed.
pid_t first_to_end = 0;

void let_the_first_end() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (first_to_end != 0 && kill(first_to_end, 0) == 0 && std::chrono::steady_clock::now() < deadline) sched_yield();
}

int run(int argc, char** argv) {
  const std::string fault = argument(argc, argv, "fault");
  const LaunchInfo launch = launch_info();
  const bool mine = std::to_string(launch.rank) == argument(argc, argv, "rank");

  const bool nccl = argument(argc, argv, "backend") == "nccl";
  if (const std::string why = nccl ? comm_test::unavailable_to_processes(launch.local_size) : ""; !why.empty()) {
    if (launch.rank == 0) std::printf("SKIPPED: %s\n", why.c_str());
    return 0;
  }
  if (mine && fault == "blocked") {
    for (;;) pause();  // for example, a file system hangs
  }
  if (mine && fault == "killed") raise(SIGKILL);
  if (mine && fault == "exits") return 3;
  std::thread stopper;
  if (mine && fault == "stopped") {
    stopper = std::thread([rank = launch.rank] {
      while (!has_come(rank)) sched_yield();
      raise(SIGSTOP);
    });
    stopper.detach();
  }
  BootstrapOptions options;
  options.fingerprint = {
      {"version", mine && fault == "version" ? "0.2.0" : "0.1.0"},
      {"config", std::string("seed = 7\n[train]\nlr = ") + (mine && fault == "config" ? "0.2" : "0.1") + "\n"}};
  if (mine && fault == "device") options.device = "cuda";
  Job job = bootstrap(options);
  if (job.rank == 0) std::printf("bootstrapped %d ranks\n", job.size);
  if (job.rank == 0) std::printf("local %d of %d\n", job.local_rank, job.local_size);

  if (fault == "input") {
    job.run_together({"reading the text", 0}, [&] {
      if (mine) throw Error(ErrorKind::kInput, "data", "no such file: corpus.bin");
    });
  }
  if (fault == "plan") {
    job.run_together({"planning", 0}, [&] { throw Error(ErrorKind::kPlan, "plan", "3 heads over 2 ranks"); });
  }
  if (fault == "shape") {
    job.require_agreement({{"shape", mine ? "[1,64]" : "[1,128]"}}, {"attention forward", 12});
  }
  job.run_together({"nothing", 0}, [] {});
  if (fault == "throws later") {
    // Over NCCL the other ranks may learn of the error before the rank that throws has ended.
    at::Tensor pids = at::empty({job.size, 1}, at::kLong);
    job.world->all_gather(pids, at::full({1}, static_cast<int64_t>(getpid()), at::kLong), {"process numbers", 0});
    const int thrower = std::stoi(argument(argc, argv, "rank"));
    if (!mine) first_to_end = static_cast<pid_t>(pids[thrower].item<int64_t>());
  }
  std::shared_ptr<Communicator> gpus;
  at::TensorOptions floats = at::kFloat;
  if (nccl) {
    const int gpu = comm_test::gpu_of_process(job.local_rank, job.local_size);
    comm_test::use_gpu(gpu);
    gpus = make_nccl_communicator(*job.world, {.device = gpu, .timeout = Seconds(30)});
    floats = floats.device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
  }
  Communicator& comm = gpus ? *gpus : *job.world;
  if (fault == "stops before a sum") {
    comm.set_timeout(Seconds(1.5));
    for (int step = 1;; ++step) {
      if (mine && step == 6) raise(SIGSTOP);
      at::Tensor sum = at::zeros({4}, floats);
      comm.all_reduce(sum, ReduceOp::kSum, {"sum", step, "step"});
    }
  }
  if (fault == "stops in a gather") {
    // This rank has announced its call, so the others notice only because its data do not arrive.
    comm.set_timeout(Seconds(1.5));
    const at::Tensor weights = at::zeros({1000000}, floats), all = at::empty({job.size, 1000000}, floats);
    for (int step = 1;; ++step) {
      const auto work = comm.begin_all_gather(all, weights, {"weights of layer 3", step, "step"});
      if (mine && step == 6) raise(SIGSTOP);
      work->wait();
    }
  }
  // A ring that sends until the fault happens.
  at::Tensor held = at::zeros({100000}, floats);
  at::Tensor next = at::empty({100000}, floats);
  const bool endless = fault == "stops later" || fault == "killed later" || fault == "throws later";
  for (int step = 0; step < 20 || endless; ++step) {
    comm.set_timeout(Seconds(step == 0 && nccl ? 30 : 1.5));  // the first exchange connects
    if (mine && step == 5 && fault == "stops later") raise(SIGSTOP);
    if (mine && step == 5 && fault == "killed later") raise(SIGKILL);
    auto work = comm.exchange({{held, (job.rank + 1) % job.size}}, {{next, (job.rank + job.size - 1) % job.size}},
                              {"ring", step, "hop"});
    if (mine && step == 5 && fault == "throws later") throw Error(ErrorKind::kResource, "kernel", "out of memory");
    work->wait();
    while (!work->test()) sched_yield();  // on a GPU wait() does not block
    work.reset();
    std::swap(held, next);
  }
  const bool at_its_end = fault == "ends late" || fault == "stops at its end";
  comm.set_timeout(Seconds(at_its_end ? 5 : 30));  // NCCL must be ended, too
  comm.barrier({"the end", 0});
  if (mine && fault == "stops at its end") raise(SIGSTOP);
  if (mine && fault == "ends late") {
    // Longer than the others' deadline in MPI_Finalize, which is ANNULUS_BOOTSTRAP_TIMEOUT plus 10 s.
    const auto done = std::chrono::steady_clock::now() + std::chrono::seconds(17);
    std::this_thread::sleep_until(done);  // at work, but on no core that other tests need
    std::printf("the last one is done\n");
  }
  if (job.rank == 0) std::printf("finished\n");
  return 0;
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  try {
    return annulus::run(argc, argv);
  } catch (const annulus::ReportedError& e) {
    annulus::let_the_first_end();
    return e.exit_code();
  } catch (const annulus::Error& e) {
    annulus::let_the_first_end();
    std::fprintf(stderr, "%s (exit code %d)\n", e.what(), e.exit_code());
    return e.exit_code();
  }
}
