"""Attention of one process over keys and values gathered from all ranks, the plain baseline of one's own: PyTorch's
scaled_dot_product_attention, and transformers' "sdpa" attention, which calls it."""

import types

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


class _Gather(torch.autograd.Function):
    """The rows of all ranks. Its gradient is added up over the ranks in fp32. That of torch.distributed.nn.functional.all_gather is
    wrong over gloo (torch 2.11.0) if the gradient that arrives is not contiguous."""

    @staticmethod
    def forward(ctx, t):
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        total = grad.float().contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].to(grad.dtype)


def _gathered(q, k, v, p):
    k, v = _Gather.apply(k), _Gather.apply(v)
    pos_q, pos_k = p.positions_q[:, None], torch.arange(p.length_k)[None, :]
    seen = (pos_k <= pos_q) if p.causal else torch.ones(len(pos_q), p.length_k, dtype=torch.bool)
    if p.window is not None:
        seen &= (pos_k >= pos_q - p.window[0]) & (pos_k <= pos_q + p.window[1])
    if p.documents is not None:
        ends = p.documents[1:].long()
        seen &= torch.bucketize(pos_q, ends, right=True) == torch.bucketize(pos_k, ends, right=True)
    return *(t.transpose(1, 2) for t in (q, k, v)), seen


def sdpa(q, k, v, p):
    q, k, v, seen = _gathered(q, k, v, p)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=p.scale, enable_gqa=True).transpose(1, 2)


def transformers_sdpa(q, k, v, p):
    from transformers import AttentionInterface

    q, k, v, seen = _gathered(q, k, v, p)
    module = types.SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=p.causal)
    return AttentionInterface()["sdpa"](module, q, k, v, seen[None, None].expand(q.shape[0], 1, -1, -1), scaling=p.scale)[0]


for function in (sdpa, transformers_sdpa):
    function.unclaimed = {
        "lse": "it is not returned",
        "uneven lengths": "all_gather of torch.distributed takes parts of one length",
        "kept keys": "a row that sees no key is not defined",
    }
sdpa.package, transformers_sdpa.package = "torch", "transformers"
