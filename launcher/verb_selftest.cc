// annulus selftest: small jobs that show whether ranks start, print, exchange, fail and stop on this machine as they
// should. The integration tests of the launcher run them too.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "comm/launch_info.h"
#include "common/error.h"
#include "common/names.h"
#include "launcher/verb.h"

namespace annulus {
namespace {

volatile sig_atomic_t asked_to_stop = 0;
void on_stop(int) { asked_to_stop = 1; }

class SelftestVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("TEST", what_, "print, exit, fail, kill, hang, stop or spin")->required();
    app.add_option("--rank", rank_, "the rank that fails (exit, fail, kill; default: 0)")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--code", code_, "its exit code (exit; default: 1)")->check(CLI::Range(0, 255));
    app.add_option("--signal", signal_, "the signal that ends it (kill; default: 9)")->check(CLI::Range(1, 64));
    app.add_flag("--deaf", deaf_, "hang: ignore requests to stop");
    app.footer(
        "  print  every rank prints a line to standard output and one to standard error\n"
        "  exit   one rank leaves with --code, the others wait\n"
        "  fail   one rank raises an error, the others wait\n"
        "  kill   one rank is ended by --signal, the others wait\n"
        "  hang   every rank waits until it is ended\n"
        "  stop   every rank waits until it is asked to stop, and then leaves with exit code 130\n"
        "  spin   every rank prints a line ten times a second until it is asked to stop\n"
        "Example:\n  ./annulus launch -n 2 selftest print");
  }

  void check() override {
    index_of_name(what_, {"print", "exit", "fail", "kill", "hang", "stop", "spin"}, "test", "selftest");
  }

  int run() override {
    const LaunchInfo info = launch_info();
    if (what_ == "print") {
      std::array<char, 256> host{};
      gethostname(host.data(), host.size() - 1);
      std::printf("rank %d of %d on %s\n", info.rank, info.size, host.data());
      std::fflush(stdout);
      std::fprintf(stderr, "standard error of rank %d\n", info.rank);
      return 0;
    }
    if (what_ == "exit" && info.rank == rank_) return code_;
    if (what_ == "fail" && info.rank == rank_) {
      throw Error(ErrorKind::kInput, "selftest", "this rank was told to fail; nothing is wrong");
    }
    if (what_ == "kill" && info.rank == rank_) {
      std::fprintf(stderr, "rank %d ends itself with signal %d\n", info.rank, signal_);
      const rlimit none{0, 0};
      setrlimit(RLIMIT_CORE, &none);
      raise(signal_);
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
      // In pieces: a signal that comes between the test and the sleep is noticed at the next.
      const timespec piece{0, 100'000'000};
      nanosleep(&piece, nullptr);
    }
    std::printf("rank %d stops\n", info.rank);
    return 130;
  }

 private:
  std::string what_;
  int rank_ = 0;
  int code_ = 1;
  int signal_ = SIGKILL;
  bool deaf_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_selftest_verb() { return std::make_unique<SelftestVerb>(); }

}  // namespace annulus
