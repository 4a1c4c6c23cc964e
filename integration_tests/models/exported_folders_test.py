#!/usr/bin/env python3
"""Tests `train --init` and `export` with models of every family of transformers: an exported model has the keys and bits of
the imported one, and transformers loads it without missing or unexpected keys."""

import copy
import json
import os
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import cli  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

SIZES = dict(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
    rope_theta=500000.0,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1000000.0)
IDS = dict(pad_token_id=None, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama3": transformers.LlamaConfig(
        rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **SIZES
    ),
    "linear": transformers.LlamaConfig(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4), **SIZES),
    "mistral": transformers.MistralConfig(sliding_window=8, head_dim=16, **SIZES),
    "qwen2": transformers.Qwen2Config(
        rope_parameters=YARN, use_sliding_window=True, sliding_window=8, max_window_layers=1, **SIZES
    ),
    "qwen3": transformers.Qwen3Config(head_dim=16, rope_parameters=dict(YARN, attention_factor=1.25), **SIZES),
    "smollm3": transformers.SmolLM3Config(
        use_sliding_window=True, sliding_window=8, no_rope_layers=[1, 0, 1], rope_parameters=YARN, **IDS, **SIZES
    ),
    "gemma3": transformers.Gemma3TextConfig(
        head_dim=16, query_pre_attn_scalar=24, sliding_window=8, sliding_window_pattern=2, **IDS, **SIZES
    ),
}
TRAIN = """
run = { name = "tiny", steps = 1 }
data = { train = ["text.txt"], context = 32, batch = 2 }
optimizer = { lr = 1e-30, weight_decay = 0.0 }
validation.every = 0
"""
# Keys of a configuration that do not describe the model.
BESIDES = {"transformers_version", "_name_or_path", "dtype", "max_position_embeddings"}


def said(config):
    return {key: value for key, value in config.to_dict().items() if key not in BESIDES}


class HuggingFaceTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        with open(self.path("config.toml"), "w") as f:
            f.write(TRAIN)
        with open(self.path("text.txt"), "w") as f:
            f.write("all work and no play makes jack a dull boy\n" * 100)

    def make(self, name, dtype=torch.float32, **how):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
        for parameter in model.parameters():  # no zeros, because the smallest update changes them
            parameter.data.normal_(0, 0.1)
        model = model.to(dtype)
        model.save_pretrained(self.path(name), **how)
        return model

    def done(self, *args):
        code, out, err = self.annulus(*args)
        self.assertEqual(code, 0, f"{args}: {err}")
        return out

    def assert_inspects(self, folder, config, parameters):
        """Asserts that `inspect` reports what transformers reads; returns its report."""
        of = json.loads(self.done("inspect", self.path(folder), "--length", "64", "--json"))
        self.assertEqual(of["family"], config.model_type)
        self.assertEqual(of["parameters"], parameters)
        for key, theirs in {"dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
                            "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size",
                            "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
                            "context": "max_position_embeddings"}.items():
            self.assertEqual(of[key], getattr(config, theirs), f"{folder}: {key}")
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        self.assertEqual(of["rope_theta"], rope["rope_theta"])
        self.assertIn(f'kind = "{rope["rope_type"]}"', of["rope_scaling"])
        self.assertTrue(of["rope_fp32"])
        return of

    def load(self, folder):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(self.path(folder), output_loading_info=True)
        for kind, what in info.items():
            self.assertFalse(what, f"{folder}: {kind}")
        return model

    def assert_same_weights(self, got, wanted, what):
        wanted = wanted.state_dict()
        self.assertEqual(set(got.state_dict()), set(wanted))
        for name, value in got.state_dict().items():
            self.assertTrue(torch.equal(value, wanted[name]), f"{what}: {name}")

    def test_export_reproduces_the_import_of_every_family(self):
        for i, name in enumerate(CONFIGS):
            dtype = torch.bfloat16 if i % 2 else torch.float32
            model = self.make(name, dtype, **({"max_shard_size": "40KB"} if i % 3 else {}))
            self.done("launch", "-n", "2", "train", "config.toml", "--init", name, "--set", f"run.name={name}",
                      "--set", f"optimizer.shard={i % 4}")
            out = self.done("export", name, f"out-{name}", "--shard-size", "30KB" if i % 2 else "1GB")
            self.assertIn(type(model).__name__, out)
            # The run is on bytes, and transformers takes the tokenizer of every qwen2 model for Qwen's.
            self.assertEqual(out.count("note:"), out.count("note: AutoTokenizer"), out)
            self.assertEqual(out.count("note:"), 1 if name == "qwen2" else 0, out)
            self.assert_inspects(name, CONFIGS[name], sum(p.numel() for p in model.parameters()))
            again = self.load(f"out-{name}")
            self.assertEqual(again.dtype, dtype, name)
            self.assertEqual(said(again.config), said(model.config), name)
            self.assert_same_weights(again, model, name)

    def test_accepts_the_older_spelling_of_keys(self):
        model = self.make("llama3")
        path = self.path("llama3/config.json")
        with open(path) as f:
            config = json.load(f)
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        rope["type"] = rope.pop("rope_type")
        config["torch_dtype"] = config.pop("dtype")
        with open(path, "w") as f:
            json.dump(config, f)
        self.done("train", "config.toml", "--init", "llama3")
        self.done("export", "tiny", "out")
        with open(self.path("out/config.json")) as f:
            self.assertEqual(json.load(f), config)
        again = self.load("out")
        self.assertEqual(again.config.rope_parameters["rope_type"], "llama3")
        self.assert_same_weights(again, model, "llama3")

    def test_defaults_match_transformers(self):
        for family in ("llama", "mistral", "smollm3", "qwen2", "qwen3", "gemma3_text"):
            os.makedirs(self.path(family))
            with open(self.path(f"{family}/config.json"), "w") as f:
                json.dump(dict(SIZES, model_type=family, pad_token_id=None), f)  # smollm3 has one beyond this vocabulary
            config = transformers.AutoConfig.from_pretrained(self.path(family))
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(self.path(f"{family}-saved"))
            shutil.copy(self.path(f"{family}-saved/model.safetensors"), self.path(family))
            of = self.assert_inspects(family, config, sum(p.numel() for p in model.parameters()))
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            self.assertEqual(of["head_dim"], head_dim)
            window = config.sliding_window if family in ("mistral", "gemma3_text") else None
            said = f'{{ kind = "window", left = {window - 1}, right = 0 }}' if window else '{ kind = "causal" }'
            self.assertEqual(of["patterns"], [{"pattern": said, "layers": [0, 1, 2]}])
            self.assertEqual(of["query_pre_attn_scalar"], getattr(config, "query_pre_attn_scalar", head_dim))
            layers = {"gemma3_text": '[{ kind = "default", theta = 10000.0 }]'}.get(family, "[]")
            self.assertEqual(of["rope_layers"], layers, family)
        self.assertIn("angles in fp32", self.done("inspect", family, "--length", "64"))

    def test_export_has_the_settings_of_the_training(self):
        """A longer context by yarn, with a window: the configuration has both, and a run continues without the folder."""
        self.make("mistral")
        train = ["train", "config.toml", "--init", "mistral", "--set", "data.context=128", "--set",
                 'model.rope_scaling={ kind = "yarn", factor = 2.0, original_context = 64 }', "--set",
                 'model.pattern={ kind = "window", left = 15, right = 0 }']
        self.done(*train)
        shutil.rmtree(self.path("mistral"))
        for steps, which in enumerate([["runs/tiny-001"], ["tiny-001"], []], 2):  # given by path, by name, or the newest
            self.done(*train, "--resume", *which, "--set", f"run.steps={steps}")
        out = self.done("export", "tiny", "out")
        self.assertIn("MistralForCausalLM in fp32, context 128", out)
        config = self.load("out").config
        self.assertEqual(config.sliding_window, 16)
        self.assertEqual(config.max_position_embeddings, 128)
        rope = config.rope_parameters
        self.assertEqual(
            (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]), ("yarn", 2.0, 64)
        )

    def test_exports_a_model_trained_from_scratch(self):
        self.done("train", "config.toml", "--set", "model.layers=2", "--set", "model.dim=32", "--set", "model.heads=2",
                  "--set", 'model.rope_scaling={ kind = "yarn", factor = 2.0, original_context = 16, beta_fast = 16 }')
        out = self.done("export", "tiny", "out", "--dtype", "bf16")
        self.assertIn("note: the model was trained with rotary angles in fp64", out)
        model = self.load("out")
        self.assertEqual((type(model).__name__, model.dtype), ("LlamaForCausalLM", torch.bfloat16))
        rope = model.config.rope_parameters
        self.assertEqual((rope["rope_type"], rope["factor"], rope["beta_fast"], rope["rope_theta"]), ("yarn", 2, 16, 1e4))
        self.assert_refused(2, "out already exists", "export", "tiny", "out")
        self.assert_refused(2, "bf16, fp64", "export", "tiny", "other", "--dtype", "fp8")

    def test_exports_a_model_of_layers_that_differ(self):
        """Windows and rotary positions by layer, trained from scratch: smollm3, and with the other forms gemma3_text."""
        small = ["--set", "model.layers=5", "--set", "model.dim=32", "--set", "model.heads=2"]
        window = '{ kind = "window", left = 15, right = 0 }'
        self.done("train", "config.toml", *small, "--set", f'model.pattern=[{window}, {{ kind = "causal" }}]',
                  "--set", 'model.rope_layers=[{}, {}, { kind = "none" }]')
        self.assertIn("SmolLM3ForCausalLM", self.done("export", "tiny", "smollm"))
        config = self.load("smollm").config
        self.assertEqual(config.no_rope_layers, [1, 1, 0, 1, 1])
        self.assertEqual(config.layer_types, ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"])
        self.assertEqual(config.sliding_window, 16)
        forms = {"qk_norm": "true", "post_norms": "true", "norm_zero_centered": "true", "scale_embeddings": "true"}
        forms |= {"activation": "gelu_tanh", "query_pre_attn_scalar": "24", "tie_embeddings": "true", "rope_theta": "1e6"}
        forms |= {"pattern": f'[{window}, {{ kind = "causal" }}]', "rope_layers": "[{ theta = 500 }, {}]"}
        self.done("train", "config.toml", *small, "--set", "run.name=forms",
                  *(word for key, value in forms.items() for word in ("--set", f"model.{key}={value}")))
        self.assertIn("Gemma3ForCausalLM", self.done("export", "forms", "gemma"))
        config = self.load("gemma").config
        self.assertEqual(config.query_pre_attn_scalar, 24)
        self.assertEqual(config.rope_parameters["sliding_attention"]["rope_theta"], 500)
        self.assertEqual(config.rope_parameters["full_attention"]["rope_theta"], 1e6)
        shown = self.done("inspect", "forms", "--length", "64")
        for says in ("theta 500", "in layers 0", "GeGLU", "norms by 1 + weight", "root of 24"):
            self.assertIn(says, shown)
        self.done("train", "config.toml", *small, "--set", "run.name=none", "--set", "model.post_norms=true")
        self.assert_refused(2, "no family can express this model", "export", "none", "nothing")

    def test_refuses_invalid_models(self):
        self.make("llama")
        self.assert_refused(2, "leave the key out", "train", "config.toml", "--init", "llama", "--set", "model.dim=64")
        path = self.path("llama/config.json")
        with open(path) as f:
            config = json.load(f)
        with open(path, "w") as f:
            json.dump(config | {"num_local_experts": 8}, f)
        self.assert_refused(3, '"num_local_experts" is not supported', "train", "config.toml", "--init", "llama")
        with open(path, "w") as f:
            json.dump(config | {"intermediate_size": 64}, f)
        self.assert_refused(3, r"model\.safetensors: tensor .*\[48, 32\].*\[64, 32\]|\[32, 48\]", "train", "config.toml",
                            "--init", "llama")
        self.assert_refused(3, "there is no such folder", "train", "config.toml", "--init", "nowhere")


if __name__ == "__main__":
    cli.main()
