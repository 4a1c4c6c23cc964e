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
}

LENGTH = 24


def make(name, attention, dtype=torch.float32):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS[name]),
        attn_implementation=attention,
        experts_implementation="eager",  # the other one takes no fp64
    )
    assert model.config._attn_implementation == attention
    return model.to(dtype)


def batch(packed):
    """Returns a batch of two rows; if `packed`, each row has several documents."""
    torch.manual_seed(2)
    ids = torch.randint(64, (2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    if packed:
        rows = [[7, 9, 8], [3, 21]]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


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
