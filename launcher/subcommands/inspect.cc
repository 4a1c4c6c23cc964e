// annulus inspect: shows what a run or a folder in Hugging Face's layout holds and what the model costs. This file has
// the options and prints the results; runtime/inference/inspection.h does the work.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "common/error.h"
#include "common/text.h"
#include "launcher/subcommand.h"
#include "runtime/inference/inspection.h"

namespace annulus {
namespace {

std::string bytes(int64_t n) { return bytes_text(static_cast<double>(n)); }

std::string flops_text(double flops) {
  if (flops >= 1e12) return rounded(flops / 1e12, 2) + " TFLOP";
  return flops >= 1e9 ? rounded(flops / 1e9, 2) + " GFLOP" : rounded(flops / 1e6, 2) + " MFLOP";
}

std::string biases(const ModelSection& m) {
  std::vector<std::string> of;
  if (m.qkv_bias) of.emplace_back("queries, keys and values");
  if (m.out_bias) of.emplace_back("attention's output");
  if (m.mlp_bias) of.emplace_back("the MLP");
  return of.empty() ? "no biases" : "biases of " + join(of, ", ");
}

// The rotary embeddings of the layers.
void print_positions(const ModelSection& m) {
  const ModelShape::Rotaries rotaries = m.rotaries();
  std::string name = "positions";
  for (size_t i = 0; i < rotaries.distinct.size(); ++i) {
    const RotarySpec& of = rotaries.distinct[i];
    const bool whole = of.theta == std::floor(of.theta) && of.theta < 1e15;
    const std::string theta = whole ? with_commas(static_cast<int64_t>(of.theta)) : exact(of.theta);
    std::string text = "not encoded";
    if (of.scaling.kind != RotaryScaling::Kind::kNone) {
      text = "rotary, theta " + theta + ", " + of.scaling.text() + "; angles in " +
             (m.rope_fp32 ? "fp32, as transformers computes them" : "fp64");
    }
    std::vector<int64_t> layers;
    for (size_t layer = 0; layer < rotaries.of_layer.size(); ++layer) {
      if (rotaries.of_layer[layer] == i) layers.push_back(static_cast<int64_t>(layer));
    }
    print_fact(std::exchange(name, ""),
               text + (rotaries.distinct.size() == 1 ? "" : "; in layers " + ranges_text(layers)));
  }
}

// What the model has besides its sizes, norms of its residual stream and SwiGLU.
std::string forms(const ModelSection& m) {
  std::string text;
  if (m.qk_norm) text += "; norms of queries and keys";
  if (m.score_divisor() != static_cast<double>(m.head_dim())) {
    text += "; scores divided by the root of " + exact(m.query_pre_attn_scalar);
  }
  if (m.attention_sinks.any()) {
    std::vector<int64_t> layers;
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (m.attention_sinks.of(layer)) layers.push_back(layer);
    }
    const bool all = static_cast<int64_t>(layers.size()) == m.layers;
    text += "; sinks" + (all ? "" : " in layers " + ranges_text(layers));
  }
  if (m.softcap != 0) text += "; scores capped at " + exact(m.softcap);
  if (m.post_norms) text += "; norms of what layers add";
  if (m.norm_zero_centered) text += "; norms by 1 + weight";
  if (m.activation == Activation::kGeluTanh) text += "; GeGLU";
  if (m.scale_embeddings) text += "; embeddings times sqrt(width)";
  return text;
}

void show_inspection(const Inspection& of) {
  const ModelSection& m = of.model;
  std::printf("%s\n", of.path.c_str());
  const std::string family = of.family.empty() ? "none: " + of.no_family : of.family;
  print_fact("family",
             of.is_run ? (m.from.empty() ? "begun here" : "begun as " + m.from) + "; export: " + family : family);
  print_fact("parameters", with_commas(of.parameters) + (m.tie_embeddings ? ", embedding and output tied" : ""));
  print_fact("sizes", counted(m.layers, "layer") + ", width " + with_commas(m.dim) + ", MLP " + with_commas(m.ffn) +
                          ", vocabulary " + with_commas(m.vocab));
  print_fact("attention", counted(m.heads, "head") + " of " + std::to_string(m.head_dim()) + ", " +
                              counted(m.kv_heads, "kv head") + "; " + biases(m) + forms(m));
  print_positions(m);
  std::string name = "patterns";
  for (const Inspection::Pattern& pattern : of.patterns) {
    const bool all = of.patterns.size() == 1;
    print_fact(std::exchange(name, ""),
               pattern.text + (all ? " in all layers" : " in layers " + ranges_text(pattern.layers)));
  }
  print_fact("context", with_commas(of.context, "position"));
  print_fact("weights", of.dtypes.empty() ? "no checkpoint yet"
                                          : join(of.dtypes, ", ") + ", " + bytes(of.weight_bytes) +
                                                (of.step ? ", of step " + with_commas(*of.step) : "") + "; in bf16 " +
                                                bytes(2 * of.parameters) + ", in fp32 " + bytes(4 * of.parameters));
  std::printf("at %s\n", with_commas(of.length, "token").c_str());
  print_fact("compute", flops_text(of.flops) + " a token, forward and backward; attention is " +
                            rounded(100 * of.attention_flops / of.flops, 1) + " % of it");
  const MemoryKinds& t = of.training;
  print_fact("training", bytes(t.total()) + " in " + m.dtype + " on one rank that holds all, a row at a time:");
  print_fact("", "weights " + bytes(t.weights) + ", gradients " + bytes(t.gradients) + ", optimizer " +
                     bytes(t.optimizer) + ", activations " + bytes(t.activations) + ", working " + bytes(t.working));
  print_fact("import",
             bytes(of.import_bytes) + " of host memory at most, on one rank that holds all: fp32 weights and a block");
  print_fact("export", bytes(of.export_bytes) + " of host memory at most");
}

void show_inspection_json(const Inspection& of) {
  using Json = nlohmann::ordered_json;
  const ModelSection& m = of.model;
  Json patterns = Json::array();
  for (const Inspection::Pattern& p : of.patterns) patterns.push_back({{"pattern", p.text}, {"layers", p.layers}});
  const MemoryKinds& t = of.training;
  const Json all = {
      {"path", of.path},
      {"run", of.is_run},
      {"from", m.from},
      {"family", of.family.empty() ? Json() : Json(of.family)},
      {"parameters", of.parameters},
      {"layers", m.layers},
      {"dim", m.dim},
      {"heads", m.heads},
      {"kv_heads", m.kv_heads},
      {"head_dim", m.head_dim()},
      {"ffn", m.ffn},
      {"vocab", m.vocab},
      {"norm_eps", m.norm_eps},
      {"tie_embeddings", m.tie_embeddings},
      {"qkv_bias", m.qkv_bias},
      {"out_bias", m.out_bias},
      {"mlp_bias", m.mlp_bias},
      {"qk_norm", m.qk_norm},
      {"softcap", m.softcap},
      {"attention_sinks", nlohmann::json::parse(m.attention_sinks.text())},
      {"rope_theta", m.rope_theta},
      {"rope_scaling", m.rope_scaling.text()},
      {"rope_fp32", m.rope_fp32},
      {"rope_layers", m.rope_layers.text()},
      {"activation", activation_name(m.activation)},
      {"norm_zero_centered", m.norm_zero_centered},
      {"post_norms", m.post_norms},
      {"scale_embeddings", m.scale_embeddings},
      {"query_pre_attn_scalar", m.score_divisor()},
      {"dtype", m.dtype},
      {"dropout", m.dropout},
      {"patterns", patterns},
      {"context", of.context},
      {"weights", {{"dtypes", of.dtypes}, {"bytes", of.weight_bytes}, {"step", of.step ? Json(*of.step) : Json()}}},
      {"length", of.length},
      {"flops_per_token", of.flops},
      {"attention_flops_per_token", of.attention_flops},
      {"training_bytes",
       {{"weights", t.weights},
        {"gradients", t.gradients},
        {"optimizer", t.optimizer},
        {"activations", t.activations},
        {"working", t.working},
        {"total", t.total()}}},
      {"import_bytes", of.import_bytes},
      {"export_bytes", of.export_bytes}};
  std::printf("%s\n", all.dump(2).c_str());
}

class InspectSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("FOLDER_OR_RUN", which_, "a folder in Hugging Face's layout, a run folder, or the name of a run")
        ->required();
    app.add_option("--runs", root_, "folder in which the name of a run is looked up (default: runs)")
        ->type_name("FOLDER");
    app.add_option("--length", length_,
                   "tokens of the sequences that compute and memory are shown for (default: the context)")
        ->check(CLI::PositiveNumber);
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.footer(
        "Example (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus inspect quickstart --length 131072");
  }

  int run() override {
    const Inspection of = inspect_model(which_, root_, length_);
    (json_ ? show_inspection_json : show_inspection)(of);
    return 0;
  }

 private:
  std::string which_, root_ = "runs";
  std::optional<int64_t> length_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_inspect_subcommand() { return std::make_unique<InspectSubcommand>(); }

}  // namespace annulus
