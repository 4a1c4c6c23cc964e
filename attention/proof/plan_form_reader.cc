// Reads the JSON form of a plan, which may come from anywhere; see plan_form.h. Programs that pass can be verified
// without further checks of memory or indices: whatever they name exists, spans lie within what they index, and sums of
// rows do not overflow.
#include <algorithm>
#include <istream>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "attention/plan/traffic.h"
#include "attention/proof/form_keys.h"
#include "attention/proof/form_stream.h"
#include "attention/proof/form_value.h"
#include "attention/proof/plan_form.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 40;  // of a sequence, as validate(AttentionShape) has it
constexpr int64_t kMostItems = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostRows =
    int64_t{1} << 58;  // in all row sets of a program: sums of a few of them must not overflow

Band read_band(const FormValue& value) {
  Band band;
  band.lo = value.optional_integer("lo", -Band::kUnbounded, Band::kUnbounded, band.lo);
  band.hi = value.optional_integer("hi", -Band::kUnbounded, Band::kUnbounded, band.hi);
  return band;
}

// Runs `check`, which judges what the form says, and names the form in its errors.
template <typename Check>
auto as_input(const std::string& source, const Check& check) {
  try {
    return check();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUsage && error.kind() != ErrorKind::kPlan) throw;
    refuse_form(source, "problem: " + printable(error.message(), /*most=*/1000));
  }
}

PatternSpec read_pattern(const FormValue& value, const AttentionShape& shape) {
  if (value.is_text()) return parse_pattern(value.text(), "pattern");
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kSlices;
  value.each([&](const FormValue& item) {
    item.require_keys({"queries", "keys", "batch", "heads", "lo", "hi"});
    Slice slice{Span::range(0, shape.batch), Span::range(0, shape.heads), {}, {}, read_band(item)};
    item.member("queries", [&](const FormValue& v) { slice.queries = v.span(shape.q_len); });
    item.member("keys", [&](const FormValue& v) { slice.keys = v.span(shape.k_len); });
    item.optional("batch", [&](const FormValue& v) { slice.batch = v.span(shape.batch); });
    item.optional("heads", [&](const FormValue& v) { slice.heads = v.span(shape.heads); });
    spec.slices.push_back(slice);
  });
  return spec;
}

void read_problem(const FormValue& problem, const PlanFormSource& source, PlanForm& form) {
  problem.require_keys(
      {"batch", "heads", "kv_heads", "queries", "keys", "query_offset", "pattern", "ranks", "schedule", "within"});
  PlanRequest& request = form.request;
  AttentionShape& shape = request.shape;
  constexpr int64_t most = kMostPositions;
  shape.batch = problem.optional_integer("batch", 0, most, 1);
  shape.heads = problem.integer("heads", 0, most);
  shape.kv_heads = problem.optional_integer("kv_heads", 0, most, shape.heads);
  shape.q_len = problem.integer("queries", 0, most);
  shape.k_len = problem.optional_integer("keys", 0, most, shape.q_len);
  shape.query_offset = problem.optional_integer("query_offset", -most, most, 0);
  request.ranks = static_cast<int>(problem.integer("ranks", 0, kMostItems));
  request.within = static_cast<int>(problem.optional_integer("within", 0, kMostItems, 0));
  problem.optional("schedule", [&](const FormValue& v) { form.schedule = v.text(); });
  as_input(source.name, [&] {
    validate(request);  // before anything takes memory by these sizes
    problem.member("pattern", [&](const FormValue& v) { request.pattern = read_pattern(v, shape); });
    if (is_adaptive(request.pattern)) {
      refuse_form(source.name,
                  "problem.pattern has an adaptive block map, which is selected at each call, so there is "
                  "no plan to prove");
    }
    if (source.load) request.pattern = source.load(request.pattern, shape);
    validate(request);
    form.pattern = std::make_shared<const Pattern>(make_pattern(request.pattern, shape));
  });
  // Only now, because what annulus asks of a schedule's requests holds for no plan of others.
  const std::vector<std::string>& names = schedule_names();
  const auto found = std::find(names.begin(), names.end(), form.schedule);
  if (found != names.end()) request.schedule = static_cast<ScheduleKind>(found - names.begin());
  form.queries.length = shape.q_len;
  form.keys.length = shape.k_len;
}

// Reads one rank's program.
class ProgramReader {
 public:
  ProgramReader(const PlanForm& form, int rank) : shape_(form.request.shape), pattern_(*form.pattern) {
    program_.request = form.request;
    program_.rank = rank;
    program_.masks = pattern_.masks;
  }

