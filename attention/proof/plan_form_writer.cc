// Writes the JSON form of a plan; see plan_form.h. The text is put together by hand, because a tree of JSON values
// would take several times the memory of a program.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "attention/proof/form_keys.h"
#include "attention/proof/plan_form.h"
#include "common/error.h"

namespace annulus {
namespace {

// The members of an object that is open. Each call returns the text to which the next member's value is appended.
class Members {
 public:
  explicit Members(std::string& out) : out_(out) { out_ += '{'; }
  std::string& operator()(std::string_view key) {
    out_ += first_ ? "\"" : ",\"";
    first_ = false;
    out_ += key;
    out_ += "\":";
    return out_;
  }
  void operator()(std::string_view key, int64_t number) { (*this)(key) += std::to_string(number); }
  void close() { out_ += '}'; }

 private:
  std::string& out_;
  bool first_ = true;
};

void append_text(std::string& out, std::string_view text) { out += nlohmann::json(text).dump(); }

void append(std::string& out, const Span& s) {
  out += '[' + std::to_string(s.begin) + ',' + std::to_string(s.count == 1 ? 1 : s.stride) + ',' +
         std::to_string(s.count) + ']';
}

template <typename List, typename Each>
void append_list(std::string& out, const List& list, const char* between, const Each& each) {
  out += '[';
  bool first = true;
  for (const auto& item : list) {
    if (!first) out += between;
    first = false;
    each(item);
  }
  out += ']';
}

void append(std::string& out, const std::vector<Span>& spans) {
  append_list(out, spans, ",", [&](const Span& s) { append(out, s); });
}

void append_pair(std::string& out, int a, int b) { out += '[' + std::to_string(a) + ',' + std::to_string(b) + ']'; }

void append(std::string& out, const RowSet& rows, const AttentionShape& shape, bool of_keys) {
  append_list(out, rows.blocks, ",", [&](const RowBlock& block) {
    Members members(out);
    if (block.batch != every(shape.batch)) append(members("batch"), block.batch);
    if (block.heads != every(of_keys ? shape.kv_heads : shape.heads)) append(members("heads"), block.heads);
    append(members("positions"), block.positions);
    members.close();
  });
}

void append(std::string& out, const Tile& t, const AttentionShape& shape) {
  Members members(out);
  if (t.queries >= 0) members("query_buffer", t.queries);
  append(members("queries"), t.query_positions);
  append(members("query_rows"), t.query_rows);
  members("buffer", t.buffer);
  if (t.block != 0) members("block", t.block);
  append(members("keys"), t.key_positions);
  append(members("key_rows"), t.key_rows);
  if (t.grad_buffer >= 0) {
    members("grad_buffer", t.grad_buffer);
    if (t.grad_block != 0) members("grad_block", t.grad_block);
    if (t.grad_rows != t.key_rows) append(members("grad_rows"), t.grad_rows);
  }
  if (t.batch != every(shape.batch)) append(members("batch"), t.batch);
  if (t.queries >= 0 || t.heads != every(shape.heads)) append(members("heads"), t.heads);
  if (!t.band.unbounded_below()) members("lo", t.band.lo);
  if (!t.band.unbounded_above()) members("hi", t.band.hi);
  if (t.mask >= 0) members("mask", t.mask);
  members.close();
}

void append(std::string& out, const Step& step, const Program& program) {
  const AttentionShape& shape = program.request.shape;
  Members members(out);
  for (const auto& [key, transfers] : {std::pair{"sends", &step.sends}, std::pair{"receives", &step.receives}}) {
    if (transfers->empty()) continue;
    append_list(members(key), *transfers, ",", [&](const Transfer& t) {
      Members transfer(out);
      transfer("peer", t.peer);
      transfer("buffer", t.buffer);
      const auto b = static_cast<size_t>(t.buffer);
      const Buffer* const buffer = b < program.buffers.size() ? &program.buffers[b] : nullptr;
      if (!buffer || !(t.rows == buffer->rows)) {
        append(transfer("rows"), t.rows, shape, !buffer || buffer->of_keys());
      }
      transfer.close();
    });
  }
  if (!step.zero.empty()) append_list(members("zero"), step.zero, ",", [&](int b) { out += std::to_string(b); });
  if (!step.tiles.empty())
    append_list(members("tiles"), step.tiles, ",", [&](const Tile& t) { append(out, t, shape); });
  if (!step.finishes.empty()) {
    append_list(members("finishes"), step.finishes, ",",
                [&](const Finish& f) { append_pair(out, f.queries, f.results); });
  }
  if (!step.adds.empty()) {
    append_list(members("adds"), step.adds, ",", [&](const Add& a) { append_pair(out, a.dst, a.src); });
  }
  members.close();
}

// Whether the pattern or a part of it is known by a digest alone, so that its text cannot be read back.
bool made_by_a_program(const PatternSpec& spec) {
  return (spec.kind == PatternSpec::Kind::kBlocks && spec.blocks.map == BlocksSpec::Map::kGiven) ||
         (!spec.mask.empty() && spec.mask.file.empty()) || std::ranges::any_of(spec.members, made_by_a_program);
}

void append_pattern(std::string& out, const PlanRequest& request) {
  if (!made_by_a_program(request.pattern)) return append_text(out, request.pattern.text());
  const std::shared_ptr<const Pattern> pattern = cached_pattern(request);
  if (!pattern->masks.empty()) {
    throw Error(
        ErrorKind::kPlan, "plan",
        "a plan with a mask of tokens that a program has made cannot be written, because nothing could read the "
        "mask back; write the mask to a file and name that as the pattern's mask");
  }
  append_list(out, pattern->slices, ",", [&](const Slice& s) {
    Members members(out);
    append(members("queries"), s.queries);
    append(members("keys"), s.keys);
    if (s.batch != every(request.shape.batch)) append(members("batch"), s.batch);
    if (s.heads != every(request.shape.heads)) append(members("heads"), s.heads);
    if (!s.band.unbounded_below()) members("lo", s.band.lo);
    if (!s.band.unbounded_above()) members("hi", s.band.hi);
    members.close();
  });
}

void append_problem(std::string& out, const PlanRequest& request) {
  const AttentionShape& shape = request.shape;
  Members members(out);
  if (shape.batch != 1) members("batch", shape.batch);
  members("heads", shape.heads);
  if (shape.kv_heads != shape.heads) members("kv_heads", shape.kv_heads);
  members("queries", shape.q_len);
  if (shape.k_len != shape.q_len) members("keys", shape.k_len);
  if (shape.query_offset != 0) members("query_offset", shape.query_offset);
  append_pattern(members("pattern"), request);
  members("ranks", request.ranks);
  append_text(members("schedule"), to_string(request.schedule));
  if (request.within != 0) members("within", request.within);
  members.close();
}

void append_held(std::string& out, const HeldRows& held) {
  Members members(out);
  for (const DirectionKey& d : kDirectionKeys) {
    Members direction(members(d.key));
    for (const HeldKey& k : kHeldKeys) {
      if (const std::optional<int64_t>& said = held.*d.held.*k.said) direction(k.key, *said);
    }
    direction.close();
  }
  members.close();
}

}  // namespace

PlanFormWriter::PlanFormWriter(std::function<void(std::string_view)> write) : write_(std::move(write)) {}

void PlanFormWriter::add(const Program& program, const HeldRows& held) {
  const AttentionShape& shape = program.request.shape;
  std::string out;
  if (ranks_++ == 0) {
    out += "{\"annulus_plan\":" + std::to_string(kPlanFormVersion) + ",\n\"problem\":";
    append_problem(out, program.request);
    out += ",\n\"programs\":[\n";
  } else {
    out += ",\n";
  }
  Members members(out);
  append(members("queries"), program.query_spans);
  if (shape.k_len != shape.q_len || program.key_spans != program.query_spans)
    append(members("keys"), program.key_spans);
  append_held(members("held"), held);
  append_list(members("buffers"), program.buffers, ",\n", [&](const Buffer& buffer) {
    Members of_buffer(out);
    append_text(of_buffer("kind"), kBufferKinds[static_cast<size_t>(buffer.kind)]);
    if (!is_own(buffer.kind) || !(buffer.rows == own_rows(program, buffer.kind))) {
      append(of_buffer("rows"), buffer.rows, shape, buffer.of_keys());
    }
    of_buffer.close();
  });
  if (program.saved >= 0) members("saved", program.saved);
  for (const DirectionKey& d : kDirectionKeys) {
    append_list(members(d.key), program.*d.steps, ",\n", [&](const Step& step) { append(out, step, program); });
  }
  members.close();
  write_(out);
}

void PlanFormWriter::finish() { write_("\n]}\n"); }

}  // namespace annulus
