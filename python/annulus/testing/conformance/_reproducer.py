"""Writes a program that repeats one failure by itself: the adapter's source, the case, and the definition once more, written apart from
the suite's. It needs torch and the package under test, and nothing of annulus. Used by __main__.py and examples/conformance.
"""

import os
import re

from ._cases import HEAD_SIZE, Case, cases
from ._definition import WIDTH
from ._suite import REPEATED, Cell, Outcome, repeated_case

_HEAD = '''"""{what}

{reason}

Run it by `python {file}`. It needs torch{package}. It exits with 1 if a result is off by more than its
bound, relative to the largest element; errors of one process in the same dtype are printed beside.{layer}
"""

import sys
import types

import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS, DTYPE, CALLS = {size}, torch.{dtype}, {calls}
BOUNDS = {bounds}
BATCH, HEADS, KV_HEADS, HEAD_SIZE, WIDTH = {batch}, {heads}, {kv_heads}, {head_size}, {width}
QUERIES, KEYS, LAYOUT, LENGTHS = {length_q}, {length_k}, "{layout}", {lengths}
CAUSAL, WINDOW, DOCUMENTS, FIRST_KEY, GAIN = {causal}, {window}, {documents}, {first_key}, {gain}

# ---- the adapter

{source}

# ---- the definition
'''

_LAYER = '''
weight_in and weight_out are those of a layer around attention, with the loss averaged over ranks.'''

