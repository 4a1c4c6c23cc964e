// See logits.h.
#include "runtime/inference/logits.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "attention/execution/gather_positions.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "memory/device_memory.h"
#include "runtime/inference/inference_model.h"
#include "runtime/model/model.h"
#include "runtime/tensor_files/model_dtypes.h"
#include "runtime/tensor_files/safetensors.h"
#include "runtime/training/memory_plan.h"

namespace annulus {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, "logits", message); }

}  // namespace

void check_options(const LogitsOptions& o) {
  if (o.model.empty()) refuse("expected --model, a run or a folder in Hugging Face's layout");
  if (o.input.empty()) refuse("expected --input FILE, a safetensors file with tokens [batch, length] int64");
  if (o.output.empty()) refuse("expected --output FILE, the safetensors file to write");
  if (same_file(o.input, o.output)) refuse("--input and --output are the same file: name another file to write");
  check_options(o.rows);
  if (!(o.timeout > 0)) refuse("--timeout must be above 0 seconds");
  require_output("logits", "--output " + o.output, o.output);
}

LogitsJob::LogitsJob(const LogitsOptions& options, int ranks)
    : options_((check_options(options), options)), opened_(options.model, options.root, options.step) {
  kernel_ = parse_kernel(options.rows.kernel, "--kernel");
  validate(opened_.model());
  read_input();
  layers_ = row_requests(opened_.model(), options.rows, {tokens_.size(0), tokens_.size(1)}, ranks, options.backward,
                         "logits");
}

void LogitsJob::read_input() {
  const SafetensorsFile file(options_.input);
  const auto fail = [&](const std::string& name, const std::string& message) {
    throw Error(ErrorKind::kInput, "logits", options_.input + ", tensor \"" + name + "\": " + message);
  };
  const auto read = [&](const char* name) {
    const TensorInfo& info = *file.find(name);
    if (info.dtype != at::kLong) {
      fail(name, "dtype " + std::string(safetensors_dtype(info.dtype)) + " should be I64");
    }
    if (info.shape.size() != 2 || info.shape[0] < 1 || info.shape[1] < 1) {
      fail(name, "shape " + list_text(info.shape) + " should be [batch, length]");
    }
    return file.load(name);
  };
  if (file.find("tokens") == nullptr) {
    throw Error(ErrorKind::kInput, "logits",
                options_.input + " has no tensor \"tokens\", which should be [batch, length] of int64");
  }
  const bool has_targets = file.find("targets") != nullptr;
  if (options_.backward && !has_targets) {
    throw Error(ErrorKind::kInput, "logits",
                options_.input + " has no tensor \"targets\", which --backward needs for the loss");
  }
  const auto require_below = [&](const char* name, const at::Tensor& ids, bool negative) {
    const int64_t* p = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.numel(); ++i) {
      if (p[i] < opened_.model().vocab && (negative || p[i] >= 0)) continue;
      fail(name, "the id " + std::to_string(p[i]) + " in row " + std::to_string(i / ids.size(1)) + ", position " +
                     std::to_string(i % ids.size(1)) + " is outside the model's vocabulary of " +
                     std::to_string(opened_.model().vocab));
    }
  };
  tokens_ = read("tokens");
  require_below("tokens", tokens_, /*negative=*/false);
  if (!has_targets) return;
  targets_ = read("targets");
  if (targets_.sizes() != tokens_.sizes()) {
    fail("targets", "shape " + list_text(targets_.sizes().vec()) + " should be that of tokens, " +
                        list_text(tokens_.sizes().vec()));
  }
  require_below("targets", targets_, /*negative=*/true);
  targets_ = targets_.clamp_min(-1);
  counted_ = targets_.ge(0).sum().item<int64_t>();
  if (counted_ == 0) fail("targets", "all of them are negative, so none counts");
}

at::ScalarType LogitsJob::dtype() const { return model_dtype(options_.dtype, "--dtype"); }

