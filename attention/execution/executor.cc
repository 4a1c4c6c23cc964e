// Runs one rank's program (attention_forward and attention_backward of planned_call.h): transfers go through the
// Communicator, tiles through a Kernel for this rank's queries and one for each set of queries that comes from another
// rank. The code does not depend on patterns or schedules.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "attention/execution/call_checks.h"
#include "attention/execution/cudnn_workaround.h"
#include "attention/execution/planned_call.h"
#include "attention/execution/prove.h"
#include "attention/execution/select_blocks.h"
#include "attention/execution/sinks.h"
#include "attention/execution/travelling_blocks.h"
#include "attention/plan/schedules.h"
#include "attention/tiles/tile_views.h"
#include "common/trace/beat.h"
#include "common/trace/recorder.h"

namespace annulus {
namespace {

// Returns the plan of the block maps that q and k select. It is made for this call only, so it is not cached. Before
// they continue, the ranks compare what they selected and whether all of them could plan and prove it.
std::shared_ptr<const RankPlan> select_and_plan(const at::Tensor& q, const at::Tensor& k, const AttentionCall& call) {
  const PlanningTime time;
  const PlanRequest request = select_blocks(resolve_schedule(call.request), q, k, *call.comm, call.label);
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

// What kernels call between pieces of work shows that this rank makes progress, too.
Kernel::Poll with_beat(Kernel::Poll poll) {
  return [poll = std::move(poll)] {
    beat();
    poll();
  };
}

// The tensors of queries, for which a kernel is begun: those of this rank, or of a block that came from another.
struct Queries {
  at::Tensor q, dout, out;  // [B, rows, heads, D]; dout and out in the backward
  at::Tensor lse;           // [B, heads, rows]
};

struct Execution {
  const AttentionCall& call;
  const Program& program;
  const std::string operation;
  const std::vector<Step>& steps;
  const bool backward;
  TravellingBlocks buffers;
  Finite& own_keys;
  const KernelCall of_kernels;
  // By Tile::queries; -1 is this rank's, which is there from the beginning.
  std::map<int, std::unique_ptr<Kernel>> kernels;
  int64_t peak_result_elements = 0;  // of the kernels that have ended
  // The (gradient buffer, block) pairs that must be zero but have not been written yet.
  std::set<std::pair<int, int>> fresh;
  const bool on_cpu;
  const Kernel::Poll poll;
  int64_t messages_sent = 0, bytes_sent = 0, bytes_lent = 0;
  double waited = 0;

  Execution(const PlannedCall& c, const std::string& direction, const std::vector<Step>& s, const Queries& own,
            const at::Tensor& k, Finite& finite, const KernelCall& kernel)
      : call(c.settings()),
        program(c.plan()->program),
        operation(call.label + " " + direction),
        steps(s),
        backward(&s == &program.backward),
        buffers(program, s, k, *call.comm),
        own_keys(finite),
        of_kernels(kernel),
        on_cpu(k.is_cpu()),
        // Where nothing is under way a kernel may take as long a piece of work as it likes.
        poll(c.poll()                ? with_beat(c.poll())
             : call.comm->size() > 1 ? with_beat([comm = call.comm] { comm->progress(); })
                                     : nullptr) {
    begin(-1, own, kernel);
    if (!program.moves_queries()) return;
    BlockTensors rows{flat(own.q)};
    if (backward) rows.insert(rows.end(), {flat(own.dout), flat(own.out), rows_of(own.lse)});
    buffers.put(kOwnQueriesBuffer, std::move(rows));
  }

  // [B, m, H, D] as the rows of a buffer, and [B, H, m] as rows of one element.
  static at::Tensor flat(const at::Tensor& tensor) { return tensor.contiguous().view({-1, tensor.size(3)}); }
  static at::Tensor rows_of(const at::Tensor& lse) { return lse.transpose(1, 2).contiguous().view({-1, 1}); }
  // The inverse of rows_of for a block of `like` [B, rows, heads, ..].
  static at::Tensor lse_of(const at::Tensor& rows, const at::Tensor& like) {
    return rows.view({like.size(0), like.size(1), like.size(2)}).transpose(1, 2).contiguous();
  }

  const RowBlock& block_of_queries(int number) const {
    return program.buffers[static_cast<size_t>(number)].rows.blocks[0];
  }

  void begin(int number, const Queries& queries, const KernelCall& kernel_call) {
    std::unique_ptr<Kernel>& kernel = kernels[number];
    kernel = make_kernel(call.kernel, queries.q, call.dropout.rate > 0, call.softcap > 0);
    if (backward) {
      kernel->begin_backward(queries.dout, queries.q, queries.out, queries.lse, kernel_call);
    } else {
      kernel->begin_forward(queries.q, kernel_call);
    }
  }

  // The kernel of these queries, which is begun at the first use.
  Kernel& kernel_of(int number) {
    if (const auto it = kernels.find(number); it != kernels.end()) return *it->second;
    const RowBlock& block = block_of_queries(number);
    const BlockTensors& tensors = buffers.get(number);
    const auto view = [&](const at::Tensor& t) {
      return t.view({block.batch.count, block.positions_count(), block.heads.count, t.size(1)});
    };
    Queries queries{.q = view(tensors[0]), .dout = {}, .out = {}, .lse = {}};
    if (backward) queries = {queries.q, view(tensors[1]), view(tensors[2]), lse_of(tensors[3], queries.q)};
    KernelCall call_of_block = of_kernels;
    call_of_block.dropout.first_head = block.heads.begin;
    begin(number, queries, call_of_block);
    return *kernels[number];
  }

  // Ends the computation with some queries: out [B, n, H, D] and lse [B, H, n], or dq alone.
  std::pair<at::Tensor, at::Tensor> results_of(int number) {
    Kernel& kernel = kernel_of(number);
    std::pair<at::Tensor, at::Tensor> results;
    if (backward) {
      results.first = kernel.finish_backward();
    } else {
      kernel.finish_forward(results.first, results.second);
    }
    peak_result_elements = std::max(peak_result_elements, kernel.peak_result_elements());
    kernels.erase(number);
    return results;
  }

  // The same as the rows of a buffer of results.
  BlockTensors end(int number) {
    const auto [result, lse] = results_of(number);
    BlockTensors tensors{flat(result.to(lse.defined() ? lse.scalar_type() : accumulator_type(result.scalar_type())))};
    if (lse.defined()) tensors.push_back(rows_of(lse));
    return tensors;
  }

  // This rank's out and lse, or dq alone, with what other ranks have computed for its queries.
  std::pair<at::Tensor, at::Tensor> own_results(const at::Tensor& q) {
    const TraceSpan span(TraceKind::kCompute, "finish");
    if (!own_ended_) return results_of(-1);
    const BlockTensors& own = buffers.get(kOwnResultsBuffer);
    return {own[0].view(q.sizes()), backward ? at::Tensor() : lse_of(own[1], q)};
  }

  // The block of a buffer of keys or gradients as the kernel of these queries counts its heads.
  KeyBlock block(int buffer, int number, int queries = -1) {
    const BlockTensors& pair = buffers.get(buffer);
    KeyBlock block = key_block(pair[0], pair[1], program.buffers[static_cast<size_t>(buffer)].rows, number);
    block.fresh = fresh.count({buffer, number}) > 0;
    if (buffer == kOwnKVBuffer) block.finite = &own_keys;  // its rows are one block
    if (queries >= 0) block.heads.begin -= block_of_queries(queries).heads.begin / of_kernels.group;
    return block;
  }
  // The same for gradients that the kernel will write.
  KeyBlock grads(int buffer, int number, int queries) {
    KeyBlock grads = block(buffer, number, queries);
    fresh.erase({buffer, number});
    return grads;
  }

  // Takes these dk and dv for the rank's own gradients. Nothing may be added to them.
  void put_own_gradients(const Kernel::KeyGradients& gradients) {
    buffers.put(kOwnGradBuffer, {gradients.dk, gradients.dv});
    fresh.erase({kOwnGradBuffer, 0});
  }

  // Runs all steps: starts each step's transfers, calls compute(kernel, tiles) for its tiles, those of the same queries
  // and one block at a time, ends queries, waits, does the additions, and ends the lives of buffers.
  template <typename Compute>
  void run(Compute compute) {
    for (size_t s = 0; s < steps.size(); ++s) {
      const Step& step = steps[s];
      const int number = static_cast<int>(s);
      const TraceHop hop(number + 1);
      const TraceSpan of_hop(TraceKind::kPhase, "hop");
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
      const auto place_of = [](const Tile& t) {
        return std::tuple(t.queries, t.buffer, t.block, t.grad_buffer, t.grad_block);
      };
      for (size_t i = 0; i < step.tiles.size();) {
        size_t past = i + 1;
        while (past < step.tiles.size() && place_of(step.tiles[past]) == place_of(step.tiles[i])) ++past;
        const TraceSpan of_tiles(TraceKind::kCompute, "tiles");
        compute(kernel_of(step.tiles[i].queries), std::span<const Tile>(step.tiles).subspan(i, past - i));
        i = past;
      }
      for (const auto& [buffer, number] : fresh) zero_if_fresh(block(buffer, number));  // no tile has written these
      for (const Finish& finish : step.finishes) {
        const TraceSpan of_finish(TraceKind::kCompute, "finish");
        buffers.fill(finish.results, end(finish.queries));
      }
      if (work) {
        const double before = call.comm->stats().wait_seconds;
        work->wait();
        // On a device this orders streams. The device's wait is measured later, and added to the communicator's.
        if (on_cpu) waited += call.comm->stats().wait_seconds - before;
      }
      std::optional<TraceSpan> of_adds;
      if (!step.adds.empty()) of_adds.emplace(TraceKind::kCompute, TraceName("add"));
      for (const Add& add : step.adds) {
        if (add.dst == kOwnResultsBuffer && program.moves_queries() && !own_ended_) {
          buffers.put(kOwnResultsBuffer, end(-1));
          own_ended_ = true;
        }
        const bool merges = !backward && !program.buffers[static_cast<size_t>(add.dst)].of_keys();
        transfer_rows(buffers.get(add.dst), program.buffers[static_cast<size_t>(add.dst)].rows, buffers.get(add.src),
                      program.buffers[static_cast<size_t>(add.src)].rows, merges ? Joining::kMerge : Joining::kAdd);
      }
      of_adds.reset();
      work.reset();
      buffers.end_step(number);
    }
  }

 private:
  template <typename Tensors>
  static std::vector<Message> messages(const std::vector<Transfer>& transfers, Tensors tensors_of) {
    std::vector<Message> list;
    for (const Transfer& t : transfers) {
      for (at::Tensor& tensor : tensors_of(t)) list.push_back({std::move(tensor), t.peer});
    }
    return list;
  }

  bool own_ended_ = false;
};

void report(AttentionStats* stats, const Execution& execution) {
  if (!stats) return;
  *stats = {execution.buffers.peak_kv(),
            execution.buffers.peak_grad(),
            execution.buffers.peak_query(),
            execution.buffers.peak_result(),
            execution.peak_result_elements,
            execution.messages_sent,
            execution.bytes_sent,
            execution.bytes_lent,
            execution.waited};
}

}  // namespace

bool lends_saved(const AttentionOutput& forward) {
  return lends_saved(forward.program(), *forward.call.settings().comm);
}

AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const PlannedCall& planned, AttentionStats* stats) {
  return attention_forward(q, k, v, planned, at::Tensor(), stats);
}

AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const PlannedCall& planned, const at::Tensor& sinks, AttentionStats* stats) {
  avoid_wrong_gradients();
  const AttentionCall& call = planned.settings();
  const TraceSpan span(TraceKind::kPhase, "attention forward", call.label);
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
  KernelCall of_kernel = kernel_call(q, call, program);
  if (call.sinks) of_kernel.at_once = false;  // out is rounded after they are added
  Execution execution(result.call, "forward", program.forward, {.q = q, .dout = {}, .out = {}, .lse = {}}, k,
                      result.own_keys, of_kernel);
  execution.buffers.put(kOwnKVBuffer, {Execution::flat(k), Execution::flat(v)});
  execution.run([&](Kernel& kernel, std::span<const Tile> tiles) {
    kernel.forward(execution.block(tiles[0].buffer, tiles[0].block, tiles[0].queries), tiles, execution.poll);
  });
  std::tie(result.out, result.lse) = execution.own_results(q);
  if (call.sinks) add_sinks(result.out, result.lse, sinks);
  result.sinks = sinks;
  result.out = result.out.to(q.scalar_type());
  if (program.saved >= 0) {
    const BlockTensors& saved = execution.buffers.get(program.saved);
    result.saved_k = saved[0];
    result.saved_v = saved[1];
  }
  report(stats, execution);
  return result;
}

