// See attend.h.
#include "runtime/attend/attend.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "attention/execution/gather_positions.h"
#include "attention/execution/planned_call.h"
#include "attention/plan/balance.h"
#include "attention/plan/choice.h"
#include "comm/agreement.h"
#include "comm/gather_trace.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "common/trace/recorder.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

struct NamedFile {
  std::string name;  // "--output"
  std::string path;
};

void add_map_files(const PatternSpec& pattern, std::vector<NamedFile>& files) {
  if (!pattern.blocks.file.empty()) files.push_back({"the block map's file of --pattern", pattern.blocks.file});
  if (!pattern.mask.file.empty()) files.push_back({"the mask's file of --pattern", pattern.mask.file});
  for (const PatternSpec& member : pattern.members) add_map_files(member, files);
}

// Refuses an output that would replace an input or the other output.
void check_outputs(const AttendOptions& options, const PatternSpec& pattern) {
  std::vector<NamedFile> others;
  if (!options.input.empty()) others.push_back({"--input", options.input});
  add_map_files(pattern, others);
  for (const NamedFile& file : {NamedFile{"--output", options.output}, NamedFile{"--mask-out", options.mask_out},
                                NamedFile{"--trace", options.trace}}) {
    if (file.path.empty()) continue;
    for (const NamedFile& other : others) {
      if (!same_file(file.path, other.path)) continue;
      throw Error(ErrorKind::kUsage, "attend",
                  file.name + " " + file.path + " and " + other.name + ", " + other.path +
                      ", are the same file: name another file to write");
    }
    require_output("attend", file.name + " " + file.path, file.path);
    others.push_back(file);
  }
}

// Reads only the rows at `spans` of a tensor [B, S, heads, D], in as few pieces as possible, and returns them one after
// the other.
at::Tensor read_rows(const SafetensorsFile& file, const TensorInfo& info, const std::vector<Span>& spans) {
  int64_t rows = 0;
  for (const Span& span : spans) rows += span.count;
  at::Tensor tensor = at::empty({info.shape[0], rows, info.shape[2], info.shape[3]}, info.dtype);
  const auto row_bytes = static_cast<uint64_t>(info.shape[2] * info.shape[3] * tensor.element_size());
  char* to = static_cast<char*>(tensor.data_ptr());
  const auto read = [&](int64_t row, int64_t count) {
    const uint64_t bytes = static_cast<uint64_t>(count) * row_bytes;
    file.read(info, static_cast<uint64_t>(row) * row_bytes, bytes, to);
    to += bytes;
  };
  for (int64_t b = 0; b < info.shape[0]; ++b) {
    for (const Span& span : spans) {
      const int64_t pieces = span.stride == 1 ? std::min<int64_t>(1, span.count) : span.count;
      for (int64_t i = 0; i < pieces; ++i) read(b * info.shape[1] + span.at(i), span.stride == 1 ? span.count : 1);
    }
  }
  return tensor;
}

constexpr OpLabel kGathering{"attend, gathering results"};

// Waits until the device has completed what this thread has launched.
void finish(at::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

std::string amount(int64_t bytes) {
  return bytes < 10'000 ? with_commas(bytes, "byte") : rounded(static_cast<double>(bytes) / 1e6, 2) + " MB";
}

std::string dropout_text(const Dropout& d) {
  return d.rate == 0 ? "no"
                     : exact(d.rate) + ", seed " + std::to_string(d.seed) + ", step " + std::to_string(d.step) +
                           ", layer " + std::to_string(d.layer);
}

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, "attend", message); }
[[noreturn]] void refuse_input(const std::string& message) { throw Error(ErrorKind::kInput, "attend", message); }

}  // namespace

