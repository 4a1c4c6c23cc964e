// Runs one rank's program (attention_forward and attention_backward of planned_call.h): transfers go through the
// Communicator, tiles through a Kernel. The code does not depend on patterns or schedules.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "attention/execution/call_checks.h"
#include "attention/execution/library_settings.h"
#include "attention/execution/planned_call.h"
#include "attention/execution/prove.h"
#include "attention/execution/select_blocks.h"
#include "attention/execution/sinks.h"
#include "attention/execution/travelling_blocks.h"
#include "attention/plan/schedules.h"
#include "attention/tiles/tile_views.h"

namespace annulus {
namespace {

// Returns the plan of the block maps that q and k select. It is made for this call only, so it is not cached. Before
// they continue, the ranks compare what they selected and whether all of them could plan and prove it.
std::shared_ptr<const RankPlan> select_and_plan(const at::Tensor& q, const at::Tensor& k, const AttentionCall& call) {
  const PlanningTime time;
  const PlanRequest request = select_blocks(call.request, q, k, *call.comm, call.label);
  std::shared_ptr<const RankPlan> plan;
  const auto find = [&]() -> Agreed {
    const Pattern pattern = make_pattern(request.pattern, request.shape);
    plan = std::make_shared<const RankPlan>(request, make_program(request, pattern, call.comm->rank()));
    if (call.prove) plan->share(&pattern);
    return {plan->digest, call.prove};
  };
  const auto fields = [&]() -> std::vector<Field> { return {{"selected blocks", request.text()}}; };
  if (any_asks(*call.comm, {call.label}, find, fields)) prove_together(*plan, *call.comm);
  return plan;
}

// Whether all tiles are in one step and read one block, and no other rank adds to their gradients.
bool one_block(const Program& program) { return program.request.ranks == 1; }

// A program whose blocks are selected by q and k runs once, so kernels keep nothing that they make from it.
KernelCall kernel_call(const at::Tensor& q, const AttentionCall& call, const Program& program) {
  const AttentionShape& shape = program.request.shape;
  return {.scale = scale_of(call, q.size(3)),
          .softcap = call.softcap,
          .group = shape.heads / shape.kv_heads,
          .dropout = call.dropout,
          .program = is_adaptive(call.request.pattern) ? 0 : program.number.value(),
          .at_once = one_block(program),
          .masks = &program.masks};
}

struct Execution {
  const AttentionCall& call;
  const Program& program;
  const std::string operation;
  const std::vector<Step>& steps;
  TravellingBlocks buffers;
  Finite& own_keys;
  // The (gradient buffer, block) pairs that must be zero but have not been written yet.
  std::set<std::pair<int, int>> fresh;
  const bool on_cpu;
  const Kernel::Poll poll;
  int64_t messages_sent = 0, bytes_sent = 0, bytes_lent = 0;
  double waited = 0;

  Execution(const PlannedCall& c, const std::string& direction, const std::vector<Step>& s, const at::Tensor& k,
            Finite& own)
      : call(c.settings()),
        program(c.plan()->program),
        operation(call.label + " " + direction),
        steps(s),
        buffers(program, s, k, *call.comm),
        own_keys(own),
        on_cpu(k.is_cpu()),
        // Where nothing is under way a kernel may take as long a piece of work as it likes.
        poll(c.poll()                ? c.poll()
             : call.comm->size() > 1 ? Kernel::Poll([comm = call.comm] { comm->progress(); })
                                     : nullptr) {}

  KeyBlock block(int buffer, int number) {
    const TensorPair& pair = buffers.get(buffer);
    KeyBlock block = key_block(pair.k, pair.v, program.buffers[static_cast<size_t>(buffer)].rows, number);
    block.fresh = fresh.count({buffer, number}) > 0;
    if (buffer == kOwnKVBuffer) block.finite = &own_keys;  // its rows are one block
    return block;
  }
  // The same for gradients that the kernel will write.
  KeyBlock grads(int buffer, int number) {
    KeyBlock grads = block(buffer, number);
    fresh.erase({buffer, number});
    return grads;
  }

  // Takes these dk and dv for the rank's own gradients. Nothing may be added to them.
  void put_own_gradients(const Kernel::KeyGradients& gradients) {
    buffers.put(kOwnGradBuffer, {gradients.dk, gradients.dv});
    fresh.erase({kOwnGradBuffer, 0});
  }

