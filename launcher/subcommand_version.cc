// annulus version: prints the version. Host discovery (launcher/hosts/host_discovery.h) also starts it on hosts that
// did not answer.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "common/version.h"
#include "launcher/subcommand.h"

namespace annulus {
namespace {

class VersionSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override { app.footer("Example:\n  ./annulus version"); }
  int run() override {
    std::printf("annulus %s\n", kVersion);
    return 0;
  }
};

}  // namespace

std::unique_ptr<Subcommand> make_version_subcommand() { return std::make_unique<VersionSubcommand>(); }

}  // namespace annulus