// The most bytes that a rank holds: the weights and their gradients, what the layers declare, and its logits.
double LogitsJob::bytes_of_rank(const LayerRequests& layers, int rank, at::Device device, bool attends) const {
  const ModelShape& s = opened_.model();
  const Computes on{dtype(), device.is_cuda()};
  // Sizes of a config.json whose weights alone are beyond any memory would overflow the exact numbers below.
  const double weights = parameter_estimate(s) * static_cast<double>(on.element()) * (options_.backward ? 2 : 1);
  if (weights > 0x1p53) return weights;
  const int64_t batch = tokens_.size(0), length = row_layout(layers).count(rank), rows = batch * length;
  StepCharges step;
  step.lasts({"weights and gradients", parameter_count(s) * on.element() * (options_.backward ? 2 : 1)});
  if (!attends) {
    step.lasts({"forward", layer_forward_bytes(s, batch, length, on)});
  } else if (options_.backward) {
    const CallTraits call{s.head_dim(), on.dtype, on.gpu, /*dropout=*/false, s.softcap > 0};
    add_model_charges(s, {batch, length, /*recompute=*/true}, on,
                      layer_charges(layers, batch, rank, kernel_, call, s.attention_sinks), {}, step);
  } else {
    step.lasts({"forward", row_forward_bytes(s, layers, batch, rank, kernel_, on)});
  }
  step.lasts({"logits", options_.last ? 0 : on.wide() * rows * s.vocab});
  return static_cast<double>(step.most().bytes);
}

// The bytes of the results of all ranks, which the first one gathers.
double LogitsJob::results_of(const Communicator& world) const {
  if (world.rank() != 0 || world.size() == 1) return 0;
  const auto wide = static_cast<double>(c10::elementSize(at::toOpMathType(dtype())));
  const double logits = static_cast<double>(options_.last ? tokens_.size(0) : tokens_.numel()) *
                        static_cast<double>(opened_.model().vocab);
  return wide * (logits + (options_.backward ? parameter_estimate(opened_.model()) : 0));
}

void LogitsJob::choose(Communicator& world, int ranks_here, at::Device device) {
  RowChoices::Settings settings{.model = opened_.model(),
                                .options = options_.rows,
                                .backward = options_.backward,
                                .module = "logits",
                                .device = device,
                                .free = {},
                                .bytes = [&](const LayerRequests& layers, const RowShape&) {
                                  return bytes_of_rank(layers, world.rank(), device);
                                }};
  settings.model.dtype = options_.dtype;
  if (const std::optional<AvailableMemory> free = available_memory(device)) {
    const double left = static_cast<double>(free->bytes) - results_of(world);
    settings.free = left / (device.is_cuda() ? 1 : ranks_here);
  }
  layers_ = RowChoices(settings, world).of({tokens_.size(0), tokens_.size(1)});
}

void LogitsJob::require_memory(const Communicator& world, int ranks_here, at::Device device, bool attends) const {
  const double bytes =
      bytes_of_rank(layers_, world.rank(), device, attends) * (device.is_cuda() ? 1 : ranks_here) + results_of(world);
  require_free(
      "logits", "weights, logits and the layers' memory", bytes, ranks_here, device,
      std::string("use more hosts or --dtype bf16") + (options_.last ? "" : ", or --last for only the last position"));
}

std::vector<Field> LogitsJob::fields() const {
  std::string attention;
  for (const size_t i : layers_.of_layer) attention += layers_.distinct[i].text() + "; ";
  const auto digest = [](const at::Tensor& ids) {
    return ids.defined() ? checksum(ids.const_data_ptr(), ids.nbytes()) : "none";
  };
  return {{"attention", attention},
          {"tokens", digest(tokens_)},
          {"targets", digest(targets_)},
          {"vocabulary", std::to_string(opened_.model().vocab)},
          {"rotary embedding", opened_.model().rotaries().text()},
          {"dtype", options_.dtype},
          {"kernel", std::string(to_string(kernel_))},
          {"results", std::string(options_.last ? "last" : "all") + (options_.backward ? ", backward" : "")}};
}