  // Runs all steps: starts each step's transfers, calls compute(tiles) for its tiles, those of one block at a time,
  // waits, does the additions, and ends the lives of buffers.
  template <typename Compute>
  void run(Compute compute) {
    for (size_t s = 0; s < steps.size(); ++s) {
      const Step& step = steps[s];
      const int number = static_cast<int>(s);
      std::unique_ptr<Work> work;
      if (!step.sends.empty() || !step.receives.empty()) {
        const std::vector<Message> receives =
            messages(step.receives, [this](const Transfer& t) { return buffers.to_receive(t); });
        const std::vector<Message> sends =
            messages(step.sends, [this](const Transfer& t) { return buffers.to_send(t); });
        for (const Message& m : sends) bytes_sent += static_cast<int64_t>(m.tensor.nbytes());
        messages_sent += static_cast<int64_t>(sends.size());
        const int64_t lent = call.comm->stats().bytes_lent;
        work = call.comm->exchange(sends, receives, {operation, number + 1, "hop"});
        bytes_lent += call.comm->stats().bytes_lent - lent;
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
      for (const auto& [buffer, number] : fresh) zero_if_fresh(block(buffer, number));  // no tile has written these
      if (work) {
        const double before = call.comm->stats().wait_seconds;
        work->wait();
        // On a device this orders streams. The device's wait is measured later, and added to the communicator's.
        if (on_cpu) waited += call.comm->stats().wait_seconds - before;
      }
      for (const Add& add : step.adds) {
        TensorPair &dst = buffers.get(add.dst), &src = buffers.get(add.src);
        transfer_rows(dst, program.buffers[static_cast<size_t>(add.dst)].rows, src,
                      program.buffers[static_cast<size_t>(add.src)].rows, /*add=*/true);
      }
      work.reset();
      buffers.end_step(number);
    }
  }

 private:
  template <typename Tensors>
  static std::vector<Message> messages(const std::vector<Transfer>& transfers, Tensors tensors_of) {
    std::vector<Message> list;
    for (const Transfer& t : transfers) {
      const TensorPair pair = tensors_of(t);
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
  *stats = {execution.buffers.peak_kv(),
            execution.buffers.peak_grad(),
            kernel.peak_result_elements(),
            execution.messages_sent,
            execution.bytes_sent,
            execution.bytes_lent,
            execution.waited};
}

}  // namespace

AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const PlannedCall& planned, AttentionStats* stats) {
  return attention_forward(q, k, v, planned, at::Tensor(), stats);
}

AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const PlannedCall& planned, const at::Tensor& sinks, AttentionStats* stats) {
  avoid_wrong_gradients();
  const AttentionCall& call = planned.settings();
  const bool unproved = agree_on(planned, q, std::nullopt, [&] {
    require_fit(q, k, v, call);
    require_sinks(sinks, q, call);
    return planned.asks_for_proof();
  });
  AttentionOutput result;
  result.number = call.comm->number_call();
  if (unproved) prove_together(*planned.plan(), *call.comm);
  const bool adaptive = is_adaptive(call.request.pattern);
  result.call = adaptive ? planned.with(select_and_plan(q, k, call)) : planned;
  const Program& program = result.program();
  const std::unique_ptr<Kernel> kernel = make_kernel(call.kernel, q, call.dropout.rate > 0, call.softcap > 0);
  Execution execution(result.call, "forward", program.forward, k, result.own_keys);
  execution.buffers.put(kOwnKVBuffer, {flat(k), flat(v)});
  KernelCall of_kernel = kernel_call(q, call, program);
  if (call.sinks) of_kernel.at_once = false;  // out is rounded after they are added
  kernel->begin_forward(q, of_kernel);
  execution.run([&](std::span<const Tile> tiles) {
    kernel->forward(execution.block(tiles[0].buffer, tiles[0].block), tiles, execution.poll);
  });
  kernel->finish_forward(result.out, result.lse);
  if (call.sinks) add_sinks(result.out, result.lse, sinks);
  result.sinks = sinks;
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
                                      const at::Tensor& v, AttentionOutput forward, AttentionStats* stats) {
  const AttentionCall& call = forward.call.settings();
  agree_on(forward.call, q, forward.number, [&] {
    require_fit(q, k, v, call);
    require_fit(dout, forward, q);
    return false;
  });
  const Program& program = forward.program();
  at::Tensor dsinks;
  if (call.sinks) {
    dsinks = sink_gradients(dout, forward.out, forward.lse, forward.sinks).to(forward.sinks.scalar_type());
  }
  const std::unique_ptr<Kernel> kernel = make_kernel(call.kernel, q, call.dropout.rate > 0, call.softcap > 0);
  Execution execution(forward.call, "backward", program.backward, k, forward.own_keys);
  execution.buffers.put(kOwnKVBuffer, {flat(k), flat(v)});
  if (program.saved >= 0) execution.buffers.put(program.saved, {forward.saved_k, forward.saved_v});
  kernel->begin_backward(dout, q, forward.out, forward.lse, kernel_call(q, call, program));
  execution.run([&](std::span<const Tile> tiles) {
    const KeyBlock keys = execution.block(tiles[0].buffer, tiles[0].block);
    if (one_block(program)) {
      if (const auto whole = kernel->whole_backward(keys, tiles, execution.poll)) {
        return execution.put_own_gradients(*whole);
      }
    }
    kernel->backward(keys, execution.grads(tiles[0].grad_buffer, tiles[0].grad_block), tiles, execution.poll);
  });
  const at::ScalarType type = q.scalar_type();
  const TensorPair& home = execution.buffers.get(kOwnGradBuffer);
  AttentionGradients result{kernel->finish_backward().to(type), home.k.view(k.sizes()).to(type),
                            home.v.view(v.sizes()).to(type), dsinks};
  report(stats, execution, *kernel);
  return result;
}

}  // namespace annulus
