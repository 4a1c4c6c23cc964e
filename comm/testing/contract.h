// The contract of Communicator (comm/communicator.h) as tests with GoogleTest, for every backend of it, annulus's own
// and yours. A test program registers its backend, which says how ranks are run and on which device; the tests are in
// contract_*.cc and link themselves in. Each runs once for each number of ranks that it can say something about. A
// single rank exchanges with itself.
//
//   const bool registered = annulus::contract::register_backend([] {
//     annulus::contract::Backend backend;
//     backend.name = "mine";
//     backend.sizes = {1, 2, 3};
//     backend.run = [](int size, const std::function<void(annulus::Communicator&)>& body) { ... };
//     return backend;
//   });
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus::contract {

struct Backend {
  std::string name;
  at::Device device = at::kCPU;
  std::vector<int> sizes;  // numbers of ranks to test with
  // Runs body on each of the `size` ranks that are in this process, with a communicator that no earlier test has used.
  std::function<void(int size, const std::function<void(Communicator&)>& body)> run;
  // Why the backend cannot be tested here; empty if it can.
  std::string unavailable;
  bool large_rounds = false;  // sums are split into rounds of the default size
  bool lends = false;         // ranks of one host lend memory to each other
  // Why there are no sizes above 1 here; empty if that is no fault of the machine.
  std::string alone = "";
};

// Sets the backend of this test program, before InitGoogleTest(), which calls `make` once. Returns true, so that it can
// initialize a variable of the program.
bool register_backend(std::function<Backend()> make);

// For ranks that are processes: the first test that fails on a rank ends that rank with exit code 1, so that the other
// ranks, which might never hear from it again, need not wait for their deadlines. Call after InitGoogleTest.
void leave_at_a_failure();

}  // namespace annulus::contract