void check_options(const AttendOptions& o) {
  if (o.input.empty() && o.random.empty()) {
    refuse("expected --input FILE with q, k and v, or --random to make them; `annulus attend --help` shows an example");
  }
  if (!o.input.empty() && !o.random.empty()) refuse("--input and --random were both given; leave one of them out");
  if (!o.random.empty()) parse_random_input(o.random, "--random");
  const PatternSpec pattern = parse_pattern(o.pattern, "--pattern");
  if (o.layout) parse_layout_or_auto(*o.layout, "--layout");
  if (o.layout && !o.lengths.empty()) {
    refuse("--lengths gives each rank a contiguous part, and --layout was given as well; leave one of them out");
  }
  parse_schedule(o.schedule, "--schedule");
  parse_query_offset(o.query_offset, "--query-offset");
  parse_kernel(o.kernel, "--kernel");
  if (o.softcap != 0 && !(o.softcap >= 1e-30 && o.softcap <= 1e30)) {
    refuse("--softcap should be positive and finite, from 1e-30 to 1e30, or 0 for none");
  }
  if (o.scale && !(std::isfinite(*o.scale) && *o.scale != 0)) refuse("--scale should be a finite number other than 0");
  if (o.output.empty() && !o.input.empty()) refuse("expected --output FILE, the safetensors file to write");
  if (!(o.dropout.rate >= 0 && o.dropout.rate < 1)) refuse("--dropout should be at least 0 and below 1");
  if (o.dropout.step < 0 || o.dropout.layer < 0) refuse("--step and --layer should be at least 0");
  if (!o.check_rows.empty()) parse_row_draw(o.check_rows, "--check");
  if (!o.mask_out.empty() && pattern.kind != PatternSpec::Kind::kBlocks) {
    refuse("--mask-out writes the block map of a pattern of kind \"blocks\", but --pattern is " + pattern.text());
  }
}

AttendJob::AttendJob(const AttendOptions& options, const AttendRanks& ranks) : options_(options) {
  check_options(options);  // errors in the options are reported before errors in files
  kernel_ = parse_kernel(options.kernel, "--kernel");
  request_.pattern = parse_pattern(options.pattern, "--pattern");
  const std::optional<LayoutKind> layout = parse_layout_or_auto(options.layout.value_or("zigzag"), "--layout");
  request_.layout = layout.value_or(LayoutKind::kZigzag);
  request_.schedule = parse_schedule(options.schedule, "--schedule");
  request_.within = options.within;
  check_outputs(options, request_.pattern);
  if (!options.random.empty()) {
    random_ = parse_random_input(options.random, "--random");
    dtype_ = random_->dtype;
    head_dim_ = random_->dim;
    request_.shape = aligned(random_->shape(parse_query_offset(options.query_offset, "--query-offset")));
  } else {
    open_input();
  }
  request_.terms = on_hosts(
      terms_of(options.machine, "--machine", options.device, head_dim_, at::elementSize(dtype_), options.backward),
      ranks.hosts);
  if (ranks.free_bytes > 0) request_.terms = within_memory(request_.terms, static_cast<double>(ranks.free_bytes));
  request_.ranks = ranks.hosts.ranks();
  request_.even = options_.even;
  request_.uneven_lengths = options_.lengths;
  if (!options.check_rows.empty()) draw_ = parse_row_draw(options.check_rows, "--check");
  if (!layout) {  // before a mask is read, of which a rank may hold only the bits of its own queries
    PlanRequest unmasked = request_;
    unmasked.pattern = read_block_maps(without_masks(request_.pattern), request_.shape);
    const LayoutChoice choice = choose_layout(unmasked);
    request_.layout = choice.layout;
    layout_reason_ = choice.reason;
  }
  if (request_.schedule == ScheduleKind::kAuto && request_.ranks > 1 && has_mask(request_.pattern)) {
    PlanRequest without_bits = request_;  // which are those that the chosen schedule needs
    without_bits.pattern = read_block_maps(request_.pattern, request_.shape, HeldBits());
    const PlanChoice choice = choose_plan(without_bits);
    request_.schedule = choice.request.schedule;
    request_.within = choice.request.within;
    schedule_reason_ = choice.reason();
  }
  request_.pattern = read_block_maps(request_.pattern, request_.shape, bits_to_read(ranks.rank));
  validate(request_);
  if (request_.schedule == ScheduleKind::kAuto && request_.terms->most_bytes() > 0) resolve_schedule(request_);
  if (options.check && !draw_) {
    check_oracle_size(request_.shape, head_dim_);
  }
}

