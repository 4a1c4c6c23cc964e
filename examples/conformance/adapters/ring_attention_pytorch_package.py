"""ring-attention-pytorch: ring_flash_attn with a reduction over the ring, as its RingAttention calls it for tensors on CPUs. Shards have
equal lengths, which RingAttention makes by padding. Its query head h reads kv head h mod (kv heads); where others have h divided by the
size of a group, query heads are put into its order here and back.
"""

from ring_attention_pytorch.ring_flash_attention import ring_flash_attn


def _swapped(t, groups):
    """[batch, rows, groups x members, size] with the members of a head first."""
    return t.unflatten(2, (groups, -1)).transpose(2, 3).flatten(2, 3)


def _attend(q, k, v, p, striped):
    kv_heads = k.shape[2]
    out = ring_flash_attn(
        _swapped(q, kv_heads), k, v, causal=p.causal, bucket_size=max(1, q.shape[1]), ring_reduce_col=True, striped_ring_attn=striped,
        ring_size=p.size,
    )
    return _swapped(out, q.shape[2] // kv_heads)


def ring(q, k, v, p):
    return _attend(q, k, v, p, False)


def striped(q, k, v, p):
    return _attend(q, k, v, p, True)


ring.package = striped.package = "ring-attention-pytorch"
striped.layout = "striped"
ring.unclaimed = striped.unclaimed = {
    "window": "its look-back counts whole buckets of keys, not keys",
    "documents": "no argument for packed documents",
    "uneven lengths": "its README pads sequences to the ring's length",
    "cross-attention": "over a ring, queries and keys of one sequence",
    "kept keys": "its key padding mask is ignored where attention is causal",
    "lse": "not returned",
    "bf16": "nothing is said of it for the part in PyTorch",
}
