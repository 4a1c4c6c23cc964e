// See begun_collective.h.
#include "comm/c10d/begun_collective.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/checks.h"

namespace annulus::c10d_internal {

using namespace comm_internal;

bool Pending::over() const {
  return std::all_of(transfers.begin(), transfers.end(), [](const TransferPtr& transfer) { return transfer->done; });
}

void Pending::raise(const Communicator& comm) const {
  for (const TransferPtr& transfer : transfers) {
    if (!transfer->failure.empty()) throw_comm(label, describe(comm, *transfer) + " failed: " + transfer->failure);
    if (transfer->came.empty()) continue;
    throw_mismatch(label, describe_ranks(comm, {transfer->peer}) + " sent " + transfer->came + ", but " +
                              describe_ranks(comm, {comm.rank()}) + " expected " + transfer->expected);
  }
}

std::string Pending::describe_unfinished(const Communicator& comm) const {
  std::vector<TransferState> states;
  for (const TransferPtr& transfer : transfers) states.push_back(*transfer);
  return comm_internal::describe_unfinished(comm, states, collective);
}

BegunCollective::BegunCollective(const Communicator& comm, Sender& sender, Begun call, std::shared_ptr<Headers> headers)
    : comm_(comm), sender_(sender), call_(std::move(call)), headers_(std::move(headers)) {}

void BegunCollective::advance(bool first) noexcept {
  if (over()) return;
  try {
    if (stage_ == Stage::kAgreeing) {
      headers_->pending.raise(comm_);
      if (!headers_->pending.over()) return;
      require_same_headers(comm_, headers_->all, call_.label);
      stage_ = Stage::kAgreed;
    }
    if (!first) return;
    if (stage_ == Stage::kAgreed) {
      rounds_ = std::make_shared<Rounds>(comm_.rank(), comm_.hosts(), std::numeric_limits<int64_t>::max(), call_);
      stage_ = Stage::kMoving;
      post_steps();
    }
    while (done_ < rounds_->count()) {
      under_way_.front().raise(comm_);
      if (!under_way_.front().over()) return;
      under_way_.pop_front();
      rounds_->finish(done_++);
      post_steps();
    }
    stage_ = Stage::kComplete;
    call_.out = call_.in = at::Tensor();
    rounds_->drop();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

// Posts the steps that may be posted.
void BegunCollective::post_steps() {
  for (; posted_ < rounds_->count() && rounds_->needs(posted_) <= done_; ++posted_) {
    Pending& pending = under_way_.emplace_back();
    pending.label = call_.label;
    sender_.post(pending, rounds_->sends(posted_), rounds_->receives(posted_), rounds_);
  }
}

std::string BegunCollective::describe_unfinished() const {
  if (stage_ == Stage::kAgreeing) return headers_->pending.describe_unfinished(comm_);
  if (!under_way_.empty() && !under_way_.front().over()) return under_way_.front().describe_unfinished(comm_);
  return std::string(call_.name()) + ": not done, because an earlier collective of this communicator is not done";
}

std::vector<BegunPtr>& begun_collectives() {
  static auto& begun = *new std::vector<BegunPtr>;
  return begun;
}

void advance_all() {
  auto& begun = begun_collectives();
  std::vector<const Communicator*> busy;  // those with a collective that is not over
  for (const BegunPtr& collective : begun) {
    const bool first = std::find(busy.begin(), busy.end(), &collective->comm()) == busy.end();
    collective->advance(first);
    if (first && !collective->over()) busy.push_back(&collective->comm());
  }
  std::erase_if(begun, [](const BegunPtr& collective) { return collective->over(); });
}

}  // namespace annulus::c10d_internal
