#!/usr/bin/env python3
"""Compares rotary tables of imported models with those of transformers, at positions up to 1,048,575."""

import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import model_folders as models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

TOOL = os.path.abspath(sys.argv[1])

# Shapes and scalings that models of these families have.
SHAPES = [
    ("llama", 128, 5e5, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 8192),
    ("llama", 64, 5e5, {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 8192),
    ("llama", 128, 1e4, {"rope_type": "default"}, 4096),
    ("llama", 96, 1e4, {"rope_type": "linear", "factor": 8.0}, 4096),
    ("mistral", 128, 1e6, {"rope_type": "default"}, 32768),
    ("qwen2", 128, 1e6, {"rope_type": "yarn", "factor": 4.0}, 32768),
    ("qwen3", 128, 1e6, {"rope_type": "yarn", "factor": 32.0}, 32768),
    ("qwen3", 128, 5e6, {"rope_type": "yarn", "factor": 3.7, "beta_fast": 20.0, "beta_slow": 2.0}, 40960),
    ("llama", 64, 1e4, {"rope_type": "yarn", "factor": 16.0, "truncate": False, "attention_factor": 0.9}, 4096),
    ("smollm3", 128, 5e6, {"rope_type": "default"}, 65536),
    ("gemma3_text", 256, 1e6, {"rope_type": "linear", "factor": 8.0}, 131072),
]
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
ARCHITECTURES |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


class RotaryTables(unittest.TestCase):
    def test_tables_match_transformers(self):
        positions = torch.cat([torch.arange(64), torch.tensor([4095, 8191, 32767, 131071, 524287]),
                               torch.randint(1 << 20, (200,)), torch.tensor([(1 << 20) - 1])])
        for family, head_dim, theta, rope, context in SHAPES:
            rope = rope | {"rope_theta": theta}
            if rope["rope_type"] in ("llama3", "yarn"):
                rope["original_max_position_embeddings"] = context
            layers = {"full_attention": rope, "sliding_attention": LOCAL} if family == "gemma3_text" else {None: rope}
            config = transformers.AutoConfig.for_model(
                family, hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=4, head_dim=head_dim,
                max_position_embeddings=int(context * rope.get("factor", 1)), num_hidden_layers=len(layers),
                rope_parameters=layers if len(layers) > 1 else rope, intermediate_size=8, vocab_size=8, pad_token_id=None,
                **({"layer_types": list(layers)} if len(layers) > 1 else {}))
            model = transformers.AutoModel.from_config(config)
            with tempfile.TemporaryDirectory() as folder:
                config.architectures = [ARCHITECTURES[family]]
                config.save_pretrained(folder)
                models.write({"positions": positions}, os.path.join(folder, "in"))
                for layer, kind in enumerate(layers):
                    subprocess.run([TOOL, folder, str(layer), os.path.join(folder, "in"), os.path.join(folder, "out")], check=True)
                    kinds = [] if kind is None else [kind]
                    cosine, sine = model.rotary_emb(torch.zeros(1), positions.unsqueeze(0), *kinds)
                    self.compare(models.read(os.path.join(folder, "out")), cosine, sine, (family, layers[kind]))

    def compare(self, table, cosine, sine, what):
        for name, theirs in (("cosine", cosine), ("sine", sine)):
            wanted = theirs[0, :, : theirs.shape[-1] // 2]
            # Angles have the same bits. Each side rounds twice, in the function and in the product with the attention factor,
            # by no more than a unit in the last place, which is 2^-24 below 1.
            allowed = 4 * 2**-24 * max(1, wanted.abs().max().item())
            self.assertLessEqual((table[name] - wanted).abs().max().item(), allowed, (what, name))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
