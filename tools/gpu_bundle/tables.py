"""Writes what a bundle measured as the tables of docs/performance.md, "On a GPU". report.py uses it;
tests/tools/gpu_report_test.py compares the first three columns with the document's table."""

NOT_MEASURED = "not measured yet"
LENGTHS = (8192, 16384, 32768)
# What `annulus bench gpu` calls the kinds of memory, after the name of the step.
PLANNED = ("weights", "gradients", "optimizer", "activations", "working memory")
MEASURED = ("memory of the state", "memory of a step", "memory reserved but unused", "memory outside LibTorch")


def counted(n):
    return "{:,}".format(int(n))


class Measured:
    """The figures and ratios of one device."""

    def __init__(self, report, device):
        self.report = report
        self.figures = {f["name"]: f for f in report.figures if f["device"] == device}
        self.ratios = {r["name"]: r for r in report.ratios if r["device"] == device}

    def ratio(self, name):
        r = self.ratios.get(name)
        if r is None:
            return ""
        if r.get("invalid"):
            return "INVALID, %.3f: %s" % (r["ratio"], r["invalid"])
        return "%.3f (%.3f to %.3f)%s" % (r["ratio"], r["low"], r["high"], {True: ", met", False: ", missed", None: ""}[r["met"]])

    def value(self, name, form, scale=1):
        f = self.figures.get(name)
        return "" if f is None else form % (scale * f["value"])

    def operators(self, name):
        said = self.figures.get(name, {}).get("operators", "")
        return " by " + said if said else ""

    def dense(self, direction, length):
        name = "dense %s %d" % (direction, length)
        speed = self.value(name, "%.0f TFLOP/s")
        return "; ".join(filter(None, [self.ratio("gpu/" + name), speed and speed + self.operators(name)]))

    def ring(self):
        said = self.ratio("gpu/ring of 8")
        parts = [self.ratio("gpu/ring of 8 " + d) and "%s %.3f%s" % (d, self.ratios["gpu/ring of 8 " + d]["ratio"], self.operators("ring " + d))
                 for d in ("forward", "backward")]
        return "; ".join(filter(None, [said, ", ".join(filter(None, parts))]))

    def pattern(self, name):
        said = [self.value(name + ", off the oracle", "correct (%.1e)")]
        for direction in ("forward", "backward"):
            of = "%s %s" % (name, direction)
            time = self.value(of, "%.2f ms", 1e3)
            flex = self.value("FlexAttention, " + of, "%.2f ms", 1e3)
            if time:
                said.append("%s %s%s, %s of its share%s" % (
                    direction, time, self.operators(of), self.value(of + ", over share", "%.2f"),
                    flex and ", FlexAttention " + flex))
            elif flex:
                said.append("%s: FlexAttention %s" % (direction, flex))
            invalid = self.figures.get(of, {}).get("invalid")
            said.append(invalid and "INVALID: " + invalid)
        return "; ".join(filter(None, said))

    def training(self):
        f = self.figures.get("training, MFU")
        met = "" if f is None else ", met" if f["value"] >= 0.5 else ", missed"
        return "; ".join(filter(None, [
            self.value("training, MFU", "%.3f") + met, self.value("training step", "%.3f s a step"),
            self.value("training, tokens per second", "%.0f tokens/s"), self.operators("training step")[1:]]))

    def longest_row(self):
        f = self.figures.get("longest row trained")
        rows = [int(n.split()[1]) for n in self.figures if n.startswith("longest ") and n.split()[1].isdigit()]
        return int(f["value"]) if f else max(rows, default=0)

    def longest(self):
        length = self.longest_row()
        if not length:
            return ""
        return "; ".join(filter(None, [
            counted(length) + " tokens", self.value("longest %d" % length, "%.1f s a step"),
            self.value("longest %d, peak memory of tensors" % length, "%.1f GiB of tensors")]))

    def scaling(self):
        return ", ".join("%d GPUs %.2f" % (s["gpus"], s["over_one"]) for s in self.report.scaling if s["gpus"] > 1)

    def tests(self):
        of = [r for r in self.report.results if r["part"] in ("operators", "merges", "others")]
        if not any(r["result"] in ("passed", "failed") for r in of):
            return ""
        number = lambda result: sum(r["result"] == result for r in of)
        said = "%d passed, %d failed" % (number("passed"), number("failed"))
        said += "".join(", %d %s" % (number(r), r) for r in ("skipped", "left out") if number(r))
        ran = ", ".join("%s %s" % (name, counted(n)) for name, n in sorted(self.report.operators.items()))
        return said + ("; calls of operators: " + ran if ran else "")

    def rows(self):
        yield ("causal, 8,192 tokens, forward: the executor on one rank over calling cuDNN", "`bench gpu --part dense`",
               "at most 1.031 (1 / 0.97)", self.dense("forward", LENGTHS[0]))
        yield "the same, backward", "", "at most 1.031", self.dense("backward", LENGTHS[0])
        for length in LENGTHS[1:]:
            for direction in ("forward", "backward"):
                yield "%s tokens, %s" % (counted(length), direction), "", "at most 1.031", self.dense(direction, length)
        yield ("a zigzag ring of 8 ranks, all run in turn on one device, over one call, forward and backward, 32,768 tokens",
               "`bench gpu --part ring`", "at most 1.06", self.ring())
        yield ("training step of a 1B-class Llama, 32,768 tokens, bf16: MFU on pairs that count",
               "`bench gpu --part train --config configs/llama-1b.toml`", "at least 0.50", self.training())
        yield ("window of 4,096, 32,768 tokens: over its share of the call without a mask; beside FlexAttention's",
               "`bench gpu --part patterns`; `flex_attention.py`", "correct, and measured", self.pattern("window 4096"))
        yield "dilated (2,048 to 32,768, rates 1, 2, 4, 8, 16)", "", "correct, and measured", self.pattern("dilated")
        yield "block-sparse, density 0.1", "", "correct, and measured", self.pattern("blocks, density 0.1")
        yield ("longest row trained on one device with `model.recompute`, and where the memory goes",
               "`bench gpu --part longest --config configs/llama-1b.toml`", "measured", self.longest())
        yield ("a Llama of 4 layers, width 1,024, bf16, rows of 65,536 tokens: tokens a second on 2, 4, 8 GPUs over one",
               "`run.sh --only scaling`", "measured", self.scaling())
        yield "the tests for GPUs", "`run.sh --only tests`", "all pass", self.tests()

    def memory(self):
        """A line for each step whose memory was measured: planned by purpose, and what LibTorch's allocator counted."""
        steps = [("training step", "training")]
        if self.longest_row():
            steps.append(("row of %s tokens" % counted(self.longest_row()), "longest %d" % self.longest_row()))
        for shown, name in steps:
            planned = [self.value("%s, planned %s" % (name, kind), "%.2f") for kind in PLANNED]
            measured = [self.value("%s, %s" % (name, kind), "%.2f") for kind in MEASURED]
            if any(planned) or any(measured):
                yield [shown, *planned, self.value(name + ", planned memory", "%.2f"),
                       self.value(name + ", peak memory of tensors", "%.2f"), *measured]


