// Makes the report of a plan; see plan_report.h.
#include "attention/execution/plan_report.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "attention/pattern/pattern.h"
#include "attention/plan/tilings.h"
#include "attention/plan/time.h"
#include "attention/plan/traffic.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<PlanCost> costs(const std::vector<Traffic>& ranks, int64_t head_dim, int64_t element_bytes) {
  const RowBytes rows{head_dim, element_bytes};
  std::vector<PlanCost> costs;
  const auto add = [&](const char* key, const char* name, bool bytes, int64_t scale, auto value) {
    const auto less = [&](const Traffic& a, const Traffic& b) { return value(a) < value(b); };
    const auto [least, most] = std::minmax_element(ranks.begin(), ranks.end(), less);
    costs.push_back({key, name, bytes, static_cast<double>(scale) * static_cast<double>(value(*least)),
                     static_cast<double>(scale) * static_cast<double>(value(*most))});
  };
  const auto row = [&](BufferKind kind) { return rows.of(kind, ranks[0].backward); };
  // Rows of K and of V, and of dK and of dV, are counted separately.
  const int64_t kv = row(BufferKind::kKV) / 2, grad = row(BufferKind::kGrad) / 2;
  add("messages_sent", "messages sent", false, 1, [](const Traffic& t) { return t.messages(); });
  add("kv_bytes_sent", "keys and values sent", true, kv, [](const Traffic& t) { return t.kv_rows; });
  add("gradient_bytes_sent", "gradients sent", true, grad, [](const Traffic& t) { return t.grad_rows; });
  add("kv_bytes_held", "keys and values held", true, kv, [](const Traffic& t) { return t.peak_kv_rows; });
  add("gradient_bytes_held", "gradients held", true, grad, [](const Traffic& t) { return t.peak_grad_rows; });
  const bool moves_queries = std::any_of(ranks.begin(), ranks.end(), [](const Traffic& t) {
    return t.query_rows + t.result_rows + t.peak_query_rows + t.peak_result_rows > 0;
  });
  if (!moves_queries) return costs;
  const int64_t query = row(BufferKind::kQueries), result = row(BufferKind::kResults);
  add("query_bytes_sent", "queries sent", true, query, [](const Traffic& t) { return t.query_rows; });
  add("result_bytes_sent", "results sent", true, result, [](const Traffic& t) { return t.result_rows; });
  add("query_bytes_held", "queries of others held", true, query, [](const Traffic& t) { return t.peak_query_rows; });
  add("result_bytes_held", "partial results held", true, result, [](const Traffic& t) { return t.peak_result_rows; });
  return costs;
}

}  // namespace

void require_plannable(const PlanRequest& request) {
  validate(request);
  if (!is_adaptive(request.pattern)) return;
  throw Error(ErrorKind::kPlan, "plan",
              "an adaptive block map is selected from queries and keys at each call, so there is no plan before one; "
              "`annulus attend --mask-out F` writes the map of a call, which map = \"file\" reads");
}

PlanReport::PlanReport(const PlanRequest& request, int64_t head_dim, int64_t element_bytes, bool prove, const Say& say,
                       const std::vector<LayoutKind>& layouts, const Take& take)
    : request_(request), prove_(prove), free_(available_memory()) {
  const auto begin = std::chrono::steady_clock::now();
  require_plannable(request_);
  require_memory(0);
  if (request_.terms == TermsPointer()) request_.terms = terms_of("", "machine", "cpu", head_dim, element_bytes);
  choice_ = choose_plan(request_, layouts);
  request_ = choice_.request;
  pairs_ = count_pairs(*cached_pattern(request_));
  std::vector<Traffic> forward, backward;
  for_each_program(request_, [&](Program program) {
    forward.push_back(traffic(program, program.forward));
    backward.push_back(traffic(program, program.backward));
    if (take) take(program);
    if (prove_) {
      program_bytes_ += static_cast<double>(program_bytes(program));
      programs_.push_back(std::move(program));
      // The programs that are still to be made are assumed to take as many bytes each as those made so far.
      require_memory(program_bytes_ / static_cast<double>(programs_.size()) * request_.ranks);
    }
    say("made " + std::to_string(forward.size()) + " of " + counted(request_.ranks, "rank"));
  });
  forward_ = costs(forward, head_dim, element_bytes);
  backward_ = costs(backward, head_dim, element_bytes);
  made_ = seconds_since(begin);
  const int64_t wide = RowBytes{head_dim, element_bytes}.accumulator_bytes();
  for (const Traffic& t : forward) sent_.bytes += static_cast<double>(t.bytes(head_dim, element_bytes, wide));
  for (const Tiling& tiling : tilings(request_)) {
    const double bytes = tiling.bytes(head_dim, element_bytes, wide);
    if (tiling.columns == 1) sent_.least_of_keys = sent_.least_of_tilings = bytes;
    if (bytes < sent_.least_of_tilings) sent_.least_of_tilings = bytes, sent_.columns = tiling.columns;
  }
}

