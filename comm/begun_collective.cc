// See begun_collective.h.
#include "comm/begun_collective.h"

namespace annulus::comm_internal {

BegunCollective::BegunCollective(const Communicator& comm, Begun call, int64_t max_message)
    : comm_(comm), call_(std::move(call)), max_message_(max_message) {
  try {
    rounds_ = std::make_shared<Rounds>(comm_.rank(), comm_.hosts(), max_message_, call_);
  } catch (...) {
    refused_ = std::current_exception();
  }
}

// Messages may keep the rounds for longer.
BegunCollective::~BegunCollective() {
  if (complete_) rounds_->drop();
}

bool BegunCollective::advance() noexcept {
  if (over()) return false;
  try {
    if (!agreed_) {
      const std::vector<CollectiveHeader>* all = headers();
      if (all == nullptr) return false;
      require_same_headers(comm_, *all, call_.label);
      if (refused_) std::rethrow_exception(refused_);
      rounds_->begin();
      agreed_ = true;
    } else {
      if (!finish_step(done_)) return false;
      rounds_->finish(done_++);
    }
    for (; started_ < rounds_->count() && rounds_->needs(started_) <= done_; ++started_) {
      start_step(started_, rounds_->sends(started_), rounds_->receives(started_), rounds_);
    }
    if (done_ < rounds_->count()) return true;
    complete_ = true;
    call_.out = call_.in = at::Tensor();
    rounds_->end();
  } catch (...) {
    failure_ = std::current_exception();
  }
  return true;
}

bool BegunCollective::check() const {
  if (failure_) std::rethrow_exception(failure_);
  return complete_;
}

bool advance_all(BegunCollectives& begun) {
  bool advanced = false;
  for (const auto& collective : begun) advanced = collective->advance() || advanced;
  std::erase_if(begun, [](const auto& collective) { return collective->over(); });
  return advanced;
}

void abandon_all(BegunCollectives& begun, const Communicator& comm) {
  std::erase_if(begun, [&](const auto& collective) {
    if (&collective->comm() != &comm) return false;
    [[maybe_unused]] const auto* leaked = new std::shared_ptr<BegunCollective>(collective);
    return true;
  });
}

}  // namespace annulus::comm_internal
