"""yunchang: LongContextAttention as a ring, and UlyssesAttention, the exchange of heads alone, as its README and tests call them."""

import torch.distributed as dist
from yunchang import LongContextAttention, UlyssesAttention, set_seq_parallel_pg
from yunchang.kernels import AttnType

UNCLAIMED = {
    "fp32": "flash-attn's kernels take fp16 and bf16",
    "documents": "no argument for packed documents",
    "uneven lengths": "its extract functions cut sequences evenly",
    "cross-attention": "queries and keys of one sequence",
    "kept keys": "no argument for padding",
    "one kv head": "README: not for fewer key/value heads than ranks of the exchange",
    "lse": "the layer drops it",
}
_layers = {}


def _ring(q, k, v, p, ring_impl_type):
    if ring_impl_type not in _layers:
        set_seq_parallel_pg(1, p.size, dist.get_rank(), p.size)
        _layers[ring_impl_type] = LongContextAttention(ring_impl_type=ring_impl_type, attn_type=AttnType.FA)
    window = (-1, -1) if p.window is None else p.window
    return _layers[ring_impl_type](q, k, v, softmax_scale=p.scale, causal=p.causal, window_size=window)


def ring(q, k, v, p):
    return _ring(q, k, v, p, "basic")


def zigzag(q, k, v, p):
    return _ring(q, k, v, p, "zigzag")


def striped(q, k, v, p):
    return _ring(q, k, v, p, "strip")


def ulysses(q, k, v, p):
    layer = _layers.setdefault("ulysses", UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA))
    window = (-1, -1) if p.window is None else p.window
    return layer(q, k, v, softmax_scale=p.scale, causal=p.causal, window_size=window)


zigzag.layout, striped.layout = "zigzag", "striped"
for function in (ring, zigzag, striped, ulysses):
    function.package, function.unclaimed = "yunchang", UNCLAIMED
zigzag.unclaimed = striped.unclaimed = UNCLAIMED | {"full": "README: a load balance for causal attention"}
