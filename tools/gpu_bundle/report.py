#!/usr/bin/env python3
"""Makes report.json and report.txt from the files that run.sh left in a folder. It needs only Python's own library.

    report.py FOLDER

FOLDER holds steps.tsv (a line for each step: name, part, kind, result, seconds, reason), facts.tsv, logs/NAME.out and
NAME.err, xml/NAME.xml of GoogleTest, bench/*.json of `annulus bench`, bench/*.jsonl of training, and on machines with
GPUs gpus.csv and clocks.csv of nvidia-smi. Exits with 1 if anything failed.
"""

import csv
import glob
import json
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from test_report import gtest_cases, text_of  # noqa: E402

LINES_SHOWN = 12
SIGNALS = {134: "aborted", 135: "bus error", 136: "arithmetic fault", 137: "killed", 139: "segmentation fault"}


def rows(path):
    return [line.split("\t") for line in text_of(path).splitlines() if line]


def objects(text):
    """The JSON objects in a text, each of which is one line."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                read = json.loads(line)
            except ValueError:
                continue
            if isinstance(read, dict):
                found.append(read)
    return found


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def listed(found, key):
    """The objects of the list found[key]; empty if it is no list, as a faulty program may have written it."""
    values = found.get(key) if isinstance(found, dict) else None
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def tail(*texts):
    lines = [l for text in texts for l in text.splitlines() if l.strip()]
    return "\n".join(lines[-LINES_SHOWN:])


class Report:
    def __init__(self, folder):
        self.folder = folder
        self.facts = {row[0]: row[1] if len(row) > 1 else "" for row in rows(self.path("facts.tsv"))}
        self.expected = {}
        self.results = []  # {"name", "part", "result", "seconds", "reason"} for each step, for GoogleTest for each case
        self.figures, self.ratios, self.training, self.scaling = [], [], [], []
        self.devices, self.clocks = [], {}
        for part in (self.read_expected, self.read_devices, self.read_clocks):
            self.attempt("report", "report", part)
        for row in rows(self.path("steps.tsv")):
            row = (row + [""] * 6)[:6]
            self.attempt(row[0], row[1], lambda: self.add_step(*row))
        self.attempt("report", "report", self.read_bench)
        self.attempt("report", "report", self.read_training)

    def attempt(self, name, part, read):
        """Calls `read`. If that fails, a failure is recorded and the rest is still reported."""
        try:
            read()
        except Exception as error:
            self.add(name, part, "failed", 0, "its results cannot be read: %s: %s" % (type(error).__name__, error))

    def read_expected(self):
        text = text_of(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json"))
        self.expected = json.loads(text) if text else {}

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def log(self, name, stream):
        return text_of(self.path("logs", "%s.%s" % (name, stream)))

    def add(self, name, part, result, seconds, reason=""):
        self.results.append({"name": name, "part": part, "result": result, "seconds": seconds, "reason": reason})

    def add_step(self, name, part, kind, result, seconds, reason):
        seconds = int(seconds or 0)
        if result in ("skipped", "left out"):
            self.add(name, part, result, seconds, reason)
            return
        code = int(result)
        output, errors = self.log(name, "out"), self.log(name, "err")
        if kind == "gtest":
            self.add_gtest(name, part, code, seconds, reason, output, errors)
            return
        skipped = re.search(r"^SKIPPED: (.*)", output, re.M)
        why = reason or self.unexpected(name, code, output + errors)
        if skipped and not code:  # a step that skipped itself need not print what is expected of it
            self.add(name, part, "skipped", seconds, skipped.group(1))
        elif why:
            self.add(name, part, "failed", seconds, "\n".join(filter(None, [why, tail(output, errors)])))
        else:
            self.add(name, part, "passed", seconds)
        # Measurements from before a failure are kept.
        for found in objects(output):
            if found.get("bench") == "gpu":
                self.add_figures(found, str(found.get("part", name)))
                self.add_ratios(found)
                self.facts["measured on"] = str(found.get("device", "unknown"))
                self.facts["measured with"] = str(found.get("versions", "unknown"))
            elif kind == "flex":
                self.add_figures(found, "flex_attention")

    def add_figures(self, found, part):
        for f in listed(found, "figures"):
            if is_number(f.get("value")):
                median = f["median"] if is_number(f.get("median")) else f["value"]
                self.figures.append(dict(f, name=str(f.get("name")), unit=str(f.get("unit", "")), median=median, part=part))

    def add_ratios(self, found):
        for r in listed(found, "ratios"):
            if not is_number(r.get("ratio")) or any(r.get("name") == known["name"] for known in self.ratios):
                continue
            goal, ratio = r.get("goal"), r["ratio"]
            low, high = (r[k] if is_number(r.get(k)) else ratio for k in ("low", "high"))
            met = ratio <= goal if is_number(goal) else None
            self.ratios.append(dict(r, name=str(r.get("name")), low=low, high=high, met=met))

    def unexpected(self, name, code, text):
        want = self.expected.get(name, {"exit": 0, "once": [], "forbid": []})
        if code != want["exit"]:
            said = SIGNALS.get(code, "exit code %d" % code)
            return said if want["exit"] == 0 else "%s, %d was expected" % (said, want["exit"])
        for once in want["once"]:
            lines = sum(once in line for line in text.splitlines())
            if lines != 1:
                return "%d lines hold, instead of one: %s" % (lines, once)
        for line in want["forbid"]:
            if line in text:
                return "its output holds: " + line
        return ""

    def add_gtest(self, name, part, code, seconds, reason, output, errors):
        cases = gtest_cases(self.path("xml", name + ".xml")) or []
        for case in cases:
            # The test's own message, which for a failure includes "file:line".
            self.add("%s %s" % (name, case.name), part, case.result, 0, case.message.strip())
        if code and not any(c.result == "failed" for c in cases):
            why = reason or SIGNALS.get(code, "exit code %d" % code)
            last = re.findall(r"^\[ RUN      \] (.*)", output, re.M)
            if last and not re.search(r"^\[  (?:     OK|FAILED|SKIPPED) ?.*" + re.escape(last[-1]), output, re.M):
                why += " in " + last[-1]
            self.add(name, part, "failed", seconds, "\n".join([why, tail(errors or output)]))
        elif not code and not cases:
            self.add(name, part, "failed", seconds, "it ended with exit code 0, but left no results")

    def read_devices(self):
        lines = [l for l in text_of(self.path("gpus.csv")).splitlines() if l.strip()]
        reader = csv.DictReader(lines, skipinitialspace=True)
        self.devices = [{str(k): v for k, v in row.items() if isinstance(v, str)} for row in reader]

    def read_clocks(self):
        """Summarizes the readings of each GPU under load, that is, with at least half of its highest power."""
        by_gpu = {}
        for line in text_of(self.path("clocks.csv")).splitlines():
            try:
                gpu, sm, memory, celsius, watts = [float(v) for v in line.split(",")]
            except ValueError:
                continue
            by_gpu.setdefault(int(gpu), []).append((sm, memory, celsius, watts))
        for gpu, readings in sorted(by_gpu.items()):
            top = max(r[3] for r in readings)
            loaded = [r for r in readings if r[3] >= top / 2]
            column = lambda i: [r[i] for r in loaded]
            self.clocks[gpu] = {
                "readings": len(loaded),
                "sm_mhz_least": min(column(0)),
                "sm_mhz_median": statistics.median(column(0)),
                "sm_mhz_most": max(column(0)),
                "memory_mhz_median": statistics.median(column(1)),
                "celsius_most": max(column(2)),
                "watts_most": top,
            }

    def read_bench(self):
        for path in sorted(glob.glob(self.path("bench", "*.json"))):
            try:
                self.add_ratios(json.loads(text_of(path)))
            except ValueError:
                continue

    def read_training(self):
        for path in sorted(glob.glob(self.path("bench", "*.jsonl"))):
            lines = [o for o in objects(text_of(path)) if is_number(o.get("tokens_per_second")) and o["tokens_per_second"] > 0]
            if not lines:
                continue
            speeds = [o["tokens_per_second"] for o in lines[1:] or lines]  # the first line includes the warm-up
            name = os.path.basename(path)[: -len(".jsonl")]
            loss = lines[-1].get("loss")
            self.training.append({"name": name, "tokens_per_second": statistics.median(speeds),
                                  "loss": loss if is_number(loss) else None, "steps": lines[-1].get("step")})
        speed_of = {t["name"]: t["tokens_per_second"] for t in self.training}
        one = speed_of.get("scaling-1")
        for n in (1, 2, 4, 8):
            speed = speed_of.get("scaling-%d" % n)
            if speed and one:
                self.scaling.append({"gpus": n, "tokens_per_second": speed, "over_one": speed / one, "efficiency": speed / one / n})

    def count(self, result):
        return sum(r["result"] == result for r in self.results)

    def json(self):
        return {
            "format": "annulus-gpu-report-1",
            "facts": self.facts,
            "gpus": self.devices,
            "clocks": self.clocks,
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "skipped": self.count("skipped"),
            "left_out": self.count("left out"),
            "goals_met": sum(r["met"] is True for r in self.ratios),
            "goals_missed": sum(r["met"] is False for r in self.ratios),
            "results": self.results,
            "ratios": self.ratios,
            "figures": self.figures,
            "training": self.training,
            "scaling": self.scaling,
        }

    def text(self):
        lines = ["annulus on GPUs", ""]
        for name, value in self.facts.items():
            if value:
                lines.append("%-18s %s" % (name, value))
        for device in self.devices:
            lines.append("%-18s %s" % ("gpu", ", ".join("%s %s" % (k, v) for k, v in device.items() if v and "uuid" not in k)))
        for gpu, c in self.clocks.items():
            lines.append("%-18s multiprocessors %.0f to %.0f MHz, median %.0f; memory %.0f MHz; at most %.0f C, %.0f W (%d readings)" % (
                "gpu %d under load" % gpu, c["sm_mhz_least"], c["sm_mhz_most"], c["sm_mhz_median"], c["memory_mhz_median"],
                c["celsius_most"], c["watts_most"], c["readings"]))
        if self.ratios:
            lines += ["", "ratios, lower is better" + " " * 24 + "ratio   quartiles        goal"]
            for r in self.ratios:
                goal = "" if r["met"] is None else "%.3f %s" % (r["goal"], "met" if r["met"] else "MISSED")
                lines.append("  %-43s %7.3f   %.3f to %.3f   %s" % (
                    r["name"], r["ratio"], r["low"], r["high"], goal))
        if self.figures:
            lines += ["", "figures" + " " * 42 + "best     median"]
            for f in self.figures:
                lines.append("  %-40s %12.5g %10.5g %s" % (
                    f["name"], f["value"], f["median"], f["unit"]))
        if self.training:
            lines += ["", "training"]
            for t in self.training:
                loss = "" if t["loss"] is None else ", loss %.3f" % t["loss"]
                lines.append("  %-40s %12.0f tokens/s after %s steps%s" % (t["name"], t["tokens_per_second"], t["steps"], loss))
        if self.scaling:
            lines += ["", "scaling, the same rows over more GPUs"]
            for s in self.scaling:
                lines.append("  %d GPUs %14.0f tokens/s  %6.2f of one  %5.1f%% of ideal" % (
                    s["gpus"], s["tokens_per_second"], s["over_one"], 100 * s["efficiency"]))
        for result, title in (("failed", "FAILED"), ("left out", "left out"), ("skipped", "skipped")):
            found = [r for r in self.results if r["result"] == result]
            if not found:
                continue
            lines += ["", "%s: %d" % (title, len(found))]
            by_reason = {}
            for r in found:
                by_reason.setdefault(r["reason"], []).append(r["name"])
            for reason, names in by_reason.items():
                shown = names if len(names) <= 6 else names[:5] + ["and %d more" % (len(names) - 5)]
                lines += ["  " + n for n in shown]
                lines += ["      " + l for l in reason.splitlines()]
        last = "%d passed, %d failed, %d skipped" % (self.count("passed"), self.count("failed"), self.count("skipped"))
        if self.count("left out"):
            last += ", %d left out" % self.count("left out")
        missed = sum(r["met"] is False for r in self.ratios)
        met = sum(r["met"] is True for r in self.ratios)
        if met or missed:
            last += "; goals: %d met, %d missed" % (met, missed)
        return "\n".join(lines + ["", last, ""])


def main():
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit("usage: report.py FOLDER, which run.sh filled")
    report = Report(sys.argv[1])
    text = report.text()
    # Each file is replaced as a whole, because the report is made repeatedly and the process may be killed meanwhile.
    for name, said in (("report.json", json.dumps(report.json(), indent=1) + "\n"), ("report.txt", text)):
        with open(report.path(name + ".new"), "w") as f:
            f.write(said)
        os.replace(report.path(name + ".new"), report.path(name))
    sys.stdout.write(text)
    print("report: " + report.path("report.txt"))
    sys.exit(1 if report.count("failed") else 0)


if __name__ == "__main__":
    main()