AttentionGradients attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, AttentionOutput forward, AttentionStats* stats) {
  const AttentionCall& call = forward.call.settings();
  const TraceSpan span(TraceKind::kPhase, "attention backward", call.label);
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
  Execution execution(forward.call, "backward", program.backward, {q, dout, forward.out, forward.lse}, k,
                      forward.own_keys, kernel_call(q, call, program));
  execution.buffers.put(kOwnKVBuffer, {Execution::flat(k), Execution::flat(v)});
  if (program.saved >= 0) execution.buffers.put(program.saved, {forward.saved_k, forward.saved_v});
  execution.run([&](Kernel& kernel, std::span<const Tile> tiles) {
    const Tile& first = tiles[0];
    const KeyBlock keys = execution.block(first.buffer, first.block, first.queries);
    if (one_block(program)) {
      if (const auto whole = kernel.whole_backward(keys, tiles, execution.poll)) {
        return execution.put_own_gradients(*whole);
      }
    }
    kernel.backward(keys, execution.grads(first.grad_buffer, first.grad_block, first.queries), tiles, execution.poll);
  });
  const at::ScalarType type = q.scalar_type();
  const BlockTensors& home = execution.buffers.get(kOwnGradBuffer);
  AttentionGradients result{execution.own_results(q).first.to(type), home[0].view(k.sizes()).to(type),
                            home[1].view(v.sizes()).to(type), dsinks};
  report(stats, execution);
  return result;
}

}  // namespace annulus