// The bits of masks that this rank reads.
HeldBits AttendJob::bits_to_read(std::optional<int> rank) const {
  // The check of all pairs is made on rank 0.
  const bool looks_at_all = options_.check && !draw_ && rank == 0;
  if (!rank || !has_mask(request_.pattern)) return HeldBits::everything();
  if (looks_at_all) return HeldBits::of({Span::range(0, request_.shape.q_len)});
  HeldBits bits = needed_bits(request_, *rank);
  if (draw_ && !bits.all) {
    HeldBits drawn = HeldBits::of(drawn_queries(*draw_, request_.shape, query_layout(request_)));
    bits.parts.push_back(std::move(drawn.parts[0]));
  }
  return bits;
}

void AttendJob::open_input() {
  file_.emplace(options_.input);
  const TensorInfo* q = file_->find("q");
  const TensorInfo* k = file_->find("k");
  for (const char* name : {"q", "k", "v", "dout", "sinks"}) {
    const bool wanted = std::strcmp(name, "dout") == 0    ? options_.backward
                        : std::strcmp(name, "sinks") == 0 ? options_.sinks
                                                          : true;
    if (wanted && file_->find(name) == nullptr) {
      std::string has;
      for (const TensorInfo& info : file_->tensors()) has += (has.empty() ? "" : ", ") + info.name;
      refuse_input(options_.input + " has no tensor \"" + name + "\": expected q, k, v" +
                   (options_.backward ? " and, with --backward, dout" : "") +
                   (options_.sinks ? " and, with --sinks, sinks" : "") + "; it has " + (has.empty() ? "none" : has));
    }
  }
  dtype_ = q->dtype;
  if (dtype_ != at::kFloat && dtype_ != at::kDouble && dtype_ != at::kBFloat16 && dtype_ != at::kHalf) {
    refuse_input(options_.input + ", tensor \"q\": dtype " + std::string(safetensors_dtype(dtype_)) +
                 " should be one of F32, F64, BF16, F16");
  }
  for (const TensorInfo* info : {q, k}) {
    if (info->shape.size() != 4) {
      refuse_input(options_.input + ", tensor \"" + info->name + "\": shape " + list_text(info->shape) +
                   " should be [batch, length, heads, head size]");
    }
  }
  const std::vector<int64_t>&qs = q->shape, &ks = k->shape;
  check_tensor("k", "[B, Sk, Hk, D] with q's B and D", {qs[0], ks[1], ks[2], qs[3]});
  check_tensor("v", "like k", ks);
  if (options_.backward) check_tensor("dout", "like q", qs);
  if (options_.sinks) {
    const TensorInfo& info = *file_->find("sinks");
    if (info.shape != std::vector<int64_t>{qs[2]} || !at::isFloatingType(info.dtype)) {
      refuse_input(options_.input + ", tensor \"sinks\": " + std::string(safetensors_dtype(info.dtype)) + " " +
                   list_text(info.shape) +
                   " should be one floating number for each head of q: " + list_text(std::vector<int64_t>{qs[2]}));
    }
  }
  head_dim_ = qs[3];
  if (head_dim_ == 0) {
    refuse_input(options_.input + ": q has the head size 0, which should be at least 1");
  }
  const int64_t offset = parse_query_offset(options_.query_offset, "--query-offset");
  request_.shape = aligned({qs[0], qs[2], ks[2], qs[1], ks[1], offset});
}

