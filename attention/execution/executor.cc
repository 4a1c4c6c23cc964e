// Runs one rank's program: transfers through the Communicator, tiles through a Kernel. Knows no pattern and no
// schedule.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "attention/execution/attention.h"
#include "attention/kernels/tile_views.h"
#include "attention/plan/schedules.h"
#include "common/error.h"

namespace annulus {
namespace {

struct TensorPair {
  at::Tensor k, v;  // or dk and dv: [batch rows, positions, kv heads, D]
  int64_t numel() const { return k.defined() ? k.numel() + v.numel() : 0; }
};

// The buffers of one direction of one call. Storage is taken when a buffer's life begins and goes to the next buffer
// that fits when it ends: a long ring allocates twice, not P times.
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
    const RowSet& rows = program_.buffers[index(buffer)].rows;
    const std::vector<int64_t> shape{rows.batch.count, rows.positions_count(), rows.heads.count, head_dim_};
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

// The tensors are this rank's rows of the program's problem.
void require_fit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  if (!call.program || !call.comm) refuse(call, "expected a program and a communicator, got none");
  const Program& program = *call.program;
  // No rank numbers in these texts: ranks with the same complaint agree, and each raises its own (see agree).
  if (call.comm->size() != program.request.ranks || call.comm->rank() != program.rank) {
    refuse(call, "expected a communicator of the plan's " + std::to_string(program.request.ranks) +
                     " ranks, and this rank's program, got a communicator of " + std::to_string(call.comm->size()) +
                     " ranks" + (call.comm->rank() != program.rank ? " and another rank's program" : ""));
  }
  const auto expect = [&](const at::Tensor& tensor, const char* name, int64_t rows, int64_t heads) {
    const AttentionShape& shape = program.request.shape;
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
  expect(q, "q", program.query_count(), program.request.shape.heads);
  expect(k, "k", program.key_count(), program.request.shape.kv_heads);
  expect(v, "v", program.key_count(), program.request.shape.kv_heads);
}

// What the backward is given besides: dout like q, and what the forward returned.
void require_fit(const at::Tensor& dout, const AttentionOutput& forward, const at::Tensor& q,
                 const AttentionCall& call) {
  const Program& program = *call.program;
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
  const RowSet& rows = program.buffers[static_cast<size_t>(program.saved)].rows;
  for (const at::Tensor* saved : {&forward.saved_k, &forward.saved_v}) {
    expect(*saved, "the forward's saved keys and values",
           {rows.batch.count, rows.positions_count(), rows.heads.count, q.size(3)}, q.scalar_type());
  }
}

std::string exactly(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

double scale_of(const at::Tensor& q, const AttentionCall& call) {
  return call.scale != 0 ? call.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
}

// Before anything travels, all ranks must be in the same call of the same plan. What a rank finds wrong with its own
// tensors is part of what is compared: if one rank must refuse, all do.
void agree(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
           const std::string& direction, const at::Tensor* dout = nullptr, const AttentionOutput* forward = nullptr) {
  std::string complaint = "none";
  try {
    require_fit(q, k, v, call);
    if (forward) require_fit(*dout, *forward, q, call);
  } catch (const Error& error) {
    if (!call.comm || call.comm->size() == 1) throw;
    complaint = std::string(error.what()).substr(std::string("[attention] ").size());
  }
  if (call.comm->size() == 1) return;
  const bool readable = call.program && q.defined() && q.dim() == 4;
  require_agreement(*call.comm,
                    {{"what does not fit", complaint},
                     {"call", call.label + " " + direction},
                     {"plan", call.program ? call.program->request.text() : "none"},
                     {"dtype", q.defined() ? toString(q.scalar_type()) : "none"},
                     {"head size", readable ? std::to_string(q.size(3)) : "none"},
                     {"scale", readable ? exactly(scale_of(q, call)) : "none"},
                     {"device", q.defined() ? c10::DeviceTypeName(q.device().type()) : "none"},
                     {"kernel", std::string(to_string(call.kernel))}},
                    {call.label, 0});
  if (complaint != "none") throw Error(ErrorKind::kPlan, "attention", complaint);  // all ranks alike
}

struct Execution {
  const AttentionCall& call;
  const std::string operation;
  const std::vector<Step>& steps;
  Buffers buffers;
  const Kernel::Poll poll;
  int64_t messages_sent = 0, bytes_sent = 0;
  double waited = 0;

  Execution(const AttentionCall& c, const std::string& direction, const std::vector<Step>& s, const at::Tensor& k)
      : call(c),
        operation(c.label + " " + direction),
        steps(s),
        buffers(*c.program, s, k),
        // One rank waits for nobody: its kernel may take as long a piece of work as it likes.
        poll(c.comm->size() > 1 ? Kernel::Poll([comm = c.comm] { comm->progress(); }) : nullptr) {}

  // compute(tiles) for all tiles of all steps, those of one buffer at a time; around it transfers, additions and the
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
      for (const int buffer : step.zero) {
        TensorPair& pair = buffers.get(buffer);
        pair.k.zero_();
        pair.v.zero_();
      }
      for (size_t i = 0; i < step.tiles.size();) {
        size_t past = i + 1;
        while (past < step.tiles.size() && step.tiles[past].buffer == step.tiles[i].buffer &&
               step.tiles[past].grad_buffer == step.tiles[i].grad_buffer) {
          ++past;
        }
        compute(std::span<const Tile>(step.tiles).subspan(i, past - i));
        i = past;
      }
      if (work) {
        const double before = call.comm->stats().wait_seconds;
        work->wait();
        waited += call.comm->stats().wait_seconds - before;
      }
      for (const Add& add : step.adds) {
        TensorPair &dst = buffers.get(add.dst), &src = buffers.get(add.src);
        dst.k.add_(src.k);
        dst.v.add_(src.v);
      }
      work.reset();
      buffers.end_step(number);
      if (&steps == &call.program->backward) buffers.release_saved(number);
    }
  }

