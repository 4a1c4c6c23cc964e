// Runs one rank's program: transfers through the Communicator, tiles through a Kernel. Knows no pattern and no
// schedule.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <set>
#include <utility>

#include "attention/execution/attention.h"
#include "attention/execution/select_blocks.h"
#include "attention/kernels/tile_views.h"
#include "attention/kernels/upload.h"
#include "attention/plan/schedules.h"
#include "common/checksum.h"
#include "common/error.h"

namespace annulus {
namespace {

struct TensorPair {
  at::Tensor k, v;  // or dk and dv: [rows of the buffer's RowSet, D]
  int64_t numel() const { return k.defined() ? k.numel() + v.numel() : 0; }
};

// Of a block's tensor, the given global batch rows and kv heads, both among its own.
at::Tensor part_of(const at::Tensor& tensor, const KeyBlock& block, const Span& batch, const Span& heads) {
  const auto take = [](const at::Tensor& t, int64_t dim, const Span& held, const Span& wanted) {
    if (held == wanted) return t;
    const int64_t step = wanted.count > 1 ? wanted.stride / held.stride : 1;
    return t.slice(dim, held.index_of(wanted.begin), held.index_of(wanted.last()) + 1, step);
  };
  return take(take(tensor, 0, block.batch, batch), 2, block.heads, heads);
}

// Row numbers, of two blocks, of the positions that both hold. Positions are stored in the same order in both.
struct CommonRows {
  std::vector<int64_t> a, b;
};
CommonRows common_positions(const std::vector<Span>& a, const std::vector<Span>& b) {
  CommonRows rows;
  int64_t row_a = 0, row_b = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Span both = intersect(a[i], b[j]);
    for (int64_t n = 0; n < both.count; ++n) {
      rows.a.push_back(row_a + a[i].index_of(both.at(n)));
      rows.b.push_back(row_b + b[j].index_of(both.at(n)));
    }
    if (a[i].last() <= b[j].last()) {
      row_a += a[i++].count;
    } else {
      row_b += b[j++].count;
    }
  }
  return rows;
}

at::Tensor index_of(const std::vector<int64_t>& rows, const at::Tensor& like) {
  return upload(at::tensor(rows, at::kLong), like.device());
}
bool consecutive(const std::vector<int64_t>& rows) {
  return rows.back() - rows.front() + 1 == static_cast<int64_t>(rows.size());
}

// dst = src, or dst += src, in the rows that both hold.
void transfer_rows(const TensorPair& dst, const RowSet& dst_rows, const TensorPair& src, const RowSet& src_rows,
                   bool add) {
  if (dst_rows == src_rows) {
    for (const auto& [to, from] : {std::pair{dst.k, src.k}, std::pair{dst.v, src.v}})
      add ? to.add_(from) : to.copy_(from);
    return;
  }
  for (size_t d = 0; d < dst_rows.blocks.size(); ++d) {
    for (size_t s = 0; s < src_rows.blocks.size(); ++s) {
      const RowBlock &to_block = dst_rows.blocks[d], &from_block = src_rows.blocks[s];
      const Span batch = intersect(to_block.batch, from_block.batch),
                 heads = intersect(to_block.heads, from_block.heads);
      if (batch.empty() || heads.empty()) continue;
      const CommonRows rows = common_positions(to_block.positions, from_block.positions);
      if (rows.a.empty()) continue;
      const KeyBlock to = key_block(dst.k, dst.v, dst_rows, static_cast<int>(d));
      const KeyBlock from = key_block(src.k, src.v, src_rows, static_cast<int>(s));
      const at::Tensor to_index = consecutive(rows.a) ? at::Tensor() : index_of(rows.a, to.k);
      const at::Tensor from_index = consecutive(rows.b) ? at::Tensor() : index_of(rows.b, from.k);
      const int64_t n = static_cast<int64_t>(rows.a.size());
      for (const bool values : {false, true}) {
        const at::Tensor t = part_of(values ? to.v : to.k, to, batch, heads);
        const at::Tensor f = part_of(values ? from.v : from.k, from, batch, heads);
        const at::Tensor part = from_index.defined() ? f.index_select(1, from_index) : f.narrow(1, rows.b[0], n);
        if (to_index.defined()) {
          add ? t.index_add_(1, to_index, part) : t.index_copy_(1, to_index, part);
        } else {
          const at::Tensor target = t.narrow(1, rows.a[0], n);
          add ? target.add_(part) : target.copy_(part);
        }
      }
    }
  }
}

// The buffers of one direction of one call. Storage is taken when a buffer's life begins and goes to the next buffer
// that fits when it ends: a long ring allocates twice, not P times.
//
// On a GPU the host is steps ahead of the device, and transfers run on a stream of their own. Storage is reused in the
// order of the compute stream alone, which is enough:
// - exchange() lets the transfers of a step begin after all that the compute stream holds by then: a block is sent
//   after the tiles or additions that made it, and nothing arrives in storage that an earlier step's tile still reads.
// - Within a step nobody else uses what arrives or leaves: the verifier proves that no tile or addition of the step
//   touches a buffer that is received in it, and none changes one that is sent.
// - Work::wait() puts the compute stream behind all transfers of the step, the sends too, before its additions are
//   issued and before end_step lets storage go: to the next buffer, or to the allocator, which hands it out again in
//   the order of the compute stream.
// So every use of a piece of storage, on either stream, is ordered after the one before it, and the host never waits.
class Buffers {
 public:
  Buffers(const Program& program, const std::vector<Step>& steps, const at::Tensor& k)
      : program_(program),
        lives_(lifetimes(program, steps)),
        kv_options_(k.options()),
        grad_options_(k.options().dtype(accumulator_type(k.scalar_type()))),
        head_dim_(k.size(3)),
        tensors_(program.buffers.size()) {}

