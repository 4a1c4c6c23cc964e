// See ranks_test.h.
#include "comm/testing/ranks_test.h"

#include <gtest/gtest-spi.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/testing/orders.h"
#include "comm/threads/threads.h"

namespace annulus::testing {
namespace {

Communicator*& world() {
  static Communicator* world = nullptr;
  return world;
}

Seconds deadline() {
  const char* const text = std::getenv("ANNULUS_TEST_DEADLINE");
  const double seconds = text == nullptr ? 0 : std::atof(text);
  return Seconds(seconds > 0 ? seconds : 20);
}

// Ends a rank whose ASSERT has failed, so that the others do not wait for it. Its failure is reported already.
class FailedAssertion final : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

// What one rank did.
struct RankResult {
  std::string failures;  // "ring_test.cc:31: Expected equality ..." for each
  std::string skipped;   // why the rank skipped the test
  std::exception_ptr raised;
};

// Runs the body of a test on this rank. Throws what it throws, and for a failed ASSERT.
void run_on_rank(Communicator& comm, const RankBody& body, RankResult& result) {
  ::testing::TestPartResultArray parts;
  try {
    // GoogleTest's own way to look at failures: those of this thread go into `parts`.
    const ::testing::ScopedFakeTestPartResultReporter caught(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &parts);
    body(comm);
  } catch (...) {
    result.raised = std::current_exception();
  }
  std::string fatal;
  for (int i = 0; i < parts.size(); ++i) {
    const ::testing::TestPartResult& part = parts.GetTestPartResult(i);
    if (part.skipped()) result.skipped += part.message();
    if (!part.failed()) continue;
    const std::string file = part.file_name() == nullptr ? "unknown file" : part.file_name();
    const std::string text = file + ":" + std::to_string(part.line_number()) + ": " + part.message();
    result.failures += text + "\n";
    if (part.fatally_failed() && fatal.empty()) fatal = text;
  }
  if (!result.raised && !fatal.empty()) result.raised = std::make_exception_ptr(FailedAssertion(fatal));
  if (result.raised) std::rethrow_exception(result.raised);
}

bool is_assertion(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const FailedAssertion&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string with_rank(int rank, int size, const std::string& text) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": " + text;
}

struct Outcome {
  std::string failures;  // of all ranks; empty if the test passed
  std::string skipped;
};

Outcome run_on_threads(int size, const RankBody& body, RankOrder* order) {
  std::vector<RankResult> results(static_cast<size_t>(std::max(size, 0)));
  std::exception_ptr first;
  try {
    run_ranks(
        size, [&](Communicator& comm) { run_on_rank(comm, body, results[static_cast<size_t>(comm.rank())]); }, at::kCPU,
        order);
  } catch (...) {
    first = std::current_exception();
  }
  Outcome out;
  bool named = false;
  for (int r = 0; r < size; ++r) {
    const RankResult& result = results[static_cast<size_t>(r)];
    if (!result.failures.empty()) out.failures += with_rank(r, size, result.failures);
    // Errors of the other ranks follow from the first.
    if (first && result.raised == first && !is_assertion(first)) {
      out.failures += with_rank(r, size, what_of(first)) + "\n";
    }
    named = named || result.raised == first;
    if (out.skipped.empty()) out.skipped = result.skipped;
  }
  if (first && !named) out.failures += what_of(first) + "\n";
  return out;
}

Outcome run_on_processes(int size, const RankBody& body) {
  Communicator& all = *world();
  all.set_timeout(deadline() + Seconds(20));  // a rank that has failed waits here for the others' deadline
  const std::unique_ptr<Communicator> comm = all.split(all.rank() < size ? 0 : -1, all.rank());
  RankResult mine;
  if (comm) {
    comm->set_timeout(deadline());
    try {
      run_on_rank(*comm, body, mine);
    } catch (...) {
      if (!is_assertion(mine.raised)) mine.failures += what_of(mine.raised) + "\n";
    }
  }
  Outcome out;
  const std::vector<std::string> failures = all_gather_text(all, mine.failures, {"results of a test", 0});
  for (int r = 0; r < size; ++r) {
    const std::string& text = failures[static_cast<size_t>(r)];
    if (!text.empty()) out.failures += with_rank(r, size, text);
  }
  out.skipped = mine.skipped;
  return out;
}

// Returns the numbers of ranks that can be run here.
std::vector<int> possible(const std::vector<int>& sizes) {
  if (world() == nullptr) return sizes;
  std::vector<int> out;
  std::copy_if(sizes.begin(), sizes.end(), std::back_inserter(out), [](int n) { return n <= world()->size(); });
  return out;
}

}  // namespace

void set_world(Communicator* of) { world() = of; }

void on_ranks(const std::vector<int>& sizes, const RankBody& body) {
  const std::vector<int> here = possible(sizes);
  if (here.empty()) {
    GTEST_SKIP() << "needs at least " << *std::min_element(sizes.begin(), sizes.end()) << " ranks, but "
                 << world()->size() << " were started";
  }
  std::string skipped;
  bool ran = false;
  for (const int size : here) {
    const Outcome outcome = world() == nullptr ? run_on_threads(size, body, nullptr) : run_on_processes(size, body);
    if (!outcome.failures.empty()) {
      ADD_FAILURE() << outcome.failures;
      return;
    }
    ran = ran || outcome.skipped.empty();
    skipped = outcome.skipped;
  }
  if (!ran) GTEST_SKIP() << skipped;
}

void in_orders(const std::vector<int>& sizes, int orders, const RankBody& body) {
  if (world() != nullptr) return on_ranks(sizes, body);
  const OrderSearch search = search_of_environment(orders);
  std::string skipped;
  bool ran = false;
  for (const int size : sizes) {
    const auto found = find_failing_order(
        [&](RankOrder& order) {
          const Outcome outcome = run_on_threads(size, body, &order);
          skipped = outcome.skipped;
          return outcome.failures;
        },
        search);
    if (!found) {
      ran = ran || skipped.empty();
      continue;
    }
    ADD_FAILURE() << found->failure << "on " << size << " ranks, in order " << found->tried << " of " << search.orders
                  << (found->order.switches.empty() ? ", without switches between ranks\n" : ", with these switches:\n")
                  << found->events
                  << (found->repeatable
                          ? "Repeat it with ANNULUS_TEST_ORDER='" + found->order.text() + "'\n"
                          : "The same order passed when it was run again: the outcome depends on more than "
                            "the order of events\n");
    return;
  }
  if (!ran) GTEST_SKIP() << skipped;
}

}  // namespace annulus::testing