void AttendJob::check_tensor(const char* name, const char* expected, const std::vector<int64_t>& shape) const {
  const TensorInfo& info = *file_->find(name);
  if (info.dtype != dtype_) {
    refuse_input(options_.input + ", tensor \"" + name + "\": dtype " + std::string(safetensors_dtype(info.dtype)) +
                 " should be q's, " + std::string(safetensors_dtype(dtype_)));
  }
  if (info.shape != shape) {
    refuse_input(options_.input + ", tensor \"" + name + "\": shape " + list_text(info.shape) + " should be " +
                 expected + ": " + list_text(shape));
  }
}

std::vector<Field> AttendJob::fields() const {
  return {{"attention", request_.text()},
          {"dtype", std::string(safetensors_dtype(dtype_))},
          {"head size", std::to_string(head_dim_)},
          {"random", random_ ? random_->text() : "no"},
          {"kernel", std::string(to_string(kernel_))},
          {"scale", options_.scale ? std::to_string(*options_.scale) : "default"},
          {"soft cap", exact(options_.softcap)},
          {"sinks", options_.sinks ? "yes" : "no"},
          {"dropout", dropout_text(options_.dropout)},
          {"backward", options_.backward ? "yes" : "no"},
          {"check", draw_            ? draw_->text()
                    : options_.check ? "yes"
                                     : "no"}};
}

at::Tensor AttendJob::sinks() const {
  if (!options_.sinks) return {};
  return random_ ? random_sinks(*random_) : file_->load("sinks");
}

RandomTensors AttendJob::inputs(const std::vector<Span>* queries, const std::vector<Span>* keys) const {
  if (random_) return queries != nullptr ? make_random(*random_, *queries, *keys) : make_random(*random_);
  const auto take = [&](const char* name, const std::vector<Span>* spans) {
    return spans != nullptr ? read_rows(*file_, *file_->find(name), *spans) : file_->load(name);
  };
  RandomTensors in{take("q", queries), take("k", keys), take("v", keys), {}};
  if (options_.backward) in.dout = take("dout", queries);
  return in;
}