  // Hands in a buffer's content from outside; its memory is not recycled.
  void put(int buffer, TensorPair pair) {
    count(buffer, pair.numel());
    tensors_[index(buffer)] = std::move(pair);
    foreign_.push_back(buffer);
  }

  TensorPair& get(int buffer) {
    TensorPair& pair = tensors_[index(buffer)];
    if (!pair.k.defined()) allocate(buffer);
    return pair;
  }

  // Ends the lives that end with this step.
  void end_step(int step) {
    for (size_t b = 0; b < tensors_.size(); ++b) {
      if (lives_[b].last != step || !tensors_[b].k.defined()) continue;
      const int buffer = static_cast<int>(b);
      const bool kept = buffer == program_.saved || is_own(buffer);
      if (kept) continue;
      count(buffer, -tensors_[b].numel());
      if (std::find(foreign_.begin(), foreign_.end(), buffer) == foreign_.end()) {
        free_.push_back(std::move(tensors_[b]));
      }
      tensors_[b] = {};
    }
  }
  // The saved block is the caller's in the backward: this call stops counting it once it is read no more.
  void release_saved(int step) {
    if (program_.saved < 0 || lives_[index(program_.saved)].last != step) return;
    count(program_.saved, -tensors_[index(program_.saved)].numel());
    tensors_[index(program_.saved)] = {};
  }

  // Scattered rows of a buffer, to be sent: memory of their own until the step ends.
  TensorPair pack(int buffer, const RowSet& rows) {
    TensorPair pair{at::empty({rows.rows(), head_dim_}, kv_options_), at::empty({rows.rows(), head_dim_}, kv_options_)};
    transfer_rows(pair, rows, get(buffer), program_.buffers[index(buffer)].rows, /*add=*/false);
    packed_ += pair.numel();
    count(buffer, pair.numel());
    return pair;
  }
  void release_packed() {
    alive_[0] -= packed_;
    packed_ = 0;
  }

  int64_t peak_kv() const { return peak_[0]; }
  int64_t peak_grad() const { return peak_[1]; }

 private:
  static size_t index(int buffer) { return static_cast<size_t>(buffer); }
  bool is_own(int buffer) const {
    const BufferKind kind = program_.buffers[index(buffer)].kind;
    return kind == BufferKind::kOwnKV || kind == BufferKind::kOwnGrad;
  }
  bool is_gradient(int buffer) const { return program_.buffers[index(buffer)].holds_gradient(); }
  void count(int buffer, int64_t elements) {
    const size_t which = is_gradient(buffer) ? 1 : 0;
    alive_[which] += elements;
    peak_[which] = std::max(peak_[which], alive_[which]);
  }

