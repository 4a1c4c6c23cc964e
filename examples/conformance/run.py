#!/usr/bin/env python3
"""Runs the conformance suite on every adapter here whose package is installed, and writes the table of docs/conformance.md.

    pip install -r examples/conformance/requirements.txt      once, beside torch and annulus
    examples/conformance/run.py --ranks 2,3,4 --out conformance

A package that is not installed, or cannot be imported, is skipped with its reason. Each failure is repeated by its reproducer, a program
without annulus, and the table says if that does not fail. Results of a call stay in the folder, so that --only NAME renews some of them.
Without a GPU, stand_ins/ takes the place of flash-attn's kernels.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if importlib.util.find_spec("annulus") is None:
    sys.path.insert(0, os.path.join(HERE, "..", "..", "python"))
if importlib.util.find_spec("flash_attn") is None:
    sys.path.insert(0, os.path.join(HERE, "stand_ins"))

from annulus.testing import conformance  # noqa: E402
from annulus.testing.conformance._reproducer import write  # noqa: E402

# Adapter: the package that it needs, and what the table says beside its version.
ADAPTERS = {
    "annulus_package.py:contiguous": ("", "annulus, contiguous"),
    "annulus_package.py:zigzag": ("", "annulus, zigzag"),
    "annulus_package.py:striped": ("", "annulus, striped"),
    "gathered.py:sdpa": ("torch", "SDPA over gathered keys"),
    "gathered.py:transformers_sdpa": ("transformers", "sdpa over gathered keys"),
    "torch_package.py:ring": ("torch", "context_parallel"),
    "ring_attention_pytorch_package.py:ring": ("ring-attention-pytorch", "ring"),
    "ring_attention_pytorch_package.py:striped": ("ring-attention-pytorch", "striped"),
    "ring_flash_attn_package.py:ring": ("ring-flash-attn", "ring"),
    "ring_flash_attn_package.py:zigzag": ("ring-flash-attn", "zigzag"),
    "ring_flash_attn_package.py:stripe": ("ring-flash-attn", "stripe"),
    "ring_flash_attn_package.py:llama3": ("ring-flash-attn", "llama3, packed"),
    "yunchang_package.py:ring": ("yunchang", "ring"),
    "yunchang_package.py:zigzag": ("yunchang", "zigzag"),
    "yunchang_package.py:striped": ("yunchang", "strip"),
    "yunchang_package.py:ulysses": ("yunchang", "Ulysses"),
    "deepspeed_package.py:ulysses": ("deepspeed", "Ulysses"),
    "ringmaster_package.py:ulysses": ("axolotl-ringmaster", "Ulysses"),
    "ringmaster_package.py:allgather": ("axolotl-ringmaster", "ring, all-gather"),
    "ringmaster_package.py:p2p": ("axolotl-ringmaster", "ring, p2p"),
    "para_attn_package.py:ulysses": ("para-attn", "Ulysses, forward"),
}


def results_of(adapter, sizes, folder, ranks):
    """Runs an adapter; returns its report, with a reproducer for each case that failed, or the reason why it was skipped."""
    package, _ = ADAPTERS[adapter]
    try:
        version = importlib.metadata.version(package) if package else ""
        outcome = conformance.Suite(os.path.join(HERE, "adapters", adapter), ranks, deadline=60.0).run(sizes)
    except importlib.metadata.PackageNotFoundError:
        return {"adapter": adapter, "skipped": f"{package} is not installed"}
    except RuntimeError as error:  # it cannot be imported
        return {"adapter": adapter, "skipped": str(error).strip().splitlines()[-1]}
    repeated = {}
    for cell in outcome.failed:
        cell.reproducer = os.path.relpath(write(outcome, cell, os.path.join(folder, "reproducers")))
        if cell.case not in {case for case, _, _ in repeated.values()}:  # the smallest of its case
            repeated[cell.reproducer] = (cell.case, cell.verdict, None)
    report = conformance.as_json(outcome) | {"adapter": adapter, "package": package, "version": version}
    print(conformance.text(outcome), flush=True)
    return report | {"repeated": repeated}


def fails(program, verdict):
    """Whether a reproducer fails too, in a process that has no annulus; a wrong result must be wrong there as well."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p.endswith("stand_ins")))
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=300)
    return done.returncode != 0 and (verdict != "wrong" or "WRONG" in done.stdout or "has the shape" in done.stdout)