void AttendJob::run(Communicator& world, at::Device device) const {
  const TraceThread thread(world.in_job(world.rank()), kMainThread);
  const auto rank = static_cast<size_t>(world.rank());
  // The check of all pairs needs all inputs on rank 0; with drawn rows each rank looks at its own.
  const bool dense = options_.check && !draw_;
  const OpLabel finite{"attend, checking that the input is finite"};  // before anything is computed or written
  const std::string where = random_ ? "--random " + random_->text() : options_.input;
  if (dense) {
    together(
        world, finite, [&] { require_finite(inputs(nullptr, nullptr), where); }, /*only_first=*/true);
  }
  AttentionCall call;
  call.request = request_;
  call.comm = &world;
  call.kernel = kernel_;
  call.scale = options_.scale;
  call.softcap = options_.softcap;
  call.sinks = options_.sinks;
  call.dropout = options_.dropout;
  call.label = "attend";
  const double divisor = static_cast<double>(output_divisor(request_.pattern));
  const Layout queries = query_layout(request_), keys = key_layout(request_);
  RandomTensors in = inputs(&queries.spans[rank], &keys.spans[rank]);
  const at::Tensor host_sinks = sinks(), here = host_sinks.defined() ? host_sinks.to(device) : host_sinks;
  if (draw_) {
    together(world, finite, [&] { require_finite(in, where, &queries.spans[rank], &keys.spans[rank]); });
  }
  if (options_.backward) in.dout.div_(divisor);

  for (at::Tensor* tensor : {&in.q, &in.k, &in.v, &in.dout}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
  // Planning is not part of the time that is measured.
  const PlannedCall planned(call);
  plan_calls({planned}, traits_of(in.q), {"attend, planning"});
  // A barrier lets the ranks start together, so that the time measured is that of the attention.
  Communicator& host = world.host();
  finish(device);
  host.barrier({"attend, start"});
  std::optional<TraceWindow> trace;
  if (!options_.trace.empty()) trace.emplace(trace_rank());
  const auto begin = std::chrono::steady_clock::now();
  AttentionStats forward, backward;
  const AttentionOutput output = attention_forward(in.q, in.k, in.v, planned, here, &forward);
  AttentionGradients gradients;
  if (options_.backward) gradients = attention_backward(in.dout, in.q, in.k, in.v, output, &backward);
  finish(device);
  world.progress();  // on a GPU a transfer may have been aborted; this raises before its results are used
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::optional<GatheredTrace> gathered;
  if (trace)
    gathered = gather_trace(world, trace->finish(), options_.trace, {{"attention", output.program().request.text()}});

  at::Tensor sums = at::tensor(
      {forward.messages_sent + backward.messages_sent, forward.bytes_sent + backward.bytes_sent}, at::ScalarType::Long);
  at::Tensor slowest = at::tensor({seconds}, at::ScalarType::Double);
  host.all_reduce(sums, ReduceOp::kSum, {"attend, totals"});
  host.all_reduce(slowest, ReduceOp::kMax, {"attend, totals"});

  AttendResults whole;
  if (!options_.output.empty() || dense) {
    whole.out = gather_positions(host, at::div(output.out, divisor), queries, 1, kGathering);
    whole.lse = gather_positions(host, output.lse, queries, 2, kGathering);
    if (options_.backward) {
      whole.dq = gather_positions(host, gradients.dq, queries, 1, kGathering);
      whole.dk = gather_positions(host, gradients.dk, keys, 1, kGathering);
      whole.dv = gather_positions(host, gradients.dv, keys, 1, kGathering);
      if (options_.sinks) {
        // fp64 sums of what each rank has computed in its dtype, rounded once.
        at::Tensor sum = gradients.dsinks.to(at::kCPU, at::kDouble).clone();
        host.all_reduce(sum, ReduceOp::kSum, kGathering);
        whole.dsinks = sum.to(gradients.dsinks.scalar_type());
      }
    }
  }
  // The request that ran, in which adaptive maps are those that were selected.
  const PlanRequest& ran = output.program().request;
  // The other ranks wait for rank 0, and an error such as a full disk is raised on all of them.
  together(
      world, {"attend, writing the output"}, [&] { write(whole, ran.pattern); }, /*only_first=*/true);
  if (rank == 0) {
    const std::string layout =
        request_.uneven_lengths.empty() ? std::string(to_string(request_.layout)) : "contiguous, uneven";
    std::printf("attend: %s%s, %s, %s, %s, %s sent, %.3f s%s\n", counted(world.size(), "rank").c_str(),
                device.is_cpu() ? "" : " on GPUs", std::string(to_string(ran.schedule)).c_str(), layout.c_str(),
                with_commas(sums.const_data_ptr<int64_t>()[0], "message").c_str(),
                amount(sums.const_data_ptr<int64_t>()[1]).c_str(), *slowest.const_data_ptr<double>(),
                options_.output.empty() ? "" : (" -> " + options_.output).c_str());
    if (!layout_reason_.empty()) std::printf("layout auto: %s\n", layout_reason_.c_str());
    if (request_.schedule == ScheduleKind::kAuto && world.size() > 1) {
      PlanRequest of_blocks = call.request;
      of_blocks.pattern = ran.pattern;
      std::printf("auto: %s\n", choose_plan(of_blocks).reason().c_str());
    }
    if (!schedule_reason_.empty()) std::printf("auto: %s\n", schedule_reason_.c_str());
    if (gathered) {
      std::printf("trace: %s (clocks of ranks agree within %s microseconds)\n", options_.trace.c_str(),
                  significant(static_cast<double>(gathered->clock_error) / 1e3, 2).c_str());
    }
    std::fflush(stdout);
  }
  if (!dense && !draw_) return;
  const double scale = options_.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim_)));
  if (draw_) {
    const AttendProblem problem{
        request_.pattern,
        ran.pattern,
        ran.shape,
        head_dim_,
        dtype_,
        scale,
        {options_.softcap, host_sinks},
        options_.dropout,
        queries,
        keys,
        [&](const auto& of_queries, const auto& of_keys) { return inputs(&of_queries, &of_keys); }};
    const AttendResults mine{
        at::div(output.out, divisor), output.lse, gradients.dq, gradients.dk, gradients.dv, gradients.dsinks};
    const RowsReport report = check_rows(world, problem, mine, *draw_);
    if (!report.passed()) {
      throw Error(ErrorKind::kInternal, "attend",
                  "the results differ from fp64 attention in drawn rows: errors " + report.errors() +
                      "; please report this command");
    }
    if (rank == 0) std::printf("%s\n", report.text().c_str());
    return;
  }
  together(
      world, {"attend, comparing with the oracle"},
      [&] {
        const RandomTensors all = inputs(nullptr, nullptr);
        check_selection(request_.pattern, ran.pattern, ran.shape, all);
        std::printf("check: %s\n", check_results(ran.pattern, ran.shape, all, whole, scale, options_.dropout,
                                                 {options_.softcap, host_sinks})
                                       .c_str());
      },
      /*only_first=*/true);
}