  Program read(const FormValue& value, HeldRows& held) {
    value.require_keys({"queries", "keys", "held", "buffers", "saved", "forward", "backward"});
    value.member("queries", [&](const FormValue& v) { program_.query_spans = v.spans(shape_.q_len); });
    program_.key_spans = program_.query_spans;
    if (value.has("keys") || shape_.q_len != shape_.k_len) {
      value.member("keys", [&](const FormValue& v) { program_.key_spans = v.spans(shape_.k_len); });
    }
    value.optional("held", [&](const FormValue& v) { held = read_held(v); });
    value.member("buffers", [&](const FormValue& v) {
      v.each([&](const FormValue& buffer) { program_.buffers.push_back(read_buffer(buffer)); });
    });
    program_.saved = optional_buffer(value, "saved");
    for (const DirectionKey& d : kDirectionKeys) {
      value.member(d.key, [&](const FormValue& v) {
        std::vector<Step>& steps = program_.*d.steps;
        v.each([&](const FormValue& step) { steps.push_back(read_step(step)); });
        if (steps.empty()) v.refuse("a list of at least one step, which may be {}");
      });
    }
    return std::move(program_);
  }

 private:
  static HeldRows read_held(const FormValue& value) {
    static const std::vector<std::string_view> names = [] {
      std::vector<std::string_view> all;
      for (const HeldKey& k : kHeldKeys) all.emplace_back(k.key);
      return all;
    }();
    value.require_keys({"forward", "backward"});
    HeldRows held;
    for (const DirectionKey& d : kDirectionKeys) {
      value.optional(d.key, [&](const FormValue& v) {
        v.require_keys(names);
        for (const HeldKey& k : kHeldKeys) {
          v.optional(k.key, [&](const FormValue& said) { held.*d.held.*k.said = said.integer(0, INT64_MAX); });
        }
      });
    }
    return held;
  }

  Buffer read_buffer(const FormValue& value) {
    value.require_keys({"kind", "rows"});
    Buffer buffer;
    value.member("kind", [&](const FormValue& v) {
      const std::string name = v.text();
      const auto* const found = std::find(kBufferKinds.begin(), kBufferKinds.end(), name);
      if (found == kBufferKinds.end()) {
        v.refuse("a kind of buffer" + suggestion(name, {kBufferKinds.begin(), kBufferKinds.end()}));
      }
      buffer.kind = static_cast<BufferKind>(found - kBufferKinds.begin());
    });
    if (is_own(buffer.kind) && !value.has("rows")) {
      buffer.rows = own_rows(program_, buffer.kind);
      add_rows(buffer.rows, value);
    } else {
      value.member("rows", [&](const FormValue& v) { buffer.rows = read_rows(v, buffer.of_keys()); });
    }
    return buffer;
  }

  RowSet read_rows(const FormValue& value, bool of_keys) {
    const int64_t heads = of_keys ? shape_.kv_heads : shape_.heads, length = of_keys ? shape_.k_len : shape_.q_len;
    RowSet rows;
    value.each([&](const FormValue& item) {
      item.require_keys({"batch", "heads", "positions"});
      RowBlock block{every(shape_.batch), every(heads), {}};
      item.optional("batch", [&](const FormValue& v) { block.batch = v.span(shape_.batch); });
      item.optional("heads", [&](const FormValue& v) { block.heads = v.span(heads); });
      item.member("positions", [&](const FormValue& v) { block.positions = v.spans(length); });
      rows.blocks.push_back(std::move(block));
    });
    add_rows(rows, value);
    return rows;
  }

  void add_rows(const RowSet& rows, const FormValue& value) {
    for (const RowBlock& block : rows.blocks) {
      __int128 positions = 0;
      for (const Span& s : block.positions) positions += s.count;
      // At most 2^48 rows a position, and 2^40 positions a span.
      rows_ += positions * (block.batch.count * block.heads.count);
      if (rows_ > kMostRows) value.complain("makes the rows of this rank's buffers and transfers more than 2^58");
    }
  }

  int64_t last_buffer() const { return static_cast<int64_t>(program_.buffers.size()) - 1; }
  int read_buffer_number(const FormValue& value) const { return static_cast<int>(value.integer(0, last_buffer())); }
  int buffer(const FormValue& value, const char* key) const {
    return static_cast<int>(value.integer(key, 0, last_buffer()));
  }
  int optional_buffer(const FormValue& value, const char* key) const {
    return static_cast<int>(value.optional_integer(key, 0, last_buffer(), -1));
  }

  Transfer read_transfer(const FormValue& value) {
    value.require_keys({"peer", "buffer", "rows"});
    Transfer transfer;
    transfer.peer = static_cast<int>(value.integer("peer", 0, program_.request.ranks - 1));
    transfer.buffer = buffer(value, "buffer");
    const Buffer& moved = program_.buffers[static_cast<size_t>(transfer.buffer)];
    if (value.has("rows")) {
      value.member("rows", [&](const FormValue& v) { transfer.rows = read_rows(v, moved.of_keys()); });
    } else {
      transfer.rows = moved.rows;
      add_rows(transfer.rows, value);
    }
    return transfer;
  }

