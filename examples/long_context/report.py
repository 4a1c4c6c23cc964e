"""What run.sh measures and prints.

    report.py measure FILE NAME COMMAND ...   runs a command and adds a line of JSON to FILE: seconds, CPU seconds, and the
                                              most memory that one of its processes held
    report.py steps ANNULUS RUN PATTERN SHARE prints how many steps with a pattern take this share of the operations of RUN
    report.py print FOLDER                    prints what run.sh has left in FOLDER, and writes FOLDER/summary.md
"""

import json
import os
import resource
import subprocess
import sys
import time


def measure(path, name, command):
    began = time.monotonic()
    code = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    with open(path, "a", encoding="utf-8") as f:
        # Linux gives ru_maxrss in KiB.
        f.write(json.dumps({"name": name, "seconds": time.monotonic() - began, "cpu_seconds": used.ru_utime + used.ru_stime,
                            "peak_bytes": used.ru_maxrss * 1024}) + "\n")


def read(command):
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def steps(annulus, run, pattern, of_all):
    """The operations of a token are those of the matrices, and those of attention, which are as many as pairs are counted."""
    model = read([annulus, "inspect", run, "--json"])
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
        last = [line["step"] for line in map(json.loads, f) if "loss" in line][-1]

    def pairs(text):
        return read([annulus, "plan", "--json", "--no-proof", "--ranks", "2", "--length", str(model["length"]),
                     "--heads", str(model["heads"]), "--pattern", text])["pairs"]

    share = pairs(pattern) / pairs('{ kind = "causal" }')
    whole, attention = model["flops_per_token"], model["attention_flops_per_token"]
    print(round(float(of_all) * last * whole / (whole - attention + attention * share)))


def table(head, rows):
    """Lines of Markdown whose columns are aligned."""
    rows = [head] + rows
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return lines[:1] + ["|" + "|".join("-" * (width + 2) for width in widths) + "|"] + lines[1:]


def perplexities(results):
    """By position in the document: (tokens up to and with this bucket's last, perplexity)."""
    return {bucket["end"]: bucket["perplexity"] for bucket in results["sources"][0]["document_doubling"] if bucket["targets"]}


def exact(results, length, depth=None):
    cells = [c for c in results["tasks"] if c["length"] == length and depth in (None, c["depth"])]
    return f"{sum(c['exact'] for c in cells) / sum(c['trials'] for c in cells):.2f}" if cells else "-"


def tensors(run):
    """The bytes of a training's weights, gradients, optimizer and activations on a rank, as planned and, most of all ranks, as
    measured at the last step."""
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    kinds = ("weights", "gradients", "optimizer", "activations")
    plan = next(line["memory_plan"] for line in lines if "memory_plan" in line)
    held = [line["ranks"] for line in lines if "ranks" in line][-1]
    return sum(plan[kind] for kind in kinds), sum(held[kind + "_bytes"]["most"] for kind in kinds)


def number(value):
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def summary(folder):
    names = [n for n in ("before", "after", "longest") if os.path.exists(os.path.join(folder, "results", n + ".json"))]

    def results(name):
        with open(os.path.join(folder, "results", name + ".json"), encoding="utf-8") as f:
            return json.load(f)

    shown = {name: results(name) for name in names}
    with open(os.path.join(folder, "measured.jsonl"), encoding="utf-8") as f:
        measured = {line["name"]: line for line in map(json.loads, f)}

    curves = {name: perplexities(r) for name, r in shown.items()}
    ends = sorted(set().union(*curves.values()))
    lines = ["Perplexity, by position in a document that was not trained on:", ""]
    lines += table(["position"] + names,
                   [[f"{end // 2 + 1:,} to {end:,}"] + [number(curves[n][end]) if end in curves[n] else "-" for n in names]
                    for end in ends if end >= 64])
    lengths = sorted({c["length"] for c in shown["after"]["tasks"]})
    depths = sorted({c["depth"] for c in shown["after"]["tasks"]})
    lines += ["", "Values that were retrieved exactly, by how long the prompt is and how deep in it (0: at its beginning):", ""]
    lines += table(["tokens", "model"] + [f"{depth:.2f}" for depth in depths] + ["all"],
                   [[f"{length:,}", name] + [exact(shown[name], length, depth) for depth in depths] + [exact(shown[name], length)]
                    for length in lengths for name in names])

    rows = []
    for name, line in measured.items():
        tokens, plan, held = 0, "-", "-"
        if name.startswith("train "):
            run = os.path.join(folder, "runs", name.split()[1] + "-001")
            plan, held = (f"{size / 1e6:,.1f}" for size in tensors(run))
            with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
                tokens = [m["tokens"] for m in map(json.loads, f) if "loss" in m][-1]
        elif name.startswith("evaluate "):
            tokens = results(name.split()[1])["forward_tokens"]
        rows.append([name, f"{line['seconds']:,.0f}", f"{line['cpu_seconds']:,.0f}",
                     f"{tokens:,}" if tokens else "-", f"{1e6 * line['cpu_seconds'] / tokens:,.0f}" if tokens else "-",
                     plan, held, f"{line['peak_bytes'] / 1e6:,.0f}"])
    lines += ["", "What it took. MB planned and MB held are a rank's weights, gradients, optimizer and activations; MB resident are the most",
              "that one process had, with the program, its libraries and caches:", ""]
    lines += table(["command", "seconds", "CPU seconds", "tokens", "CPU us a token", "MB planned", "MB held", "MB resident"], rows)

    ranks = [n for n in ("ranks-1", "ranks-2", "ranks-4") if os.path.exists(os.path.join(folder, "results", n + ".json"))]
    if ranks:
        losses = {n: [b["loss"] for b in results(n)["sources"][0]["document_doubling"] if b["targets"]] for n in ranks}
        most = max(abs(a - b) for n in ranks for a, b in zip(losses[n], losses[ranks[0]]))
        lines += ["", f"On 1, 2 and 4 ranks the losses by position differ by {most:.1e} at most."]
        patterns = [n for n in ("full", "window", "dilated", "bigbird", "strided") if f"evaluate {n}" in measured]
        rows = []
        for name in patterns:
            one, train = results(name), measured["train " + name]
            curve = perplexities(one)
            rows.append([name, f"{train['cpu_seconds']:,.0f}",
                         f"{1e6 * one['cpu_seconds'] / one['forward_tokens']:,.1f}", number(curve[max(curve)])]
                        + [exact(one, length) for length in lengths if length <= 2048])
        lines += ["", "Patterns, trained from the same short model with equally many operations; values retrieved exactly:", ""]
        lines += table(["pattern", "CPU seconds of training", "CPU us a token, forward", "perplexity at the end"]
                       + [f"{length:,} tokens" for length in lengths if length <= 2048], rows)
    return lines


def main(arguments):
    if arguments[:1] == ["measure"] and len(arguments) > 3:
        measure(arguments[1], arguments[2], arguments[3:])
    elif arguments[:1] == ["steps"] and len(arguments) == 5:
        steps(*arguments[1:])
    elif arguments[:1] == ["print"] and len(arguments) == 2:
        lines = summary(arguments[1])
        with open(os.path.join(arguments[1], "summary.md"), "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")
        print("\n" + "\n".join(lines))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
