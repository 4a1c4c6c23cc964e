// Plans calls, and lets ranks agree on them; see planned_call.h.
#include "attention/execution/planned_call.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "attention/execution/call_checks.h"
#include "attention/execution/prove.h"
#include "common/error.h"
#include "common/text.h"
#include "common/trace/recorder.h"

namespace annulus {
namespace {

// Passes all that ranks must share in a call, beside its plan, to take(name, value).
template <typename Take>
void for_each_term(const AttentionCall& call, const TensorTraits& tensors, Take&& take) {
  take("call", std::string_view(call.label));
  take("proof of the plan", std::string_view(call.prove ? "asked for" : "not asked for"));
  take("dtype", std::string_view(toString(tensors.dtype)));
  take("head size", tensors.head_dim);
  take("scale", scale_of(call, tensors.head_dim));
  take("soft cap", call.softcap);
  take("sinks", std::string_view(call.sinks ? "given" : "none"));
  take("dropout", call.dropout.rate == 0 ? Dropout() : call.dropout);
  take("device", std::string_view(c10::DeviceTypeName(tensors.device)));
  take("kernel", to_string(call.kernel));
}

struct TakeWords {
  std::vector<uint64_t>& words;

  void operator()(const char*, std::string_view text) {
    const Digest d = annulus::digest(text.data(), text.size());
    words.insert(words.end(), {d.high, d.low});
  }
  void operator()(const char*, int64_t value) { words.push_back(static_cast<uint64_t>(value)); }
  void operator()(const char*, double value) { words.push_back(std::bit_cast<uint64_t>(value)); }
  void operator()(const char*, const Dropout& d) {
    words.insert(words.end(), {std::bit_cast<uint64_t>(d.rate), d.seed, static_cast<uint64_t>(d.step),
                               static_cast<uint64_t>(d.layer), static_cast<uint64_t>(d.first_row),
                               static_cast<uint64_t>(d.first_head)});
  }
};

struct TakeFields {
  std::vector<Field>& fields;