def table(heads, rows):
    shown = ["|" + "".join(" %s |" % cell if cell else " |" for cell in row) for row in [heads, *rows]]
    return shown[:1] + ["|" + "---|" * len(heads)] + shown[1:]


def tables(report):
    """The tables in Markdown, for each device of which there are figures."""
    lines = []
    devices = list(dict.fromkeys(f["device"] for f in report.figures + report.ratios)) or [""]
    for device in devices:
        measured = Measured(report, device)
        facts = [device, report.facts.get("measured with", ""), report.facts.get("driver", ""),
                 "LibTorch " + report.facts.get("libtorch", "unknown").split(",")[0], report.facts.get("date", "")[:10]]
        lines += ["", "`run.sh`, " + ", ".join(filter(None, facts)) + ":", ""]
        lines += table(["what", "command", "goal", "measured"],
                       [[*row[:3], row[3] or NOT_MEASURED] for row in measured.rows()])
        memory = list(measured.memory())
        if memory:
            lines += ["", "Where the memory goes, in GiB: planned by purpose, and what LibTorch's allocator counted:", ""]
            lines += table(["", *PLANNED, "planned", "peak of tensors", "state", "more in a step", "reserved, unused",
                            "outside LibTorch"], memory)
    return "\n".join(lines[1:])
