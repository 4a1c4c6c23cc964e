"""Checks that a model of transformers can be sharded over ranks: that only attention mixes positions, and that positions
come from position ids, not from indices into a rank's part. Used by transformers.py, over several ranks only.

A rank has a part of each row, so every layer outside attention must be pointwise in positions. Instead of a list of models,
a model is run on eight random tokens (more if some dimension of it is eight) with a pointwise attention, and again with one
token changed. A module whose output changes at another position, although its inputs there did not, mixes positions: a
convolution, a recurrence, a custom attention. The token's embedding becomes NaN, which arithmetic propagates to everything
that depends on it, and rounding cannot produce. In a third run all tokens and position ids are equal; a module whose output
then differs between positions depends on indices, which differ in a part of a row.
"""

import contextlib
import contextvars
import copy
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from ._errors import AnnulusError

_local = threading.local()


def probing() -> bool:
    """Returns whether this thread is probing a model."""
    return getattr(_local, "probing", False)


@contextlib.contextmanager
def _probing() -> Iterator[None]:
    _local.probing = True
    try:
        yield
    finally:
        _local.probing = False


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Replaces attention while probing: each position depends only on its own query, key and value."""
    weight = torch.tanh(query.float().mean(-1, keepdim=True)).to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    own = value * torch.tanh(key.float().mean(-1, keepdim=True)).to(value.dtype)
    return (own.repeat_interleave(groups, dim=1) + weight).transpose(1, 2).contiguous()


class _Recorder:
    """Tracks positions through a model's modules. A tensor is tracked if exactly one dimension has the size `tokens`, which
    is chosen to differ from all dimensions of the model."""

    RUNS = ("plain", "poisoned", "alike")

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self.run = "plain"
        self.tokens = tokens
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(tokens).unsqueeze(0)
        alike = ids[:, :1].expand(1, tokens).contiguous(), torch.full_like(positions, tokens // 2)
        self.given = {"plain": (ids, positions), "poisoned": (ids, positions), "alike": alike}
        self.poisoned = tokens // 2 - 1
        self.others = torch.arange(tokens) != self.poisoned
        self.embedded = False
        self.calls: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}  # of the plain run: inputs, outputs
        self.counts: dict[nn.Module, int] = {}
        self.faults: list[tuple[nn.Module, str]] = []
        self.angles: list[tuple[nn.Module, tuple, dict[str, Any]]] = []

    def poison(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        dims = [d for d, n in enumerate(output.shape) if n == self.tokens]
        self.embedded |= len(dims) == 1
        if self.run != "poisoned" or len(dims) != 1:
            return None
        at = ~self.others.to(output.device).view([-1 if d == dims[0] else 1 for d in range(output.dim())])
        return output.masked_fill(at, float("nan"))

    def rows(self, values: Any) -> Tensor:
        """Returns a fingerprint of each position in the tensors: [tokens, tensors, 2], fp64 on the CPU: a weighted sum, and
        a bound of its rounding error."""
        found = [torch.empty(self.tokens, 0, 2, dtype=torch.float64)]
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            dims = [d for d, n in enumerate(tensor.shape) if n == self.tokens]
            if len(dims) == 1:
                flat = tensor.detach().movedim(dims[0], 0).reshape(self.tokens, -1).double().cpu()
                weights = torch.arange(flat.shape[1], dtype=torch.float64).mul_(2.4).cos_()
                # Experts with another set of tokens may round differently.
                rounding = 16 * torch.finfo(tensor.dtype).eps * flat.norm(dim=1)
                found.append(torch.stack([(flat * weights).sum(1), rounding], dim=1).unsqueeze(1))
        return torch.cat(found, dim=1)

    def look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = self.rows((args, kwargs)), self.rows(output)
        nth = self.counts[module] = self.counts.get(module, -1) + 1
        if self.run == "plain":
            self.calls[module, nth] = inputs, outputs
            leaf = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
            if leaf and any(self.is_positions(a) for a in [*args, *kwargs.values()]):
                self.angles.append((module, args, kwargs))
        elif self.run == "poisoned":
            usual = self.calls.get((module, nth), (inputs[:0], outputs[:0]))
            if usual[1].shape != outputs.shape or inputs[self.others].isnan().any():
                return
            changed = outputs[..., 0].isnan() & ~usual[1][..., 0].isnan()
            if usual[0].shape == inputs.shape and torch.equal(usual[0][self.others], inputs[self.others]):
                changed |= _differ(outputs, usual[1])
            if changed[self.others].any():
                what = f"when token {self.poisoned} of {self.tokens} was changed, its output changed at other positions"
                self.faults.append((module, f"mixes positions outside of transformers' attention interface: {what}"))
        elif torch.equal(inputs, inputs[:1].expand_as(inputs)) and _differ(outputs, outputs[:1]).any():
            what = f"of {self.tokens} equal tokens with equal position ids, some have another output"
            self.faults.append((module, f"takes positions from the index in a row instead of position_ids: {what}"))

    def is_positions(self, given: Any) -> bool:
        if not isinstance(given, Tensor) or given.shape != (1, self.tokens) or given.is_floating_point():
            return False
        return torch.equal(given.cpu(), torch.arange(self.tokens).unsqueeze(0))


def _differ(rows: Tensor, others: Tensor) -> Tensor:
    return (rows - others)[..., 0].abs() > others[..., 1]


def _numbers(value: Any) -> Iterator[tuple[str, int]]:
    """Yields the integers of a configuration with their keys."""
    for key, entry in value.items() if isinstance(value, dict) else ():
        if isinstance(entry, int):
            yield str(key), entry
        for inner in entry if isinstance(entry, (list, tuple)) else [entry]:
            yield from _numbers(inner)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation mode, and finally restores its modules, buffers and the random generators."""
    modules = list(model.modules())
    kept = [(m, dict(m.__dict__), [(n, b, b.clone()) for n, b in m._buffers.items() if b is not None]) for m in modules]
    devices = {p.device for p in itertools.chain(model.parameters(), model.buffers()) if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            with torch.no_grad():
                for module, attributes, buffers in kept:
                    module.__dict__.update(attributes)
                    for name, buffer, value in buffers:
                        module._buffers[name] = buffer
                        if not torch.equal(buffer, value):  # autograd may have kept it, which a copy would invalidate
                            buffer.copy_(value)


def check_loss(model: PreTrainedModel) -> None:
    """Checks, once for each model, that its loss is the sum over shift_labels divided by num_items_in_batch, as shard_batch
    requires. Not collective.

    Raises AnnulusError for another loss, and the model's own errors.
    """
    if model in _summing:
        return
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device).unsqueeze(0) % model.get_input_embeddings().weight.shape[0]
    labels = torch.where(ids % 2 == 0, ids, -100)
    given = dict(input_ids=ids, position_ids=torch.arange(8, device=device).unsqueeze(0), use_cache=False)
    with _probing(), _unchanged(model), torch.no_grad():
        out = model(**given, labels=labels, shift_labels=labels, num_items_in_batch=16)
    if getattr(out, "loss", None) is None:  # a model inside another one, which passes all its arguments on
        _summing.add(model)
        return
    wanted = nn.functional.cross_entropy(out.logits[0].float(), labels[0].to(out.logits.device), reduction="sum") / 16
    if abs(out.loss.item() - wanted.item()) > 0.05 * wanted.item():  # a mean would be four times as much
        raise AnnulusError(
            f"[transformers] the loss of {type(model).__name__} is not the sum over shift_labels divided by "
            f"num_items_in_batch: expected {wanted.item():.4g} for eight tokens, got {out.loss.item():.4g}. Over several ranks "
            "leave out the labels and compute the loss from the logits and shift_labels"
        )
    _summing.add(model)


