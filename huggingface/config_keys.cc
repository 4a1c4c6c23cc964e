// See config_keys.h.
#include "huggingface/config_keys.h"

#include <algorithm>

#include "huggingface/model_config.h"

namespace annulus {
namespace huggingface {
namespace {

using enum KeyUse;

constexpr std::string_view kWindows = "qwen2 qwen3";
constexpr std::string_view kExperts = "a mixture of experts";
constexpr std::string_view kLongrope = "longrope scaling";
constexpr std::string_view kGeneration = "generation, a habit of older files";
constexpr std::string_view kLabels = "of classifiers";

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> table = {
      {"model_type", kMapped, "the family: `llama`, `mistral`, `qwen2`, `qwen3`"},
      {"architectures", kMapped, "null, or the family's causal language model alone: `LlamaForCausalLM`, ..."},
      {"hidden_size", kMapped, "`model.dim`; required"},
      {"num_hidden_layers", kMapped, "`model.layers`; required"},
      {"num_attention_heads", kMapped, "`model.heads`; required"},
      {"num_key_value_heads", kMapped,
       "`model.kv_heads`; null: as many as heads; where it is missing, too, but 8 in mistral, 32 in qwen2 and qwen3"},
      {"head_dim", kMapped, "`model.head_dim`; missing or null: hidden_size / num_attention_heads, but 128 in qwen3"},
      {"intermediate_size", kMapped, "`model.ffn`; required"},
      {"vocab_size", kMapped, "`model.vocab`; required"},
      {"rms_norm_eps", kMapped, "`model.norm_eps`; 1e-6 where it is missing"},
      {"tie_word_embeddings", kMapped, "`model.tie_embeddings`; false where it is missing"},
      {"attention_bias", kMapped, "`model.qkv_bias` and `model.out_bias`; qwen2 has the first without a key",
       "llama qwen3"},
      {"mlp_bias", kMapped, "`model.mlp_bias`", "llama"},
      {"attention_dropout", kMapped, "`model.dropout`; 0 where it is missing"},
      {"dtype", kMapped, "`model.dtype`: `bfloat16` is \"bf16\", all others \"fp32\""},
      {"torch_dtype", kMapped, "the older name of dtype, which comes first"},
      {"max_position_embeddings", kMapped,
       "the context, which training does not depend on; where yarn and llama3 lack the original one, it is that. "
       "Export writes the longest rows of the run where they are longer"},
      {"sliding_window", kMapped,
       "of w: `model.pattern` { kind = \"window\", left = w - 1, right = 0 }, in mistral of every layer (4096 where it "
       "is "
       "missing; null: none), in qwen2 and qwen3 of layer_types",
       "mistral qwen2 qwen3"},
      {"use_sliding_window", kMapped, "false, or missing: sliding_window is none", kWindows},
      {"layer_types", kMapped, "of each layer `full_attention`, or `sliding_attention`; missing: by max_window_layers",
       kWindows},
      {"max_window_layers", kMapped, "the first layer with the window where layer_types are missing; 28", kWindows},
      {"rope_theta", kMapped, "`model.rope_theta`, in rope_parameters or beside them; 10000 where it is missing"},
      {"rope_parameters", kMapped, "`model.rope_scaling`, with the keys below"},
      {"rope_scaling", kMapped, "the older name of rope_parameters; only one of them may say something"},
      {"original_max_position_embeddings", kMapped, "comes before that of rope_parameters"},
      {"rope_parameters.rope_type", kMapped, "the kind: `default`, `linear`, `llama3`, `yarn`; no other"},
      {"rope_parameters.type", kMapped, "the older name of rope_type"},
      {"rope_parameters.rope_theta", kMapped, "comes before that beside the rotary parameters"},
      {"rope_parameters.factor", kMapped,
       "`factor`; of yarn null is max_position_embeddings / original_max_position_embeddings"},
      {"rope_parameters.original_max_position_embeddings", kMapped, "`original_context`, of llama3 and yarn"},
      {"rope_parameters.low_freq_factor", kMapped, "`low_freq_factor`, of llama3"},
      {"rope_parameters.high_freq_factor", kMapped, "`high_freq_factor`, of llama3"},
      {"rope_parameters.beta_fast", kMapped, "`beta_fast`, of yarn; null or 0: 32"},
      {"rope_parameters.beta_slow", kMapped, "`beta_slow`, of yarn; null or 0: 1"},
      {"rope_parameters.attention_factor", kMapped, "`attention_factor`, of yarn; null: 0.1 ln(factor) + 1"},
      {"rope_parameters.truncate", kMapped, "`truncate`, of yarn; true where it is missing"},
      {"rope_parameters.partial_rotary_factor", kChecked, "the whole head is turned", {}, "null 1 1.0"},
      {"rope_parameters.mscale", kRefused,
       "another attention factor of yarn, where both are there and attention_factor is not"},
      {"rope_parameters.mscale_all_dim", kRefused,
       "another attention factor of yarn, where both are there and attention_factor is not"},
      {"rope_parameters.short_factor", kRefused, kLongrope},
      {"rope_parameters.long_factor", kRefused, kLongrope},
      {"rope_parameters.mrope_section", kRefused, "rotary positions of several axes"},

      {"hidden_act", kChecked, "the MLP is SwiGLU", {}, "\"silu\""},
      {"partial_rotary_factor", kChecked, "the whole head is turned", {}, "null 1 1.0"},
      {"rope_interleaved", kChecked, "pairs are (i, i + head_dim / 2)", {}, "null false"},
      {"use_mrope", kChecked, "positions have one axis", {}, "null false"},
      {"use_qk_norm", kChecked, "norms of queries and keys are qwen3's", {}, "null false"},
      {"is_encoder_decoder", kChecked, "a decoder alone", {}, "null false"},
      {"add_cross_attention", kChecked, "a decoder alone", {}, "null false"},
      {"cross_attention_hidden_size", kChecked, "a decoder alone", {}, "null"},
      {"tie_encoder_decoder", kChecked, "a decoder alone", {}, "null false"},
      {"pruned_heads", kChecked, "every head is there", {}, "null {}"},
      {"chunk_size_feed_forward", kChecked, "the MLP is not cut by the model", {}, "null 0"},

      {"num_experts", kRefused, kExperts},
      {"num_local_experts", kRefused, kExperts},
      {"n_routed_experts", kRefused, kExperts},
      {"n_shared_experts", kRefused, kExperts},
      {"num_experts_per_tok", kRefused, kExperts},
      {"moe_intermediate_size", kRefused, kExperts},
      {"shared_expert_intermediate_size", kRefused, kExperts},
      {"decoder_sparse_step", kRefused, kExperts},
      {"mlp_only_layers", kRefused, kExperts},
      {"router_aux_loss_coef", kRefused, kExperts},
      {"attn_logit_softcapping", kRefused, "scores with a soft cap"},
      {"final_logit_softcapping", kRefused, "logits with a soft cap"},
      {"attention_sinks", kRefused, "attention sinks"},
      {"attn_sinks", kRefused, "attention sinks"},
      {"attention_chunk_size", kRefused, "chunked attention"},
      {"no_rope_layers", kRefused, "layers without rotary positions"},
      {"no_rope_layer_interval", kRefused, "layers without rotary positions"},
      {"per_layer_config", kRefused, "layers of several sizes"},
      {"quantization_config", kRefused, "quantised weights"},
      {"quantization", kRefused, "quantised weights"},
      {"compression_config", kRefused, "quantised weights"},
      {"auto_map", kRefused, "a model with code of its own"},

      {"bos_token_id", kPassed, "for tokenizers and generation"},
      {"eos_token_id", kPassed, "for tokenizers and generation"},
      {"pad_token_id", kPassed, "for tokenizers and generation"},
      {"sep_token_id", kPassed, "for tokenizers"},
      {"decoder_start_token_id", kPassed, "for generation"},
      {"tokenizer_class", kPassed, "for tokenizers"},
      {"initializer_range", kPassed, "of weights that begin anew"},
      {"pretraining_tp", kPassed, "how the first training was cut"},
      {"use_cache", kPassed, "generation"},
      {"max_sequence_length", kPassed, "an older name of the context; max_position_embeddings is what counts"},
      {"model_max_length", kPassed, "of tokenizers"},
      {"transformers_version", kPassed, "who wrote the file"},
      {"_name_or_path", kPassed, "where it came from"},
      {"name_or_path", kPassed, "where it came from"},
      {"_commit_hash", kPassed, "where it came from"},
      {"unsloth_version", kPassed, "who wrote the file"},
      {"unsloth_fixed", kPassed, "who wrote the file"},
      {"transformers.js_config", kPassed, "for another library"},
      {"is_llama_config", kPassed, "who wrote the file"},
      {"attn_implementation", kPassed, "which of the library's kernels"},
      {"_attn_implementation", kPassed, "which of the library's kernels"},
      {"_attn_implementation_autoset", kPassed, "which of the library's kernels"},
      {"torchscript", kPassed, "how the library runs it"},
      {"use_bfloat16", kPassed, "how another library runs it"},
      {"tf_legacy_loss", kPassed, "how another library runs it"},
      {"is_decoder", kPassed, "the families have no other form"},
      {"return_dict", kPassed, "what the library's calls return"},
      {"output_hidden_states", kPassed, "what the library's calls return"},
      {"output_attentions", kPassed, "what the library's calls return"},
      {"tie_last_hidden_states", kPassed, "what the library's calls return"},
      {"id2label", kPassed, kLabels},
      {"label2id", kPassed, kLabels},
      {"num_labels", kPassed, kLabels},
      {"problem_type", kPassed, kLabels},
      {"finetuning_task", kPassed, kLabels},
      {"task_specific_params", kPassed, kGeneration},
      {"prefix", kPassed, kGeneration},
      {"return_dict_in_generate", kPassed, kGeneration},
      {"output_scores", kPassed, kGeneration},
      {"do_sample", kPassed, kGeneration},
      {"max_length", kPassed, kGeneration},
      {"max_new_tokens", kPassed, kGeneration},
      {"min_length", kPassed, kGeneration},
      {"early_stopping", kPassed, kGeneration},
      {"num_beams", kPassed, kGeneration},
      {"num_beam_groups", kPassed, kGeneration},
      {"diversity_penalty", kPassed, kGeneration},
      {"temperature", kPassed, kGeneration},
      {"top_k", kPassed, kGeneration},
      {"top_p", kPassed, kGeneration},
      {"typical_p", kPassed, kGeneration},
      {"repetition_penalty", kPassed, kGeneration},
      {"length_penalty", kPassed, kGeneration},
      {"exponential_decay_length_penalty", kPassed, kGeneration},
      {"no_repeat_ngram_size", kPassed, kGeneration},
      {"encoder_no_repeat_ngram_size", kPassed, kGeneration},
      {"bad_words_ids", kPassed, kGeneration},
      {"num_return_sequences", kPassed, kGeneration},
      {"forced_bos_token_id", kPassed, kGeneration},
      {"forced_eos_token_id", kPassed, kGeneration},
      {"remove_invalid_values", kPassed, kGeneration},
      {"suppress_tokens", kPassed, kGeneration},
      {"begin_suppress_tokens", kPassed, kGeneration},
  };
  return table;
}

const ConfigKey* find_config_key(std::string_view name) {
  for (const ConfigKey& key : config_keys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

bool is_of_family(const ConfigKey& key, std::string_view family) {
  return key.families.empty() ||
         (" " + std::string(key.families) + " ").find(" " + std::string(family) + " ") != std::string::npos;
}

}  // namespace huggingface

std::string model_config_reference() {
  using huggingface::KeyUse;
  std::string out = "| key | families | what is done with it |\n|---|---|---|\n";
  for (const huggingface::ConfigKey& key : huggingface::config_keys()) {
    std::string values(key.values);
    for (size_t at = 0; (at = values.find(' ', at)) != std::string::npos; at += 4) values.replace(at, 1, "`, `");
    const std::string doc(key.doc);
    const std::string what = key.use == KeyUse::kMapped    ? doc
                             : key.use == KeyUse::kChecked ? "must be `" + values + "`: " + doc
                             : key.use == KeyUse::kPassed  ? "passed through: " + doc
                                                           : "refused: " + doc;
    std::string families(key.families.empty() ? "all" : key.families);
    for (size_t at = 0; (at = families.find(' ', at)) != std::string::npos; at += 2) families.replace(at, 1, ", ");
    out += "| `" + std::string(key.name) + "` | " + families + " | " + what + " |\n";
  }
  return out;
}

}  // namespace annulus