_BODY = '''

def counted(query, key):
    """Whether a query sees a key, by their positions in the whole sequence."""
    seen = key >= FIRST_KEY
    if CAUSAL:
        seen = seen and key <= query
    if WINDOW is not None:
        seen = seen and query - WINDOW[0] <= key <= query + WINDOW[1]
    if DOCUMENTS is not None:
        seen = seen and all((query < end) == (key < end) for end in DOCUMENTS[1:])
    return seen


def dense(q, k, v, dtype):
    """Attention of whole sequences, row by row, and its log-sum-exp."""
    out, lse = [], []
    for query in range(QUERIES):
        keys = [key for key in range(KEYS) if counted(query, key)]
        for head in range(HEADS):
            if not keys:
                out.append(torch.zeros(BATCH, HEAD_SIZE, dtype=dtype) + 0 * q[:, query, head].to(dtype))
                lse.append(torch.full((BATCH,), -torch.inf, dtype=dtype))
                continue
            of = head // (HEADS // KV_HEADS)
            scores = (q[:, query, head, None].to(dtype) * k[:, keys, of].to(dtype)).sum(-1) * HEAD_SIZE**-0.5
            lse.append(scores.logsumexp(-1))
            out.append(((scores - lse[-1][:, None]).exp()[..., None] * v[:, keys, of].to(dtype)).sum(1))
    out = torch.stack(out, 1).view(BATCH, QUERIES, HEADS, HEAD_SIZE)
    return out.to(q.dtype), torch.stack(lse, 1).view(BATCH, QUERIES, HEADS).transpose(1, 2)


def parts(length):
    """The positions of each rank."""
    def chunk(i, n):
        return list(range(i * length // n, (i + 1) * length // n))

    if LENGTHS is not None:
        return [p.tolist() for p in torch.arange(length).split(LENGTHS)]
    if LAYOUT == "zigzag":
        return [chunk(r, 2 * RANKS) + chunk(2 * RANKS - 1 - r, 2 * RANKS) for r in range(RANKS)]
    return [list(range(r, length, RANKS)) if LAYOUT == "striped" else chunk(r, RANKS) for r in range(RANKS)]


def drawn():
    torch.manual_seed(1)
    shapes = [(QUERIES, HEADS, GAIN), (KEYS, KV_HEADS, 1.0), (KEYS, KV_HEADS, 1.0), (QUERIES, HEADS, 1.0)]
    return [(torch.randn(BATCH, n, h, HEAD_SIZE, dtype=torch.float64) * gain).to(DTYPE) for n, h, gain in shapes]


def drawn_layer():
    """What the layer around attention takes: its inputs of queries and of keys (None: the same), its weights, and dy."""
    torch.manual_seed(2)
    inside, outside = HEADS * HEAD_SIZE, (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    shapes = [(BATCH, QUERIES, WIDTH), (BATCH, KEYS, WIDTH), (WIDTH, outside), (inside, WIDTH), (BATCH, QUERIES, WIDTH)]
    x, x_k, weight_in, weight_out, dy = (torch.randn(s, dtype=torch.float64) for s in shapes)
    tensors = x, x_k, weight_in * WIDTH**-0.5, weight_out * inside**-0.5, dy
    x, x_k, weight_in, weight_out, dy = (t.to(DTYPE) for t in tensors)
    return x, None if KEYS == QUERIES else x_k, weight_in, weight_out, dy


def project(x, x_k, weight):
    """q, k and v: views of one projection where queries and keys are of the same rows."""
    widths = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
    if x_k is None:
        parts = (x @ weight).split(widths, -1)
    else:
        parts = [t @ w for t, w in zip((x, x_k, x_k), weight.split(widths, -1))]
    return [t.unflatten(-1, (-1, HEAD_SIZE)) for t in parts]


def wanted(dtype, computed):
    q, k, v, dout = (t.to(dtype) for t in drawn())
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = dense(q, k, v, computed)
    out.backward(dout)
    found = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if GRADIENTS:
        x, x_k, weight_in, weight_out, dy = (t if t is None else t.to(dtype) for t in drawn_layer())
        weight_in.requires_grad_(), weight_out.requires_grad_()
        (dense(*project(x, x_k, weight_in), computed)[0].flatten(-2) @ weight_out).backward(dy / RANKS)
        found |= {"weight_in": weight_in.grad, "weight_out": weight_out.grad}
    return found


def rank(mine, address):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=mine, world_size=RANKS)
    at_q, at_k = parts(QUERIES)[mine], (parts(QUERIES) if KEYS == QUERIES else parts(KEYS))[mine]
    q, k, v, dout = drawn()
    problem = types.SimpleNamespace(
        rank=mine, size=RANKS, group=None, layout=LAYOUT, positions_q=torch.tensor(at_q, dtype=torch.int64),
        positions_k=torch.tensor(at_k, dtype=torch.int64), length_q=QUERIES, length_k=KEYS,
        lengths_q=[len(p) for p in parts(QUERIES)], lengths_k=[len(p) for p in (parts(QUERIES) if KEYS == QUERIES else parts(KEYS))],
        scale=HEAD_SIZE**-0.5, causal=CAUSAL, window=WINDOW, dtype=DTYPE,
        documents=None if DOCUMENTS is None else torch.tensor(DOCUMENTS, dtype=torch.int32),
        kept_keys=None if FIRST_KEY == 0 else torch.arange(KEYS) >= FIRST_KEY,
    )
    given = [t.requires_grad_() for t in (q[:, at_q].clone(), k[:, at_k].clone(), v[:, at_k].clone())]
    before, first, bad = [t.detach().clone() for t in given], None, False
    for call in range(CALLS):
        for t in given:
            t.grad = None
        answer = {function}(*given, problem)
        out, lse = answer if isinstance(answer, (tuple, list)) else (answer, None)
        got = {"out": out.detach(), "lse": lse if lse is None else lse.detach()}
        if GRADIENTS:
            out.backward(dout[:, at_q])
            got |= {"d" + n: torch.zeros_like(t) if t.grad is None else t.grad.clone() for n, t in zip("qkv", given)}
        got = {n: t for n, t in got.items() if t is not None}
        first = first or got
        if CALLS > 2 and call % 8 == 0:
            import os

            pages = int(open("/proc/self/statm").read().split()[1])
            print(f"rank {mine}, call {call}: {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB resident, "
                  f"{len(os.listdir('/proc/self/fd'))} files, {len(os.listdir('/proc/self/task'))} threads", flush=True)
    if any(not torch.equal(t.detach(), b) for t, b in zip(given, before)):
        print(f"rank {mine}: q, k or v were changed", flush=True)
        bad = True
    if any(not torch.equal(t, first[n]) for n, t in got.items() if not t.isnan().any()):
        print(f"rank {mine}: two calls differ", flush=True)
        bad = True
    if GRADIENTS:
        x, x_k, weight_in, weight_out, dy = drawn_layer()
        weight_in.requires_grad_(), weight_out.requires_grad_()
        answer = {function}(*project(x[:, at_q], x_k if x_k is None else x_k[:, at_k], weight_in), problem)
        out = answer[0] if isinstance(answer, (tuple, list)) else answer
        (out.flatten(-2) @ weight_out).backward(dy[:, at_q])
        grads, of_ranks = [torch.zeros_like(w) if w.grad is None else w.grad for w in (weight_in, weight_out)], [None] * RANKS
        dist.all_gather_object(of_ranks, grads)
        got |= {n: torch.stack([g.double() for g in all_]).mean(0) for n, all_ in zip(("weight_in", "weight_out"), zip(*of_ranks))}
    exact, usual = wanted(torch.float64, torch.float64), wanted(DTYPE, torch.float32)
    for name, t in got.items():
        at = slice(None) if name.startswith("weight") else at_k if name in ("dk", "dv") else at_q
        want, plain = (w[name][:, :, at] if name == "lse" else w[name][:, at] for w in (exact, usual))
        if t.shape != want.shape:
            print(f"rank {mine}: {name} has the shape {list(t.shape)}, expected was {list(want.shape)}", flush=True)
            bad = True
        elif t.numel():
            size = exact[name][exact[name].isfinite()].abs().max()
            off, one = (torch.where(x.double() == want, 0.0, (x.double() - want).abs().nan_to_num(torch.inf)).max() / size for x in (t, plain))
            wrong = not off <= BOUNDS.get(name, 0.1)
            bad = bad or wrong
            print(f"rank {mine}: {name} is off by {off:.2g}; one process by {one:.2g}{' <- WRONG' if wrong else ''}", flush=True)
    answers = [None] * RANKS
    dist.all_gather_object(answers, bad)
    dist.destroy_process_group()  # its threads would abort the process as it exits
    if any(answers):
        sys.exit(1)


if __name__ == "__main__":
    import faulthandler
    import tempfile

    faulthandler.dump_traceback_later(180, exit=True)  # a hang
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(rank, (f"file://{folder}/store",), RANKS)
        except torch.multiprocessing.ProcessRaisedException as error:
            print(error)
            sys.exit(1)
        except torch.multiprocessing.ProcessExitedException as error:
            sys.exit(error.exit_code)
'''


