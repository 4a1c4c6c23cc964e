// annulus host: the process that host discovery (launcher/hosts/host_discovery.h) starts on each host. It is for
// internal use and is not listed by --help.
#include <CLI/CLI.hpp>

#include "launcher/hosts/host_discovery.h"
#include "launcher/subcommand.h"

namespace annulus {
namespace {

class HostSubcommand : public Subcommand {
 public:
  void declare(CLI::App&) override {}
  int run() override { return run_discovery_agent(); }
};

}  // namespace

std::unique_ptr<Subcommand> make_host_subcommand() { return std::make_unique<HostSubcommand>(); }

}  // namespace annulus
