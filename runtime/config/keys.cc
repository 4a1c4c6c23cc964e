// See keys.h.
#include "runtime/config/keys.h"

#include <algorithm>
#include <sstream>

#include "attention/plan/choice.h"
#include "attention/plan/plan.h"
#include "common/text.h"
#include "runtime/config/values.h"

namespace annulus::config_keys {
namespace {

// Upper bounds keep products of two sizes within 64 bits, and numbers within fp32; they are far beyond any use.
constexpr double kMany = 1e12;
constexpr double kWide = 1 << 24;

Range at_least(double low, double high = kMany) { return {low, high, true, true}; }
Range above(double low) { return {low, kMany, false, true}; }
Range fraction() { return {0, 1, true, false}; }

void check_run_name(const std::string& value, std::string_view where) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  if (!value.empty() && value.size() <= 100 && value[0] != '.' && std::all_of(value.begin(), value.end(), good)) return;
  refuse(std::string(where),
         "expected 1 to 100 letters, digits, '-', '_' and '.', the first one not '.', got \"" + value + "\"");
}

void check_folder(const std::string& value, std::string_view where) {
  check_not_empty(value, where);
  if (value.starts_with("~")) {
    refuse(std::string(where), "only a shell expands \"~\": write the whole path, got \"" + value + "\"");
  }
}

void check_bytes(const std::string& value, std::string_view where) {
  if (value.empty() || bytes_of_text(value)) return;
  refuse(std::string(where), "expected a number of bytes such as 750GB or 64GiB, got \"" + value + "\"");
}

Rules of_model(Rules rules) {
  rules.of_model = true;
  return rules;
}

Rules of_shape(Rules rules) {
  rules.imported = true;
  return of_model(std::move(rules));
}

}  // namespace

void check_not_empty(const std::string& value, std::string_view where) {
  if (value.empty()) refuse(std::string(where), "must not be empty");
}

