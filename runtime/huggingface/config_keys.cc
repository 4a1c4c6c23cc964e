// See config_keys.h.
#include "runtime/huggingface/config_keys.h"

#include "runtime/huggingface/model_config.h"

namespace annulus {
namespace huggingface {
namespace {

using enum KeyUse;

constexpr std::string_view kWindows = "qwen2 qwen3";
constexpr std::string_view kExperts = "it describes a mixture of experts";
constexpr std::string_view kLongrope = "it belongs to longrope scaling";
constexpr std::string_view kGeneration = "a generation setting, which older files keep here";
constexpr std::string_view kLabels = "a setting of classifiers";

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> table = {
      {"model_type", kMapped, "the family: `llama`, `mistral`, `qwen2`, `qwen3`"},
      {"architectures", kMapped, "null, or only the family's causal language model: `LlamaForCausalLM`, ..."},
      {"hidden_size", kMapped, "`model.dim`; required"},
      {"num_hidden_layers", kMapped, "`model.layers`; required"},
      {"num_attention_heads", kMapped, "`model.heads`; required"},
      {"num_key_value_heads", kMapped,
       "`model.kv_heads`; null: as many as heads; missing: as many as heads, but 8 in mistral and 32 in qwen2 and "
       "qwen3"},
      {"head_dim", kMapped, "`model.head_dim`; missing or null: hidden_size / num_attention_heads, but 128 in qwen3"},
      {"intermediate_size", kMapped, "`model.ffn`; required"},
      {"vocab_size", kMapped, "`model.vocab`; required"},
      {"rms_norm_eps", kMapped, "`model.norm_eps`; 1e-6 if missing"},
      {"tie_word_embeddings", kMapped, "`model.tie_embeddings`; false if missing"},
      {"attention_bias", kMapped, "`model.qkv_bias` and `model.out_bias`; qwen2 always has the first, without a key",
       "llama qwen3"},
      {"mlp_bias", kMapped, "`model.mlp_bias`", "llama"},
      {"attention_dropout", kMapped, "`model.dropout`; 0 if missing"},
      {"dtype", kMapped, "`model.dtype`: `bfloat16` becomes \"bf16\", every other value \"fp32\""},
      {"torch_dtype", kMapped, "the older name of dtype; dtype takes precedence"},
      {"max_position_embeddings", kMapped,
       "the context length, which does not affect training; it is also used if the original length of yarn or llama3 "
       "is missing. Export writes the length of the run's longest rows if they are longer"},
      {"sliding_window", kMapped,
       "the window w, which becomes `model.pattern` { kind = \"window\", left = w - 1, right = 0 }; in mistral for "
       "every layer (4096 if missing; null: no window), in qwen2 and qwen3 for the layers that layer_types names",
       "mistral qwen2 qwen3"},
      {"use_sliding_window", kMapped, "false or missing: there is no window", kWindows},
      {"layer_types", kMapped,
       "`full_attention` or `sliding_attention` for each layer; missing: max_window_layers decides", kWindows},
      {"max_window_layers", kMapped, "the first layer with the window if layer_types is missing; 28 if missing",
       kWindows},
      {"rope_theta", kMapped, "`model.rope_theta`, inside or beside rope_parameters; 10000 if missing"},
      {"rope_parameters", kMapped, "`model.rope_scaling`, with the keys below"},
      {"rope_scaling", kMapped, "the older name of rope_parameters; if both are given, they must be equal"},
      {"original_max_position_embeddings", kMapped, "takes precedence over the one in rope_parameters"},
      {"rope_parameters.rope_type", kMapped, "the kind: `default`, `linear`, `llama3` or `yarn`"},
      {"rope_parameters.type", kMapped, "the older name of rope_type"},
      {"rope_parameters.rope_theta", kMapped,
       "`model.rope_theta`; must equal the one beside rope_parameters if both are given"},
      {"rope_parameters.factor", kMapped,
       "`factor`; null or missing in yarn: max_position_embeddings / original_max_position_embeddings"},
      {"rope_parameters.original_max_position_embeddings", kMapped, "`original_context` of llama3 and yarn"},
      {"rope_parameters.low_freq_factor", kMapped, "`low_freq_factor` of llama3"},
      {"rope_parameters.high_freq_factor", kMapped, "`high_freq_factor` of llama3"},
      {"rope_parameters.beta_fast", kMapped, "`beta_fast` of yarn; missing, null or 0: 32"},
      {"rope_parameters.beta_slow", kMapped, "`beta_slow` of yarn; missing, null or 0: 1"},
      {"rope_parameters.attention_factor", kMapped, "`attention_factor` of yarn; missing or null: 0.1 ln(factor) + 1"},
      {"rope_parameters.truncate", kMapped, "`truncate` of yarn; true if missing"},
      {"rope_parameters.partial_rotary_factor",
       kChecked,
       "the rotary embedding rotates the whole head",
       {},
       "null 1 1.0"},
      {"rope_parameters.mscale", kRefused,
       "with mscale_all_dim and without attention_factor it sets yarn's attention factor; otherwise it is passed "
       "through"},
      {"rope_parameters.mscale_all_dim", kRefused,
       "with mscale and without attention_factor it sets yarn's attention factor; otherwise it is passed through"},
      {"rope_parameters.short_factor", kRefused, kLongrope},
      {"rope_parameters.long_factor", kRefused, kLongrope},
      {"rope_parameters.mrope_section", kRefused, "it describes rotary positions with several axes"},

      {"hidden_act", kChecked, "the MLP is SwiGLU", {}, "\"silu\""},
      {"partial_rotary_factor", kChecked, "the rotary embedding rotates the whole head", {}, "null 1 1.0"},
      {"rope_interleaved", kChecked, "rotary pairs are (i, i + head_dim / 2)", {}, "null false"},
      {"use_mrope", kChecked, "positions have one axis", {}, "null false"},
      {"use_qk_norm", kChecked, "only qwen3 has norms of queries and keys, without this key", {}, "null false"},
      {"is_encoder_decoder", kChecked, "only decoders are supported", {}, "null false"},
      {"add_cross_attention", kChecked, "only decoders are supported", {}, "null false"},
      {"cross_attention_hidden_size", kChecked, "only decoders are supported", {}, "null"},
      {"tie_encoder_decoder", kChecked, "only decoders are supported", {}, "null false"},
      {"pruned_heads", kChecked, "pruned heads are not supported", {}, "null {}"},
      {"chunk_size_feed_forward", kChecked, "the MLP is not computed in chunks", {}, "null 0"},

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
      {"attn_logit_softcapping", kRefused, "it caps attention scores"},
      {"final_logit_softcapping", kRefused, "it caps logits"},
      {"attention_sinks", kRefused, "it describes attention sinks"},
      {"attn_sinks", kRefused, "it describes attention sinks"},
      {"attention_chunk_size", kRefused, "it describes chunked attention"},
      {"no_rope_layers", kRefused, "it describes layers without rotary positions"},
      {"no_rope_layer_interval", kRefused, "it describes layers without rotary positions"},
      {"per_layer_config", kRefused, "it describes layers of different sizes"},
      {"quantization_config", kRefused, "it describes quantised weights"},
      {"quantization", kRefused, "it describes quantised weights"},
      {"compression_config", kRefused, "it describes quantised weights"},
      {"auto_map", kRefused, "the model needs code of its own"},

      {"bos_token_id", kPassed, "used by tokenizers and generation"},
      {"eos_token_id", kPassed, "used by tokenizers and generation"},
      {"pad_token_id", kPassed, "used by tokenizers and generation"},
      {"sep_token_id", kPassed, "used by tokenizers"},
      {"decoder_start_token_id", kPassed, "used by generation"},
      {"tokenizer_class", kPassed, "used by tokenizers"},
      {"initializer_range", kPassed, "used only to initialize new weights"},
      {"pretraining_tp", kPassed, "how the original training was divided"},
      {"use_cache", kPassed, "a generation setting"},
      {"max_sequence_length", kPassed, "an older name of the context length; max_position_embeddings is used"},
      {"model_max_length", kPassed, "a setting of tokenizers"},
      {"transformers_version", kPassed, "what wrote the file"},
      {"_name_or_path", kPassed, "where the model came from"},
      {"name_or_path", kPassed, "where the model came from"},
      {"_commit_hash", kPassed, "where the model came from"},
      {"unsloth_version", kPassed, "what wrote the file"},
      {"unsloth_fixed", kPassed, "what wrote the file"},
      {"transformers.js_config", kPassed, "used by another library"},
      {"is_llama_config", kPassed, "what wrote the file"},
      {"attn_implementation", kPassed, "the attention kernel that transformers uses"},
      {"_attn_implementation", kPassed, "the attention kernel that transformers uses"},
      {"_attn_implementation_autoset", kPassed, "the attention kernel that transformers uses"},
      {"torchscript", kPassed, "how transformers runs the model"},
      {"use_bfloat16", kPassed, "how another library runs the model"},
      {"tf_legacy_loss", kPassed, "how another library runs the model"},
      {"is_decoder", kPassed, "these families are always decoders"},
      {"return_dict", kPassed, "what calls of transformers return"},
      {"output_hidden_states", kPassed, "what calls of transformers return"},
      {"output_attentions", kPassed, "what calls of transformers return"},
      {"tie_last_hidden_states", kPassed, "what calls of transformers return"},
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
    for (size_t at = 0; (at = values.find(' ', at)) != std::string::npos; at += 6) values.replace(at, 1, "` or `");
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