  Tile read_tile(const FormValue& value) const {
    value.require_keys({"query_buffer", "queries", "query_rows", "buffer", "block", "keys", "key_rows", "grad_buffer",
                        "grad_block", "grad_rows", "batch", "heads", "lo", "hi", "mask"});
    Tile tile;
    tile.queries = optional_buffer(value, "query_buffer");
    value.member("queries", [&](const FormValue& v) { tile.query_positions = v.span(shape_.q_len); });
    value.member("query_rows", [&](const FormValue& v) { tile.query_rows = v.span(shape_.q_len); });
    tile.buffer = static_cast<int>(value.optional_integer("buffer", 0, last_buffer(), 0));
    tile.block = static_cast<int>(value.optional_integer("block", 0, kMostItems, 0));
    value.member("keys", [&](const FormValue& v) { tile.key_positions = v.span(shape_.k_len); });
    value.member("key_rows", [&](const FormValue& v) { tile.key_rows = v.span(shape_.k_len); });
    tile.grad_buffer = optional_buffer(value, "grad_buffer");
    tile.grad_block = static_cast<int>(value.optional_integer("grad_block", 0, kMostItems, 0));
    if (tile.grad_buffer >= 0) tile.grad_rows = tile.key_rows;
    value.optional("grad_rows", [&](const FormValue& v) { tile.grad_rows = v.span(shape_.k_len); });
    tile.batch = every(shape_.batch);
    value.optional("batch", [&](const FormValue& v) { tile.batch = v.span(shape_.batch); });
    tile.heads = every(shape_.heads);
    if (tile.queries >= 0 || value.has("heads")) {
      value.member("heads", [&](const FormValue& v) { tile.heads = v.span(shape_.heads); });
    }
    tile.band = read_band(value);
    value.optional("mask", [&](const FormValue& v) {
      tile.mask = v.integer(0, static_cast<int64_t>(program_.masks.size()) - 1);
      require_mask_bits(v, tile);
    });
    return tile;
  }

  // A mask has bits only where a part of a block is shown. The keys of a tile that each query may see must lie in one
  // run of such blocks.
  void require_mask_bits(const FormValue& value, const Tile& tile) const {
    const MaskPlane& plane = program_.masks[static_cast<size_t>(tile.mask)];
    const BlockMap& partial = plane.mask->partial;
    for (int64_t i = 0; i < tile.query_positions.count; ++i) {
      const int64_t query = tile.query_positions.at(i);
      const Span keys = tile.key_positions.clip(query + tile.band.lo, query + tile.band.hi);
      if (keys.empty()) continue;
      const auto row = static_cast<size_t>(plane.plane * partial.query_blocks + query / TokenMask::kBlock);
      const auto runs = partial.runs.begin();
      const bool found =
          std::any_of(runs + partial.offsets[row], runs + partial.offsets[row + 1], [&](const BlockRun& run) {
            return keys.begin >= run.begin * TokenMask::kBlock && keys.last() < run.end * TokenMask::kBlock;
          });
      if (found) continue;
      value.complain("cuts keys " + to_string(keys) + " of query " + std::to_string(query) +
                     ", but not all of them lie in blocks of which the mask shows a part");
    }
  }

  template <typename Pair>
  Pair read_pair(const FormValue& value) const {
    std::vector<int> numbers;
    value.each([&](const FormValue& v) { numbers.push_back(read_buffer_number(v)); });
    if (numbers.size() != 2) value.refuse("the numbers of two buffers");
    return {numbers[0], numbers[1]};
  }

  Step read_step(const FormValue& value) {
    value.require_keys({"sends", "receives", "zero", "tiles", "finishes", "adds"});
    Step step;
    const auto read_list = [&](const char* key, auto& list, const auto& read_item) {
      value.optional(
          key, [&](const FormValue& v) { v.each([&](const FormValue& item) { list.push_back(read_item(item)); }); });
    };
    read_list("sends", step.sends, [&](const FormValue& v) { return read_transfer(v); });
    read_list("receives", step.receives, [&](const FormValue& v) { return read_transfer(v); });
    read_list("zero", step.zero, [&](const FormValue& v) { return read_buffer_number(v); });
    read_list("tiles", step.tiles, [&](const FormValue& v) { return read_tile(v); });
    read_list("finishes", step.finishes, [&](const FormValue& v) { return read_pair<Finish>(v); });
    read_list("adds", step.adds, [&](const FormValue& v) { return read_pair<Add>(v); });
    return step;
  }

  const AttentionShape& shape_;
  const Pattern& pattern_;
  Program program_;
  __int128 rows_ = 0;  // in the row sets so far
};

