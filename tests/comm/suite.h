// One suite for every backend of Communicator. A backend's test file says how to run ranks and on which device; the
// tests are in suite_*.cc. Each test runs once per rank count; with one rank, exchanges are with oneself.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus::comm_test {

struct Backend {
  std::string name;
  at::Device device = at::kCPU;
  std::vector<int> sizes;  // rank counts to test with
  // Runs body on every rank of `size` that lives in this process, with a communicator that no earlier test has used.
  std::function<void(int size, const std::function<void(Communicator&)>& body)> run;
  // The text why nothing can be tested here; empty when all is well.
  std::string unavailable;
  bool large_rounds = false;  // sums travel in rounds as large as users have
};

// Defined by the backend's test file. Called after its main has set up what it needs.
Backend& backend();

// For ranks that are processes: the first test that fails on a rank ends that rank with exit code 1, so that the
// others, which may never hear of it again, need not wait for their deadlines. To be called after InitGoogleTest.
void leave_at_a_failure();

}  // namespace annulus::comm_test
