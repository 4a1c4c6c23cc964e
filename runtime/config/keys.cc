// See keys.h.
#include "runtime/config/keys.h"

#include <algorithm>
#include <sstream>

#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "common/error.h"

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
  throw Error(ErrorKind::kUsage, "config",
              std::string(where) +
                  ": expected 1 to 100 letters, digits, '-', '_' and '.', the first one not '.', got \"" + value +
                  "\"");
}

void check_folder(const std::string& value, std::string_view where) {
  check_not_empty(value, where);
  if (value.starts_with("~")) {
    throw Error(ErrorKind::kUsage, "config",
                std::string(where) + ": only a shell expands \"~\": write the whole path, got \"" + value + "\"");
  }
}

Key of_model(Key key) {
  key.of_model = true;
  return key;
}

Key of_shape(Key key) {
  key.imported = true;
  return of_model(std::move(key));
}

}  // namespace

void check_not_empty(const std::string& value, std::string_view where) {
  if (value.empty()) throw Error(ErrorKind::kUsage, "config", std::string(where) + ": must not be empty");
}

const std::vector<Key>& keys() {
#define ANNULUS_AT(member) [](Config& c) -> Slot { return &c.member; }
  static const std::vector<Key> table = {
      {"",
       "device",
       ANNULUS_AT(device),
       "where to compute; \"auto\" uses GPUs if the host has one for each local rank",
       false,
       {},
       {"auto", "cpu", "cuda"}},
      {"", "timeout", ANNULUS_AT(timeout), "seconds after which a communication that has not finished is an error",
       false, above(0)},
      {"", "tf32", ANNULUS_AT(tf32),
       "on a GPU (never run on one), multiply fp32 matrices in TF32, with 10 bits of fraction instead of 23"},
      {"", "deterministic", ANNULUS_AT(deterministic),
       "on GPUs (never run on one), compute the same bits in every run with the same ranks, at some cost; on CPUs this "
       "is always so with the same ranks, threads, vector instructions and software (docs/training-habits.md)"},
      {"",
       "cuda_graphs",
       ANNULUS_AT(cuda_graphs),
       "on GPUs (never run on one), record a step as a CUDA graph and replay it; this needs a context axis of one "
       "rank, "
       "optimizer.shard 0 or 1, running positions, and no documents, dropout or adaptive patterns",
       false,
       {},
       {"auto", "off"}},

      {"run",
       "name",
       ANNULUS_AT(run.name),
       "runs are kept in FOLDER/NAME-001, -002, ...",
       false,
       {},
       {},
       check_run_name},
      {"run", "folder", ANNULUS_AT(run.folder), "where runs are kept", false, {}, {}, check_folder},
      {"run", "seed", ANNULUS_AT(run.seed), "seed of the weights, the order of rows, and dropout", false,
       at_least(0, 9e18)},
      {"run", "steps", ANNULUS_AT(run.steps), "optimizer steps of the whole run", true, at_least(1)},
      {"run", "log_every", ANNULUS_AT(run.log_every), "steps between two reports", false, at_least(1)},
      {"run", "log_bytes", ANNULUS_AT(run.log_bytes),
       "the most bytes of a rank's log file in the run's folder, beside which one older, full file is kept; 0: no "
       "such files",
       false, at_least(0)},
      {"run", "keep_logs", ANNULUS_AT(run.keep_logs),
       "how many of the newest folders in runs/logs `launch` keeps, including its own; 0: all", false, at_least(0)},

      {"data", "train", ANNULUS_AT(data.train),
       "what to train on: a list of files and globs (`**` matches folders at any depth) or \"python-sources\"; or a "
       "list of sources to mix, each a table of `files`, `weight`, `name`, `format`, `width`, `begin`, `end`",
       true},
      {"data", "max_bytes", ANNULUS_AT(data.max_bytes),
       "use only this many bytes from the beginning of each source of text; 0: all", false, at_least(0, 9e18)},
      {"data", "validation_fraction", ANNULUS_AT(data.validation_fraction),
       "share of the documents of each source, chosen by their content, that is held out for validation", false,
       fraction()},
      {"data", "context", ANNULUS_AT(data.context),
       "tokens in a row (a sequence); or by step: `[[0, 8192], [1000, 131072, 1]]`, in which a third number is the "
       "batch from that step on"},
      {"data", "batch", ANNULUS_AT(data.batch), "rows that pass through the model together, over all ranks", false,
       at_least(1, kWide)},
      {"data", "accumulate", ANNULUS_AT(data.accumulate),
       "batches whose gradients are summed in one step, which has batch * accumulate rows; or by step, a batch ramp: "
       "`[[0, 1], [500, 2], [1000, 4]]`"},
      {"data",
       "packing",
       ANNULUS_AT(data.packing),
       "how rows are made: \"stream\" cuts all documents, joined end to end; \"best-fit\" packs whole documents with "
       "little padding; \"document\" puts one document in a row",
       false,
       {},
       {"stream", "best-fit", "document"}},
      {"data", "documents", ANNULUS_AT(data.documents),
       "true: a token attends only to its own document, in addition to what model.pattern says; false: attention "
       "crosses the documents of a row, with every data.packing; each file of text is a document"},
      {"data",
       "long_documents",
       ANNULUS_AT(data.long_documents),
       "what happens to a document longer than a row if documents are packed whole",
       false,
       {},
       {"cut", "refuse"}},
      {"data",
       "positions",
       ANNULUS_AT(data.positions),
       "rotary positions: \"running\" counts through the row, \"restart\" begins at 0 where a row or a document "
       "begins, with every data.packing and data.documents",
       false,
       {},
       {"running", "restart"}},
      {"data", "ignore", ANNULUS_AT(data.ignore), "ids of tokens that do not count as targets"},
      {"data", "index", ANNULUS_AT(data.index),
       "folder for the row indexes of token shards; empty: beside the first file of the source"},

      {"model", "from", ANNULUS_AT(model.from),
       "a folder in Hugging Face's layout (docs/models.md) with the model's shape and its initial weights; empty: the "
       "shape is given by the keys below, and the initial weights by run.seed"},
      of_shape({"model", "layers", ANNULUS_AT(model.layers), "decoder layers", true, at_least(1, 100000)}),
      of_shape({"model", "dim", ANNULUS_AT(model.dim), "width of the residual stream", true, at_least(2, kWide)}),
      of_shape(
          {"model", "heads", ANNULUS_AT(model.heads), "query heads, a multiple of kv_heads", true, at_least(1, kWide)}),
      of_shape({"model", "kv_heads", ANNULUS_AT(model.kv_heads), "key/value heads; 0: as many as heads", false,
                at_least(0, kWide)}),
      of_shape({"model", "head_dim", ANNULUS_AT(model.head_size), "width of a head, even; 0: dim / heads", false,
                at_least(0, kWide)}),
      of_shape({"model", "ffn", ANNULUS_AT(model.ffn),
                "hidden width of SwiGLU; 0: 8/3 dim rounded up to a multiple of 64", false, at_least(0, kWide)}),
      of_shape({"model", "vocab", ANNULUS_AT(model.vocab),
                "number of token ids, above the largest id in the data; text, whose tokens are bytes, needs 256", false,
                at_least(2, kWide)}),
      {"model",
       "dtype",
       ANNULUS_AT(model.dtype),
       "what the model computes in; with \"bf16\" the weights that are updated and saved are still fp32; \"fp64\", "
       "which "
       "is slow and only for CPUs, is an exact reference for the others",
       false,
       {},
       {"fp32", "bf16", "fp64"}},
      of_model({"model", "rope_theta", ANNULUS_AT(model.rope_theta), "base of the rotary embedding's wavelengths",
                false, above(0)}),
      of_model({"model", "rope_scaling", ANNULUS_AT(model.rope_scaling),
                "scaling of the rotary frequencies for a longer context: a table with kind \"default\", \"linear\", "
                "\"llama3\" or \"yarn\" and its numbers"}),
      of_model({"model", "rope_fp32", ANNULUS_AT(model.rope_fp32),
                "compute rotary angles in fp32, as `transformers` does, and not in fp64; true by default for imported "
                "models"}),
      of_shape({"model", "tie_embeddings", ANNULUS_AT(model.tie_embeddings),
                "use one matrix for the embedding and the output"}),
      of_shape(
          {"model", "norm_eps", ANNULUS_AT(model.norm_eps), "added to the mean square in RMSNorm", false, above(0)}),
      of_shape(
          {"model", "qkv_bias", ANNULUS_AT(model.qkv_bias), "biases in the projections to queries, keys and values"}),
      of_shape({"model", "out_bias", ANNULUS_AT(model.out_bias), "a bias in attention's output projection"}),
      of_shape({"model", "mlp_bias", ANNULUS_AT(model.mlp_bias), "biases in the MLP's projections"}),
      of_shape({"model", "qk_norm", ANNULUS_AT(model.qk_norm),
                "RMSNorm of each query and key over head_dim, before the rotation"}),
      {"model", "pattern", ANNULUS_AT(model.pattern),
       "which keys a query sees: an attention pattern, or a list of one for each layer"},
      {"model", "dropout", ANNULUS_AT(model.dropout), "share of attention probabilities that training drops", false,
       fraction()},
      {"model", "recompute", ANNULUS_AT(model.recompute),
       "keep less memory for the backward, which computes norms, projections and the MLP again; attention is never "
       "computed again"},

      {"optimizer", "lr", ANNULUS_AT(optimizer.lr), "highest learning rate", true, above(0)},
      {"optimizer",
       "schedule",
       ANNULUS_AT(optimizer.schedule),
       "how the learning rate falls after the warm-up: \"cosine\" or \"linear\" until run.steps; \"constant\", not at "
       "all; \"wsd\", linearly over the last optimizer.decay steps",
       false,
       {},
       {"cosine", "linear", "constant", "wsd"}},
      {"optimizer",
       "min_lr_ratio",
       ANNULUS_AT(optimizer.min_lr_ratio),
       "learning rate at run.steps as a share of lr, for schedules that fall",
       false,
       {0, 1, true, true}},
      {"optimizer", "warmup", ANNULUS_AT(optimizer.warmup), "steps over which the learning rate rises to lr", false,
       at_least(0)},
      {"optimizer", "decay", ANNULUS_AT(optimizer.decay), "steps of the final fall; required by \"wsd\"", false,
       at_least(0)},
      {"optimizer", "weight_decay", ANNULUS_AT(optimizer.weight_decay),
       "AdamW's weight decay for matrices; vectors have none", false, at_least(0)},
      {"optimizer", "beta1", ANNULUS_AT(optimizer.beta1), "AdamW's decay of the mean gradient", false, fraction()},
      {"optimizer", "beta2", ANNULUS_AT(optimizer.beta2), "AdamW's decay of the mean squared gradient", false,
       fraction()},
      {"optimizer", "eps", ANNULUS_AT(optimizer.eps),
       "added to the root of the mean squared gradient in AdamW's divisor", false, above(0)},
      {"optimizer", "groups", ANNULUS_AT(optimizer.groups),
       "parameters with rates of their own: tables of `match` (a name with `*` and `?`), `lr` (multiplies the "
       "schedule's) and `weight_decay`; the first one that matches applies"},
      {"optimizer", "clip", ANNULUS_AT(optimizer.clip), "highest global norm of the gradient; 0: no limit", false,
       at_least(0)},
      {"optimizer", "skips", ANNULUS_AT(optimizer.skips),
       "the run fails when this many updates in a row are skipped, because gradients are not finite, no target counts, "
       "or the gradient norm is a spike",
       false, at_least(1)},
      {"optimizer", "spike", ANNULUS_AT(optimizer.spike),
       "a gradient norm above this multiple of the running median is a spike; 0: off, otherwise above 1", false,
       at_least(0)},
      {"optimizer", "spike_window", ANNULUS_AT(optimizer.spike_window),
       "number of the last applied norms in the median; until there are that many, nothing is a spike", false,
       at_least(1, 10000)},
      {"optimizer",
       "spike_action",
       ANNULUS_AT(optimizer.spike_action),
       "what to do at a spike: \"skip\" skips the update, \"rewind\" goes back to the last checkpoint and leaves out "
       "the rows of that step",
       false,
       {},
       {"skip", "rewind"}},
      {"optimizer",
       "shard",
       ANNULUS_AT(optimizer.shard),
       "what is sharded over the ranks, as in the stages of ZeRO: 0 nothing; 1 AdamW's moments and the fp32 master "
       "weights; 2 also gradients; 3 also the weights that the model computes with",
       false,
       {0, 3, true, true}},
      {"optimizer",
       "shard_within",
       ANNULUS_AT(optimizer.shard_within),
       "the ranks over which it is sharded: \"world\", all of them; \"host\", those of each host, with sums between "
       "hosts",
       false,
       {},
       {"world", "host"}},

      {"mesh", "data", ANNULUS_AT(mesh.data), "ranks along the axis that splits the batch", false,
       at_least(1, 1 << 20)},
      {"mesh", "context", ANNULUS_AT(mesh.context),
       "ranks along the axis that splits each sequence; 0: all that mesh.data leaves", false, at_least(0, 1 << 20)},

      {"network", "interfaces", ANNULUS_AT(network.interfaces),
       "the IP interfaces that NCCL and MPI use, such as \"eth0,eth1\"; empty: they choose"},
      {"network", "hcas", ANNULUS_AT(network.hcas),
       "the RDMA devices that NCCL and MPI use (never run on one), such as \"mlx5_0,mlx5_1:1\" (\":1\" means port "
       "1 only); empty: they choose"},
      {"network",
       "rank_hca",
       ANNULUS_AT(network.rank_hca),
       "which of these devices a rank uses (never run on one): \"auto\" leaves the choice to NCCL and MPI, "
       "\"nearest\" is the one that `annulus topology` shows",
       false,
       {},
       {"auto", "nearest"}},
      {"network", "exchange_ctas", ANNULUS_AT(network.exchange_ctas),
       "on GPUs (never run on one), the most thread blocks, and so multiprocessors, that NCCL takes while keys and "
       "values travel beside the attention that is computed; 0: NCCL chooses",
       false, at_least(0, 64)},

      {"attention",
       "layout",
       ANNULUS_AT(attention.layout),
       "which rank owns which positions of a sequence",
       false,
       {},
       layout_names()},
      {"attention",
       "schedule",
       ANNULUS_AT(attention.schedule),
       "how ranks exchange keys and values; \"auto\" is group-cast if the ranks, taken together, need less than half "
       "of "
       "the rows that other ranks own, otherwise ring",
       false,
       {},
       schedule_names()},
      {"attention",
       "kernel",
       ANNULUS_AT(attention.kernel),
       "the kernel that computes a tile: \"reference\", \"cpu\", \"efficient\", \"cudnn\", \"flash2\", \"flash3\"; "
       "\"auto\" chooses by capability; none has ever run on a GPU",
       false,
       {},
       {},
       check_not_empty},
      {"attention", "even", ANNULUS_AT(attention.even),
       "refuse a context that does not give every rank the same share"},

      {"validation", "every", ANNULUS_AT(validation.every), "steps between two validations; 0: never", false,
       at_least(0)},
      {"validation", "batches", ANNULUS_AT(validation.batches), "batches in a validation, always the same ones", false,
       at_least(1)},

      {"checkpoint", "every", ANNULUS_AT(checkpoint.every), "steps between two checkpoints; 0: only at the end", false,
       at_least(0)},
      {"checkpoint", "keep", ANNULUS_AT(checkpoint.keep), "newest checkpoints to keep", false, at_least(1, kWide)},

      {"memory", "caches", ANNULUS_AT(memory.caches),
       "MiB that the caches of a rank may hold in total (plans, patterns, compositions, rotary tables); 0: nothing is "
       "kept",
       false, at_least(0, 1 << 20)},
  };
#undef ANNULUS_AT
  return table;
}

const Key* find_key(std::string_view full) {
  for (const Key& key : keys()) {
    if (key.full() == full) return &key;
  }
  return nullptr;
}

Value value_of(const Key& key, const Config& config) {
  // Nothing is written through the slot.
  return std::visit([](auto* at) -> Value { return *at; }, key.slot(const_cast<Config&>(config)));
}

std::string range_text(const Key& key, bool whole, double refused) {
  if (!key.choices.empty()) {
    std::string text = "one of ";
    for (size_t i = 0; i < key.choices.size(); ++i) text += (i ? ", \"" : "\"") + key.choices[i] + "\"";
    return text;
  }
  const Range& r = key.range;
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
