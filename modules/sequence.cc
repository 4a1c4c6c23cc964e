// See sequence.h.
#include "modules/sequence.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <numeric>
#include <string>

#include "attention/plan/layout.h"
#include "comm/agreement.h"
#include "common/checksum.h"
#include "common/error.h"

namespace annulus {
namespace {

std::string list(const std::vector<int64_t>& lengths) {
  std::string text;
  for (const int64_t n : lengths) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return text;
}

std::vector<int64_t> dealt(LayoutKind layout, int64_t length, int ranks) {
  const Layout made = make_layout(layout, length, ranks);
  std::vector<int64_t> lengths;
  for (int r = 0; r < ranks; ++r) lengths.push_back(made.count(r));
  return lengths;
}

}  // namespace

SequenceParts agree_on_call(const std::function<CallTerms()>& find, Communicator& comm, OpLabel label) {
  CallTerms terms;
  std::exception_ptr complaint;
  std::string text = "none";
  try {
    terms = find();
  } catch (const std::exception&) {
    if (comm.size() == 1) throw;
    complaint = std::current_exception();
    text = error_in_flight("").what();
  }
  if (comm.size() == 1) return {{terms.queries}, {terms.keys}};
  terms.alike.insert(terms.alike.begin(), {"what does not fit", text});

  // Lengths, and the checksum of what must be alike: its text only travels when it is not.
  std::string words;
  for (const Field& f : terms.alike) {
    words += std::to_string(f.name.size()) + ":" + f.name + std::to_string(f.value.size()) + ":" + f.value;
  }
  const std::string sum = checksum(words.data(), words.size());
  std::array<int64_t, 6> mine = {terms.queries, terms.keys};
  std::memcpy(&mine[2], sum.data(), 4 * sizeof(int64_t));
  at::Tensor all = at::empty({comm.size(), 6}, at::kLong);
  comm.host().all_gather(all, at::tensor(mine, at::kLong), label);
  SequenceParts parts;
  bool same = true;
  for (int r = 0; r < comm.size(); ++r) {
    const int64_t* p = all.const_data_ptr<int64_t>() + int64_t{6} * r;
    parts.queries.push_back(p[0]);
    parts.keys.push_back(p[1]);
    same = same && std::equal(p + 2, p + 6, all.const_data_ptr<int64_t>() + 2);
  }
  if (!same) require_agreement(comm, terms.alike, label);
  if (complaint) std::rethrow_exception(complaint);  // all ranks alike
  return parts;
}

void place_sequence(PlanRequest& request, const SequenceParts& parts) {
  const int ranks = static_cast<int>(parts.queries.size());
  request.ranks = ranks;
  request.shape.q_len = std::accumulate(parts.queries.begin(), parts.queries.end(), int64_t{0});
  request.shape.k_len = std::accumulate(parts.keys.begin(), parts.keys.end(), int64_t{0});
  request.uneven_lengths.clear();
  const std::vector<int64_t> queries = dealt(request.layout, request.shape.q_len, ranks);
  const std::vector<int64_t> keys = dealt(request.layout, request.shape.k_len, ranks);
  if (parts.queries == queries && parts.keys == keys) return;
  if (request.layout == LayoutKind::kContiguous && parts.queries == parts.keys) {
    request.uneven_lengths = parts.queries;
    return;
  }
  const bool of_queries = parts.queries != queries;
  const std::string layout(to_string(request.layout));
  throw Error(ErrorKind::kPlan, "plan",
              "the ranks hold " + list(of_queries ? parts.queries : parts.keys) + " positions of the " +
                  (of_queries ? "queries" : "keys") + ", but the layout " + layout + " deals these " +
                  std::to_string(of_queries ? request.shape.q_len : request.shape.k_len) + " positions as " +
                  list(of_queries ? queries : keys) +
                  "; parts of other lengths can be had with the layout contiguous, for queries and keys alike");
}

}  // namespace annulus
