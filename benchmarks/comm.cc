// `annulus bench comm`: the cost of communication between ranks compared with plain MPI on the same buffers, in turn
// within one run; with --start, how long a job takes to start.
#include <ATen/ops/zeros.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/launched.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "comm/bootstrap/launch_info.h"
#include "comm/hosts.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "runtime/data/dataset.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

void check_mpi(int code) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorKind::kComm, "bench", std::string("plain MPI failed: ") + text);
}

const std::vector<std::string> kParts = {
    "barrier",    "exchange", "exchange inside hosts", "exchange between hosts", "all_gather", "reduce_scatter",
    "all_reduce", "broadcast"};

// The goal: this share of plain MPI's speed, for exchanges of at least this many bytes.
constexpr double kMpiShare = 0.95;
constexpr int64_t kGoalFrom = 1 << 20;

constexpr OpLabel kLabel = {"bench", 0};

// An operation to measure, by plain MPI (`raw`) and by annulus (`ours`) on the same tensors. `bytes` are those of a
// message in an exchange, of one rank's piece in an all_gather or reduce_scatter, and of the whole tensor in an
// all_reduce or broadcast; 0 for a barrier.
struct Operation {
  int64_t bytes = 0;
  std::function<void()> raw, ours;
};

struct OperationCosts {
  std::vector<double> wall, cpu;  // seconds of one operation: wall time of the slowest rank, CPU time of all ranks
};

