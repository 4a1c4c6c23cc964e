"""Small models of transformers with random weights, rows for them, and comparisons of two models. Used by
transformers_*.py."""

import copy

import exactness
import torch
import transformers

_SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
_SIZES |= dict(num_key_value_heads=2, head_dim=8)

CONFIGS = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "mistral": transformers.MistralConfig(sliding_window=5, **_SIZES),
    # The first layer attends to all positions, the others to a window.
    "qwen3": transformers.Qwen3Config(use_sliding_window=True, sliding_window=4, max_window_layers=1, **_SIZES),
    "mixtral": transformers.MixtralConfig(num_local_experts=4, sliding_window=None, **_SIZES),
    # Latent attention: values have another size than queries and keys.
    "deepseek_v3": transformers.DeepseekV3Config(
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=3,
        **_SIZES | dict(num_key_value_heads=4, head_dim=4),
    ),
}

# Models that only their eager attention computes: a soft cap of scores, and learned sinks beside windows in every second
# layer. transformers' sdpa would leave the cap out without a word.
EAGER = {
    # With random weights scores are about 0.01, so a cap must be as small to change a loss.
    "gemma2": transformers.Gemma2Config(attn_logit_softcapping=0.02, query_pre_attn_scalar=8, sliding_window=5, **_SIZES),
    "gpt_oss": transformers.GptOssConfig(num_local_experts=4, num_experts_per_tok=2, sliding_window=4, **_SIZES),
}
CONFIGS |= EAGER
# Models that do not pass positions to their mask, so that packed documents are refused.
UNPACKED = {"gpt_oss"}

# Rotary angles that depend on the length of the whole row: of the rows here (LENGTH), but not of a rank's part.
_LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=20, short_factor=[1.0] * 4)
_LONG |= dict(long_factor=[1.5, 2.0, 3.0, 4.0])
_DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
ROTARY = {
    "longrope": transformers.LlamaConfig(rope_parameters=_LONG, max_position_embeddings=64, **_SIZES),
    "dynamic": transformers.LlamaConfig(rope_parameters=_DYNAMIC, max_position_embeddings=10, **_SIZES),
}

# Layers outside attention that mix positions.
MIXING = {
    "qwen3_next": transformers.Qwen3NextConfig(
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, **_SIZES
    ),
    "minimax": transformers.MiniMaxConfig(
        layer_types=["full_attention", "linear_attention", "full_attention"], num_local_experts=4, **_SIZES
    ),
    "falcon_h1": transformers.FalconH1Config(
        mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8, **_SIZES
    ),
}  # fmt: skip

LENGTH = 24


def make(name, attention, dtype=torch.float32):
    torch.manual_seed(1)
    attention = "eager" if attention == "sdpa" and name in EAGER else attention
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy((CONFIGS | ROTARY | MIXING)[name]),
        attn_implementation=attention,
        experts_implementation="eager",  # the other one takes no fp64
    )
    assert model.config._attn_implementation == attention
    return model.to(dtype)


def packings(name):
    """Returns for which values of `packed` the model has a batch."""
    return (False,) if name in UNPACKED else (False, True)


def batch(packed):
    """Returns a batch of two rows; if `packed`, each row has several documents."""
    torch.manual_seed(2)
    ids = torch.randint(64, (2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    if packed:
        rows = [[7, 9, 8], [3, 21]]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def padding(where):
    """Returns an attention_mask for these rows, with hidden positions on the left, on the right or in between."""
    hidden = {
        "left": [(0, slice(3)), (1, slice(7))],
        "right": [(0, slice(-3, None))],
        "holes": [(0, slice(3, 5)), (0, slice(9, 10)), (1, slice(1)), (1, slice(20, 21))],
        "all": [(0, slice(None))],
    }
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    for place in hidden[where]:
        mask[place] = 0
    return mask


def last_alone():
    """Returns a seq_idx in which the last position of each row is a document."""
    return torch.tensor([[0] * (LENGTH - 1) + [1]] * 2, dtype=torch.int32)


class Convolution(torch.nn.Conv1d):
    """A causal convolution over positions."""

    def __init__(self):
        super().__init__(32, 32, 3, padding=2, groups=32)

    def forward(self, x):
        return super().forward(x.mT)[..., : x.shape[1]].mT


class AboveMean(torch.nn.Module):
    """Lets pass what is above the mean of the row: arithmetic carries nothing from one position to another."""

    def forward(self, x):
        return x * (x > x.mean(1, keepdim=True))


class Index(torch.nn.Module):
    """Adds something by the index of a token in what it gets, not by its position id."""

    def forward(self, x):
        return x + torch.arange(x.shape[1]).to(x).sin()[:, None]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_exact(got, usual, exact, what):
    """Compares losses and gradients with those of the usual attention in fp32 (exactness.py). `exact` has fp64 weights,
    though transformers computes norms and losses in fp32 nevertheless, as exactly as for the other two."""
    exactness.as_exact(*(torch.tensor(loss) for loss, _ in (got, usual, exact)), what)
    # A tensor may be the sum of others that cancel, as gradients of keys are.
    terms = max(exactness.largest(g) for g in exact[1].values())
    for name, wanted in exact[1].items():
        exactness.as_exact(got[1][name], usual[1][name], wanted, (what, name), terms)