def verdict_of(cells):
    """The entry of the table for one case of an adapter, over all numbers of ranks and dtypes."""
    cells = [c for c in cells if c["verdict"] != "not claimed"]
    if not cells:
        return "–"
    for verdict in (*conformance.FAILURES, "refused"):
        bad = [c for c in cells if c["verdict"] == verdict]
        if not bad:
            continue
        names = list(dict.fromkeys(f["tensor"] for c in bad for f in c["results"] if f["error"] is None or not f["error"] <= f["allowed"]))
        names = [n for n in names if not n.startswith("weight")] or names
        words = verdict + (" " + " ".join(names) if verdict == "wrong" else "")
        if len({c["ranks"] for c in bad}) < len({c["ranks"] for c in cells}):
            words += " (" + ", ".join(sorted({str(c["ranks"]) for c in bad})) + " ranks)"
        elif {c["dtype"] for c in bad} != {c["dtype"] for c in cells}:
            words += " (" + ", ".join(sorted({c["dtype"] for c in bad})) + ")"
        return words if verdict == "refused" else f"**{words}**"
    return "ok"


def kept(folder, adapter, report=None):
    """Keeps the report of an adapter in the folder, or returns the one that is there."""
    path = os.path.join(folder, adapter.replace(":", "-") + ".json")
    if report is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    elif os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    return report


def table(folder):
    """The table in markdown of all results in the folder."""
    reports = [r for r in (kept(folder, adapter) for adapter in ADAPTERS) if r is not None]
    ran = [r for r in reports if "skipped" not in r]
    cases = list(dict.fromkeys(c["case"] for r in ran for c in r["cells"]))
    lines = ["|implementation|" + "|".join(cases) + "|", "|" + "---|" * (1 + len(cases))]
    for r in ran:
        name = f"{r['package']} {r['version']}, ".replace("+cu130", "") if r["package"] else ""
        entries = [verdict_of([c for c in r["cells"] if c["case"] == case]) for case in cases]
        lines.append(f"|{name}{ADAPTERS[r['adapter']][1]}|" + "|".join(entries) + "|")
    lines += [""] + [f"{', '.join(filter(None, ADAPTERS[r['adapter']]))}: skipped: {r['skipped']}" for r in reports if "skipped" in r]
    for r in ran:
        for path, (*_, again) in r["repeated"].items():
            words = {True: "fails as well", False: "**does not fail**", None: "was not run"}[again]
            lines.append(f"- `python {path}` {words}")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks (default: 2,3,4)")
    parser.add_argument("--out", default="conformance", help="the folder of results (default: conformance)")
    parser.add_argument("--only", action="append", help=f"an adapter, several times for several: {', '.join(ADAPTERS)}")
    given = parser.parse_args()
    if unknown := [a for a in given.only or () if a not in ADAPTERS]:
        parser.error(f"--only: there is no adapter {unknown[0]}")
    os.makedirs(given.out, exist_ok=True)
    for adapter in given.only or ADAPTERS:
        with conformance.Ranks() as ranks:
            report = results_of(adapter, [int(n) for n in given.ranks.split(",")], given.out, ranks)
        if "skipped" in report:
            print(f"{adapter}: skipped: {report['skipped']}", flush=True)
        kept(given.out, adapter, report)
    for adapter in given.only or ADAPTERS:
        report = kept(given.out, adapter)
        for path, (case, verdict, again) in report.get("repeated", {}).items():
            if again is None:
                report["repeated"][path] = (case, verdict, fails(path, verdict))
                kept(given.out, adapter, report)
    with open(os.path.join(given.out, "table.md"), "w", encoding="utf-8") as file:
        file.write(table(given.out))
    print(f"the table: {os.path.join(given.out, 'table.md')}")


if __name__ == "__main__":
    main()