def _run(model: PreTrainedModel, recorder: _Recorder) -> None:
    device = next(model.parameters()).device
    parameters = inspect.signature(model.forward).parameters
    hooks = [m.register_forward_hook(recorder.look, with_kwargs=True) for m in model.modules()]
    hooks.append(model.get_input_embeddings().register_forward_hook(recorder.poison, prepend=True))
    try:
        with _probing(), torch.no_grad():
            for recorder.run in recorder.RUNS:
                recorder.counts.clear()
                ids, positions = (t.to(device) for t in recorder.given[recorder.run])
                given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
                if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
                    given = {name: value for name, value in given.items() if name in parameters}
                model(**given)
                if recorder.faults:
                    return
    finally:
        for hook in hooks:
            hook.remove()


def _depends_on_length(module: nn.Module, args: Any, kwargs: Any, recorder: _Recorder, far: int) -> bool:
    """Returns whether the angles of other positions change if the last position id is `far`. Runs a copy on the CPU, where a
    position outside a table raises an error that can be caught."""
    copied: list[nn.Module] = []

    def ask(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        moved = tree_map_only(
            Tensor, lambda t: change(t.cpu()) if recorder.is_positions(t) else t.cpu().nan_to_num(), (args, kwargs)
        )
        if not copied:
            copied.append(copy.deepcopy(module).cpu())
        return [t for t in tree_leaves(copied[0](*moved[0], **moved[1])) if isinstance(t, Tensor)]

    def last_is_far(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids[:, -1] = far
        return ids

    def others(tensors: list[Tensor]) -> list[Tensor]:
        dims = [[d for d, n in enumerate(t.shape) if n == recorder.tokens] for t in tensors]
        return [t.narrow(d[0], 0, recorder.tokens - 1).clone() for t, d in zip(tensors, dims) if len(d) == 1]

    try:
        near = others(ask(lambda ids: ids))
    except Exception as error:
        raise AnnulusError(
            f"[transformers] {type(module).__name__} gets position ids, and annulus looks whether its results depend on the "
            f"row's length, but it cannot be run alone ({type(error).__name__}: {error}): use one rank"
        ) from error
    try:
        changed = others(ask(last_is_far))
    except (IndexError, RuntimeError):
        return False  # a table of fixed size
    return not all(map(torch.equal, near, changed))


class _WholeLength:
    """Hooks for a module that computes rotary angles: appends the largest position of the whole row to its input, and drops
    it from its results."""

    def __init__(self, longest: Callable[[Tensor], Tensor | None]) -> None:
        self.longest = longest
        self.extended = 0

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.extended = 0
        ids = next((a for a in [*args, *kwargs.values()] if _are_ids(a)), None)
        last = None if probing() or ids is None else self.longest(ids)
        if last is None:
            return None
        self.extended = ids.shape[1] + 1
        more = torch.cat([ids, last.to(ids).expand(ids.shape[0], 1)], dim=1)
        return tuple(more if a is ids else a for a in args), {k: more if a is ids else a for k, a in kwargs.items()}

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.extended == 0:
            return None

        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != self.extended:
                raise AnnulusError(
                    f"[transformers] {type(module).__name__} computes rotary angles that depend on the row's length, but "
                    f"returns {list(tensor.shape)} for {self.extended} positions, not [batch, positions, ...]: use one rank"
                )
            return tensor[:, :-1]

        return tree_map_only(Tensor, cut, output)


def _are_ids(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point()


_summing: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models that passed check_loss

# All modules of models that passed check.
_known: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def known(module: nn.Module) -> bool:
    return module in _known


def check(model: PreTrainedModel, longest: Callable[[Tensor], Tensor | None]) -> None:
    """Checks, once for each model, that its layers outside attention do not mix positions, and hooks modules whose rotary
    angles depend on the length of the row. Not collective, since all ranks get the same result.

    longest: returns the largest position over all ranks, or None for a call on one rank.

    Raises AnnulusError, which names the module, if it mixes positions, and for a model that cannot be run like this.
    """
    if model in _known:
        return
    numbers = list(_numbers(model.config.to_dict()))
    sizes = {n for _, n in numbers} | {n for p in model.parameters() for n in p.shape}
    tokens = next(n for n in itertools.count(8) if n not in sizes)
    name = type(model).__name__
    try:
        recorder = _Recorder(tokens, model.get_input_embeddings().weight.shape[0])
        with _unchanged(model):
            # In a fresh context, because an enclosing forward may collect the outputs of modules.
            contextvars.Context().run(_run, model, recorder)
    except AnnulusError:
        raise
    except Exception as error:
        raise AnnulusError(
            f"[transformers] over several ranks {name} must compute each position by itself outside attention, and annulus "
            f"looks whether it does by a forward of {tokens} tokens, but this raises {type(error).__name__}: {error}; use "
            "one rank"
        ) from error
    if not recorder.embedded:
        raise AnnulusError(
            f"[transformers] {name} does not call its input embedding with a row of tokens, so annulus cannot look at it: use "
            "one rank"
        )
    if recorder.faults:
        module, what = recorder.faults[0]
        path = next(n for n, m in model.named_modules() if m is module)
        raise AnnulusError(
            f"[transformers] in {name}, {path or 'its forward'} ({type(module).__name__}) {what}. Over several ranks each "
            "would begin anew with its own part of the row: use one rank"
        )
    far = 2 * max([n for key, n in numbers if "position" in key], default=2**17) + 1
    for module, args, kwargs in recorder.angles:
        if (copied := getattr(module, "_annulus_whole_length", None)) is not None and module not in _known:
            copied.longest = longest  # a copy.deepcopy of a checked model has its hooks
            _known.add(module)
        if module in _known or not _depends_on_length(module, args, kwargs, recorder, far):
            continue
        module._annulus_whole_length = whole = _WholeLength(longest)
        module.register_forward_pre_hook(whole.before, with_kwargs=True)
        module.register_forward_hook(whole.after)
        _known.add(module)  # a module that several layers share is hooked once
    _known.update(model.modules())