  void allocate(int buffer) {
    const std::vector<int64_t> shape{program_.buffers[index(buffer)].rows.rows(), head_dim_};
    const at::TensorOptions& options = is_gradient(buffer) ? grad_options_ : kv_options_;
    TensorPair& pair = tensors_[index(buffer)];
    const bool leaves = buffer == program_.saved || is_own(buffer);  // outlives the call: exactly its size
    for (size_t i = 0; i < free_.size() && !leaves; ++i) {
      if (free_[i].k.sizes() == at::IntArrayRef(shape) && free_[i].k.scalar_type() == options.dtype().toScalarType()) {
        pair = std::move(free_[i]);
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
    if (!pair.k.defined()) {
      // What is kept but does not fit is let go first: memory is what the plan says, not twice that.
      free_.clear();
      pair = {at::empty(shape, options), at::empty(shape, options)};
    }
    count(buffer, pair.numel());
  }

  const Program& program_;
  const std::vector<Lifetime> lives_;
  const at::TensorOptions kv_options_, grad_options_;
  const int64_t head_dim_;
  std::vector<TensorPair> tensors_;
  std::vector<TensorPair> free_;
  std::vector<int> foreign_;
  int64_t packed_ = 0;
  int64_t alive_[2] = {0, 0}, peak_[2] = {0, 0};
};

std::string sizes_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d ? "," : "") + std::to_string(tensor.size(d));
  return text + "]";
}

[[noreturn]] void refuse(const AttentionCall& call, const std::string& message) {
  throw Error(ErrorKind::kPlan, "attention", call.label + ": " + message);
}

std::string exactly(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

// The communicator is the plan's. No rank numbers in these texts: ranks with the same complaint agree, and each raises
// its own (see agree).
void require_communicator(const AttentionCall& call) {
  if (!call.comm) refuse(call, "expected a communicator, got none");
  const int ranks = (call.program ? call.program->request : call.request).ranks;
  const bool other = call.program && call.comm->rank() != call.program->rank;
  if (call.comm->size() == ranks && !other) return;
  refuse(call, "expected a communicator of the plan's " + std::to_string(ranks) +
                   " ranks, and this rank's program, got a communicator of " + std::to_string(call.comm->size()) +
                   " ranks" + (other ? " and another rank's program" : ""));
}

// The tensors are this rank's rows of the request's problem.
void require_fit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  const PlanRequest& request = call.program ? call.program->request : call.request;
  if (!(call.dropout.rate >= 0 && call.dropout.rate < 1)) {
    refuse(call, "expected a dropout rate of at least 0 and below 1, got " + exactly(call.dropout.rate));
  }
  const auto expect = [&](const at::Tensor& tensor, const char* name, int64_t rows, int64_t heads) {
    const AttentionShape& shape = request.shape;
    if (tensor.dim() != 4 || tensor.size(0) != shape.batch || tensor.size(1) != rows || tensor.size(2) != heads ||
        tensor.size(3) != q.size(q.dim() - 1) || tensor.size(3) < 1) {
      refuse(call, std::string("expected ") + name + " [" + std::to_string(shape.batch) + "," + std::to_string(rows) +
                       "," + std::to_string(heads) + ",D], got " + sizes_text(tensor));
    }
    if (tensor.scalar_type() != q.scalar_type() || tensor.device() != q.device()) {
      refuse(call, std::string("expected q, k, v of one dtype on one device, got ") + toString(q.scalar_type()) +
                       " on " + q.device().str() + " and " + name + " " + toString(tensor.scalar_type()) + " on " +
                       tensor.device().str());
    }
  };
  if (!q.defined() || !k.defined() || !v.defined()) refuse(call, "expected q, k and v, got an undefined tensor");
  const at::ScalarType type = q.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16 && type != at::kHalf) {
    refuse(call, std::string("expected fp32, fp64, bf16 or fp16 tensors, got ") + toString(type));
  }
  const int64_t queries = query_layout(request).count(call.comm->rank());
  const int64_t keys = key_layout(request).count(call.comm->rank());
  expect(q, "q", queries, request.shape.heads);
  expect(k, "k", keys, request.shape.kv_heads);
  expect(v, "v", keys, request.shape.kv_heads);
}