// Over a communicator over MPI that has all ranks in the order of MPI_COMM_WORLD.
class Operations {
 public:
  Operations(Communicator& world, int64_t smallest, int64_t largest)
      : world_(world),
        smallest_(smallest),
        largest_(largest),
        in_(at::zeros({world.size() * largest / 4}, at::kFloat)),
        out_(at::zeros({world.size() * largest / 4}, at::kFloat)) {
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &mpi_));
  }
  ~Operations() { MPI_Comm_free(&mpi_); }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  // The operations of a part in the order of the table; none if these ranks have no such neighbours.
  std::vector<Operation> of(const std::string& part) {
    if (part == "barrier") {
      return {{0, [this] { check_mpi(MPI_Barrier(mpi_)); }, [this] { world_.barrier(kLabel); }}};
    }
    const auto [to, from] = part.starts_with("exchange") ? neighbours(part) : std::pair(0, 0);
    if (to < 0) return {};
    std::vector<Operation> all;
    for (int64_t bytes = smallest_; bytes <= largest_; bytes *= 4) all.push_back(operation(part, bytes, to, from));
    return all;
  }

  // Measures one turn, which repeats the operation so often that the resolution of the clock does not matter.
  void measure(const Operation& operation, const std::function<void()>& run, OperationCosts& costs) {
    const int64_t times = std::clamp<int64_t>((16 << 20) / std::max<int64_t>(operation.bytes, 1), 1, 200);
    world_.barrier(kLabel);
    const double wall = wall_seconds(), cpu = cpu_seconds();
    for (int64_t i = 0; i < times; ++i) run();
    const double took = wall_seconds() - wall, used = cpu_seconds() - cpu;
    costs.wall.push_back(over_ranks(world_, {took}, ReduceOp::kMax)[0] / static_cast<double>(times));
    costs.cpu.push_back(over_ranks(world_, {used}, ReduceOp::kSum)[0] / static_cast<double>(times));
  }

 private:
  // The rank that this rank sends to and the one that it receives from; {-1, -1} on every rank if there are none.
  std::pair<int, int> neighbours(const std::string& part) const {
    const int size = world_.size(), rank = world_.rank();
    if (part == "exchange") return {(rank + 1) % size, (rank + size - 1) % size};
    // These parts need hosts with the same number of ranks each, numbered host by host.
    const RankHosts& hosts = world_.hosts();
    const int a_host = size / hosts.count();
    if (hosts.count() == 1 || a_host * hosts.count() != size) return {-1, -1};
    for (int r = 0; r < size; ++r) {
      if (hosts.of(r) != r / a_host) return {-1, -1};
    }
    const int first = rank / a_host * a_host, place = rank % a_host;
    if (part == "exchange between hosts") return {(rank + a_host) % size, (rank + size - a_host) % size};
    if (a_host == 1) return {-1, -1};
    return {first + (place + 1) % a_host, first + (place + a_host - 1) % a_host};
  }

  Operation operation(const std::string& part, int64_t bytes, int to, int from) {
    const int64_t n = bytes / 4, size = world_.size();
    const int count = static_cast<int>(n);
    at::Tensor in = in_.narrow(0, 0, n), out = out_.narrow(0, 0, n),
               all_in = in_.narrow(0, 0, size * n).view({size, n}),
               all_out = out_.narrow(0, 0, size * n).view({size, n});
    const auto data = [](const at::Tensor& tensor) { return tensor.mutable_data_ptr(); };
    if (part == "all_gather") {
      return {
          bytes,
          [=, this] { check_mpi(MPI_Allgather(data(in), count, MPI_FLOAT, data(all_out), count, MPI_FLOAT, mpi_)); },
          [=, this]() mutable { world_.all_gather(all_out, in, kLabel); }};
    }
    if (part == "reduce_scatter") {
      return {
          bytes,
          [=, this] { check_mpi(MPI_Reduce_scatter_block(data(all_in), data(out), count, MPI_FLOAT, MPI_SUM, mpi_)); },
          [=, this]() mutable { world_.reduce_scatter(out, all_in, kLabel); }};
    }
    if (part == "all_reduce") {
      return {bytes, [=, this] { check_mpi(MPI_Allreduce(MPI_IN_PLACE, data(in), count, MPI_FLOAT, MPI_SUM, mpi_)); },
              [=, this]() mutable { world_.all_reduce(in, ReduceOp::kSum, kLabel); }};
    }
    if (part == "broadcast") {
      return {bytes, [=, this] { check_mpi(MPI_Bcast(data(in), count, MPI_FLOAT, 0, mpi_)); },
              [=, this]() mutable { world_.broadcast(in, 0, kLabel); }};
    }
    return {bytes,
            [=, this] {
              MPI_Request requests[2];
              check_mpi(MPI_Irecv(data(out), count, MPI_FLOAT, from, 0, mpi_, &requests[0]));
              check_mpi(MPI_Isend(data(in), count, MPI_FLOAT, to, 0, mpi_, &requests[1]));
              check_mpi(MPI_Waitall(2, requests, MPI_STATUSES_IGNORE));
            },
            [=, this] {
              world_.exchange({{in, to}}, {{out, from}}, kLabel)->wait();
            }};
  }

  Communicator& world_;
  const int64_t smallest_, largest_;
  const at::Tensor in_, out_;
  MPI_Comm mpi_ = MPI_COMM_NULL;
};

std::string size_text(int64_t bytes) {
  if (bytes == 0) return "";
  if (bytes < (1 << 10)) return std::to_string(bytes) + " B";
  return bytes < (1 << 20) ? std::to_string(bytes >> 10) + " KiB" : std::to_string(bytes >> 20) + " MiB";
}

// The stages of a start: the process was created; its libraries were loaded and its command line was read; it had
// joined the job as a rank; the data and the model were ready; the first step was done.
enum StartStage : size_t { kProcess, kProgram, kJoined, kModel, kFirstStep, kStartStages };
// When a rank reached each stage, in seconds of CLOCK_MONOTONIC, which all processes of a host share.
using StartTimes = std::array<double, kStartStages>;

// The start of this process in seconds of CLOCK_MONOTONIC. /proc gives it in clock ticks since the boot.
double process_start() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // the program's name may contain spaces and parentheses
  std::string field;
  constexpr int kStart = 20;  // the number of the field "starttime", counted after the name
  for (int i = 0; i < kStart; ++i) fields >> field;
  const double since_boot = std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return wall_seconds() - (seconds_of(CLOCK_BOOTTIME) - since_boot);
}

// kProcess of this process, and the current time as kProgram.
StartTimes start_times_of_process() {
  StartTimes times{};
  times[kProcess] = process_start();
  times[kProgram] = wall_seconds();
  return times;
}

