"""Makes folders in Hugging Face's layout with small models of random weights, of every family and scaling of the rotary
embedding, and computes with them by transformers. Used by the tests of this folder."""

import json
import os
import types

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, LENGTH = 320, 208
_SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4)
_SIZES |= dict(num_key_value_heads=2, max_position_embeddings=256)

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "factor": 2.0}


def _rope(theta, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


CONFIGS = {
    "llama 2": transformers.LlamaConfig(**_SIZES | {"num_key_value_heads": 4}, **_rope(10000.0)),
    "llama, linear": transformers.LlamaConfig(**_SIZES, **_rope(10000.0, **_LINEAR)),
    "llama 3.1": transformers.LlamaConfig(**_SIZES, rms_norm_eps=1e-5, **_rope(500000.0, **_LLAMA3)),
    "llama, yarn": transformers.LlamaConfig(**_SIZES, head_dim=24, **_rope(10000.0, **_YARN)),
    "llama, biases": transformers.LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **_rope(10000.0)
    ),
    # Sizes that are not multiples of a vector of 16.
    "llama, odd": transformers.LlamaConfig(
        **_SIZES | {"hidden_size": 44, "intermediate_size": 75, "vocab_size": 301}, head_dim=10, **_rope(10000.0)
    ),
    "mistral": transformers.MistralConfig(**_SIZES, sliding_window=37, head_dim=32, **_rope(1e6)),
    "mistral, yarn": transformers.MistralConfig(
        **_SIZES, sliding_window=None, **_rope(1e6, **_YARN, beta_fast=16.0, attention_factor=1.1)
    ),
    "qwen 2.5": transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True, **_rope(1e6)),
    "qwen 2.5, windows": transformers.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=50, max_window_layers=1, **_rope(1e6, **_YARN)
    ),
    "qwen 3": transformers.Qwen3Config(**_SIZES, head_dim=32, **_rope(1e6)),
    "qwen 3, layers": transformers.Qwen3Config(
        **_SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=29,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
        **_rope(1e6, **_LLAMA3),
    ),
    # Layers that differ: some without rotary positions, or with a base of their own where there is a window. A pad_token_id
    # would make transformers leave out the gradient of an embedding.
    "smollm 3": transformers.SmolLM3Config(**_SIZES, no_rope_layer_interval=2, pad_token_id=None, **_rope(5e6)),
    "smollm 3, windows": transformers.SmolLM3Config(
        **_SIZES,
        head_dim=24,
        use_sliding_window=True,
        sliding_window=41,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        no_rope_layers=[1, 1, 0],
        mlp_bias=True,
        tie_word_embeddings=False,
        pad_token_id=None,
        **_rope(5e6, **_YARN),
    ),
    "gemma 3": transformers.Gemma3TextConfig(
        **_SIZES, head_dim=24, query_pre_attn_scalar=20, sliding_window=33, sliding_window_pattern=2, pad_token_id=None
    ),
    "gemma 3, linear": transformers.Gemma3TextConfig(
        **_SIZES | {"num_key_value_heads": 1},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=50,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        pad_token_id=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
}

LLAMAS = [name for name in CONFIGS if name.startswith("llama")]
BY_LAYER = [name for name in CONFIGS if name.startswith(("smollm", "gemma"))]
OTHERS = [name for name in CONFIGS if name not in LLAMAS + BY_LAYER]


def make(name, dtype=torch.float32, config=None, attention="eager"):
    """Returns a model with random norms and biases too, whose logits and gradients are far from those of a uniform guess."""
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config or CONFIGS[name], attn_implementation=attention)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in key:
                parameter.mul_(4)
    frequencies = {key: buffer.clone() for key, buffer in model.named_buffers()}
    model.to(dtype)
    for key, buffer in frequencies.items():  # which transformers keeps in fp32, whatever dtype it loads weights in
        model.get_submodule(key.rpartition(".")[0]).register_buffer(key.rpartition(".")[2], buffer, persistent=False)
    return model.eval()


def make_exact(name, config=None):
    """Returns the same model in fp64, also where transformers computes in fp32 whatever the dtype is: in norms and in the
    softmax of its eager attention. Cosines and sines of the rotary embedding are still those of fp32, as the model's are."""
    model = make(name, torch.float64, config, attention="sdpa")

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def zero_centered_norm(self, x):
        return (1 + self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(zero_centered_norm if hasattr(module, "eps") else norm, module)
    return model


def nudge_tables(model):
    """Moves each cosine and sine of the rotary embedding by a unit in the last place of fp32, up or down by chance. As far as
    that may results of two programs differ which compute in fp64 from tables in fp32."""
    rotary, draw = model.model.rotary_emb, torch.Generator().manual_seed(1)
    tables = rotary.forward

    def nudged(*args, **named):
        return tuple(t * (1 + 2**-23 * (2 * torch.randint(2, t.shape, generator=draw) - 1)) for t in tables(*args, **named))

    rotary.forward = nudged
    return model


def save(model, folder, **how):
    model.save_pretrained(folder, **how)
    return folder


def old_spelling(folder):
    """Rewrites FOLDER/config.json as versions of transformers before 5 wrote it."""
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        config = json.load(f)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    with open(path, "w") as f:
        json.dump(config, f)


def batch(seed=3, rows=2, length=LENGTH, vocab=VOCAB):
    """Returns tokens and targets, some of which do not count."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, length), generator=draw)
    targets = torch.randint(vocab, (rows, length), generator=draw)
    targets[:, ::7] = -100
    return {"tokens": tokens, "targets": targets}


def write(data, path):
    save_file({name: t.contiguous() for name, t in data.items()}, path)
    return path


def read(path):
    return load_file(path)


def expected(model, data):
    """Returns what `annulus logits --backward` writes, computed by transformers."""
    model.zero_grad()
    logits = model(input_ids=data["tokens"]).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), data["targets"].flatten(), ignore_index=-100)
    loss.backward()
    results = {"logits": logits.detach(), "loss": loss.detach()}
    results |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return results


TEXT = "The ring passes keys and values from rank to rank, and every rank adds what it has seen. " * 20


def tokenizer(folder):
    """Writes a byte-level tokenizer with a few merges to FOLDER; the model has all of its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    made.save(os.path.join(folder, "tokenizer.json"))
    return made