void AttendJob::write(const AttendResults& whole, const PatternSpec& pattern) const {
  if (!options_.output.empty()) {
    std::vector<NamedTensor> tensors = {{"out", whole.out}, {"lse", whole.lse}};
    if (options_.backward) {
      tensors.insert(tensors.end(), {{"dq", whole.dq}, {"dk", whole.dk}, {"dv", whole.dv}});
      if (options_.sinks) tensors.push_back({"dsinks", whole.dsinks});
    }
    write_safetensors(options_.output, tensors, {{"pattern", request_.pattern.text()}});
  }
  if (!options_.mask_out.empty()) write_block_map(options_.mask_out, make_block_map(pattern, request_.shape));
}

std::string attend_command(const PlanRequest& request, const RandomInput& input, KernelKind kernel, bool backward,
                           const Dropout& dropout, double scale, double softcap, bool sinks) {
  RandomInput described = input;
  described.batch = request.shape.batch;
  described.queries = request.shape.q_len;
  described.keys = request.shape.k_len;
  described.heads = request.shape.heads;
  described.kv_heads = request.shape.kv_heads;
  std::string text = "./annulus launch -n " + std::to_string(request.ranks) + " attend --random " + described.text() +
                     " --pattern " + shell_quote({request.pattern.text()});
  if (request.uneven_lengths.empty()) {
    text += " --layout " + std::string(to_string(request.layout));
  } else {
    for (size_t i = 0; i < request.uneven_lengths.size(); ++i) {
      text += (i == 0 ? " --lengths " : ",") + std::to_string(request.uneven_lengths[i]);
    }
  }
  text += " --schedule " + std::string(to_string(request.schedule));
  if (request.within > 0) text += " --within " + std::to_string(request.within);
  text += " --kernel " + std::string(to_string(kernel));
  if (request.even) text += " --even";
  if (request.shape.query_offset != 0) text += " --query-offset " + std::to_string(request.shape.query_offset);
  if (scale != 0) text += " --scale " + exact(scale);
  if (softcap != 0) text += " --softcap " + exact(softcap);
  if (sinks) text += " --sinks";
  if (dropout.rate != 0) {
    text += " --dropout " + exact(dropout.rate) + " --seed " + std::to_string(dropout.seed) + " --step " +
            std::to_string(dropout.step) + " --layer " + std::to_string(dropout.layer);
  }
  return text + (backward ? " --backward" : "") + " --check";
}

}  // namespace annulus
