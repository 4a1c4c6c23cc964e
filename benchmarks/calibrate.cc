// `annulus bench calibrate`: writes the profile of this machine (calibration.h), by which `auto` then chooses.
#include <functional>
#include <string>

#include "benchmarks/benchmark.h"
#include "benchmarks/calibration.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

class CalibrateBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--out", out_, "the profile to write (default: it is printed)")->type_name("FILE");
    add(app, "--head-dim", settings_.head_dim, "head size");
    add(app, "--heads", settings_.heads, "heads of the tiles that are measured");
    add(app, "--seconds", settings_.seconds, "seconds of each measurement");
    app.add_option("--threads", threads_, "measure ranks that are threads of this process, not processes")
        ->check(CLI::Range(2, 1024));
    app.footer(
        "Examples:\n  ./annulus bench calibrate --out machine.toml\n"
        "  ./annulus plan --ranks 4 --length 65536 --heads 8 --machine ./machine.toml");
  }

  void check() override {
    if (!out_.empty()) require_output("bench", "--out " + out_, out_);
  }

  std::optional<int> run_alone(std::ostream& out) override {
    if (threads_ == 0) return std::nullopt;
    run_ranks(threads_, [&](Communicator& world) { measure(world, out, thread_cpu_seconds); });
    return 0;
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    measure(world, out, cpu_seconds);
    return {};
  }

 private:
  void measure(Communicator& world, std::ostream& out, const std::function<double()>& clock) {
    if (world.size() < 2) {
      throw Error(ErrorKind::kUsage, "bench",
                  "calibrate measures the link between ranks, but there is one rank: start two or more, or give "
                  "--threads 2");
    }
    const MachineProfile machine = calibrate(world, settings_, clock);
    if (world.rank() != 0) return;
    if (out_.empty()) {
      out << machine.text() << std::flush;
      return;
    }
    write_atomically(FileSystem::real(), out_, machine.text());
    out << "fp32: " << rounded(4 * machine.fp32->forward.rates.back().back() / 1e9, 1) << " GFLOP/s forward, "
        << rounded(10 * machine.fp32->backward.rates.back().back() / 1e9, 1)
        << " backward; link: " << rounded(machine.inside.bandwidth / 1e9, 2) << " GB/s, "
        << rounded(machine.inside.message * 1e6, 1) << " us a message -> " << out_ << std::endl;
  }

  CalibrationSettings settings_;
  std::string out_;
  int threads_ = 0;
};

}  // namespace

std::unique_ptr<Benchmark> make_calibrate_benchmark() { return std::make_unique<CalibrateBenchmark>(); }

}  // namespace annulus
