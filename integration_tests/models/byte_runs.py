"""Trains small models on bytes, one of every family that such a run is exported as. Used by byte_tokenizer_test.py and
perplexity_test.py."""

import cli

# The keys of [model] that make a run of each family.
FAMILIES = {
    "llama": {},
    "mistral": {"pattern": '{ kind = "window", left = 20, right = 0 }'},
    "qwen2": {"qkv_bias": "true"},
    "qwen3": {"qk_norm": "true"},
    "smollm3": {"rope_layers": '[{}, { kind = "none" }]'},
    "gemma3_text": {
        "pattern": '[{ kind = "window", left = 20, right = 0 }, { kind = "causal" }]',
        "rope_layers": "[{ theta = 1e4 }, {}]",
        "activation": "gelu_tanh",
        **dict.fromkeys(["qk_norm", "post_norms", "norm_zero_centered", "scale_embeddings"], "true"),
    },
}
TEXT = "def rank(ring):\n    return ring[0]  # \u00e9in \U0001f600 Schl\u00fcssel\n" * 300


def train(test, family, steps=20):
    """Trains a run that is named after its family in the folder of a cli.CliTest, on TEXT in rows of 64 bytes."""
    cli.write_tiny_run(test.folder, steps, text=TEXT)
    sets = [f"run.name={family}", "model.layers=2", *(f"model.{key}={value}" for key, value in FAMILIES[family].items())]
    code, _, err = test.annulus("train", "config.toml", *(word for each in sets for word in ("--set", each)))
    test.assertEqual(code, 0, err)


def export(test, family, *more):
    """Exports that run to a folder; returns the folder's path and what `export` prints."""
    code, out, err = test.annulus("export", family, f"{family}-folder", *more)
    test.assertEqual((code, err), (0, ""), out)
    return test.path(f"{family}-folder"), out
