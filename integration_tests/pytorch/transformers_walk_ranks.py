#!/usr/bin/env python3
"""One rank of a walk over every causal decoder of transformers that a tiny configuration can make, with
attn_implementation="annulus" over several ranks: loss and gradients are those of one process, or the model is refused by
name on all ranks. A long sweep; the target transformers_walk_torchrun_test starts it."""

import collections
import os
import sys

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import annulus.transformers  # noqa: E402
import torch  # noqa: E402
import transformers_decoders as decoders  # noqa: E402
import transformers_models as models  # noqa: E402

torch.distributed.init_process_group("gloo")
group = torch.distributed.group.WORLD
size = annulus.size(group)
annulus.transformers.register(group, "zigzag")
outcomes = collections.defaultdict(list)


def walk(name, case, batch):
    """Compares one model, and notes the outcome."""
    tiny = decoders.config(name)
    whole = {k: v for k, v in batch.items() if k != "attention_mask" or not v.all()}
    given = dict(whole, shift_labels=annulus.shift_labels(batch["labels"], batch["position_ids"]), use_cache=False)
    wanted = []
    for dtype in (torch.float32, torch.float64):
        model = decoders.make(tiny, "own").to(dtype)
        try:
            loss = model.eval()(**given).loss
            loss.backward()
        except Exception as error:
            outcomes[f"transformers itself fails ({type(error).__name__})"].append(f"{name}: {case}")
            return
        if not loss.isfinite():
            outcomes["transformers itself gives NaN, where a row is hidden"].append(f"{name}: {case}")
            return
        wanted.append((loss.item(), models.gradients(model)))
    try:
        model = decoders.make(tiny, "annulus").eval()
    except KeyError as error:
        assert error.args == ("annulus",), error
        outcomes["cannot be made with another attention than those in its own table"].append(name)
        return
    try:
        loss = model(**annulus.transformers.shard_batch(batch)).loss
    except annulus.AnnulusError as error:
        outcomes[str(error).split(", which annulus")[0]].append(f"{name}: {case}")
        return
    loss.backward()
    got = annulus.all_reduce(loss.detach(), group=group).item()
    zero = torch.zeros(1)
    grads = {
        n: annulus.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group=group)
        for n, p in model.named_parameters()
    }
    exact = {n: g if g is not None else zero.expand_as(grads[n]) for n, g in wanted[1][1].items()}
    usual = {n: g if g is not None else zero.expand_as(grads[n]) for n, g in wanted[0][1].items()}
    models.assert_as_exact((got, grads), (wanted[0][0], usual), (wanted[1][0], exact), (name, case))
    outcomes["as one process"].append(f"{name}: {case}")


packed = models.batch(True)
plain = models.batch(False)
visible = torch.ones(2, models.LENGTH, dtype=torch.int64)
visible[0, :5] = visible[1, 9] = 0
# What a hidden position computes is not defined, nor what it predicts.
predicted = torch.cat([torch.ones(2, 1, dtype=torch.int64), visible[:, :-1]], 1) * visible
padded = plain | {"attention_mask": visible, "labels": torch.where(predicted > 0, plain["labels"], -100)}
for name in sys.argv[1:] or decoders.names():
    if not decoders.unmakable(name):
        for case, batch in ("plain", plain), ("packed", packed), ("padding", padded):
            try:
                walk(name, case, batch)
            except Exception as error:
                error.add_note(f"{name}: {case}")
                raise
if annulus.rank(group) == 0:
    for outcome, cases in sorted(outcomes.items()):
        print(f"{len(cases):4} {outcome}: {', '.join(cases)}")
    assert outcomes["as one process"], "every model was refused"
    print(f"{size} ranks: every decoder as one process, or refused", flush=True)
torch.distributed.destroy_process_group()
