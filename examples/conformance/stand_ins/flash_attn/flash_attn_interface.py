"""The functions of flash_attn.flash_attn_interface: those with an underscore are what its autograd functions call, and what packages
for rings of devices call block by block."""

import torch


def _refuse(dropout_p, softcap, alibi_slopes, *others):
    if dropout_p or softcap or alibi_slopes is not None or any(o is not None for o in others):
        raise NotImplementedError("this stand-in of flash-attn for CPUs has no dropout, soft cap, ALiBi or paged keys")


def _scores(q, k, scale, causal, left, right):
    """The scaled scores [heads, queries, keys] in fp32 of q [queries, heads, size] and k [keys, kv heads, size], -inf where masked."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.repeat_interleave(group, 1).float()) * scale
    apart = torch.arange(m)[None, :] - (torch.arange(n)[:, None] + m - n)  # aligned at the bottom right
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        hidden |= apart < -left
    if right >= 0:
        hidden |= apart > right
    return scores.masked_fill(hidden, -torch.inf)


def _forward(q, k, v, scale, causal, left, right):
    scores = _scores(q, k, scale, causal, left, right)
    lse = scores.logsumexp(-1)  # [heads, queries]
    empty = lse == -torch.inf
    weights = (scores - lse.masked_fill(empty, torch.inf)[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", weights.to(q.dtype).float(), v.repeat_interleave(q.shape[1] // v.shape[1], 1).float())
    return out.to(q.dtype), lse.masked_fill(empty, torch.inf)


def _backward(dout, q, k, v, out, lse, scale, causal, left, right):
    """dq, dk, dv for the out and lse that are given, which may be those of more keys than these."""
    group = q.shape[1] // k.shape[1]
    weights = (_scores(q, k, scale, causal, left, right) - lse.float()[..., None]).exp()
    dout = dout.float()
    delta = (dout * out.float()).sum(-1).t()[..., None]
    ds = weights * (torch.einsum("qhd,khd->hqk", dout, v.repeat_interleave(group, 1).float()) - delta)
    ds = ds.to(q.dtype).float() * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(group, 1).float())
    dk = torch.einsum("hqk,qhd->khd", ds, q.float()).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("hqk,qhd->khd", weights.to(q.dtype).float(), dout).unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):
    _refuse(dropout_p, softcap, alibi_slopes)
    rows = [_forward(*row, softmax_scale, causal, window_size_left, window_size_right) for row in zip(q, k, v)]
    out, lse = (torch.stack(t) for t in zip(*rows))
    return out, lse, None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):
    _refuse(dropout_p, softcap, alibi_slopes)
    for b in range(q.shape[0]):
        grads = _backward(dout[b], q[b], k[b], v[b], out[b], softmax_lse[b], softmax_scale, causal, window_size_left, window_size_right)
        for into, grad in zip((dq, dk, dv), grads):
            if into is not None:
                into[b].copy_(grad)
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


def _documents(cu_seqlens_q, cu_seqlens_k):
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [(slice(*a), slice(*b)) for a, b in zip(zip(q, q[1:]), zip(k, k[1:]))]


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    zero_tensors=False,
):
    _refuse(dropout_p, softcap, alibi_slopes, block_table, leftpad_k, seqused_k)
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), torch.inf)
    for of_q, of_k in _documents(cu_seqlens_q, cu_seqlens_k):
        out[of_q], lse[:, of_q] = _forward(q[of_q], k[of_k], v[of_k], softmax_scale, causal, window_size_left, window_size_right)
    return out, lse, None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):
    _refuse(dropout_p, softcap, alibi_slopes)
    for of_q, of_k in _documents(cu_seqlens_q, cu_seqlens_k):
        grads = _backward(dout[of_q], q[of_q], k[of_k], v[of_k], out[of_q], softmax_lse[:, of_q], softmax_scale, causal,
                          window_size_left, window_size_right)
        for into, of, grad in zip((dq, dk, dv), (of_q, of_k, of_k), grads):
            if into is not None:
                into[of].copy_(grad)
    return (dout.float() * out.float()).sum(-1).t()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, forward, backward, between, after):
        out, lse, _, _ = forward(q, k, v, *between, *after, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = backward, between, after
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        backward, between, after = ctx.rest
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        backward(dout, q, k, v, out, lse, *grads, *between, *after, False)
        return *grads, None, None, None, None


def _public(q, k, v, forward, backward, between, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    after = (dropout_p, scale, causal, *window_size, softcap, alibi_slopes)
    out, lse = _Attention.apply(q, k, v, forward, backward, between, after)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):
    """q [batch, queries, heads, size], k and v [batch, keys, kv heads, size]. Returns out like q, and lse [batch, heads, queries] if
    return_attn_probs."""
    return _public(q, k, v, _flash_attn_forward, _flash_attn_backward, (), dropout_p, softmax_scale, causal, window_size, softcap,
                   alibi_slopes, return_attn_probs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):
    """q [rows, heads, size], k and v [rows, kv heads, size], with the cumulative lengths of documents. Returns out like q, and lse
    [heads, rows] if return_attn_probs."""
    _refuse(0, 0, None, block_table)
    between = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _public(q, k, v, _flash_attn_varlen_forward, _flash_attn_varlen_backward, between, dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, return_attn_probs)
