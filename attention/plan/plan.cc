// Checks requests, chooses schedules and makes programs; see plan.h.
#include "attention/plan/plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/plan/choice.h"
#include "attention/plan/schedules.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

struct ScheduleEntry {
  const char* name;
  void (*make)(Needs&, Program&);
  bool groups;  // whether `within` means something to it
};

// In the order of ScheduleKind.
constexpr ScheduleEntry kSchedules[] = {{"ring", make_ring, false},
                                        {"all-gather", make_all_gather, false},
                                        {"group-cast", make_group_cast, true},
                                        {"double-ring", make_double_ring, true},
                                        {"ulysses", make_ulysses, true},
                                        {"ulysses-ring", make_ulysses_ring, true},
                                        {"mesh", make_mesh, true},
                                        {"auto", nullptr, true}};

const ScheduleEntry& entry_of(ScheduleKind kind) { return kSchedules[static_cast<size_t>(kind)]; }

constexpr int kMostRanks = 1 << 20;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kPlan, "plan", message); }

Layout layout_of(const PlanRequest& request, int64_t length) {
  return request.uneven_lengths.empty() ? make_layout(request.layout, length, request.ranks)
                                        : make_uneven_layout(request.uneven_lengths, length);
}

bool is_dealt(const PlanRequest& request) { return is_dealt(request.layout) && request.uneven_lengths.empty(); }

// Enforces the rule `equal_segments` of other libraries, which require that every rank gets whole segments of the
// greatest length.
void require_equal_segments(const PatternSpec& spec, const PlanRequest& request) {
  for (const PatternSpec& member : spec.members) require_equal_segments(member, request);
  if (spec.kind != PatternSpec::Kind::kDilated || !spec.dilated.equal_segments) return;
  const auto& lengths = spec.dilated.segment_lengths;
  const int64_t unit = request.ranks * *std::max_element(lengths.begin(), lengths.end());
  const int64_t length = request.shape.q_len % unit != 0 ? request.shape.q_len : request.shape.k_len;
  if (length % unit == 0) return;
  refuse("equal_segments = true needs a length that is a multiple of ranks x the longest segment, " +
         std::to_string(request.ranks) + " x " + std::to_string(unit / request.ranks) + " = " + std::to_string(unit) +
         ", got " + std::to_string(length) + "; use a length of " +
         (length / unit > 0 ? std::to_string(length / unit * unit) + " or " : "") +
         std::to_string((length / unit + 1) * unit) + ", or leave equal_segments out, and any length will work");
}

// The divisors of a number of ranks from `least` on that fit, as a list for a message.
template <typename Fits>
std::string divisors(int ranks, int least, Fits fits) {
  std::vector<std::string> all;
  for (int n = least; n <= ranks; ++n) {
    if (ranks % n == 0 && fits(n)) all.push_back(std::to_string(n));
  }
  return join(all, ", ");
}

// Ulysses divides the query heads among the ranks of an inner group.
void require_heads(const PlanRequest& request) {
  if (request.schedule != ScheduleKind::kUlysses && request.schedule != ScheduleKind::kUlyssesRing) return;
  const int64_t heads = request.shape.heads;
  const int within = request.within > 0 ? request.within : request.ranks;
  if (heads % within == 0) return;
  const std::string fitting = divisors(request.ranks, 2, [&](int n) { return heads % n == 0; });
  refuse("schedule \"" + std::string(to_string(request.schedule)) + "\" divides the query heads among the " +
         counted(within, "rank") + " of an inner group, but " + counted(heads, "head") + " cannot be divided by " +
         std::to_string(within) + "; " +
         (fitting.empty() ? "" : "set within to a number that divides ranks and heads, such as " + fitting + "; or ") +
         "use schedule group-cast or mesh, or ring without within");
}