// Collective: makes a model of one layer and runs its first step. Rank 0 writes the times, each the latest of all
// ranks, to `path`; it raises Error(kResource) if it cannot.
void start_and_step(Communicator& world, StartTimes times, const std::string& path) {
  times[kJoined] = wall_seconds();
  const Config config = config_of({.layers = 1, .dim = 64, .heads = 2, .ffn = 128, .context = 256, .steps = 1});
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  Training training(config, world, data, at::kCPU);
  times[kModel] = wall_seconds();
  training.step();
  times[kFirstStep] = wall_seconds();
  const nlohmann::json latest = over_ranks(world, {times.begin(), times.end()}, ReduceOp::kMax);
  if (world.rank() == 0) write_atomically(FileSystem::real(), path, latest.dump() + "\n");
}

// Starts jobs of 2 and 8 ranks of `bench comm --start-times`, in turn, and prints the fastest start of each. `own` are
// the times of this process, the launcher. Returns the exit code of a job that failed, or 0.
int measure_starts(const StartTimes& own, int64_t rounds, std::ostream& out) {
  const ScratchFolder scratch;
  const std::string path = scratch.file("start.json");
  std::vector<std::pair<int, std::vector<double>>> fastest = {{2, {}}, {8, {}}};  // by the number of ranks
  for (int64_t round = 0; round < rounds; ++round) {
    for (auto& [ranks, stages] : fastest) {
      const double began = wall_seconds();
      if (const int code = launch_ranks(ranks, {"bench", "comm", "--start-times", path}); code != 0) return code;
      StartTimes times{};
      try {
        times = nlohmann::json::parse(read_small_file("bench", path)).get<StartTimes>();
      } catch (const nlohmann::json::exception& e) {
        throw Error(ErrorKind::kInput, "bench", path + " does not hold the times of a start: " + e.what());
      }
      // The seconds of each stage, and of all of them.
      std::vector<double> took = {times[kProcess] - began};
      for (size_t i = 1; i < kStartStages; ++i) took.push_back(times[i] - times[i - 1]);
      took.push_back(times[kFirstStep] - began);
      if (stages.empty() || took.back() < stages.back()) stages = took;
    }
  }
  out << line(
             "\nseconds from `launch` to the first step, of the last rank, the quickest of %lld starts; the launcher's "
             "own program took %.2f s to load\n\n",
             rounds, own[kProgram] - own[kProcess])
      << "  ranks  launch and mpirun  loading  joining  data, model  first step      all\n";
  for (const auto& [ranks, stages] : fastest) {
    out << line("  %5lld  ", ranks);
    for (const double& seconds : stages) out << line("%9.2f", seconds) << (&seconds == &stages.back() ? "\n" : "  ");
  }
  out.flush();
  return 0;
}

class CommBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--part", parts_, "measure only this: " + join(kParts, ", ") + "; default: all")
        ->check(CLI::IsMember(kParts));
    add(app, "--smallest", smallest_,
        "bytes of the smallest message, a multiple of 4; each is four times the one before");
    add(app, "--largest", largest_, "bytes of the largest message, at most 4 GiB");
    add(app, "--rounds,--repeats", rounds_, "turns that count");
    app.add_flag("--start", start_,
                 "measure instead the time from `launch` to the first step over 2 and 8 ranks, and its stages");
    app.add_option("--start-times", times_path_, "")->group("");  // for ranks of --start: the file to write
    for (const char* ignored : {"--part", "--smallest", "--largest", "--json"}) {
      app.get_option("--start")->excludes(app.get_option(ignored));
    }
    app.footer(
        "It starts 2 ranks itself if `launch` has not started them.\n"
        "Examples:\n  ./annulus bench comm\n  ./annulus bench comm --start");
  }

  void check() override {
    times_ = start_times_of_process();
    constexpr int64_t kMost = int64_t{4} << 30;  // plain MPI counts floats in an int
    if (smallest_ % 4 == 0 && largest_ >= smallest_ && largest_ <= kMost) return;
    throw Error(
        ErrorKind::kUsage, "bench",
        line("comm: expected a --smallest that is a multiple of 4, and a --largest of at least that and at most "
             "%lld bytes, but got %lld and %lld",
             kMost, smallest_, largest_));
  }

  std::optional<int> run_alone(std::ostream& out) override {
    if (!start_ || launch_info().launched) return std::nullopt;
    return measure_starts(times_, rounds_, out);
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    if (start_) {
      throw Error(ErrorKind::kUsage, "bench",
                  "comm --start starts its ranks itself; run it without launch: ./annulus bench comm --start");
    }
    if (!times_path_.empty()) {
      start_and_step(world, times_, times_path_);
      return {};
    }
    if (world.size() < 2) {
      throw Error(ErrorKind::kPlan, "bench",
                  "messages need at least 2 ranks, but this job has 1; use `annulus launch -n 2 bench comm`");
    }
    Operations operations(world, smallest_, largest_);
    for (const std::string& part : parts_) {
      if (!operations.of(part).empty()) continue;
      throw Error(ErrorKind::kPlan, "bench",
                  "\"" + part + "\" needs several hosts with the same number of neighbouring ranks" +
                      (part == "exchange inside hosts" ? ", at least two on each" : "") + ", but these are " +
                      counted(world.size(), "rank") + " on " + counted(world.hosts().count(), "host"));
    }
    std::vector<BenchRatio> ratios;
    std::string settings = counted(world.size(), "rank");
    if (world.hosts().count() > 1) settings += " on " + counted(world.hosts().count(), "host");
    const auto print = [&](const char* format, auto... values) {
      if (world.rank() == 0) out << line(format, values...) << std::flush;
    };
    print("%s; least of %lld turns, plain MPI and annulus one after the other; CPU: of all ranks together\n\n",
          settings, rounds_);
    print("  %-22s  %8s  %10s  %10s  %7s  %13s  %12s  %12s\n", "", "", "MPI, us", "annulus, us", "GB/s", "share of MPI",
          "CPU us, MPI", "annulus");
    for (const std::string& part : parts_.empty() ? kParts : parts_) {
      for (const Operation& operation : operations.of(part)) {
        OperationCosts raw, ours, ignored;
        operations.measure(operation, operation.raw, ignored);
        operations.measure(operation, operation.ours, ignored);
        for (int64_t turn = 0; turn < rounds_; ++turn) {
          if (turn % 2 == 0) operations.measure(operation, operation.raw, raw);
          operations.measure(operation, operation.ours, ours);
          if (turn % 2 == 1) operations.measure(operation, operation.raw, raw);
        }
        const double time = least(ours.wall);
        const bool goal = part.starts_with("exchange") && operation.bytes >= kGoalFrom;
        const std::string size = size_text(operation.bytes);
        ratios.push_back(ratio_of("comm/" + part + (size.empty() ? "" : " of " + size), settings, ours.wall, raw.wall,
                                  goal ? std::optional(1 / kMpiShare) : std::nullopt));
        print("  %-22s  %8s  %10.1f  %10.1f  %7.2f  %12.2f%s  %12.1f  %12.1f\n", part, size, 1e6 * least(raw.wall),
              1e6 * time, static_cast<double>(operation.bytes) / time / 1e9, least(raw.wall) / time, goal ? "*" : " ",
              1e6 * least(raw.cpu), 1e6 * least(ours.cpu));
      }
    }
    print("\n* the goal is a share of at least %.2f\n", kMpiShare);
    return ratios;
  }

 private:
  int64_t smallest_ = 1 << 10, largest_ = 64 << 20;  // bytes of a message
  int64_t rounds_ = 7;                               // one more runs first
  std::vector<std::string> parts_;                   // empty: all of them
  bool start_ = false;
  std::string times_path_;
  StartTimes times_{};
};

}  // namespace

std::unique_ptr<Benchmark> make_comm_benchmark() { return std::make_unique<CommBenchmark>(); }

}  // namespace annulus
