"""Makes prefix trees of groups of rollouts, for `annulus tokenize` with --trees or --group. Used by the workers of pool.py.

  --trees         a line of JSON is a group: where the field holds one completion, text or conversation otherwise, it has a list
  --group FIELD   the lines of a file with the same FIELD are a group, each a rollout

A rollout with n tokens has n - 1 inputs, each with a target, the token that follows. Rollouts share an input if they agree up to
and with its target, so each input of a tree has one target, whose weight is the sum of those of its rollouts. A *branch* is a
stretch of tokens of which each predicts the next; those behind the first of a tree begin with the token that all rollouts there
have in common last, and go on behind the input before it (docs/reference/formats.md).
"""

import json
import math
from collections import Counter
from dataclasses import dataclass

from errors import INPUT, Refused
from targets import Document


@dataclass(frozen=True)
class Tree:
    """The branches of a document and what merging has saved. A position is an input with its target; with a key that it sees it is
    a pair."""

    branches: list  # (first token, the input behind which it goes on or -1), both counted from the document's beginning
    rollouts: int
    positions: int
    positions_apart: int  # of the rollouts one by one
    pairs: int
    pairs_apart: int


def groups(records, targets):
    """Yields the groups of (record, where) pairs, each as its rollouts' pairs and the place of its first. Raises Refused."""
    if targets.group is None:
        for record, where in records:
            yield rollouts_of(record, where, targets), where
        return
    found = {}
    for record, where in records:
        key = record.get(targets.group)
        if key is None:
            raise Refused(INPUT, f"{where()} has no field \"{targets.group}\", by which lines are grouped: --group takes one of "
                                 f"{', '.join(record)}")
        found.setdefault(json.dumps(key, sort_keys=True), []).append((record, where))
    for group in found.values():
        yield group, group[0][1]


def rollouts_of(record, where, targets):
    """Returns the rollouts of a line that is a group, each as a line of its own."""
    values = targets.value(record, targets.field, "--field", where)
    if not isinstance(values, list) or not values:
        raise Refused(INPUT, f"{where()}: the field \"{targets.field}\" is {json.dumps(values)[:40]}, but with --trees a list of at "
                             f"least one {targets.one} is expected")
    weights = record.get(targets.weight) if targets.weight else None
    if isinstance(weights, list) and len(weights) != len(values):
        raise Refused(INPUT, f"{where()} has {len(weights)} weights in \"{targets.weight}\" for {len(values)} rollouts in "
                             f"\"{targets.field}\": one for each is expected, or a number for all")
    rollouts = []
    for i, value in enumerate(values):
        rollout = {**record, targets.field: value}
        if isinstance(weights, list):
            rollout[targets.weight] = weights[i]
        rollouts.append((rollout, lambda i=i: f"{where()}, rollout {i + 1}"))
    return rollouts


def merge(rollouts, narrow):
    """Returns the Document of the tree of some rollouts, Documents. `narrow` rounds a weight to fp32."""
    with_inputs = [r for r in rollouts if len(r.ids) > 1] or [r for r in rollouts if r.ids][:1]
    ids, branches, depths, counted = [], [], [], []  # depths: where the inputs of each branch begin on their path
    path, before = [], []  # of the rollout before: (depth, token) where its path enters branches; its ids
    for rollout in sorted(with_inputs, key=lambda r: r.ids):  # then what is shared stands next to each other
        shared = common(before, rollout.ids)
        if shared < 2:
            path = [(0, len(ids))]
            branches.append((len(ids), -1))
            depths.append(0)
            ids += rollout.ids
        elif shared == len(before):  # it goes on where that one ends, at the end of `ids`
            ids += rollout.ids[shared:]
        else:
            path = [entry for entry in path if entry[0] < shared - 1]
            depth, token = path[-1]
            branches.append((len(ids), token + shared - 2 - depth))
            depths.append(shared - 1)
            path.append((shared - 1, len(ids)))
            ids += rollout.ids[shared - 1:]
        counted += weighed(rollout, path)
        before = rollout.ids
    ends = [begin for begin, _ in branches[1:]] + [len(ids)]
    positions = [end - begin - 1 for (begin, _), end in zip(branches, ends)]
    apart = [len(r.ids) - 1 for r in rollouts]
    tree = Tree(branches, len(rollouts), sum(positions), sum(apart),
                sum(n * depth + n * (n + 1) // 2 for n, depth in zip(positions, depths)), sum(n * (n + 1) // 2 for n in apart))
    return Document(ids, added(counted, len(ids), narrow), sum(r.text_bytes for r in rollouts), tree)


def common(a, b):
    """Returns how many tokens two lists begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def weighed(rollout, path):
    """Returns (begin, end, weight) of the targets that count in a rollout, which lies on this path, as places in the tree. The
    target of an input is the token behind it; nothing predicts the first token."""
    found, depth = [], 0
    ends = [entry[0] for entry in path[1:]] + [len(rollout.ids) - 1]
    for count, weight in rollout.runs:
        first, depth = depth, depth + count
        if not weight:
            continue
        for (entered, token), end in zip(path, ends):
            begin, stop = max(first, entered + 1), min(depth, end + 1)
            if begin < stop:
                found.append((token + begin - entered, token + stop - entered, weight))
    return found


def added(counted, size, narrow):
    """Returns the runs of weights of `size` tokens, each the sum of the weights of all stretches (begin, end, weight) over it."""
    changes = {0: [], size: []}
    for begin, end, weight in counted:
        changes.setdefault(begin, []).append((weight, 1))
        changes.setdefault(end, []).append((weight, -1))
    runs, active = [], Counter()
    places = sorted(changes)
    for place, until in zip(places, places[1:]):
        for weight, change in changes[place]:
            active[weight] += change
        weight = narrow(math.fsum(w * n for w, n in active.items()))
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + until - place, weight)
        else:
            runs.append((until - place, weight))
    return runs
