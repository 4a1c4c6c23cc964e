// Proving a plan once for all ranks, before any of them sends.
#include <exception>
#include <new>
#include <string>

#include "attention/execution/attention.h"
#include "attention/plan/verifier.h"
#include "common/error.h"

namespace annulus {

void prove_plan(const PlanRequest& request, Communicator& comm) {
  constexpr int kMostRanks = 128;
  if (request.ranks > kMostRanks || is_adaptive(request.pattern)) return;
  // What rank 0 found: the kind of error, and its text.
  std::string fault;
  const auto say = [&fault](ErrorKind kind, const std::string& text) {
    fault = std::to_string(static_cast<int>(kind)) + " " + text;
  };
  if (comm.rank() == 0) {
    try {
      const Proof proof = verify(request);
      if (!proof.holds()) {
        say(ErrorKind::kInternal,
            "the plan for " + request.text() + " is wrong: " + proof.faults[0] + "; please report it");
      }
    } catch (const Error& error) {
      say(error.kind(), error.what());
    } catch (const std::bad_alloc&) {
      say(ErrorKind::kResource, "not enough memory to prove the plan for " + request.text());
    } catch (const std::exception& error) {  // the others wait for this rank's word
      say(ErrorKind::kInternal, error.what());
    }
  }
  fault = all_gather_text(comm, fault, {"proving the plan", 0})[0];
  if (fault.empty()) return;
  const size_t space = fault.find(' ');
  std::string text = fault.substr(space + 1);
  const std::string room = "[plan] ";
  if (text.rfind(room, 0) == 0) text = text.substr(room.size());
  throw Error(static_cast<ErrorKind>(std::stoi(fault.substr(0, space))), "plan", text);
}

}  // namespace annulus