// Checks that the ranks own every position exactly once. `name` is the key of their spans.
void require_owners(const Layout& layout, const char* name, const std::string& what, const std::string& source) {
  std::vector<bool> owned(static_cast<size_t>(layout.length));
  for (size_t r = 0; r < layout.spans.size(); ++r) {
    for (const Span& s : layout.spans[r]) {
      for (int64_t i = 0; i < s.count; ++i) {
        const int64_t x = s.at(i);
        if (!owned[static_cast<size_t>(x)]) {
          owned[static_cast<size_t>(x)] = true;
          continue;
        }
        size_t first = 0;  // the rank that owns it
        const auto has = [x](const Span& span) { return span.contains(x); };
        while (std::none_of(layout.spans[first].begin(), layout.spans[first].end(), has)) ++first;
        refuse_form(source,
                    "programs[" + std::to_string(r) + "]." + name + " has " + what + " " + std::to_string(x) +
                        (first == r ? " twice" : ", which programs[" + std::to_string(first) + "] has as well"));
      }
    }
  }
  const auto free = std::find(owned.begin(), owned.end(), false);
  if (free != owned.end()) {
    refuse_form(source,
                "no rank has " + what + " " + std::to_string(free - owned.begin()) + " in its \"" + name + "\"");
  }
}

class FormReader {
 public:
  explicit FormReader(const PlanFormSource& source) : source_(source) {}

  PlanForm read(std::istream& in) {
    const nlohmann::json root =
        stream_form(in, source_.name,
                    {.begin = [this](const nlohmann::json& before) { begin(before); },
                     .program = [this](const nlohmann::json& program, size_t rank) { add(program, rank); },
                     .require_memory = [this](double bytes) { require_memory(bytes); }});
    const FormValue whole(root, source_.name, "");
    whole.require_keys({"annulus_plan", "problem", "programs"});
    if (!begun_) {
      begin(root);  // says what is missing
      whole.member("programs", [](const FormValue& v) { v.refuse("a list"); });
    }
    const auto programs = static_cast<int64_t>(form_.programs.size());
    if (programs != form_.request.ranks) {
      refuse_form(source_.name, "programs should be those of all " + counted(form_.request.ranks, "rank") +
                                    " of problem.ranks, not of " + std::to_string(programs));
    }
    require_memory(proof_bytes(form_.programs, *form_.pattern));
    require_owners(form_.queries, "queries", "query", source_.name);
    require_owners(form_.keys, "keys", "key", source_.name);
    return std::move(form_);
  }

 private:
  void begin(const nlohmann::json& before) {
    const FormValue whole(before, source_.name, "");
    if (const int64_t version = whole.integer("annulus_plan", 1, kMostItems); version != kPlanFormVersion) {
      refuse_form(source_.name, "it is of version " + std::to_string(version) + ", and this annulus reads version " +
                                    std::to_string(kPlanFormVersion));
    }
    if (!whole.has("problem")) {
      refuse_form(source_.name, "problem is missing; it must stand before programs");
    }
    whole.member("problem", [&](const FormValue& v) { read_problem(v, source_, form_); });
    begun_ = true;
  }

  void add(const nlohmann::json& program, size_t rank) {
    const std::string way = "programs[" + std::to_string(rank) + "]";
    const FormValue value(program, source_.name, way);
    if (static_cast<int64_t>(rank) >= form_.request.ranks) {
      refuse_form(source_.name, "programs should be those of the " + counted(form_.request.ranks, "rank") +
                                    " of problem.ranks, but there are more");
    }
    form_.held.emplace_back();
    form_.programs.push_back(ProgramReader(form_, static_cast<int>(rank)).read(value, form_.held.back()));
    const Program& read = form_.programs.back();
    form_.queries.spans.push_back(read.query_spans);
    form_.keys.spans.push_back(read.key_spans);
    bytes_ += static_cast<double>(program_bytes(read));
    require_memory(0);
  }

  // Checks that the programs and so many bytes more fit.
  void require_memory(double more) const {
    if (!source_.free || bytes_ + more <= static_cast<double>(source_.free->bytes)) return;
    throw Error(ErrorKind::kResource, "plan",
                source_.name + ": the plan and its proof take at least " + bytes_text(bytes_ + more) + ", and " +
                    bytes_text(static_cast<double>(source_.free->bytes)) + " are free (" + source_.free->limit +
                    "); prove it where there is more");
  }

  const PlanFormSource& source_;
  PlanForm form_;
  bool begun_ = false;
  double bytes_ = 0;  // of the programs so far
};

}  // namespace

PlanForm read_plan_form(std::istream& in, const PlanFormSource& source) { return FormReader(source).read(in); }

}  // namespace annulus
