#!/usr/bin/env python3
"""A Llama of transformers whose sequences are cut over the processes of torchrun. One line registers annulus's
attention.

    torchrun --nproc-per-node 2 examples/pytorch/llama.py

Rows are packed with documents that do not attend to each other. Prints the loss, and how far loss and gradients are
from those of the same model in one process with PyTorch's own attention. The weights are random.
"""

import os
import sys

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))  # not needed with the wheel
import annulus  # noqa: E402
import annulus.transformers  # noqa: E402

CONFIG = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make(attention):
    torch.manual_seed(0)  # the same weights in every process
    return transformers.AutoModelForCausalLM.from_config(CONFIG, attn_implementation=attention).train()


def packed_rows():
    """Returns two rows of 128 tokens, each packed with documents; position ids restart with each document."""
    torch.manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (2, 128))
    lengths = [[50, 60, 18], [100, 28]]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {"input_ids": ids, "labels": ids, "position_ids": position_ids}


def main():
    dist.init_process_group("gloo")
    group, layout = dist.group.WORLD, "zigzag"
    batch = packed_rows()

    # A program changes in three places: this line, attn_implementation, and shard_batch, which takes this process's part.
    annulus.transformers.register(group, layout)
    model = make("annulus")
    loss = model(**annulus.transformers.shard_batch(batch, layout, group)).loss
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)  # each process has the gradients of its part of the loss
    dist.all_reduce(loss := loss.detach(), group=group)

    whole = make("sdpa")
    shifted = annulus.shift_labels(batch["labels"], batch["position_ids"])
    wanted = whole(**batch, shift_labels=shifted, use_cache=False).loss
    wanted.backward()
    pairs = zip(model.parameters(), whole.parameters())
    worst = max(((p.grad - w.grad).norm() / w.grad.norm()).item() for p, w in pairs)
    assert abs(loss - wanted) < 1e-5 and worst < 1e-4, (loss, wanted, worst)
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f} over {dist.get_world_size()} processes, {wanted:.6f} in one", flush=True)
        print(f"gradients differ by at most {worst:.1e} of their norm", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