  void operator()(const char* name, std::string_view text) { fields.push_back({name, std::string(text)}); }
  void operator()(const char* name, int64_t value) { fields.push_back({name, std::to_string(value)}); }
  void operator()(const char* name, double value) { fields.push_back({name, exact(value)}); }
  void operator()(const char* name, const Dropout& d) {
    fields.push_back({name, d.rate == 0 ? "none"
                                        : exact(d.rate) + ", seed " + std::to_string(d.seed) + ", step " +
                                              std::to_string(d.step) + ", layer " + std::to_string(d.layer) +
                                              ", first row " + std::to_string(d.first_row)});
  }
};

Digest digest_of(const std::vector<uint64_t>& words) { return digest(words.data(), words.size() * sizeof words[0]); }

}  // namespace

TensorTraits traits_of(const at::Tensor& q) { return {q.scalar_type(), q.size(q.dim() - 1), q.device().type()}; }

PlannedCall::PlannedCall(AttentionCall call, std::function<void()> poll, std::shared_ptr<const RankPlan> plan)
    : state_(std::make_shared<State>()) {
  state_->settings = std::move(call);
  state_->poll = std::move(poll);
  state_->plan = std::move(plan);
  if (state_->settings.comm != nullptr) state_->kept = state_->settings.comm->weak_from_this().lock();
}

const AttentionCall& PlannedCall::settings() const {
  static const AttentionCall none;  // its lack of a communicator is an error
  return state_ ? state_->settings : none;
}

void PlannedCall::require_kept() const {
  if (settings().comm == nullptr || state_->kept) return;  // without one the call itself raises, on all ranks alike
  throw Error(ErrorKind::kUsage, "attention",
              settings().label + ": the backward needs the communicator, too; create it as a std::shared_ptr");
}

void PlannedCall::find_plan() const {
  const PlanRequest& request = settings().request;
  if (state_->plan) return;
  if (is_adaptive(request.pattern)) return validate(request);
  state_->plan = cached_plan(request, settings().comm->rank());
}

bool PlannedCall::asks_for_proof() const {
  if (!settings().prove || !state_->plan || state_->plan->proved) return false;
  const PlanningTime time;
  state_->plan->share();
  return true;
}

Digest PlannedCall::digest(const TensorTraits& tensors) const {
  if (state_->digested != tensors) {
    std::vector<uint64_t> words;
    if (state_->plan) {
      words = {state_->plan->digest.high, state_->plan->digest.low};
    } else {
      TakeWords{words}("plan", settings().request.text());
    }
    for_each_term(settings(), tensors, TakeWords{words});
    state_->digest = digest_of(words);
    state_->digested = tensors;
  }
  return state_->digest;
}

std::vector<Field> PlannedCall::fields(const TensorTraits& tensors) const {
  std::vector<Field> fields;
  for_each_term(settings(), tensors, TakeFields{fields});
  if (plan() && settings().request.schedule == ScheduleKind::kAuto) {
    fields.push_back({"chosen schedule", plan()->program.request.text()});
  }
  const bool selected = plan() && is_adaptive(settings().request.pattern);
  fields.insert(fields.begin() + 1, {"plan", settings().request.text()});
  if (selected) fields.insert(fields.begin() + 2, {"selected plan", plan()->program.request.text()});
  return fields;
}

PlannedCall PlannedCall::with(std::shared_ptr<const RankPlan> selected) const {
  PlannedCall call(settings(), poll(), std::move(selected));
  call.state_->agreed = state_->agreed;
  return call;
}

void plan_calls(const std::vector<PlannedCall>& calls, const TensorTraits& tensors, OpLabel label) {
  if (calls.empty()) return;
  const TraceSpan span(TraceKind::kPlanning, "agree on calls", label.operation);
  Communicator& comm = *calls.front().settings().comm;
  // The first call of each request, in their order, and so the same on all ranks once they have agreed.
  struct First {
    const PlannedCall* call;
    bool prove;  // whether any call of the request is to be proved
  };
  std::vector<First> firsts;
  const auto find = [&]() -> Agreed {
    std::vector<uint64_t> words;
    bool asks = false;
    for (const PlannedCall& call : calls) {
      const AttentionCall& settings = call.settings();
      if (settings.comm != &comm) {
        refuse(settings, "calls over different communicators cannot be agreed on together");
      }
      require_communicator(settings);
      auto first = std::find_if(firsts.begin(), firsts.end(),
                                [&](const First& other) { return other.call->settings().request == settings.request; });
      if (first == firsts.end()) {
        call.find_plan();
        // Requests that differ only in how a pattern is written are one to the ranks, which compare digests of texts.
        first = std::find_if(firsts.begin(), firsts.end(), [&](const First& other) {
          return call.plan() && other.call->plan() && call.plan()->digest == other.call->plan()->digest;
        });
      }
      if (first == firsts.end()) {
        first = firsts.insert(first, {&call, false});
      } else {
        call.state_->plan = first->call->plan();
      }
      first->prove = first->prove || settings.prove;
      asks = call.asks_for_proof() || asks;
      const Digest digest = call.digest(tensors);
      words.insert(words.end(), {digest.high, digest.low});
    }
    return {digest_of(words), asks};
  };
  const auto fields = [&] {
    std::vector<Field> all;
    for (size_t i = 0; i < calls.size(); ++i) {
      for (const Field& field : calls[i].fields(tensors)) {
        all.push_back({"call " + std::to_string(i + 1) + ", " + field.name, field.value});
      }
    }
    return all;
  };
  if (any_asks(comm, label, find, fields)) {
    for (const First& first : firsts) {
      if (first.prove && first.call->plan()) prove_together(*first.call->plan(), comm);
    }
  }
  for (const PlannedCall& call : calls) call.state_->agreed = tensors;
}

}  // namespace annulus
