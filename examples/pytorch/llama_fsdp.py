#!/usr/bin/env python3
"""The Llama of llama.py with FSDP2 over a mesh data x context: batch rows are divided along `data`, sequences are cut
along `context`, and weights are sharded over both.

    torchrun --nproc-per-node 4 examples/pytorch/llama_fsdp.py                  # 2 x 2
    torchrun --nproc-per-node 2 examples/pytorch/llama_fsdp.py --context 2      # 1 x 2

It prints the same lines as llama.py.
"""

import argparse
import os
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llama import annulus, make, packed_rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2, help="processes that share a sequence")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    data = dist.get_world_size() // arguments.context
    mesh = init_device_mesh("cpu", (data, arguments.context), mesh_dim_names=("data", "context"))
    processes = mesh["data", "context"]._flatten()
    context, layout = mesh["context"], "zigzag"
    batch = packed_rows()

    annulus.transformers.register(context, layout)
    model = make("annulus")
    for layer in model.model.layers:
        fully_shard(layer, mesh=processes)
    fully_shard(model, mesh=processes)

    part = annulus.transformers.shard_batch(batch, layout, context)  # this process's positions of all rows
    rows = slice(mesh.get_local_rank("data"), None, data)
    part = {key: value[rows] if hasattr(value, "dim") else value for key, value in part.items()}
    loss = model(**part).loss
    # FSDP averages the processes' gradients, but these belong to parts of one loss and must be added.
    (loss * processes.size()).backward()
    dist.all_reduce(loss := loss.detach())

    whole = make("sdpa")
    shifted = annulus.shift_labels(batch["labels"], batch["position_ids"])
    wanted = whole(**batch, shift_labels=shifted, use_cache=False).loss
    wanted.backward()
    pairs = zip(model.parameters(), whole.parameters())
    worst = max(((p.grad.full_tensor() - w.grad).norm() / w.grad.norm()).item() for p, w in pairs)
    assert abs(loss - wanted) < 1e-5 and worst < 1e-4, (loss, wanted, worst)
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f} over {data} x {arguments.context} processes, {wanted:.6f} in one", flush=True)
        print(f"gradients differ by at most {worst:.1e} of their norm", flush=True)
    dist.destroy_process_group()
    # FSDP and DTensor keep their groups for the rest of the process. If a thread of gloo releases a tensor while the
    # interpreter ends, PyTorch aborts (https://github.com/pytorch/pytorch/issues/190489), so it does not get to that.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
