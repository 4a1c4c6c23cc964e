// Measures operations between ranks: run_comm_bench of comm.h.
#include "benchmarks/comm/comm.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "benchmarks/measure.h"
#include "comm/hosts.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

double over_ranks(Communicator& world, double value, ReduceOp op) {
  at::Tensor t = at::tensor({value}, at::TensorOptions().dtype(at::kDouble));
  world.all_reduce(t, op, {"bench", 0});
  return t.item<double>();
}

void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) {
    throw Error(ErrorKind::kComm, "bench", std::string(call) + " failed with code " + std::to_string(code));
  }
}

// An operation to measure, by plain MPI (`raw`) and by annulus (`ours`) on the same tensors.
struct Operation {
  std::string name;
  int64_t bytes = 0;  // 0 for a barrier
  std::function<void()> raw, ours;
};

struct Costs {
  std::vector<double> wall, cpu;  // seconds of one operation: wall time of the slowest rank, CPU time of all ranks
};

class Bench {
 public:
  Bench(const CommBenchOptions& options, Communicator& world)
      : options_(options),
        world_(world),
        in_(at::zeros({world.size(), options.largest / 4}, at::kFloat)),
        out_(at::zeros({world.size(), options.largest / 4}, at::kFloat)) {
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &mpi_), "MPI_Comm_dup");
  }
  ~Bench() { MPI_Comm_free(&mpi_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // The operations of a part in the order of the table; none if these ranks have no such neighbours.
  std::vector<Operation> operations(const std::string& part) {
    if (part == "barrier") return {barrier()};
    std::vector<Operation> all;
    for (int64_t bytes = options_.smallest; bytes <= options_.largest; bytes *= 4) {
      const int64_t floats = bytes / 4;
      if (part.starts_with("exchange")) {
        const auto [to, from] = neighbours(part);
        if (to < 0) return {};
        all.push_back(exchange(part, floats, to, from));
      } else if (part == "all_gather") {
        all.push_back(all_gather(floats));
      } else if (part == "reduce_scatter") {
        all.push_back(reduce_scatter(floats));
      } else if (part == "all_reduce") {
        all.push_back(all_reduce(floats));
      } else {
        all.push_back(broadcast(floats));
      }
    }
    return all;
  }

  // Measures one turn, which repeats the operation so often that the resolution of the clock does not matter.
  void measure(const Operation& operation, const std::function<void()>& run, Costs& costs) {
    const int64_t times = std::clamp<int64_t>((16 << 20) / std::max<int64_t>(operation.bytes, 1), 1, 200);
    world_.barrier({"bench", 0});
    const double wall = wall_seconds(), cpu = cpu_seconds();
    for (int64_t i = 0; i < times; ++i) run();
    const double took = wall_seconds() - wall, used = cpu_seconds() - cpu;
    costs.wall.push_back(over_ranks(world_, took, ReduceOp::kMax) / static_cast<double>(times));
    costs.cpu.push_back(over_ranks(world_, used, ReduceOp::kSum) / static_cast<double>(times));
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

  at::Tensor rows(at::Tensor& of, int64_t floats) const {
    return of.view({-1}).narrow(0, 0, world_.size() * floats).view({world_.size(), floats});
  }
  static void* data(const at::Tensor& tensor) { return tensor.mutable_data_ptr(); }

  Operation barrier() {
    return {"barrier", 0, [this] { check_mpi(MPI_Barrier(mpi_), "MPI_Barrier"); },
            [this] {
              world_.barrier({"bench", 0});
            }};
  }

  Operation exchange(const std::string& name, int64_t floats, int to, int from) {
    const at::Tensor in = in_.view({-1}).narrow(0, 0, floats), out = out_.view({-1}).narrow(0, 0, floats);
    return {name, floats * 4,
            [this, in, out, to, from] {
              MPI_Request requests[2];
              const int count = static_cast<int>(in.numel());
              check_mpi(MPI_Irecv(data(out), count, MPI_FLOAT, from, 0, mpi_, &requests[0]), "MPI_Irecv");
              check_mpi(MPI_Isend(data(in), count, MPI_FLOAT, to, 0, mpi_, &requests[1]), "MPI_Isend");
              check_mpi(MPI_Waitall(2, requests, MPI_STATUSES_IGNORE), "MPI_Waitall");
            },
            [this, in, out, to, from] {
              world_.exchange({{in, to}}, {{out, from}}, {"bench", 0})->wait();
            }};
  }

  Operation all_gather(int64_t floats) {
    const at::Tensor in = in_.view({-1}).narrow(0, 0, floats), out = rows(out_, floats);
    return {"all_gather", floats * 4,
            [this, in, out] {
              const int count = static_cast<int>(in.numel());
              check_mpi(MPI_Allgather(data(in), count, MPI_FLOAT, data(out), count, MPI_FLOAT, mpi_), "MPI_Allgather");
            },
            [this, in, out] {
              at::Tensor to = out;
              world_.all_gather(to, in, {"bench", 0});
            }};
  }

  Operation reduce_scatter(int64_t floats) {
    const at::Tensor in = rows(in_, floats), out = out_.view({-1}).narrow(0, 0, floats);
    return {"reduce_scatter", floats * 4,
            [this, in, out] {
              check_mpi(MPI_Reduce_scatter_block(data(in), data(out), static_cast<int>(out.numel()), MPI_FLOAT, MPI_SUM,
                                                 mpi_),
                        "MPI_Reduce_scatter_block");
            },
            [this, in, out] {
              at::Tensor to = out;
              world_.reduce_scatter(to, in, {"bench", 0});
            }};
  }

  Operation all_reduce(int64_t floats) {
    const at::Tensor tensor = in_.view({-1}).narrow(0, 0, floats);
    return {"all_reduce", floats * 4,
            [this, tensor] {
              check_mpi(
                  MPI_Allreduce(MPI_IN_PLACE, data(tensor), static_cast<int>(tensor.numel()), MPI_FLOAT, MPI_SUM, mpi_),
                  "MPI_Allreduce");
            },
            [this, tensor] {
              at::Tensor all = tensor;
              world_.all_reduce(all, ReduceOp::kSum, {"bench", 0});
            }};
  }

  Operation broadcast(int64_t floats) {
    const at::Tensor tensor = in_.view({-1}).narrow(0, 0, floats);
    return {"broadcast", floats * 4,
            [this, tensor] {
              check_mpi(MPI_Bcast(data(tensor), static_cast<int>(tensor.numel()), MPI_FLOAT, 0, mpi_), "MPI_Bcast");
            },
            [this, tensor] {
              at::Tensor all = tensor;
              world_.broadcast(all, 0, {"bench", 0});
            }};
  }

  const CommBenchOptions& options_;
  Communicator& world_;
  at::Tensor in_, out_;
  MPI_Comm mpi_ = MPI_COMM_NULL;
};

std::string size_text(int64_t bytes) {
  if (bytes == 0) return "";
  if (bytes < (1 << 10)) return std::to_string(bytes) + " B";
  return bytes < (1 << 20) ? std::to_string(bytes >> 10) + " KiB" : std::to_string(bytes >> 20) + " MiB";
}

double least(const std::vector<double>& costs) { return *std::min_element(costs.begin(), costs.end()); }

// The goal: this share of plain MPI's speed, for exchanges of at least this many bytes.
constexpr double kShare = 0.95;
constexpr int64_t kGoalFrom = 1 << 20;

}  // namespace

std::vector<std::string> comm_bench_parts() {
  return {"barrier",    "exchange", "exchange inside hosts", "exchange between hosts", "all_gather", "reduce_scatter",
          "all_reduce", "broadcast"};
}

std::vector<BenchRatio> run_comm_bench(const CommBenchOptions& options, Communicator& world, std::ostream& out) {
  if (world.size() < 2) {
    throw Error(ErrorKind::kPlan, "bench",
                "messages need at least 2 ranks, but this job has 1; use `annulus launch -n 2 bench comm`");
  }
  Bench bench(options, world);
  for (const std::string& part : options.parts) {
    if (!bench.operations(part).empty()) continue;
    throw Error(ErrorKind::kPlan, "bench",
                "\"" + part + "\" needs several hosts with the same number of neighbouring ranks" +
                    (part == "exchange inside hosts" ? ", at least two on each" : "") + ", but these are " +
                    counted(world.size(), "rank") + " on " + counted(world.hosts().count(), "host"));
  }
  std::vector<BenchRatio> ratios;
  std::string settings = counted(world.size(), "rank");
  if (world.hosts().count() > 1) settings += " on " + counted(world.hosts().count(), "host");
  const auto print = [&](const char* format, auto... values) {
    char text[256];
    std::snprintf(text, sizeof text, format, values...);
    if (world.rank() == 0) out << text << std::flush;
  };
  print("%s; least of %lld turns, plain MPI and annulus one after the other; CPU: of all ranks together\n\n",
        settings.c_str(), static_cast<long long>(options.rounds));
  print("  %-22s  %8s  %10s  %10s  %7s  %13s  %12s  %12s\n", "", "", "MPI, us", "annulus, us", "GB/s", "share of MPI",
        "CPU us, MPI", "annulus");
  for (const std::string& part : options.parts.empty() ? comm_bench_parts() : options.parts) {
    for (const Operation& operation : bench.operations(part)) {
      Costs raw, ours, ignored;
      bench.measure(operation, operation.raw, ignored);
      bench.measure(operation, operation.ours, ignored);
      for (int64_t turn = 0; turn < options.rounds; ++turn) {
        if (turn % 2 == 0) bench.measure(operation, operation.raw, raw);
        bench.measure(operation, operation.ours, ours);
        if (turn % 2 == 1) bench.measure(operation, operation.raw, raw);
      }
      const double time = least(ours.wall);
      const bool goal = part.starts_with("exchange") && operation.bytes >= kGoalFrom;
      const std::string name = part + (operation.bytes > 0 ? " of " + size_text(operation.bytes) : "");
      ratios.push_back(
          ratio_of("comm/" + name, settings, ours.wall, raw.wall, goal ? std::optional(1 / kShare) : std::nullopt));
      print("  %-22s  %8s  %10.1f  %10.1f  %7.2f  %12.2f%s  %12.1f  %12.1f\n", part.c_str(),
            size_text(operation.bytes).c_str(), 1e6 * least(raw.wall), 1e6 * time,
            static_cast<double>(operation.bytes) / time / 1e9, least(raw.wall) / time, goal ? "*" : " ",
            1e6 * least(raw.cpu), 1e6 * least(ours.cpu));
    }
  }
  print("\n* the goal is a share of at least %.2f\n", kShare);
  return ratios;
}

}  // namespace annulus
