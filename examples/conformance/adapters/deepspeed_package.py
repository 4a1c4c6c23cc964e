"""DeepSpeed: DistributedAttention, an exchange of heads around a local attention of one's own, here PyTorch's."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch.nn.functional import scaled_dot_product_attention

_made = {}


class _Local(torch.nn.Module):
    """The attention of one's own, of whole sequences: [batch, rows, heads, size], which sees every mask."""

    def forward(self, q, k, v, p):
        at_q, at_k = torch.arange(p.length_q)[:, None], torch.arange(p.length_k)[None, :]
        seen = (at_k <= at_q) if p.causal else torch.ones(p.length_q, p.length_k, dtype=torch.bool)
        if p.window is not None:
            seen &= at_k >= at_q - p.window[0]
        if p.documents is not None:
            ends = p.documents[1:].long()
            seen &= torch.bucketize(at_q, ends, right=True) == torch.bucketize(at_k, ends, right=True)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=p.scale, enable_gqa=True).transpose(1, 2)


def ulysses(q, k, v, p):
    if not _made:
        # Otherwise a kernel for all-reduces over shared memory is compiled first, which the exchange does not use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        _made["layer"] = DistributedAttention(_Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return _made["layer"](q, k, v, 0, None, p)


ulysses.package = "deepspeed"
ulysses.unclaimed = {
    "uneven lengths": "it exchanges parts of one length",
    "cross-attention": "queries and keys of one sequence",
    "kept keys": "the local attention's own",
    "lse": "not returned",
}
