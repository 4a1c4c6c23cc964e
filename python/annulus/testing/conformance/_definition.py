"""What results must be: dense attention from its definition in fp64, the same computed plainly in a narrower dtype by one process,
and the drawn inputs. Used by _judge.py and by ranks, for the inputs.

    score(q, k) = scale q . k over the counted pairs,  lse(q) = log sum_k exp(score(q, k)),  out(q) = sum_k exp(score(q, k) - lse(q)) v_k

A row without keys has out 0, lse -inf and gradients of 0.
"""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from ._cases import HEAD_SIZE, Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH = 32  # of the layer whose parameters get gradients


class Inputs(NamedTuple):
    """Whole tensors: q [batch, queries, heads, head size], k and v [batch, keys, kv heads, head size], the gradient of out, and for
    the layer its inputs x [batch, queries, width] and x_k (x itself where lengths are equal), weights and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    x: Tensor
    x_k: Tensor
    weight_in: Tensor
    weight_out: Tensor
    dy: Tensor


def draw(case: Case, dtype: str, seed: int) -> Inputs:
    """Draws the inputs of a case, the same on every machine and rank: normal numbers, rounded to the dtype."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(f"{case.name} {case.size}".encode()))

    def normal(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * factor).to(DTYPES[dtype])

    b, n, m, d = case.batch, case.length_q, case.length_k, HEAD_SIZE
    x = normal(b, n, WIDTH)
    return Inputs(
        q=normal(b, n, case.heads, d, factor=case.gain),
        k=normal(b, m, case.kv_heads, d),
        v=normal(b, m, case.kv_heads, d),
        dout=normal(b, n, case.heads, d),
        x=x,
        x_k=x if n == m else normal(b, m, WIDTH),
        weight_in=normal(WIDTH, (case.heads + 2 * case.kv_heads) * d, factor=WIDTH**-0.5),
        weight_out=normal(case.heads * d, WIDTH, factor=(case.heads * d) ** -0.5),
        dy=normal(b, n, WIDTH),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, counted: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out and lse [batch, heads, queries] of the definition, differentiably, in the dtype of q.

    counted: bool or numbers [queries, keys] or [batch, heads, queries, keys]: how often each pair is counted.
    """
    k, v = _spread(k, q), _spread(v, q)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + counted.to(q.dtype).log()
    empty = ~(counted > 0).any(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.squeeze(-1)


class _Plain(torch.autograd.Function):
    """Attention of whole tensors with sums and statistics in fp32. Probabilities, the gradient of scores and results are rounded to
    the dtype, and the backward takes the rounded out, as kernels do."""

    @staticmethod
    def forward(ctx, q, k, v, counted, scale):  # type: ignore[no-untyped-def]
        scores = (torch.einsum("bqhd,bkhd->bhqk", q.float(), _spread(k, q).float()) * scale).masked_fill(~counted, float("-inf"))
        empty = ~counted.any(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        weights = scores.softmax(-1).masked_fill(empty, 0.0)
        lse = scores.logsumexp(-1, keepdim=True).masked_fill(empty, float("-inf")).squeeze(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights.to(q.dtype).float(), _spread(v, q).float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, weights, out)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):  # type: ignore[no-untyped-def]
        q, k, v, weights, out = ctx.saved_tensors
        dtype, dout = q.dtype, dout.float()
        dv = torch.einsum("bhqk,bqhd->bkhd", weights.to(dtype).float(), dout)
        delta = (dout * out.float()).sum(-1).transpose(1, 2)[..., None]
        ds = (weights * (torch.einsum("bqhd,bkhd->bhqk", dout, _spread(v, q).float()) - delta)).to(dtype).float() * ctx.scale
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, _spread(k, q).float())
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q.float())
        group = q.shape[2] // k.shape[2]
        dk, dv = (t.unflatten(2, (-1, group)).sum(3) for t in (dk, dv))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None


def _spread(kv: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values for each query head."""
    return kv.repeat_interleave(q.shape[2] // kv.shape[2], dim=2)


def plain(q: Tensor, k: Tensor, v: Tensor, counted: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out and lse as one process gets them without any art in the dtype of q."""
    return _Plain.apply(q, k, v, counted, scale)


def project(x: Tensor, x_k: Tensor, weight_in: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of the layer, as views into one projection where queries and keys are of the same rows: what models pass."""
    widths = [case.heads * HEAD_SIZE, case.kv_heads * HEAD_SIZE, case.kv_heads * HEAD_SIZE]
    if x is x_k:
        parts = (x @ weight_in).split(widths, dim=-1)
    else:
        of_q, of_k, of_v = weight_in.split(widths, dim=-1)
        parts = (x @ of_q, x_k @ of_k, x_k @ of_v)
    return tuple(p.unflatten(-1, (-1, HEAD_SIZE)) for p in parts)  # type: ignore[return-value]


def results(case: Case, inputs: Inputs, counted: Tensor, function=attend, layer: bool = True) -> dict[str, Tensor]:
    """Returns out, lse, dq, dk and dv, and with `layer` the gradients of its weights for the loss averaged over ranks, of attention
    by `function` in one process, in the dtype of the inputs."""
    q, k, v = (t.detach().clone().requires_grad_() for t in inputs[:3])
    out, lse = function(q, k, v, counted, case.scale)
    out.backward(inputs.dout)
    found = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if layer:
        weight_in, weight_out = (w.detach().clone().requires_grad_() for w in (inputs.weight_in, inputs.weight_out))
        out, _ = function(*project(inputs.x, inputs.x_k, weight_in, case), counted, case.scale)
        (out.flatten(-2) @ weight_out).backward(inputs.dy / case.size)
        found |= {"weight_in": weight_in.grad, "weight_out": weight_out.grad}
    return found  # type: ignore[return-value]


def exact(case: Case, inputs: Inputs, counted: Tensor, layer: bool = True) -> dict[str, Tensor]:
    """Returns `results` of the definition in fp64, for the inputs as they were rounded."""
    wide = inputs._replace(**{name: t.double() for name, t in inputs._asdict().items()})
    if inputs.x is inputs.x_k:
        wide = wide._replace(x_k=wide.x)
    return results(case, wide, counted, attend, layer)


def magnitudes(case: Case, inputs: Inputs, counted: Tensor) -> dict[str, float]:
    """Returns the largest sum of magnitudes among the elements of out, dq, dk and dv, each a sum over probabilities; those of the
    gradient of scores, p (dout . v - dout . out), with what an error of out does to them."""
    q, k, v, dout = (t.double() for t in inputs[:4])
    out, lse = attend(q, k, v, counted, case.scale)
    k, v = _spread(k, q), _spread(v, q)
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * case.scale).masked_fill(~counted, float("-inf"))
    weights = (scores - lse.masked_fill(lse.isinf(), float("inf"))[..., None]).exp()
    of_out = torch.einsum("bhqk,bkhd->bqhd", weights, v.abs())
    delta, of_delta = ((a * b).sum(-1).transpose(1, 2)[..., None] for a, b in ((dout, out), (dout.abs(), of_out)))
    ds = weights * ((torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta).abs() + of_delta) * case.scale
    group = case.heads // case.kv_heads
    sums = {
        "out": of_out,
        "dq": torch.einsum("bhqk,bkhd->bqhd", ds, k.abs()),
        "dk": torch.einsum("bhqk,bqhd->bkhd", ds, q.abs()).unflatten(2, (-1, group)).sum(3),
        "dv": torch.einsum("bhqk,bqhd->bkhd", weights, dout.abs()).unflatten(2, (-1, group)).sum(3),
        "lse": torch.ones(1),
    }
    return {name: t.max().item() if t.numel() else 0.0 for name, t in sums.items()}