const std::vector<Key>& keys() {
#define ANNULUS_KEY_AT(section, name, member) #section, #name, [](Config & c) -> Slot { return &c.section.member; }
#define ANNULUS_KEY(section, name) ANNULUS_KEY_AT(section, name, name)
#define ANNULUS_TOP(name) "", #name, [](Config& c) -> Slot { return &c.name; }
  static const std::vector<Key> table = {
      {ANNULUS_TOP(device),
       "where to compute; \"auto\" uses GPUs if the host has one for each local rank",
       {.choices = {"auto", "cpu", "cuda"}}},
      {ANNULUS_TOP(timeout),
       "seconds after which a communication that has not finished is an error",
       {.range = above(0)}},
      {ANNULUS_TOP(tf32), "on a GPU, multiply fp32 matrices in TF32, with 10 bits of fraction instead of 23"},
      {ANNULUS_TOP(deterministic),
       "on GPUs, compute the same bits in every run with the same ranks, at some cost; on CPUs this "
       "is always so with the same ranks, threads, vector instructions and software (docs/how-to/reproducibility.md)"},
      {ANNULUS_TOP(cuda_graphs),
       "on GPUs, record a step as a CUDA graph and replay it; this needs a context axis of one "
       "rank, optimizer.shard 0 or 1, running positions, and no documents, dropout, adaptive patterns or "
       "offload",
       {.choices = {"auto", "off"}}},

      {ANNULUS_KEY(run, name), "runs are kept in FOLDER/NAME-001, -002, ...", {.check = check_run_name}},
      {ANNULUS_KEY(run, folder), "where runs are kept", {.check = check_folder}},
      {ANNULUS_KEY(run, seed), "seed of the weights, the order of rows, and dropout", {.range = at_least(0, 9e18)}},
      {ANNULUS_KEY(run, steps),
       "optimizer steps of the whole run",
       {.required = true, .example = "1000", .range = at_least(1)}},
      {ANNULUS_KEY(run, log_every), "steps between two reports", {.range = at_least(1)}},
      {ANNULUS_KEY(run, log_bytes),
       "the most bytes of a rank's log file in the run's folder, beside which one older, full file is kept; 0: no such "
       "files",
       {.range = at_least(0)}},
      {ANNULUS_KEY(run, keep_logs),
       "how many of the newest folders in runs/logs `launch` keeps, including its own; 0: all",
       {.range = at_least(0)}},
      {ANNULUS_KEY(run, slow_share),
       "a rank is named as slow whose own part of a step takes longer than the median of the others by more than this "
       "share of it; 0: none is",
       {.range = at_least(0)}},
      {ANNULUS_KEY(run, slow_steps), "for how many steps it must be slow", {.range = at_least(1, 1000)}},
      {ANNULUS_KEY(run, slow_seconds),
       "and for how many seconds: short steps count together, as one of these divided by run.slow_steps",
       {.range = at_least(0)}},
      {ANNULUS_KEY(run, compare_copies),
       "every how many steps, and before each checkpoint, ranks compare digests of what they hold alike (weights, with "
       "optimizer.shard = 0 also gradients), so that a rank whose memory or processor changes bits is found; 0: never",
       {.range = at_least(0)}},
      {ANNULUS_KEY(run, tensorboard),
       "write event files for TensorBoard into tensorboard/ of the run's folder, by a process beside rank 0"},

      {ANNULUS_KEY(data, train),
       "what to train on: a list of files and globs (`**` matches folders at any depth) or \"python-sources\"; or a "
       "list of sources to mix, each a table of `files`, `weight`, `name`, `format`, `width`, `begin`, `end`",
       {.required = true, .example = "[\"python-sources\"]"}},
      {ANNULUS_KEY(data, max_bytes),
       "use only this many bytes from the beginning of each source of text; 0: all",
       {.range = at_least(0, 9e18)}},
      {ANNULUS_KEY(data, validation_fraction),
       "share of the documents of each source, chosen by their content, that is held out for validation",
       {.range = fraction()}},
      {ANNULUS_KEY(data, context),
       "tokens in a row (a sequence); or by step: `[[0, 8192], [1000, 131072, 1]]`, in which a third number is the "
       "batch from that step on"},
      {ANNULUS_KEY(data, batch),
       "rows that pass through the model together, over all ranks",
       {.range = at_least(1, kWide)}},
      {ANNULUS_KEY(data, accumulate),
       "batches whose gradients are summed in one step, which has batch * accumulate rows; or by step, a batch ramp: "
       "`[[0, 1], [500, 2], [1000, 4]]`"},
      {ANNULUS_KEY(data, packing),
       "how rows are made: \"stream\" cuts all documents, joined end to end; \"best-fit\" packs whole documents with "
       "little padding; \"document\" puts one document in a row",
       {.choices = {"stream", "best-fit", "document"}}},
      {ANNULUS_KEY(data, documents),
       "true: a token attends only to its own document, in addition to what model.pattern says; false: attention "
       "crosses the documents of a row, with every data.packing; each file of text is a document"},
      {ANNULUS_KEY(data, long_documents),
       "what happens to a document longer than a row if documents are packed whole",
       {.choices = {"cut", "refuse"}}},
      {ANNULUS_KEY(data, positions),
       "rotary positions: \"running\" counts through the row, \"restart\" begins at 0 where a row or a document "
       "begins, with every data.packing and data.documents",
       {.choices = {"running", "restart"}}},
      {ANNULUS_KEY(data, ignore), "ids of tokens that do not count as targets"},
      {ANNULUS_KEY(data, index),
       "folder for the row indexes of token shards; empty: beside the first file of the source"},

      {ANNULUS_KEY(model, from),
       "a folder in Hugging Face's layout (docs/reference/models.md) with the initial weights, whose config.json "
       "decides those "
       "of "
       "the keys below that are left out; empty: the keys below decide the shape, and run.seed the initial weights"},
      {ANNULUS_KEY(model, layers), "decoder layers",
       of_shape({.required = true, .example = "4", .range = at_least(1, 100000)})},
      {ANNULUS_KEY(model, dim), "width of the residual stream",
       of_shape({.required = true, .example = "256", .range = at_least(2, kWide)})},
      {ANNULUS_KEY(model, heads), "query heads, a multiple of kv_heads",
       of_shape({.required = true, .example = "4", .range = at_least(1, kWide)})},
      {ANNULUS_KEY(model, kv_heads), "key/value heads; 0: as many as heads", of_shape({.range = at_least(0, kWide)})},
      {ANNULUS_KEY_AT(model, head_dim, head_size), "width of a head, even; 0: dim / heads",
       of_shape({.range = at_least(0, kWide)})},
      {ANNULUS_KEY(model, ffn), "hidden width of the MLP; 0: 8/3 dim rounded up to a multiple of 64",
       of_shape({.range = at_least(0, kWide)})},
      {ANNULUS_KEY(model, vocab),
       "number of token ids, above the largest id in the data; text, whose tokens are bytes, needs 256",
       of_shape({.range = at_least(2, kWide)})},
      {ANNULUS_KEY(model, dtype),
       "what the model computes in; with \"bf16\" the weights that are updated and saved are still fp32; \"fp64\", "
       "which is slow and only for CPUs, is an exact reference for the others",
       {.choices = {"fp32", "bf16", "fp64"}}},
      {ANNULUS_KEY(model, rope_theta), "base of the rotary embedding's wavelengths", of_model({.range = above(0)})},
      {ANNULUS_KEY(model, rope_scaling),
       "scaling of the rotary frequencies for a longer context: a table with kind \"default\", \"linear\", \"llama3\" "
       "or \"yarn\" and its numbers, or \"none\": no rotation (NoPE)",
       of_model({})},
      {ANNULUS_KEY(model, rope_layers),
       "a list of tables that repeats over the layers: `{}` as the model, or another rope_scaling, which may have a "
       "`theta`, such as `{ theta = 1e4 }`; empty: all alike",
       of_model({})},
      {ANNULUS_KEY(model, rope_fp32),
       "compute rotary angles in fp32, as `transformers` does, and not in fp64; true by default for imported models",
       of_model({})},
      {ANNULUS_KEY(model, tie_embeddings), "use one matrix for the embedding and the output", of_shape({})},
      {ANNULUS_KEY(model, norm_eps), "added to the mean square in RMSNorm", of_shape({.range = above(0)})},
      {ANNULUS_KEY(model, qkv_bias), "biases in the projections to queries, keys and values", of_shape({})},
      {ANNULUS_KEY(model, out_bias), "a bias in attention's output projection", of_shape({})},
      {ANNULUS_KEY(model, mlp_bias), "biases in the MLP's projections", of_shape({})},
      {ANNULUS_KEY(model, qk_norm), "RMSNorm of each query and key over head_dim, before the rotation", of_shape({})},
      {ANNULUS_KEY(model, softcap), "soft cap c of attention's scores, c tanh(score / c); 0: none",
       of_model({.range = at_least(0)})},
      {ANNULUS_KEY(model, attention_sinks),
       "a learned logit for each head of a layer in the softmaxes' denominators; also a list that repeats over the "
       "layers",
       of_shape({})},
      {ANNULUS_KEY(model, activation), "activation of the MLP's gate: SwiGLU, or GeGLU by the tanh approximation",
       of_shape({.choices = {activation_name(Activation::kSilu), activation_name(Activation::kGeluTanh)}})},
      {ANNULUS_KEY(model, norm_zero_centered), "RMSNorm multiplies by 1 + weight", of_shape({})},
      {ANNULUS_KEY(model, post_norms), "RMSNorm also of what attention and the MLP add to the residual stream",
       of_shape({})},
      {ANNULUS_KEY(model, scale_embeddings), "multiply embeddings by sqrt(dim)", of_shape({})},
      {ANNULUS_KEY(model, query_pre_attn_scalar), "scores are q.k divided by its root; 0: head_dim",
       of_shape({.range = at_least(0)})},
      {ANNULUS_KEY(model, pattern),
       "which keys a query sees: an attention pattern, or a list that repeats over the layers; also `patterns`",
       {.also = "patterns"}},
      {ANNULUS_KEY(model, dropout), "share of attention probabilities that training drops", {.range = fraction()}},
      {ANNULUS_KEY(model, recompute),
       "keep less memory for the backward, which computes norms, projections and the MLP again; attention is never "
       "computed again"},

      {ANNULUS_KEY(optimizer, lr), "highest learning rate", {.required = true, .example = "1e-3", .range = above(0)}},
      {ANNULUS_KEY(optimizer, schedule),
       "how the learning rate falls after the warm-up: \"cosine\" or \"linear\" until run.steps; \"constant\", not at "
       "all; \"wsd\", linearly over the last optimizer.decay steps",
       {.choices = {"cosine", "linear", "constant", "wsd"}}},
      {ANNULUS_KEY(optimizer, min_lr_ratio),
       "learning rate at run.steps as a share of lr, for schedules that fall",
       {.range = {0, 1, true, true}}},
      {ANNULUS_KEY(optimizer, warmup), "steps over which the learning rate rises to lr", {.range = at_least(0)}},
      {ANNULUS_KEY(optimizer, decay), "steps of the final fall; required by \"wsd\"", {.range = at_least(0)}},
      {ANNULUS_KEY(optimizer, weight_decay),
       "AdamW's weight decay for matrices; vectors have none",
       {.range = at_least(0)}},
      {ANNULUS_KEY(optimizer, beta1), "AdamW's decay of the mean gradient", {.range = fraction()}},
      {ANNULUS_KEY(optimizer, beta2), "AdamW's decay of the mean squared gradient", {.range = fraction()}},
      {ANNULUS_KEY(optimizer, eps),
       "added to the root of the mean squared gradient in AdamW's divisor",
       {.range = above(0)}},
      {ANNULUS_KEY(optimizer, groups),
       "parameters with rates of their own: tables of `match` (a name with `*` and `?`), `lr` (multiplies the "
       "schedule's) and `weight_decay`; the first one that matches applies"},
      {ANNULUS_KEY(optimizer, clip), "highest global norm of the gradient; 0: no limit", {.range = at_least(0)}},
      {ANNULUS_KEY(optimizer, skips),
       "the run fails when this many updates in a row are skipped, because gradients are not finite, no target counts, "
       "or the gradient norm is a spike",
       {.range = at_least(1)}},
      {ANNULUS_KEY(optimizer, spike),
       "a gradient norm above this multiple of the running median is a spike; 0: off, otherwise above 1",
       {.range = at_least(0)}},
      {ANNULUS_KEY(optimizer, spike_window),
       "number of the last applied norms in the median; until there are that many, nothing is a spike",
       {.range = at_least(1, 10000)}},
      {ANNULUS_KEY(optimizer, spike_action),
       "what to do at a spike: \"skip\" skips the update, \"rewind\" goes back to the last checkpoint and leaves out "
       "the rows of that step",
       {.choices = {"skip", "rewind"}}},
      {ANNULUS_KEY(optimizer, shard),
       "what is sharded over the ranks, as in the stages of ZeRO: 0 nothing; 1 AdamW's moments and the fp32 master "
       "weights; 2 also gradients; 3 also the weights that the model computes with",
       {.range = {0, 3, true, true}}},
      {ANNULUS_KEY(optimizer, shard_within),
       "the ranks over which it is sharded: \"world\", all of them; \"host\", those of each host, with sums between "
       "hosts",
       {.choices = {"world", "host"}}},
      {ANNULUS_KEY(optimizer, offload),
       "where AdamW's moments and the fp32 master weights lie: \"none\", on the device; \"host\", in pinned memory of "
       "a "
       "GPU's host; \"file\", on a disk, in memory.files",
       {.choices = {"none", "host", "file"}}},

      {ANNULUS_KEY(mesh, data), "ranks along the axis that splits the batch", {.range = at_least(1, 1 << 20)}},
      {ANNULUS_KEY(mesh, context),
       "ranks along the axis that splits each sequence; 0: all that mesh.data leaves",
       {.range = at_least(0, 1 << 20)}},

      {ANNULUS_KEY(network, interfaces),
       "the IP interfaces that NCCL and MPI use, such as \"eth0,eth1\"; empty: they choose"},
      {ANNULUS_KEY(network, hcas),
       "the RDMA devices that NCCL and MPI use, such as \"mlx5_0,mlx5_1:1\" (\":1\" means port 1 "
       "only); empty: they choose"},
      {ANNULUS_KEY(network, rank_hca),
       "which of these devices a rank uses: \"auto\" leaves the choice to NCCL and MPI, \"nearest\" "
       "is the one that `annulus topology` shows",
       {.choices = {"auto", "nearest"}}},
      {ANNULUS_KEY(network, exchange_ctas),
       "on GPUs, the most thread blocks, and so multiprocessors, that NCCL takes while keys and "
       "values travel beside the attention that is computed; 0: NCCL chooses",
       {.range = at_least(0, 64)}},

      {ANNULUS_KEY(attention, layout),
       "which rank owns which positions of a sequence; \"auto\" is the one that is predicted to take least time, with "
       "documents \"balanced\", with a ring \"per-document\"",
       {.choices = layout_names_or_auto()}},
      {ANNULUS_KEY(attention, schedule),
       "how ranks exchange keys and values; \"auto\" is the one that is predicted to take least time on "
       "attention.machine, of those with which the run fits into the memory that is free",
       {.choices = schedule_names()}},
      {ANNULUS_KEY(attention, within),
       "consecutive ranks that form an inner group, such as those of a host, for schedules with groups; 0: the "
       "schedule's own choice",
       {.range = at_least(0, 1 << 20)}},
      {ANNULUS_KEY(attention, machine),
       "the machine by which \"auto\" chooses: \"a100\", \"b200\", \"cpu\", \"h100\", \"h200\", or the path of a "
       "profile that `annulus bench calibrate` wrote; empty: ANNULUS_MACHINE, or else \"cpu\", on GPUs \"h100\""},
      {ANNULUS_KEY(attention, kernel),
       "the kernel that computes a tile: \"reference\", \"cpu\", \"efficient\", \"cudnn\", \"flash2\", \"flash3\"; "
       "\"auto\" chooses by capability; none has ever run on a GPU",
       {.check = check_not_empty}},
      {ANNULUS_KEY(attention, even), "refuse a context that does not give every rank the same share"},

      {ANNULUS_KEY(validation, every), "steps between two validations; 0: never", {.range = at_least(0)}},
      {ANNULUS_KEY(validation, batches), "batches in a validation, always the same ones", {.range = at_least(1)}},
      {ANNULUS_KEY(validation, tasks),
       "tasks of `annulus evaluate` that a validation scores in rows as long as those of the step: `[\"kv\", "
       "\"copy\"]`"},
      {ANNULUS_KEY(validation, trials),
       "prompts of each of validation.tasks, always the same ones, at depths that are "
       "spaced evenly",
       {.range = at_least(1)}},

      {ANNULUS_KEY(checkpoint, every), "steps between two checkpoints; 0: only at the end", {.range = at_least(0)}},
      {ANNULUS_KEY(checkpoint, keep), "newest checkpoints to keep", {.range = at_least(1, kWide)}},
      {ANNULUS_KEY(checkpoint, background),
       "copy the state to the host's memory, if it is free, and go on while the copy is written; false: training waits "
       "until the checkpoint is on the disk"},
      {ANNULUS_KEY(checkpoint, on_error),
       "what a run does that could not write a checkpoint, other than its last, or a line of metrics.jsonl: \"stop\" "
       "or "
       "\"continue\"",
       {.choices = {"stop", "continue"}}},

      {ANNULUS_KEY(memory, caches),
       "MiB that the caches of a rank may hold in total (plans, patterns, compositions, rotary tables); 0: nothing is "
       "kept",
       {.range = at_least(0, 1 << 20)}},
      {ANNULUS_KEY(memory, pool),
       "MiB that freed memory of a step may take on a rank while it is kept for the next one (what travels in "
       "attention, "
       "gradients, scratch of kernels, buffers of offload; not on GPUs); 0: nothing is kept",
       {.range = at_least(0, 1 << 20)}},
      {ANNULUS_KEY(memory, masks),
       "MiB that the bits of a mask of tokens may take on a rank: one for each pair of the blocks of 128 x 128 that "
       "are "
       "shown in part",
       {.range = at_least(0, 1 << 20)}},
      {ANNULUS_KEY(memory, offload),
       "where what the forward keeps waits for the backward: \"none\", on the device; \"host\", in pinned memory of a "
       "GPU's host; \"file\", on a disk; needs model.recompute",
       {.choices = {"none", "host", "file"}}},
      {ANNULUS_KEY(memory, host),
       "bytes of the host's memory that the ranks of a host may take together for offload \"host\", such as \"750GB\": "
       "the optimizer's state first, which must fit, and of what the forward keeps the rest goes to files; empty: no "
       "limit",
       {.check = check_bytes}},
      {ANNULUS_KEY(memory, files), "folder for offloaded files, which have no name; empty: run.folder"},
      {ANNULUS_KEY(memory, device_layers),
       "number of layers, the last ones, of which nothing is offloaded, because the backward needs it at once",
       {.range = at_least(0, kWide)}},
  };
#undef ANNULUS_TOP
#undef ANNULUS_KEY
#undef ANNULUS_KEY_AT
  return table;
}