void require_groups(const PlanRequest& request) {
  const int within = request.within;
  if (within == 0) return;
  if (within < 0 || request.ranks % within != 0) {
    refuse("the number of ranks that form an inner group, `within`, must divide the " + counted(request.ranks, "rank") +
           ", got " + std::to_string(within) + "; use one of " + divisors(request.ranks, 1, [](int) { return true; }) +
           ", or 0 for the schedule's own choice");
  }
  if (entry_of(request.schedule).groups) return;
  std::string fitting;
  for (const ScheduleEntry& entry : kSchedules) {
    if (entry.groups) fitting += (fitting.empty() ? "" : ", ") + std::string(entry.name);
  }
  refuse("the schedule " + std::string(to_string(request.schedule)) + " has no inner groups, got within = " +
         std::to_string(within) + "; use within = 0, or one of the schedules " + fitting);
}

int64_t total(const std::vector<Span>& spans) {
  int64_t sum = 0;
  for (const Span& s : spans) sum += s.count;
  return sum;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = names_of(kSchedules);
  return names;
}

std::string schedule_kinds() { return alternatives(schedule_names()); }

std::string_view to_string(ScheduleKind kind) { return entry_of(kind).name; }

ScheduleKind parse_schedule(std::string_view name, std::string_view where) {
  return static_cast<ScheduleKind>(index_of_name(name, schedule_names(), "schedule", where));
}

TermsPointer::TermsPointer(PlanTerms terms) : terms_(std::make_shared<const PlanTerms>(std::move(terms))) {
  const std::string text = terms_->machine.text() + "\n" + std::to_string(terms_->head_dim) + " " +
                           std::to_string(terms_->element_bytes) + " " + std::to_string(terms_->backward) + " " +
                           exact(terms_->memory) + " " + std::to_string(terms_->or_leanest) + " " +
                           std::to_string(terms_->layers);
  digest_ = checksum(text.data(), text.size());
}

const PlanTerms& TermsPointer::operator*() const {
  static const PlanTerms unknown{.machine = built_in_machine("cpu")};
  return terms_ ? *terms_ : unknown;
}

std::string TermsPointer::text() const { return terms_ ? terms_->machine.name + " " + digest_ : ""; }

bool moves_queries(ScheduleKind kind) {
  return kind == ScheduleKind::kUlysses || kind == ScheduleKind::kUlyssesRing || kind == ScheduleKind::kMesh;
}

std::string PlanRequest::text() const {
  std::string text = "batch " + std::to_string(shape.batch) + ", heads " + std::to_string(shape.heads) + ", kv heads " +
                     std::to_string(shape.kv_heads) + ", queries " + std::to_string(shape.q_len) + ", keys " +
                     std::to_string(shape.k_len) + ", query offset " + std::to_string(shape.query_offset) +
                     ", pattern " + pattern.text() + ", ";
  if (uneven_lengths.empty()) {
    text += "layout " + std::string(to_string(layout));
    if (is_dealt(layout) && balance_by) text += " by " + balance_by->text();
  } else {
    text += "lengths";
    for (const int64_t n : uneven_lengths) text += " " + std::to_string(n);
  }
  text += ", schedule " + std::string(to_string(schedule)) + ", ranks " + std::to_string(ranks);
  if (within > 0) text += ", within " + std::to_string(within);
  if (const std::string given = terms.text(); !given.empty() && schedule == ScheduleKind::kAuto) {
    text += ", machine " + given;
  }
  return text + (keep_last ? "" : ", nothing kept");
}

Layout query_layout(const PlanRequest& request) {
  return is_dealt(request) ? *cached_dealt_layout(request) : layout_of(request, request.shape.q_len);
}

Layout key_layout(const PlanRequest& request) {
  if (!is_dealt(request)) return layout_of(request, request.shape.k_len);
  if (request.shape.k_len == request.shape.q_len) return query_layout(request);
  return make_layout(LayoutKind::kContiguous, request.shape.k_len, request.ranks);
}

int64_t RowBlock::positions_count() const { return total(positions); }

int64_t RowSet::rows() const {
  int64_t sum = 0;
  for (const RowBlock& block : blocks) sum += block.rows();
  return sum;
}

