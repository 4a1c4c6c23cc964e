// Runs the tests of annulus's own communicators on backend.h.
#include "backend.h"
#include "annulus/testing/contract.h"

namespace {

const bool registered = annulus::contract::register_backend([] {
  annulus::contract::Backend backend;
  backend.name = "staging";
  backend.sizes = {1, 2, 3};
  backend.run = [](int size, const std::function<void(annulus::Communicator&)>& body) {
    annulus::run_ranks(size, [&](annulus::Communicator& comm) {
      comm.set_timeout(annulus::Seconds(60));
      body(*staging(comm));
    });
  };
  return backend;
});

}  // namespace
