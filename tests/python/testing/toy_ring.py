"""A small ring attention over torch.distributed, correct, and copies with one planted fault each: adapters for conformance_test.py,
which expects each fault to be found and named."""

import threading

import torch
import torch.distributed as dist


def _exchanged(tensors, p, step, lengths):
    """Sends tensors to the next rank and returns those of the rank before, whose rows are the block of the next step."""
    rows = lengths[(p.rank - step - 1) % p.size]
    received = [t.new_empty(t.shape[0], rows, *t.shape[2:]) for t in tensors]
    sent = [dist.isend(t.contiguous(), (p.rank + 1) % p.size) for t in tensors]
    for work in [dist.irecv(t, (p.rank - 1) % p.size) for t in received] + sent:
        work.wait()
    return received


def _scores(q, k, p, owner, fault):
    begin = sum(p.lengths_k[:owner])
    at_q, at_k = p.positions_q[:, None], torch.arange(begin, begin + k.shape[1])[None, :]
    seen = torch.ones(len(at_q), k.shape[1], dtype=torch.bool)
    if p.causal:
        seen &= at_k <= at_q + (fault == "shifted diagonal")
    if p.window is not None and fault != "lost window":
        seen &= (at_k >= at_q - p.window[0]) & (at_k <= at_q + p.window[1])
    if p.documents is not None:
        inner = p.documents[1:-1].long() + (fault == "late boundary")
        seen &= (at_q[..., None] >= inner).sum(-1) == (at_k[..., None] >= inner).sum(-1)
    if p.kept_keys is not None:
        seen &= p.kept_keys[begin : begin + k.shape[1]]
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.repeat_interleave(group, 2).float()) * p.scale
    return scores.masked_fill(~seen, -torch.inf)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, p, fault):
        if fault == "ignored strides":  # as a kernel that takes only a pointer
            q, k, v = (t.as_strided(t.shape, torch.empty(t.shape).stride()) for t in (q, k, v))
        kept = q.dtype if fault == "narrow sums" else torch.float32
        out = torch.zeros(q.shape, dtype=kept)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=kept)
        block, before, group = [k, v], None, q.shape[2] // k.shape[2]
        for step in range(p.size):
            owner = (p.rank - step) % p.size
            used = before if fault == "stale block" and step == 1 else block
            scores = _scores(q, used[0], p, owner, fault)
            of_block = scores.logsumexp(-1) if used[0].shape[1] else torch.full(lse.shape, -torch.inf)
            merged = torch.logaddexp(lse.float(), of_block)
            merged = torch.where(merged == -torch.inf, torch.tensor(-torch.inf), merged)
            finite = merged.masked_fill(merged == -torch.inf, 0.0)
            values = torch.einsum("bhqk,bkhd->bqhd", (scores - finite[..., None]).exp(), used[1].repeat_interleave(group, 2).float())
            out = ((lse.float() - finite).exp().transpose(1, 2)[..., None] * out.float() + values).to(kept)
            lse = merged.to(kept)
            before = block
            if step < p.size - 1:
                block = _exchanged(block, p, step, p.lengths_k)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.p, ctx.fault, ctx.kept = p, fault, kept
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        p, fault, kept, group = ctx.p, ctx.fault, ctx.kept, q.shape[2] // k.shape[2]
        delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
        finite = lse.float().masked_fill(lse == -torch.inf, torch.inf)[..., None]
        dq, block = torch.zeros(q.shape, dtype=kept), [k, v, torch.zeros(k.shape, dtype=kept), torch.zeros(v.shape, dtype=kept)]
        for step in range(p.size):
            weights = (_scores(q, block[0], p, (p.rank - step) % p.size, fault) - finite).exp()
            of_v = block[1].repeat_interleave(group, 2).float()
            ds = weights * (torch.einsum("bqhd,bkhd->bhqk", dout.float(), of_v) - delta) * p.scale
            dq = (dq.float() + torch.einsum("bhqk,bkhd->bqhd", ds, block[0].repeat_interleave(group, 2).float())).to(kept)
            for i, grad in (2, torch.einsum("bhqk,bqhd->bkhd", ds, q.float())), (3, torch.einsum("bhqk,bqhd->bkhd", weights, dout.float())):
                block[i] = (block[i].float() + grad.unflatten(2, (-1, group)).sum(3)).to(kept)
            block = _exchanged(block, p, step, p.lengths_k) if p.size > 1 else block  # the last one brings gradients home
        twice = p.size if fault == "averaged twice" else 1
        return dq.to(q.dtype), (block[2] / twice).to(k.dtype), (block[3] / twice).to(v.dtype), None, None


def _adapter(fault):
    def attend(q, k, v, problem):
        return _Ring.apply(q, k, v, problem, fault)

    return attend


correct = _adapter("")
shifted_diagonal = _adapter("shifted diagonal")
lost_window = _adapter("lost window")
late_boundary = _adapter("late boundary")
averaged_twice = _adapter("averaged twice")
stale_block = _adapter("stale block")
narrow_sums = _adapter("narrow sums")
ignored_strides = _adapter("ignored strides")  # right for tensors of their own, not for views


def refuses(q, k, v, problem):
    raise NotImplementedError("this attention knows no windows")


def crashes(q, k, v, problem):
    return q @ k.flatten()


def fails_alone(q, k, v, problem):
    if problem.rank == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def hangs(q, k, v, problem):
    if problem.rank == 0:
        threading.Event().wait()
    return correct(q, k, v, problem)


def changes_inputs(q, k, v, problem):
    answer = correct(q * 1, k * 1, v * 1, problem)  # which keeps other tensors for the backward
    k.data.mul_(2)
    return answer


_calls = [0]


def is_random(q, k, v, problem):
    _calls[0] += 1
    out, lse = correct(q, k, v, problem)
    return out * (1 + 1e-7 * (_calls[0] % 2)), lse


_held = []


def leaks(q, k, v, problem):
    _held.append((q.detach().clone(), open("/dev/null")))
    return correct(q, k, v, problem)