void LogitsJob::run(Communicator& world, int ranks_here, at::Device device) {
  world.set_timeout(Seconds(options_.timeout));
  world.host().set_timeout(Seconds(options_.timeout));
  // At first without attention, for whose plans rows may be much too long.
  for (const bool attends : {false, true}) {
    if (attends) choose(world, ranks_here, device);
    together(world, {"logits, planning the memory"}, [&] { require_memory(world, ranks_here, device, attends); });
  }
  const bool first = world.rank() == 0;
  Communicator& host = world.host();
  const at::ScalarType written = at::toOpMathType(dtype());
  InferenceModel held(opened_, {.dtype = dtype(), .device = device}, world, "logits");
  Model& model = held.model();
  Parameters& parameters = model.parameters();
  const Layout layout = row_layout(layers_);
  const at::Tensor positions = at::tensor(layout.positions(world.rank()), at::TensorOptions(at::kLong));
  const int64_t batch = tokens_.size(0), count = positions.numel(), length = tokens_.size(1),
                vocab = model.shape().vocab;
  std::vector<NamedTensor> results;
  if (options_.backward) {
    model.set_recompute(true);
    for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
      parameters.gradients(unit).take();
      at::Tensor(parameters.gradients(unit).tensor()).zero_();
    }
  }
  const c10::AutoGradMode grad(options_.backward);
  const at::Tensor flat = RowForward(model, world, kernel_).hidden(layers_, {.tokens = tokens_}, "logits");
  std::string loss_text;
  if (targets_.defined()) {
    const at::Tensor targets = targets_.index_select(1, positions).reshape({-1}).to(device);
    const at::Tensor local = model.loss_of(flat, targets, 1.0 / static_cast<double>(counted_));
    if (options_.backward) local.backward();
    at::Tensor loss = local.detach().to(at::kCPU, at::kDouble);
    if (world.size() > 1) host.all_reduce(loss, ReduceOp::kSum, {"logits, the loss"});
    loss_text = ", loss " + (written == at::kDouble ? exact(loss.item<double>()) : exact(loss.item<float>()));
    if (first) results.push_back({"loss", loss.to(written)});
  }
  Layout of_logits = layout;
  at::Tensor hidden = flat.detach().view({batch, count, -1});
  if (options_.last) {
    // Only the last position, on the rank that has it.
    of_logits = {.length = 1, .spans = std::vector<std::vector<Span>>(layout.spans.size())};
    at::Tensor row = hidden.narrow(1, 0, 0);
    for (int rank = 0; rank < world.size(); ++rank) {
      const std::vector<int64_t> theirs = layout.positions(rank);
      const auto found = std::find(theirs.begin(), theirs.end(), length - 1);
      if (found == theirs.end()) continue;
      of_logits.spans[static_cast<size_t>(rank)] = {{0, 1, 1}};
      if (rank == world.rank()) row = hidden.narrow(1, found - theirs.begin(), 1);
    }
    hidden = row;
  }
  const at::Tensor logits =
      model.wide_logits(hidden.reshape({-1, hidden.size(2)})).view({batch, hidden.size(1), vocab});
  const at::Tensor whole = gather_positions(host, logits, of_logits, 1, {"logits, gathering them"});
  if (first) results.push_back({"logits", options_.last ? whole.squeeze(1) : whole});
  if (options_.backward) {
    std::vector<at::Tensor> sums;
    for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
      at::Tensor sum = parameters.gradients(unit).tensor().to(at::kCPU, written);
      if (world.size() > 1)
        host.all_reduce(sum, ReduceOp::kSum, {"logits, gradients of unit", static_cast<int64_t>(unit)});
      sums.push_back(first ? sum : at::Tensor());
    }
    if (first) {
      for (NamedTensor& t : parameters.views([&](size_t unit) { return sums[unit]; })) results.push_back(std::move(t));
    }
  }
  together(
      world, {"logits, writing the output"},
      [&] {
        write_safetensors(options_.output, results, {{"model", opened_.path()}});
      },
      /*only_first=*/true);
  if (!first) return;
  std::printf("logits: %s of %s, %s%s%s -> %s\n", with_commas(batch, "row").c_str(),
              with_commas(length, "token").c_str(), counted(world.size(), "rank").c_str(),
              device.is_cpu() ? "" : " on GPUs", loss_text.c_str(), options_.output.c_str());
  std::fflush(stdout);
}

}  // namespace annulus
