// annulus host: the process that host discovery (launcher/hosts/host_discovery.h) starts on each host. It is for
// internal use and is not listed by --help.
#include <CLI/CLI.hpp>

#include "launcher/hosts/host_discovery.h"
#include "launcher/verb.h"

namespace annulus {
namespace {

class HostVerb : public Verb {
 public:
  void declare(CLI::App&) override {}
  int run() override { return run_discovery_agent(); }
};

}  // namespace

std::unique_ptr<Verb> make_host_verb() { return std::make_unique<HostVerb>(); }

}  // namespace annulus
