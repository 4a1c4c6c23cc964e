// annulus selftest: small jobs that show whether ranks start, print, exchange, fail and stop on this machine as they
// should. The integration tests of the launcher run them too.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap/launch_info.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "common/trace/beat.h"
#include "common/trace/recorder.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/start_job.h"

namespace annulus {
namespace {

volatile sig_atomic_t asked_to_stop = 0;
void on_stop(int) { asked_to_stop = 1; }

// Whether the signal's default action ends a process. The C library reserves the signals from 32 to SIGRTMIN - 1.
bool ends_a_process(int signal) {
  const std::array<int, 8> others = {SIGCHLD, SIGCONT, SIGURG, SIGWINCH, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU};
  if (signal > 31 && signal < SIGRTMIN) return false;
  return std::find(others.begin(), others.end(), signal) == others.end();
}

class SelftestSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("TEST", what_, "exchange, print, exit, fail, kill, hang, stall, stop or spin")->required();
    app.add_option("--rank", rank_, "for exit, fail, kill and stall: the rank that fails (default: 0)")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--code", code_, "for exit: the exit code of that rank (default: 1)")->check(CLI::Range(0, 255));
    app.add_option("--signal", signal_, "for kill: the signal that ends that rank (default: 9)")
        ->check(CLI::Range(1, 64));
    app.add_flag("--deaf", deaf_, "for hang: ignore requests to stop");
    app.footer(
        "  exchange  ranks send 1 MiB once around a ring, check what arrives, and compute a sum\n"
        "  print     every rank prints a line to standard output and one to standard error\n"
        "  exit      one rank exits with --code, the others wait\n"
        "  fail      one rank raises an error, the others wait\n"
        "  kill      one rank is ended by --signal, the others wait\n"
        "  hang      every rank waits until it is killed\n"
        "  stall     one rank computes for ever without progress, the others wait for it\n"
        "  stop      every rank waits until it is asked to stop, and then exits with code 130\n"
        "  spin      every rank prints a line ten times a second until it is asked to stop\n"
        "Example:\n  ./annulus launch -n 2 selftest exchange");
  }

  void check() override {
    index_of_name(what_, {"exchange", "print", "exit", "fail", "kill", "hang", "stall", "stop", "spin"}, "test",
                  "selftest");
    require_test("--rank", rank_.has_value(), {"exit", "fail", "kill", "stall"});
    require_test("--code", code_.has_value(), {"exit"});
    require_test("--signal", signal_.has_value(), {"kill"});
    require_test("--deaf", deaf_, {"hang"});
    if (signal_ && !ends_a_process(*signal_)) {
      throw Error(ErrorKind::kUsage, "selftest",
                  "--signal " + std::to_string(*signal_) + " (" + strsignal(*signal_) +
                      ") does not end a process, so the ranks would wait forever; use one that does, such as 9 or 15");
    }
  }

  int run() override {
    if (what_ == "exchange") return exchange();
    const LaunchInfo info = launch_info();
    if (what_ == "print") {
      std::array<char, 256> host{};
      gethostname(host.data(), host.size() - 1);
      std::printf("rank %d of %d on %s\n", info.rank, info.size, host.data());
      std::fflush(stdout);
      std::fprintf(stderr, "standard error of rank %d\n", info.rank);
      return 0;
    }
    const int failing = rank_.value_or(0), signal_number = signal_.value_or(SIGKILL);
    const bool one_ends = what_ == "exit" || what_ == "fail" || what_ == "kill" || what_ == "stall";
    if (const int ranks = info.launched ? info.size : 1; one_ends && ranks > 0 && failing >= ranks) {
      // Without this check, the ranks would wait forever.
      throw Error(ErrorKind::kUsage, "selftest",
                  "--rank " + std::to_string(failing) + ": there is no such rank, " +
                      (ranks == 1 ? "only rank 0" : "only ranks 0 to " + std::to_string(ranks - 1)));
    }
    if (what_ == "stall") stall(failing);
    if (what_ == "exit" && info.rank == failing) return code_.value_or(1);
    if (what_ == "fail" && info.rank == failing) {
      throw Error(ErrorKind::kInput, "selftest", "this rank was told to fail; nothing is wrong");
    }
    if (what_ == "kill" && info.rank == failing) {
      std::fprintf(stderr, "rank %d ends itself with signal %d\n", info.rank, signal_number);
      const rlimit none{0, 0};
      setrlimit(RLIMIT_CORE, &none);
      // The process may have inherited another action or a blocked signal.
      signal(signal_number, SIG_DFL);
      sigset_t blocked;
      sigemptyset(&blocked);
      sigaddset(&blocked, signal_number);
      sigprocmask(SIG_UNBLOCK, &blocked, nullptr);
      raise(signal_number);
    }
    if (what_ == "stop" || what_ == "spin") {
      struct sigaction action {};
      action.sa_handler = on_stop;
      for (const int s : {SIGUSR1, SIGTERM, SIGINT}) sigaction(s, &action, nullptr);
    }
    if (deaf_) {
      for (const int s : {SIGUSR1, SIGTERM, SIGINT}) signal(s, SIG_IGN);
    }
    std::printf("rank %d waits\n", info.rank);
    std::fflush(stdout);
    while (!asked_to_stop) {
      if (what_ == "spin") std::printf("still here\n");
      // Short sleeps, because a signal that arrives between the test and the sleep does not end that sleep.
      const timespec piece{0, 100'000'000};
      nanosleep(&piece, nullptr);
    }
    std::printf("rank %d stops\n", info.rank);
    return 130;
  }