std::optional<int64_t> consecutive_rows(const RowSet& whole, const RowSet& part) {
  if (whole == part) return 0;
  if (whole.blocks.size() != 1 || part.blocks.size() != 1) return std::nullopt;
  const RowBlock &all = whole.blocks[0], &some = part.blocks[0];
  if (!(some.heads == all.heads) || !(some.batch == all.batch) || all.batch.count != 1) return std::nullopt;
  int64_t first = -1, next = -1, row = 0;
  size_t i = 0;
  for (const Span& held : all.positions) {
    for (; i < some.positions.size() && held.contains(some.positions[i].begin); ++i) {
      const Span& s = some.positions[i];
      const int64_t at = row + held.index_of(s.begin);
      if (first < 0) first = next = at;
      if (at != next || !held.contains(s.last()) || (s.count > 1 && s.stride != held.stride)) return std::nullopt;
      next += s.count;
    }
    row += held.count;
  }
  if (i < some.positions.size() || first < 0) return std::nullopt;
  return first * all.heads.count;
}

int64_t Program::query_count() const { return total(query_spans); }
bool Program::moves_queries() const {
  return buffers.size() > kOwnQueriesBuffer && buffers[kOwnQueriesBuffer].kind == BufferKind::kOwnQueries;
}

void validate(const PlanRequest& request) {
  if (request.ranks < 1) refuse("expected at least one rank, got " + std::to_string(request.ranks));
  if (request.ranks > kMostRanks) {
    refuse("expected at most " + std::to_string(kMostRanks) + " ranks, got " + std::to_string(request.ranks));
  }
  require_groups(request);
  validate(request.shape);
  require_heads(request);
  if (!request.uneven_lengths.empty()) {
    if (static_cast<int>(request.uneven_lengths.size()) != request.ranks) {
      refuse("expected one length for each of the " + counted(request.ranks, "rank") + ", got " +
             counted(static_cast<int64_t>(request.uneven_lengths.size()), "length"));
    }
    if (request.shape.q_len != request.shape.k_len) {
      refuse("a length for each rank needs as many queries as keys, got " + std::to_string(request.shape.q_len) +
             " and " + std::to_string(request.shape.k_len) + "; use a named layout");
    }
    if (request.even) refuse("both a length for each rank and even = true were given; leave one of them out");
    make_uneven_layout(request.uneven_lengths, request.shape.q_len);
  }
  validate(request.pattern, request.shape);
  if (is_dealt(request) && request.balance_by) validate(*request.balance_by, request.shape);
  require_equal_segments(request.pattern, request);
  if (request.uneven_lengths.empty() && request.even) {
    require_even(request.layout, request.shape.q_len, request.ranks, "a sequence");
    if (request.shape.k_len != request.shape.q_len) {
      require_even(request.layout, request.shape.k_len, request.ranks, "a key sequence");
    }
  }
}

namespace {

// A rank's kernels read the bits of the queries that they compute, and the proof those of the rank's own.
void require_bits(const MaskPlanes& masks, const HeldBits::Part& rows, const PlanRequest& request, int rank) {
  const TokenMask* checked = nullptr;
  for (const MaskPlane& plane : masks) {
    if (plane.mask.get() == checked) continue;
    checked = plane.mask.get();
    const std::optional<int64_t> missing = checked->query_without_bits(rows);
    if (!missing) continue;
    refuse("the mask does not hold the bits of query " + std::to_string(*missing) + " on rank " + std::to_string(rank) +
           ", which schedule \"" + std::string(to_string(request.schedule)) +
           "\" computes here: it was made for another layout or other ranks, or for a schedule that does not move "
           "queries; make it for this layout and schedule");
  }
}

Program with_masks(Program program, const MaskPlanes& masks) {
  const PlanRequest& request = program.request;
  const Span batch = Span::range(0, request.shape.batch);
  require_bits(masks, {batch, Span::range(0, request.shape.heads), program.query_spans}, request, program.rank);
  for (const Buffer& buffer : program.buffers) {
    if (buffer.kind != BufferKind::kQueries) continue;
    const RowBlock& rows = buffer.rows.blocks[0];
    require_bits(masks, {batch, rows.heads, rows.positions}, request, program.rank);
  }
  program.masks = masks;
  return program;
}

}  // namespace

