"""annulus.attention in its layouts."""

import torch.distributed as dist
from annulus import attention  # raises ImportError where there is no library


def _attend(q, k, v, p):
    pattern = {"kind": "causal" if p.causal else "full"}
    if p.window is not None:
        pattern = {"kind": "window", "left": p.window[0], "right": p.window[1]}
    return attention(
        q, k, v, pattern, group=dist.group.WORLD, layout=p.layout, cu_seqlens=p.documents,
        kept_keys=None if p.kept_keys is None else p.kept_keys[None], return_lse=True,
    )


def contiguous(q, k, v, problem):
    return _attend(q, k, v, problem)


def zigzag(q, k, v, problem):
    return _attend(q, k, v, problem)


zigzag.layout = "zigzag"


def striped(q, k, v, problem):
    return _attend(q, k, v, problem)


striped.layout = "striped"
