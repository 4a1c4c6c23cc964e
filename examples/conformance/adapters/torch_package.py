"""torch's own context parallelism: scaled_dot_product_attention inside context_parallel, as its tutorial calls it, with the head-tail
(zigzag) order that it gives to the buffers. The backend for CPUs is chosen by torch."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

_mesh = []


def ring(q, k, v, p):
    import torch.nn.functional as F

    if not _mesh:
        _mesh.append(init_device_mesh("cpu", (p.size,)))
    whole = torch.empty(1, p.length_q)  # a buffer of the whole sequence, as it wants
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(_mesh[0], buffers=[whole], buffer_seq_dims=[1]):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=p.causal, scale=p.scale)
    return out.transpose(1, 2)


ring.layout = "zigzag"
ring.unclaimed = {
    "window": "its SDPA takes no mask over ranks",
    "documents": "its SDPA takes no mask over ranks",
    "kept keys": "its SDPA takes no mask over ranks",
    "uneven lengths": "it asks for lengths that twice the ranks divide",
    "cross-attention": "queries and keys of one sequence",
    "grouped heads": "its SDPA takes as many key/value heads as query heads",
    "lse": "not returned",
}