HeldBits needed_bits(const PlanRequest& request, int rank) {
  validate(request);
  if (request.ranks == 1) return HeldBits::everything();
  const Layout layout = query_layout(request);
  HeldBits needed = HeldBits::of(layout.spans.at(static_cast<size_t>(rank)));
  if (!moves_queries(request.schedule)) return needed;
  const QueryShare share = query_share(request, rank);
  HeldBits::Part computed{needed.parts[0].batch, share.heads, {}};
  for (const int of : share.queries) {
    const std::vector<Span>& spans = layout.spans[static_cast<size_t>(of)];
    computed.queries.insert(computed.queries.end(), spans.begin(), spans.end());
  }
  needed.parts.push_back(std::move(computed));
  return needed;
}

std::string why_bits_lack(const MaskPlanes& masks, const PlanRequest& candidate, const std::vector<int>& ranks) {
  if (!moves_queries(candidate.schedule)) return "";
  const TokenMask* checked = nullptr;
  for (const MaskPlane& plane : masks) {
    if (plane.mask.get() == checked) continue;
    checked = plane.mask.get();
    if (checked->held.all) continue;
    if (!checked->held.parts.empty()) return "each rank holds the bits of its own queries' mask alone";
    for (const int rank : ranks) {
      const int64_t bytes = checked->bytes_of_bits(needed_bits(candidate, rank));
      if (bytes <= mask_limit()) continue;
      return "the bits of a mask would take " + bytes_text(static_cast<double>(bytes)) + " on rank " +
             std::to_string(rank) + ", more than memory.masks";
    }
  }
  return "";
}

Program program_of(const PlanRequest& request, Needs& needs, const Layout& queries, const Layout& keys, int rank) {
  require_heads(request);  // of a candidate of `auto`, whose request was valid with another schedule
  Program program;
  program.request = request;
  program.rank = rank;
  program.query_spans = queries.spans[static_cast<size_t>(rank)];
  program.key_spans = keys.spans[static_cast<size_t>(rank)];
  const RowSet own = needs.all_rows(rank);
  program.buffers = {{BufferKind::kOwnKV, own}, {BufferKind::kOwnGrad, own}};
  entry_of(request.schedule).make(needs, program);
  return program;
}

Program make_program(const PlanRequest& request, int rank) {
  return make_program(resolve_schedule(request), *cached_pattern(request), rank);
}

Program make_program(const PlanRequest& request, const Pattern& pattern, int rank) {
  validate(request);
  if (rank < 0 || rank >= request.ranks) {
    refuse("rank " + std::to_string(rank) + " is not one of the plan's " + counted(request.ranks, "rank"));
  }
  const Layout queries = query_layout(request), keys = key_layout(request);
  Needs needs(pattern, queries, keys);
  const bool is_auto = request.schedule == ScheduleKind::kAuto;
  const PlanRequest chosen = is_auto ? choose_plan(request, pattern).request : request;
  return with_masks(program_of(chosen, needs, queries, keys, rank), pattern.masks);
}

void for_each_program(const PlanRequest& request, const std::function<void(Program)>& take) {
  const PlanRequest chosen = resolve_schedule(request);
  validate(chosen);
  const Layout queries = query_layout(chosen), keys = key_layout(chosen);
  const std::shared_ptr<const Pattern> pattern = cached_pattern(chosen);
  Needs needs(*pattern, queries, keys);
  for (int r = 0; r < chosen.ranks; ++r) {
    take(with_masks(program_of(chosen, needs, queries, keys, r), pattern->masks));
  }
}

std::vector<Program> make_programs(const PlanRequest& request) {
  std::vector<Program> programs;
  for_each_program(request, [&](Program program) { programs.push_back(std::move(program)); });
  return programs;
}

PlanRequest resolve_schedule(const PlanRequest& request) {
  return request.schedule == ScheduleKind::kAuto ? choose_plan(request).request : request;
}

}  // namespace annulus
