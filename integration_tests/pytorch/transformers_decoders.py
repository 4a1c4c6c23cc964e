"""Tiny configurations of every causal decoder of transformers that one can be made for. Used by transformers_walk_test.py.

A tiny configuration is the default one with the sizes below instead of its own. Where a default configuration leaves out
what its model needs, or sizes must fit each other in a way of their own, _GIVEN says it. What transformers refuses to make of
these, or what stays large, is left out and counted.
"""

import copy

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
LAYERS = 4
LARGEST = 4_000_000  # parameters

# By the name of a configuration's key. Larger numbers become these, and lists that have an entry for each layer are cut.
_SIZES = [
    (VOCABULARY, "vocab_size vocab_size_per_layer_input n_vocab text_vocab_size shape_vocab_size pronunciation_vocab_size "
        "encoder_hash_byte_group_vocab"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_decoder_layers depth",
    ),
    (
        32,
        "hidden_size d_model n_embd emb_dim embed_dim embedding_size intermediate_size moe_intermediate_size ffn_dim "
        "d_ff dff dim_ff n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size shared_expert_intermediate_size "
        "shared_intermediate_size intermediate_size_mlp expert_ffn_hidden_size lru_width "
        "linear_attn_config block_size moe_shared_expert_intermediate_size shared_experts_intermediate_size "
        "dense_intermediate_size pronunciation_embed_dim shape_embed_dim embedding_dim",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "linear_num_value_heads linear_num_key_heads linear_num_heads swa_num_attention_heads n_routed_experts "
        "num_experts num_local_experts moe_num_experts n_experts index_n_heads indexer_n_heads hc_mult ngram_vocab_size_base "
        "time_step_rank mamba_dt_rank",
    ),
    (
        2,
        "num_key_value_heads kv_n_heads indexer_compress_ratio indexer_budget swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk "
        "moe_top_k moe_k top_k attn_layer_period expert_layer_period n_group topk_group num_expert_group n_groups "
        "mamba_n_groups n_mamba_heads num_kv_heads",
    ),
    (
        1,
        "indexer_kv_heads attn_layer_offset expert_layer_offset n_shared_experts num_shared_experts first_k_dense_replace "
        "num_dense_layers num_nextn_predict_layers moe_layer_start_index",
    ),
    (
        8,
        "head_dim d_kv kv_channels linear_head_dim linear_key_head_dim linear_value_head_dim qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim index_head_dim indexer_head_dim swa_head_dim dim_head rotary_dim mamba_d_state state_size "
        "mamba_d_head mamba_head_dim attention_head_dim ssm_state_size hidden_size_per_layer_input laurel_rank "
        "mamba_n_heads mamba_num_heads",
    ),
    (16, "q_lora_rank kv_lora_rank qk_head_dim qk_dim o_lora_rank global_head_dim"),
    (
        64,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_sequence_length "
        "original_max_position_embeddings mamba_chunk_size chunk_size index_topk",
    ),
    (5, "sliding_window sliding_window_size attention_window window_size"),
]
_SIZE = {key: size for size, keys in _SIZES for key in keys.split()}
# What some models cannot do without, and their default configuration leaves out.
_NEEDED = (
    "head_dim num_key_value_heads num_experts_per_tok n_routed_experts n_shared_experts indexer_n_heads indexer_kv_heads "
    "indexer_head_dim indexer_budget indexer_compress_ratio"
).split()
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_AFTER_MAMBA = {  # the second of the hybrid layers has the weights of the first
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
_GIVEN = {
    "blenderbot": {"encoder_layers": LAYERS},  # by which its cache counts
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [32] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "granitemoehybrid": {"layer_types": _MIXED},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [4, 3], "attn_layers": ["local", "lsh"] * 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": _AFTER_MAMBA,
    "zamba2": _AFTER_MAMBA | {"hybrid_layer_ids": [1, 3], "num_mem_blocks": 1},
}


def _kept(given, layers):
    """Returns which layers a tiny model keeps: of each kind one, and of the first ones as many as there is room for."""
    kinds = next((v for k, v in given.items() if k in ("layer_types", "layers_block_type") and len(v or []) == layers), [])
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return sorted([*first, *(i for i in range(layers) if i not in first)][:LAYERS])


def _shrunk(value, key, layers):
    """layers: which ones are kept, and of how many."""
    kept, count = layers
    if isinstance(value, dict):
        made = {k: _shrunk(v, k, layers) for k, v in value.items() if not str(k).isdigit() or int(k) < LAYERS}
        if (heads := value.get("num_attention_heads")) is not None and value.get("num_key_value_heads") == heads:
            made["num_key_value_heads"] = made["num_attention_heads"]  # some models have no others
        return made
    if value is None and key in _NEEDED:
        return _SIZE[key]
    if key == "is_decoder":
        return True
    if value is None and key == "attn_layer_indices":
        return [1]
    if isinstance(value, list) and len(value) == count and count > LAYERS:
        return [value[i] for i in kept]
    if isinstance(value, int) and not isinstance(value, bool) and key in _SIZE:
        return min(value, _SIZE[key])
    if str(key).endswith("token_id") and isinstance(value, int):
        return min(value, 3)
    return value


def config(model_type):
    """Returns a configuration, or raises what transformers raises."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    given = default.to_dict()
    text = default.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", 0)
    layers = _kept(text.to_dict(), count), count
    changed = {k: v for k, v in _shrunk(given, "", layers).items() if v != given[k] and k not in kind.attribute_map}
    return kind(**changed | _GIVEN.get(model_type, {}))


def names():
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def unmakable(model_type):
    """Returns why no tiny model of this type can be made, or ""."""
    try:
        with torch.device("meta"):
            model = make(config(model_type), "eager")
    except Exception as error:
        return type(error).__name__
    return "" if sum(p.numel() for p in model.parameters()) <= LARGEST else "it stays large"


def make(tiny, attention):
    """Makes a model; attention "own" is sdpa, or eager for a model that has no other."""
    torch.manual_seed(1)
    for implementation in ("sdpa", "eager") if attention == "own" else (attention,):
        try:
            return transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(tiny), attn_implementation=implementation, experts_implementation="eager"
            )
        except ValueError:
            if implementation != "sdpa":
                raise