const Key* find_key(std::string_view full) {
  for (const Key& key : keys()) {
    if (key.full() == full) return &key;
    if (!key.rules.also.empty() && full == std::string(key.section) + "." + std::string(key.rules.also)) return &key;
  }
  return nullptr;
}

Value value_of(const Key& key, const Config& config) {
  // Nothing is written through the slot.
  return std::visit([](auto* at) -> Value { return *at; }, key.slot(const_cast<Config&>(config)));
}

std::string range_text(const Key& key, bool whole, double refused) {
  if (!key.rules.choices.empty()) return "one of \"" + join(key.rules.choices, "\", \"") + "\"";
  const Range& r = key.rules.range;
  const bool high = r.high < kMany || (std::isfinite(r.high) && refused > r.high);
  const auto show = [&](double v) {
    if (whole) return std::to_string(static_cast<int64_t>(v));
    std::ostringstream out;
    out.precision(15);
    out << v;
    return out.str();
  };
  std::string text;
  if (std::isfinite(r.low)) text = (r.low_in ? (whole ? "" : "at least ") : "above ") + show(r.low);
  if (whole && std::isfinite(r.low)) text += high ? " to " + show(r.high) : " or more";
  if (!whole && high)
    text += std::string(text.empty() ? "" : ", ") + (r.high_in ? "at most " : "below ") + show(r.high);
  return text;
}

}  // namespace annulus::config_keys