// What the backward is given besides: dout like q, and what the forward returned.
void require_fit(const at::Tensor& dout, const AttentionOutput& forward, const at::Tensor& q,
                 const AttentionCall& call) {
  if (!forward.program) refuse(call, "expected what the forward returned, got an output without a program");
  const Program& program = *forward.program;
  const PlanRequest& request = call.program ? call.program->request : call.request;
  if (program.rank != call.comm->rank() || program.request.ranks != request.ranks ||
      !(program.request.shape == request.shape) || program.query_count() != q.size(1)) {
    refuse(call, "expected what this rank's forward of the same request returned, got an output of another one");
  }
  const auto expect = [&](const at::Tensor& tensor, const char* name, at::IntArrayRef sizes, at::ScalarType type) {
    if (!tensor.defined()) refuse(call, std::string("expected ") + name + ", got an undefined tensor");
    if (tensor.sizes() != sizes || tensor.scalar_type() != type || tensor.device() != q.device()) {
      refuse(call, std::string("expected ") + name + " as the forward's q and results ask, got " + sizes_text(tensor) +
                       " " + toString(tensor.scalar_type()) + " on " + tensor.device().str());
    }
  };
  expect(dout, "dout", q.sizes(), q.scalar_type());
  expect(forward.out, "out", q.sizes(), q.scalar_type());
  expect(forward.lse, "lse", {q.size(0), q.size(2), q.size(1)}, accumulator_type(q.scalar_type()));
  if (program.saved < 0) return;
  const int64_t rows = program.buffers[static_cast<size_t>(program.saved)].rows.rows();
  for (const at::Tensor* saved : {&forward.saved_k, &forward.saved_v}) {
    expect(*saved, "the forward's saved keys and values", {rows, q.size(3)}, q.scalar_type());
  }
}

double scale_of(const at::Tensor& q, const AttentionCall& call) {
  return call.scale != 0 ? call.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
}

// Short enough to travel before every call: lists of documents and of slices may be long.
std::string shortened(const std::string& text) {
  constexpr size_t kLong = 600;
  if (text.size() <= kLong) return text;
  return text.substr(0, kLong / 2) + " ... (" + std::to_string(text.size()) + " characters, checksum " +
         checksum(text.data(), text.size()) + ")";
}

std::string text_of(const Dropout& d) {
  if (d.rate == 0) return "none";
  return exactly(d.rate) + ", seed " + std::to_string(d.seed) + ", step " + std::to_string(d.step) + ", layer " +
         std::to_string(d.layer) + ", first row " + std::to_string(d.first_row);
}

const PlanRequest& request_of(const AttentionCall& call, const AttentionOutput* forward) {
  if (forward && forward->program) return forward->program->request;
  return call.program ? call.program->request : call.request;
}

// Before anything travels, all ranks must be in the same call of the same plan. What a rank finds wrong with its own
// tensors or plan is part of what is compared: if one rank must refuse, all do. `find` looks the plan up first: it
// checks the request when it is new.
template <typename Find>
void agree(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
           const std::string& direction, Find find, const at::Tensor* dout = nullptr,
           const AttentionOutput* forward = nullptr) {
  std::string complaint = "none";
  try {
    require_communicator(call);
    find();
    require_fit(q, k, v, call);
    if (forward) require_fit(*dout, *forward, q, call);
  } catch (const std::exception& error) {  // also out of memory, or what LibTorch raises: the others must learn of it
    if (!call.comm || call.comm->size() == 1) throw;
    complaint = error.what();
    const std::string own_room = "[attention] ";
    if (complaint.rfind(own_room, 0) == 0) complaint = complaint.substr(own_room.size());
  }
  if (call.comm->size() == 1) return;
  const bool readable = q.defined() && q.dim() == 4;
  require_agreement(*call.comm,
                    {{"what does not fit", complaint},
                     {"call", call.label + " " + direction},
                     {"plan", shortened(request_of(call, forward).text())},
                     {"dtype", q.defined() ? toString(q.scalar_type()) : "none"},
                     {"head size", readable ? std::to_string(q.size(3)) : "none"},
                     {"scale", readable ? exactly(scale_of(q, call)) : "none"},
                     {"dropout", text_of(call.dropout)},
                     {"device", q.defined() ? c10::DeviceTypeName(q.device().type()) : "none"},
                     {"kernel", std::string(to_string(call.kernel))}},
                    {call.label, 0});
  if (complaint != "none") throw Error(ErrorKind::kPlan, "attention", complaint);  // all ranks alike
}

