#!/usr/bin/env python3
"""Walks over every causal decoder of transformers that a tiny configuration can make: with attn_implementation="annulus" in
one process it gives what transformers' own attention gives, or is refused by name. A long sweep."""

import collections
import os
import sys
import unittest

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import annulus.transformers  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import transformers_decoders as decoders  # noqa: E402

annulus.transformers.register()

LENGTH = 12
PARTS = 8


def batches():
    """Yields a name, the model's arguments, those of the reference where they differ, and which positions are compared."""
    torch.manual_seed(2)
    ids = torch.randint(4, decoders.VOCABULARY, (2, LENGTH))
    everything = torch.ones(2, LENGTH, dtype=torch.bool)
    yield "plain", {"input_ids": ids}, {}, everything
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([5, 4, 3], [2, 10])])
    packed = {"input_ids": ids, "position_ids": positions}
    # transformers distinguishes documents only without a cache and a mask; annulus always.
    yield "packed", packed, {"use_cache": False}, everything
    yield (
        "packed, a mask of ones",
        packed | {"attention_mask": everything.long()},
        {"attention_mask": None, "use_cache": False},
        everything,
    )
    for name, hidden in ("left", [(0, 0), (0, 1), (1, 0)]), ("right", [(0, 10), (0, 11)]), ("holes", [(0, 3), (1, 7), (1, 8)]):
        visible = everything.clone()
        for place in hidden:
            visible[place] = False
        yield f"padding, {name}", {"input_ids": ids, "attention_mask": visible.long()}, {}, visible


def generate(model, **how):
    torch.manual_seed(3)
    ids = torch.randint(4, decoders.VOCABULARY, (2, 6))
    visible = torch.ones_like(ids)
    visible[0, :2] = 0
    given = dict(attention_mask=visible, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, num_beams=1)
    return model.generate(ids, **given, return_dict_in_generate=True, output_logits=True, **how)


def named(error, model):
    """Returns whether an error names a class of the model's modules, or what was given."""
    names = {type(module).__name__ for module in model.modules()} | {"attention_mask is", "output_"}
    return any(name in str(error) for name in names)


class Walk(unittest.TestCase):
    def walk(self, name, outcomes):
        tiny = decoders.config(name)
        usual = decoders.make(tiny, "own").eval()
        exact = decoders.make(tiny, "own").double().eval()
        try:
            model = decoders.make(tiny, "annulus").eval()
        except KeyError as error:
            self.assertEqual(error.args, ("annulus",))
            outcomes["cannot be made with another attention than those in its own table"].append(name)
            return

        def compare(case, run, places):
            """run: makes logits of a model, given whether with the arguments for annulus."""
            try:
                reference, precise = run(usual, False), run(exact, False)
            except Exception as error:
                outcomes[f"transformers itself fails ({type(error).__name__})"].append(f"{name}: {case}")
                return
            try:
                got = run(model, True)
            except annulus.AnnulusError as error:
                self.assertTrue(named(error, model), f"{name}: {case}: {error}")
                outcomes[str(error).split(", which annulus")[0]].append(f"{name}: {case}")
                return
            except Exception as error:
                with self.assertRaises(type(error), msg=f"{name}: {case}: {error}"):  # transformers' own model fails like this
                    run(usual, True)
                outcomes[f"transformers itself fails ({type(error).__name__})"].append(f"{name}: {case}")
                return
            if not (reference[places].isfinite().all() and precise[places].isfinite().all()):
                outcomes["transformers itself gives NaN, where a row is hidden"].append(f"{name}: {case}")
                return
            exactness.as_exact(
                got[places], reference[places], precise[places], (name, case), terms=exactness.largest(precise[places])
            )
            outcomes["as transformers"].append(f"{name}: {case}")

        with torch.no_grad():
            for case, given, instead, places in batches():
                compare(case, lambda m, own: m(**(given if own else given | instead)).logits, places)  # noqa: B023
            for cache in ("dynamic", "static"):
                every = torch.ones(4, 2, dtype=torch.bool)
                how = {"cache_implementation": cache} if cache == "static" else {}
                compare(f"generation, {cache} cache", lambda m, own: torch.stack(generate(m, **how).logits), every)  # noqa: B023

    def part(self, index):
        outcomes = collections.defaultdict(list)
        for name in decoders.names()[index::PARTS]:
            reason = decoders.unmakable(name)
            if reason:
                outcomes[f"cannot be made: {reason}"].append(name)
                continue
            with self.subTest(name):
                self.walk(name, outcomes)
        for outcome, cases in sorted(outcomes.items()):
            print(f"{len(cases):4} {outcome}: {', '.join(cases)}")
        self.assertGreater(len(outcomes["as transformers"]), 0)


for _index in range(PARTS):
    setattr(Walk, f"test_part_{_index}", lambda self, index=_index: self.part(index))


if __name__ == "__main__":
    torch_python.main()