 private:
  std::vector<Message> messages(const std::vector<Transfer>& transfers) {
    std::vector<Message> list;
    for (const Transfer& t : transfers) {
      TensorPair& pair = buffers.get(t.buffer);
      if (!(t.rows == call.program->buffers[static_cast<size_t>(t.buffer)].rows)) {
        throw Error(ErrorKind::kInternal, "executor", "a transfer of part of a buffer; schedules move whole buffers");
      }
      list.push_back({pair.k, t.peer});
      list.push_back({pair.v, t.peer});
    }
    return list;
  }
};

void report(AttentionStats* stats, const Execution& execution, const Kernel& kernel) {
  if (!stats) return;
  *stats = {execution.buffers.peak_kv(), execution.buffers.peak_grad(), kernel.peak_result_elements(),
            execution.messages_sent,     execution.bytes_sent,          execution.waited};
}

}  // namespace

AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, AttentionStats* stats) {
  agree(q, k, v, call, "forward");
  const Program& program = *call.program;
  const std::unique_ptr<Kernel> kernel = make_kernel(call.kernel, q);
  Execution execution(call, "forward", program.forward, k);
  execution.buffers.put(kOwnKVBuffer, {k.contiguous(), v.contiguous()});
  kernel->begin_forward(q, scale_of(q, call));
  execution.run([&](std::span<const Tile> tiles) {
    const TensorPair& keys = execution.buffers.get(tiles[0].buffer);
    kernel->forward(keys.k, keys.v, tiles, execution.poll);
  });
  AttentionOutput result;
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
  agree(q, k, v, call, "backward", &dout, &forward);
  const Program& program = *call.program;
  const std::unique_ptr<Kernel> kernel = make_kernel(call.kernel, q);
  Execution execution(call, "backward", program.backward, k);
  execution.buffers.put(kOwnKVBuffer, {k.contiguous(), v.contiguous()});
  if (program.saved >= 0) execution.buffers.put(program.saved, {forward.saved_k, forward.saved_v});
  kernel->begin_backward(dout, q, forward.out, forward.lse, scale_of(q, call));
  execution.run([&](std::span<const Tile> tiles) {
    const TensorPair& keys = execution.buffers.get(tiles[0].buffer);
    TensorPair& grads = execution.buffers.get(tiles[0].grad_buffer);
    kernel->backward(keys.k, keys.v, tiles, grads.k, grads.v, execution.poll);
  });
  const at::ScalarType type = q.scalar_type();
  const TensorPair& home = execution.buffers.get(kOwnGradBuffer);
  AttentionGradients result{kernel->finish_backward().to(type), home.k.to(type), home.v.to(type)};
  report(stats, execution, *kernel);
  return result;
}

}  // namespace annulus