// The program of the block maps that q and k select: made for this call, and so not cached. Ranks compare what they
// selected, and whether they could plan it, before they go on.
std::shared_ptr<const Program> select_and_plan(const at::Tensor& q, const at::Tensor& k, const AttentionCall& call) {
  const auto begin = std::chrono::steady_clock::now();
  const PlanRequest request = select_blocks(call.request, q, k, *call.comm, call.label);
  std::shared_ptr<const Program> program;
  std::string complaint = "none";
  try {
    program = std::make_shared<const Program>(
        make_program(request, make_pattern(request.pattern, request.shape), call.comm->rank()));
  } catch (const std::exception& error) {
    if (call.comm->size() == 1) throw;
    complaint = error.what();
  }
  count_planning(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  if (call.comm->size() > 1) {
    require_agreement(*call.comm, {{"what does not fit", complaint}, {"selected blocks", shortened(request.text())}},
                      {call.label, 1});
    if (complaint != "none") throw Error(ErrorKind::kPlan, "attention", complaint);
  }
  return program;
}

KernelCall kernel_call(const at::Tensor& q, const AttentionCall& call, const AttentionShape& shape) {
  return {scale_of(q, call), shape.heads / shape.kv_heads, call.dropout};
}

struct Execution {
  const AttentionCall& call;
  const Program& program;
  const std::string operation;
  const std::vector<Step>& steps;
  Buffers buffers;
  // Gradient buffers and their blocks that are to be zero, but are not written yet.
  std::set<std::pair<int, int>> fresh;
  const Kernel::Poll poll;
  int64_t messages_sent = 0, bytes_sent = 0;
  double waited = 0;

  Execution(const AttentionCall& c, const Program& p, const std::string& direction, const std::vector<Step>& s,
            const at::Tensor& k)
      : call(c),
        program(p),
        operation(c.label + " " + direction),
        steps(s),
        buffers(p, s, k),
        // One rank waits for nobody: its kernel may take as long a piece of work as it likes.
        poll(c.comm->size() > 1 ? Kernel::Poll([comm = c.comm] { comm->progress(); }) : nullptr) {}

  KeyBlock block(int buffer, int number) {
    const TensorPair& pair = buffers.get(buffer);
    KeyBlock block = key_block(pair.k, pair.v, program.buffers[static_cast<size_t>(buffer)].rows, number);
    block.fresh = fresh.count({buffer, number}) > 0;
    return block;
  }
  // The same, of gradients for the kernel to write.
  KeyBlock grads(int buffer, int number) {
    KeyBlock grads = block(buffer, number);
    fresh.erase({buffer, number});
    return grads;
  }

  // compute(tiles) for all tiles of all steps, those of one block at a time; around it transfers, additions and the
  // ends of lives.
  template <typename Compute>
  void run(Compute compute) {
    for (size_t s = 0; s < steps.size(); ++s) {
      const Step& step = steps[s];
      const int number = static_cast<int>(s);
      std::unique_ptr<Work> work;
      if (!step.sends.empty() || !step.receives.empty()) {
        const std::vector<Message> sends = messages(step.sends);
        for (const Message& m : sends) bytes_sent += static_cast<int64_t>(m.tensor.nbytes());
        messages_sent += static_cast<int64_t>(sends.size());
        work = call.comm->exchange(sends, messages(step.receives), {operation, number});
      }
      fresh.clear();
      for (const int buffer : step.zero) {
        for (size_t b = 0; b < program.buffers[static_cast<size_t>(buffer)].rows.blocks.size(); ++b) {
          fresh.insert({buffer, static_cast<int>(b)});
        }
      }
      for (size_t i = 0; i < step.tiles.size();) {
        size_t past = i + 1;
        while (past < step.tiles.size() && step.tiles[past].buffer == step.tiles[i].buffer &&
               step.tiles[past].block == step.tiles[i].block &&
               step.tiles[past].grad_buffer == step.tiles[i].grad_buffer &&
               step.tiles[past].grad_block == step.tiles[i].grad_block) {
          ++past;
        }
        compute(std::span<const Tile>(step.tiles).subspan(i, past - i));
        i = past;
      }
      for (const auto& [buffer, number] : fresh) zero_if_fresh(block(buffer, number));  // no tile came to them
      if (work) {
        const double before = call.comm->stats().wait_seconds;
        work->wait();
        waited += call.comm->stats().wait_seconds - before;
      }
      for (const Add& add : step.adds) {
        TensorPair &dst = buffers.get(add.dst), &src = buffers.get(add.src);
        transfer_rows(dst, program.buffers[static_cast<size_t>(add.dst)].rows, src,
                      program.buffers[static_cast<size_t>(add.src)].rows, /*add=*/true);
      }
      work.reset();
      buffers.release_packed();
      buffers.end_step(number);
      if (&steps == &program.backward) buffers.release_saved(number);
    }
  }

 private:
  std::vector<Message> messages(const std::vector<Transfer>& transfers) {
    std::vector<Message> list;
    for (const Transfer& t : transfers) {
      TensorPair pair = buffers.get(t.buffer);
      if (const auto first = consecutive_rows(program.buffers[static_cast<size_t>(t.buffer)].rows, t.rows)) {
        pair = {pair.k.narrow(0, *first, t.rows.rows()), pair.v.narrow(0, *first, t.rows.rows())};
      } else {
        pair = buffers.pack(t.buffer, t.rows);
      }
      list.push_back({pair.k, t.peer});
      list.push_back({pair.v, t.peer});
    }
    return list;
  }
};

// [B, m, Hk, D] as the rows of a buffer.
at::Tensor flat(const at::Tensor& tensor) { return tensor.contiguous().view({-1, tensor.size(3)}); }

void report(AttentionStats* stats, const Execution& execution, const Kernel& kernel) {
  if (!stats) return;
  *stats = {execution.buffers.peak_kv(), execution.buffers.peak_grad(), kernel.peak_result_elements(),
            execution.messages_sent,     execution.bytes_sent,          execution.waited};
}

}  // namespace

AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, AttentionStats* stats) {
  AttentionOutput result;
  result.program = call.program;
  const bool adaptive = !call.program && is_adaptive(call.request.pattern);
  agree(q, k, v, call, "forward", [&] {
    if (adaptive) validate(call.request);
    if (!call.program && !adaptive) result.program = cached_program(call.request, call.comm->rank());
  });
  if (adaptive) result.program = select_and_plan(q, k, call);
  const Program& program = *result.program;
  const std::unique_ptr<Kernel> kernel = make_kernel(call.kernel, q, call.dropout.rate > 0);
  Execution execution(call, program, "forward", program.forward, k);
  execution.buffers.put(kOwnKVBuffer, {flat(k), flat(v)});
  kernel->begin_forward(q, kernel_call(q, call, program.request.shape));
  execution.run([&](std::span<const Tile> tiles) {
    kernel->forward(execution.block(tiles[0].buffer, tiles[0].block), tiles, execution.poll);
  });
  kernel->finish_forward(result.out, result.lse);
  result.out = result.out.to(q.scalar_type());
  if (program.saved >= 0) {
    const TensorPair& saved = execution.buffers.get(program.saved);
    result.saved_k = saved.k;
    result.saved_v = saved.v;
  }
  report(stats, execution, *kernel);
  return result;
}

AttentionGradients attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const AttentionOutput& forward, const AttentionCall& call,
                                      AttentionStats* stats) {
  agree(
      q, k, v, call, "backward", [] {}, &dout, &forward);
  const Program& program = *forward.program;
  const std::unique_ptr<Kernel> kernel = make_kernel(call.kernel, q, call.dropout.rate > 0);
  Execution execution(call, program, "backward", program.backward, k);
  execution.buffers.put(kOwnKVBuffer, {flat(k), flat(v)});
  if (program.saved >= 0) execution.buffers.put(program.saved, {forward.saved_k, forward.saved_v});
  kernel->begin_backward(dout, q, forward.out, forward.lse, kernel_call(q, call, program.request.shape));
  execution.run([&](std::span<const Tile> tiles) {
    kernel->backward(execution.block(tiles[0].buffer, tiles[0].block),
                     execution.grads(tiles[0].grad_buffer, tiles[0].grad_block), tiles, execution.poll);
  });
  const at::ScalarType type = q.scalar_type();
  const TensorPair& home = execution.buffers.get(kOwnGradBuffer);
  AttentionGradients result{kernel->finish_backward().to(type), home.k.view(k.sizes()).to(type),
                            home.v.view(v.sizes()).to(type)};
  report(stats, execution, *kernel);
  return result;
}

}  // namespace annulus
