// See config_keys.h.
#include "runtime/huggingface/config_keys.h"

#include <utility>

#include "common/text.h"
#include "runtime/huggingface/model_config.h"

namespace annulus {
namespace huggingface {
namespace {

using enum KeyUse;

constexpr std::string_view kWindows = "smollm3 qwen2 qwen3", kLayerTypes = "smollm3 qwen2 qwen3 gemma3_text";

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  // Keys that are treated alike stand in one row, separated by spaces.
  static const ConfigKey rows[] = {
      {"model_type", kMapped, "the family: `llama`, `mistral`, `smollm3`, `qwen2`, `qwen3`, `gemma3_text`"},
      {"architectures", kMapped, "null, or only the family's causal language model: `LlamaForCausalLM`, ..."},
      {"hidden_size", kMapped, "`model.dim`; required"},
      {"num_hidden_layers", kMapped, "`model.layers`; required"},
      {"num_attention_heads", kMapped, "`model.heads`; required"},
      {"num_key_value_heads", kMapped,
       "`model.kv_heads`; null: as many as heads; missing: as many as heads, but 8 in mistral, 4 in smollm3 and "
       "gemma3_text, and 32 in qwen2 and qwen3"},
      {"head_dim", kMapped,
       "`model.head_dim`; missing or null: hidden_size / num_attention_heads, but 128 in qwen3 and 256 "
       "in gemma3_text"},
      {"intermediate_size", kMapped, "`model.ffn`; required"},
      {"vocab_size", kMapped, "`model.vocab`; required"},
      {"rms_norm_eps", kMapped, "`model.norm_eps`; 1e-6 if missing"},
      {"tie_word_embeddings", kMapped,
       "`model.tie_embeddings`; if missing true in smollm3 and gemma3_text, and else false"},
      {"attention_bias", kMapped, "`model.qkv_bias` and `model.out_bias`; qwen2 always has the first, without a key",
       "llama smollm3 qwen3 gemma3_text"},
      {"mlp_bias", kMapped, "`model.mlp_bias`", "llama smollm3"},
      {"query_pre_attn_scalar", kMapped, "`model.query_pre_attn_scalar`; 256 if missing", "gemma3_text"},
      {"attention_dropout", kMapped, "`model.dropout`; 0 if missing"},
      {"dtype", kMapped, "`model.dtype`: `bfloat16` becomes \"bf16\", every other value \"fp32\""},
      {"torch_dtype", kMapped, "the older name of dtype; dtype takes precedence"},
      {"max_position_embeddings", kMapped,
       "the context length, which does not affect training; it is also used if the original length of yarn or llama3 "
       "is missing. Export writes the length of the run's longest rows if they are longer"},
      {"sliding_window", kMapped,
       "the window w, which becomes `model.pattern` { kind = \"window\", left = w - 1, right = 0 }; in mistral for "
       "every layer, in the others for the layers that layer_types names (missing: 4096, but none in smollm3; null: "
       "none)",
       "mistral smollm3 qwen2 qwen3 gemma3_text"},
      {"use_sliding_window", kMapped, "false or missing: there is no window", kWindows},
      {"layer_types", kMapped,
       "`full_attention` or `sliding_attention` for each layer; missing: max_window_layers, no_rope_layers or "
       "sliding_window_pattern decides",
       kLayerTypes},
      {"max_window_layers", kMapped,
       "the first layer with the window if layer_types is missing; 28 if missing; not used in smollm3", kWindows},
      {"sliding_window_pattern", kMapped, "every how many layers one has no window; 6 if missing", "gemma3_text"},
      {"no_rope_layers", kMapped,
       "1 for each layer, or 0: `{ kind = \"none\" }` in `model.rope_layers`; missing: no_rope_layer_interval decides",
       "smollm3"},
      {"no_rope_layer_interval", kMapped, "every how many layers one has 0; 4 if missing", "smollm3"},
      {"rope_theta", kMapped,
       "`model.rope_theta`, inside or beside rope_parameters; if missing 10000, but 2e6 in smollm3 and 1e6 in "
       "gemma3_text"},
      {"rope_local_base_freq", kMapped, "`theta` of layers with a window in `model.rope_layers`; 10000 if missing",
       "gemma3_text"},
      {"rope_parameters", kMapped, "`model.rope_scaling`, with the keys below"},
      {"rope_parameters.full_attention rope_parameters.sliding_attention", kMapped,
       "the keys below, for layers without a window and for those with one", "gemma3_text"},
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
      {"rope_parameters.short_factor rope_parameters.long_factor", kRefused, "it belongs to longrope scaling"},
      {"rope_parameters.mrope_section", kRefused, "it describes rotary positions with several axes"},

      {"hidden_act", kChecked, "the MLP is SwiGLU", "llama mistral smollm3 qwen2 qwen3", "\"silu\""},
      {"hidden_activation", kChecked, "the MLP is GeGLU", "gemma3_text", "\"gelu_pytorch_tanh\""},
      {"use_bidirectional_attention", kChecked, "attention is causal", {}, "null false"},
      {"partial_rotary_factor", kChecked, "the rotary embedding rotates the whole head", {}, "null 1 1.0"},
      {"rope_interleaved", kChecked, "rotary pairs are (i, i + head_dim / 2)", {}, "null false"},
      {"use_mrope", kChecked, "positions have one axis", {}, "null false"},
      {"use_qk_norm",
       kChecked,
       "only qwen3 and gemma3_text have norms of queries and keys, without this key",
       {},
       "null false"},
      {"is_encoder_decoder add_cross_attention", kChecked, "only decoders are supported", {}, "null false"},
      {"cross_attention_hidden_size", kChecked, "only decoders are supported", {}, "null"},
      {"tie_encoder_decoder", kChecked, "only decoders are supported", {}, "null false"},
      {"pruned_heads", kChecked, "pruned heads are not supported", {}, "null {}"},
      {"chunk_size_feed_forward", kChecked, "the MLP is not computed in chunks", {}, "null 0"},

      {"num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
       "shared_expert_intermediate_size decoder_sparse_step mlp_only_layers router_aux_loss_coef",
       kRefused, "it describes a mixture of experts"},
      {"attn_logit_softcapping", kRefused, "it caps attention scores"},
      {"final_logit_softcapping", kRefused, "it caps logits"},
      {"attention_sinks attn_sinks", kRefused, "it describes attention sinks"},
      {"attention_chunk_size", kRefused, "it describes chunked attention"},
      {"per_layer_config", kRefused, "it describes layers of different sizes"},
      {"quantization_config quantization compression_config", kRefused, "it describes quantised weights"},
      {"auto_map", kRefused, "the model needs code of its own"},

      {"bos_token_id eos_token_id pad_token_id", kPassed, "used by tokenizers and generation"},
      {"sep_token_id", kPassed, "used by tokenizers"},
      {"decoder_start_token_id", kPassed, "used by generation"},
      {"tokenizer_class", kPassed, "used by tokenizers"},
      {"initializer_range", kPassed, "used only to initialize new weights"},
      {"pretraining_tp", kPassed, "how the original training was divided"},
      {"use_cache cache_implementation", kPassed, "a generation setting"},
      {"_sliding_window_pattern", kPassed, "transformers does not read it"},
      {"max_sequence_length", kPassed, "an older name of the context length; max_position_embeddings is used"},
      {"model_max_length", kPassed, "a setting of tokenizers"},
      {"transformers_version", kPassed, "what wrote the file"},
      {"_name_or_path name_or_path _commit_hash", kPassed, "where the model came from"},
      {"unsloth_version unsloth_fixed", kPassed, "what wrote the file"},
      {"transformers.js_config", kPassed, "used by another library"},
      {"is_llama_config", kPassed, "what wrote the file"},
      {"attn_implementation _attn_implementation _attn_implementation_autoset", kPassed,
       "the attention kernel that transformers uses"},
      {"torchscript", kPassed, "how transformers runs the model"},
      {"use_bfloat16 tf_legacy_loss", kPassed, "how another library runs the model"},
      {"is_decoder", kPassed, "these families are always decoders"},
      {"return_dict output_hidden_states output_attentions tie_last_hidden_states", kPassed,
       "what calls of transformers return"},
      {"id2label label2id num_labels problem_type finetuning_task", kPassed, "a setting of classifiers"},
      {"task_specific_params prefix return_dict_in_generate output_scores do_sample max_length max_new_tokens "
       "min_length early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
       "repetition_penalty length_penalty exponential_decay_length_penalty no_repeat_ngram_size "
       "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
       "remove_invalid_values suppress_tokens begin_suppress_tokens",
       kPassed, "a generation setting, which older files keep here"},
  };
  static const std::vector<ConfigKey> table = [] {
    std::vector<ConfigKey> keys;
    for (const ConfigKey& row : rows) {
      for (std::string& name : split(row.name, ' ')) {
        keys.push_back(row);
        keys.back().name = std::move(name);
      }
    }
    return keys;
  }();
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
  std::string out = "| key | families | what is done with it |\n|---|---|---|\n", names, rest;
  const auto write = [&] {  // neighbours that are treated alike share a row
    if (!names.empty()) out += "| " + names + rest;
    names.clear();
  };
  for (const huggingface::ConfigKey& key : huggingface::config_keys()) {
    const std::string values = join(split(key.values, ' '), "` or `");
    const std::string doc(key.doc);
    const std::string what = key.use == KeyUse::kMapped    ? doc
                             : key.use == KeyUse::kChecked ? "must be `" + values + "`: " + doc
                             : key.use == KeyUse::kPassed  ? "passed through"
                                                           : "refused: " + doc;
    const std::string families = key.families.empty() ? "all" : join(split(key.families, ' '), ", ");
    const std::string treated = " | " + families + " | " + what + " |\n";
    if (treated != rest) write();
    names += (names.empty() ? "`" : ", `") + std::string(key.name) + "`";
    rest = treated;
  }
  write();
  return out;
}

}  // namespace annulus