 private:
  // Sends a tensor of each rank once around the ring and checks it at each hop.
  static int exchange() {
    Job job = start_job({});
    Communicator& world = *job.world;
    const int right = (world.rank() + 1) % world.size(), left = (world.rank() + world.size() - 1) % world.size();
    const at::Tensor own = at::full({1 << 17}, static_cast<double>(world.rank()), at::kDouble);
    at::Tensor held = own.clone();
    for (int hop = 0; hop < world.size(); ++hop) {
      at::Tensor next = at::empty_like(held);
      world.exchange({{held, right}}, {{next, left}}, {"selftest, ring", hop + 1, "hop"})->wait();
      held = next;
      const double from = (world.rank() + world.size() - 1 - hop) % world.size();
      if (!held.equal(at::full_like(held, from))) {
        throw Error(
            ErrorKind::kInternal, "selftest",
            "hop " + std::to_string(hop) + ": what came from rank " + std::to_string(left) + " is not what was sent");
      }
    }
    at::Tensor sum = at::ones({1}, at::kLong);
    world.all_reduce(sum, ReduceOp::kSum, {"selftest, sum", 0});
    if (sum.item<int64_t>() != world.size()) {
      throw Error(ErrorKind::kInternal, "selftest", "the ranks do not add up to " + std::to_string(world.size()));
    }
    if (world.rank() == 0) {
      std::printf("%s exchanged over %s: all arrived\n", counted(world.size(), "rank").c_str(),
                  std::string(world.backend()).c_str());
    }
    return 0;
  }

  // One rank makes no progress, as if its code did not end, and the others wait for it.
  [[noreturn]] static void stall(int failing) {
    Job job = start_job({});
    const ExpectProgress expected;
    for (int step = 1;; ++step) {
      beat_step(step);
      job.world->barrier({"selftest, barrier", step, "step"});
      if (step < 3 || job.rank != failing) continue;
      std::printf("rank %d stalls\n", job.rank);
      std::fflush(stdout);
      const TraceSpan span(TraceKind::kCompute, "stall");
      for (volatile bool stalls = true; stalls;) {
      }
    }
  }

  // Throws Error(kUsage) for an option that the chosen test does not have.
  void require_test(const std::string& option, bool given, const std::vector<std::string>& tests) const {
    if (!given || std::find(tests.begin(), tests.end(), what_) != tests.end()) return;
    std::string names;
    for (size_t i = 0; i < tests.size(); ++i) {
      names += (i == 0 ? "" : i + 1 == tests.size() ? " and " : ", ") + tests[i];
    }
    throw Error(ErrorKind::kUsage, "selftest",
                option + " is an option of " + names + ", and the test is " + what_ + "; leave it out");
  }

  std::string what_;
  std::optional<int> rank_, code_, signal_;
  bool deaf_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_selftest_subcommand() { return std::make_unique<SelftestSubcommand>(); }

}  // namespace annulus