const Proof& PlanReport::prove(const Say& say) {
  const auto begin = std::chrono::steady_clock::now();
  proof_ = verify(programs_, 8,
                  [&](int rank) { say("proved " + std::to_string(rank) + " of " + counted(request_.ranks, "rank")); });
  proved_ = seconds_since(begin);
  return *proof_;
}

// Checks before memory is taken, because a process that the operating system kills for its memory prints no error.
// `programs` is the size in bytes of all ranks' programs, which the proof keeps.
void PlanReport::require_memory(double programs) {
  if (!free_) return;
  const auto most = static_cast<double>(free_->bytes);
  // Finding what ranks need of each other takes one bit for each key and two ints for each key of one owner
  // (attention/plan/needs.h).
  const auto keys = static_cast<double>(request_.shape.k_len);
  const double plan = keys / 8 + keys / request_.ranks * 2 * sizeof(int);
  if (prove_ && !proof_bytes_) proof_bytes_ = proof_bytes(request_, *cached_pattern(request_));
  const double bytes = prove_ ? plan + *proof_bytes_ + programs : plan;
  if (bytes <= most) return;
  throw Error(ErrorKind::kResource, "plan",
              std::string(prove_ ? "the proof of a plan" : "a plan") + " of " +
                  with_commas(request_.shape.q_len, "position") + " for " + counted(request_.ranks, "rank") +
                  " takes " + bytes_text(bytes) + ", and " + bytes_text(most) + " are free (" + free_->limit + "): " +
                  (plan <= most && prove_ ? "without the proof it fits (--no-proof; in Python prove=False)"
                                          : "plan a shorter sequence"));
}

double PlanReport::share() const {
  const AttentionShape& s = request_.shape;
  const double all =
      static_cast<double>(s.batch * s.heads) * static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
  return all > 0 ? static_cast<double>(pairs_) / all : 0;
}

std::string PlanReport::json() const {
  using Json = nlohmann::ordered_json;
  const auto of = [](const std::vector<PlanCost>& costs) {
    Json all;
    for (const PlanCost& cost : costs) all[cost.key] = {{"least", cost.least}, {"most", cost.most}};
    return all;
  };
  Json candidates = Json::array();
  for (const PlanCandidate& c : choice_.candidates) {
    Json& candidate = candidates.emplace_back(Json{{"schedule", to_string(c.schedule)},
                                                   {"within", c.within},
                                                   {"layout", to_string(c.layout)},
                                                   {"refused", c.refused.empty() ? Json() : Json(c.refused)}});
    if (!c.refused.empty()) continue;
    candidate["bytes_held"] = c.bytes;
    for (const auto& [name, time] : {std::pair{"forward", &c.forward}, {"backward", &c.backward}}) {
      candidate[name] = {{"seconds", time->seconds},
                         {"compute", time->compute},
                         {"exposed", time->exposed},
                         {"latency", time->latency},
                         {"additions", time->add}};
    }
  }
  Json plan = {{"request", request_.text()},
               {"ranks", request_.ranks},
               {"schedule", to_string(request_.schedule)},
               {"within", request_.within},
               {"layout", to_string(request_.layout)},
               {"machine", request_.terms->machine.name},
               {"candidates", std::move(candidates)},
               {"pairs", pairs_},
               {"share_of_pairs", share()},
               {"sent_bytes", sent_.bytes},
               {"least_bytes_of_keys_and_values", sent_.least_of_keys},
               {"bytes_of_best_tiling", sent_.least_of_tilings},
               {"columns_of_best_tiling", sent_.columns},
               {"forward", of(forward_)},
               {"backward", of(backward_)},
               {"made_seconds", made_},
               {"proof", nullptr}};
  if (proof_) {
    plan["proof"] = {{"holds", proof_->holds()},
                     {"faults", proof_->faults},
                     {"pairs", proof_->pairs},
                     {"transfers", proof_->transfers / 2},
                     {"seconds", proved_}};
  }
  return plan.dump(2);
}

}  // namespace annulus