def write(outcome: Outcome, cell: Cell, folder: str) -> str:
    """Writes the program for a failed cell into a folder and returns its path."""
    claims = outcome.claims
    if cell.case == REPEATED:
        case = repeated_case(cell.size, claims)
        assert case is not None  # else nothing was repeated
    else:
        (case,) = [c for c in cases(cell.size, claims.layout) if c.name == cell.case]
    os.makedirs(folder, exist_ok=True)
    what = claims.package or os.path.basename(outcome.adapter.rpartition(":")[0]).removesuffix(".py")
    path = os.path.join(folder, f"{what}-{claims.name}-{cell.case.replace(' ', '-')}-{cell.size}-{cell.dtype}.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(program(outcome, cell, case, path))
    return path


def program(outcome: Outcome, cell: Cell, case: Case, path: str) -> str:
    """Returns the program."""
    claims = outcome.claims
    package = f" and {claims.package}=={claims.version}" if claims.package else ""
    gradients = "gradients" not in claims.unclaimed
    # Other inputs are drawn here than in the suite: what is wrong must exceed the geometric mean of its error and what is allowed.
    bounds = {f.tensor: (f.allowed * min(f.error, 1.0)) ** 0.5 if f.wrong else 3 * f.allowed for f in cell.findings}
    source = claims.source.strip()
    future = re.findall(r"(?m)^from __future__ import .*\n", source)
    for line in future:
        source = source.replace(line, "")
    values = {name: getattr(case, name) for name in ("size", "batch", "heads", "kv_heads", "length_q", "length_k", "layout", "causal",
                                                     "window", "first_key", "gain")}
    head = _HEAD.format(
        what=f"{claims.name}: {cell.case} over {cell.size} rank{'s' * (cell.size > 1)} in {cell.dtype}: {cell.verdict}.",
        reason=cell.reason.replace("\\", "/").replace('"""', "'''"), file=os.path.basename(path), package=package,
        bounds="{" + ", ".join(f'"{name}": {bound:.1e}' for name, bound in bounds.items()) + "}", layer=_LAYER if gradients else "",
        dtype={"fp32": "float32", "bf16": "bfloat16"}[cell.dtype], calls=25 if cell.verdict == "leaks" else 2,
        head_size=HEAD_SIZE, width=WIDTH, lengths=None if case.lengths is None else list(case.lengths),
        documents=None if case.documents is None else list(case.documents), source=source, **values,
    )
    body = _BODY.replace("{function}", outcome.adapter.rpartition(":")[2]).replace("GRADIENTS", str(gradients))
    return head + body
