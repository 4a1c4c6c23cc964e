#!/usr/bin/env python3
"""Makes report.json and report.txt from a folder that run.sh filled (journal.py), also from what a killed call left
there. It needs only Python's own library.

    report.py FOLDER             prints the summary: failures, and what was measured as tables for docs/performance.md
    report.py FOLDER --said STEP prints only the figures of this step, in short
    report.py FOLDER --table     prints only the tables

Exits with 1 if anything failed.
"""

import argparse
import csv
import json
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ranks  # noqa: E402
from cases import UNFINISHED, read_cases  # noqa: E402
from journal import Journal, text_of  # noqa: E402
from tables import tables  # noqa: E402

LINES_SHOWN = (8, 4)  # of a message: at its beginning, where the cause stands, and at its end
WARNINGS_SHOWN = 3  # of NCCL
# Lines that say nothing of the cause: the stack that follows an error of LibTorch, with mpirun's marks before it, what
# the tests of attention print after each case, and what cases.py and stuck.py tell those who look for the cause.
NOISE = re.compile(r"(^|>:|\s)frame #\d+: |^refused so far: |^\S+:\d+: Skipped$|^(alone|stuck):")
MOST_PRINTED = 8000  # characters of the summary; whoever runs run.sh from afar may get only the end of its output
SIGNALS = {134: "aborted", 135: "bus error", 136: "arithmetic fault", 137: "killed", 139: "segmentation fault"}


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


def short(text):
    """The beginning and the end of a message, without the lines of NOISE and those that are empty."""
    lines = [l for l in text.splitlines() if l.strip() and not NOISE.search(l.strip())]
    first, last = LINES_SHOWN
    if len(lines) > first + last:
        lines[first:-last] = ["..."]
    return "\n".join(lines)


def tail(output, errors=""):
    """What a step said last, above the errors that it wrote, from the first failed test of Python's unittest on."""
    failed = re.search(r"^(FAIL|ERROR): ", errors, re.M)
    wrote = short(errors[failed.start():] if failed else errors).splitlines()
    said = [l for l in output.splitlines() if l.strip() and not NOISE.search(l.strip())]
    return "\n".join(said[-max(LINES_SHOWN[1], sum(LINES_SHOWN) - len(wrote)):] + wrote)


def sanitizer_says(output):
    """The first error that compute-sanitizer found, and how many there are; what the test said if it found none."""
    lines = [l for l in output.splitlines() if re.match(r"=========\s+\S", l) and not re.search(r"Host Frame|COMPUTE-SANITIZER", l)]
    return short("\n".join(lines)) if len(lines) > 1 else tail(output)


class Report:
    def __init__(self, folder):
        self.folder = folder
        self.journal = Journal(folder)
        self.facts = dict(self.journal.facts)
        self.expected = {}
        self.results = []  # {"name", "part", "result", "seconds", "reason"} for each step, for GoogleTest for each case
        # Those measured later replace those of the same name on the same device.
        self.figures, self.ratios, self.training, self.scaling = {}, {}, [], []
        self.devices, self.clocks = [], {}
        self.operators = {}  # the attention operators that computed in tests: name -> calls
        for part in (self.read_expected, self.read_devices, self.read_clocks):
            self.attempt("report", "report", part)
        for step in self.journal.steps.values():
            self.attempt(step.name, step.part, lambda: self.add_step(step))
        self.attempt("report", "report", self.read_training)
        self.figures, self.ratios = list(self.figures.values()), list(self.ratios.values())

    def attempt(self, name, part, read):
        """Calls `read`. If that fails, a failure is recorded and the rest is still reported."""
        try:
            read()
        except Exception as error:
            self.add(name, part, "failed", 0, "its results cannot be read: %s: %s" % (type(error).__name__, error))

    def read_expected(self):
        text = text_of(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json"))
        self.expected = json.loads(text) if text else {}

    def path(self, name):
        return os.path.join(self.folder, name)

    def add(self, name, part, result, seconds, reason=""):
        self.results.append({"name": name, "part": part, "result": result, "seconds": seconds, "reason": reason})

    def add_step(self, step):
        # Measurements from before a failure are kept, and those of an attempt that was interrupted.
        for line in objects(step.output):
            if line.get("bench") in ("gpu", "flex_attention"):
                self.add_figures(line, step)
                self.add_ratios(line, step)
        if step.kind == "gtest":
            self.add_gtest(step)
            return
        if step.result in ("skipped", "left out", "began"):
            self.add(step.name, step.part, *self.not_ended(step))
            return
        output, errors = step.last
        skipped = re.search(r"^SKIPPED: (.*)", output, re.M)
        why = step.reason or self.unexpected(step.name, int(step.result), output + errors)
        if skipped and step.result == "0":  # a step that skipped itself need not print what is expected of it
            self.add(step.name, step.part, "skipped", step.seconds, skipped.group(1))
        elif why and step.kind == "mpi" and self.add_failed_cases(step, why):
            pass
        elif why:
            said = sanitizer_says(output) if step.kind == "memcheck" else tail(output, errors)
            warnings = list(dict.fromkeys(re.findall(r"NCCL WARN .*", step.nccl)))[:WARNINGS_SHOWN]
            self.add(step.name, step.part, "failed", step.seconds, "\n".join(filter(None, [why, said, *warnings])))
        else:
            self.add(step.name, step.part, "passed", step.seconds)

    def add_failed_cases(self, step, why):
        """Adds the cases that failed in the runs of several ranks. Returns false if there are none."""
        runs = ranks.runs_of(step.last[0])
        failed = {}
        for text in runs:
            failed.update(ranks.failed_cases(text))
        for name, lines in failed.items():
            self.add("%s %s" % (step.name, name), step.part, "failed", 0, short("\n".join(lines)) or why)
        if failed and not read_cases(runs[-1]).ran:
            self.add(step.name, step.part, "failed", step.seconds, why + "; not all of its other cases could be run")
        return bool(failed)

    @staticmethod
    def not_ended(step):
        if step.result == "began":
            return "left out", 0, "run.sh was killed during it"
        return step.result, step.seconds, step.reason

    def add_figures(self, line, step):
        device = str(line.get("device", "unknown"))
        if line.get("bench") == "gpu":
            self.facts["measured on"] = device
            self.facts["measured with"] = str(line.get("versions", "unknown"))
        part = "flex_attention" if line.get("bench") == "flex_attention" else str(line.get("part", step.name))
        for f in listed(line, "figures"):
            if is_number(f.get("value")):
                median = f["median"] if is_number(f.get("median")) else f["value"]
                self.figures[device, str(f.get("name"))] = dict(
                    f, name=str(f.get("name")), unit=str(f.get("unit", "")), median=median, part=part, device=device, step=step.name)

    def add_ratios(self, line, step):
        device = str(line.get("device", "unknown"))
        for r in listed(line, "ratios"):
            if not is_number(r.get("ratio")):
                continue
            goal, ratio = r.get("goal"), r["ratio"]
            low, high = (r[k] if is_number(r.get(k)) else ratio for k in ("low", "high"))
            met = ratio <= goal if is_number(goal) and not r.get("invalid") else None
            self.ratios[device, str(r.get("name"))] = dict(
                r, name=str(r.get("name")), low=low, high=high, met=met, device=device, step=step.name)

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

    def add_gtest(self, step):
        read = read_cases(step.output)
        for case in read.cases.values():
            if case.result:
                self.add("%s %s" % (step.name, case.name), step.part, case.result, case.seconds,
                         "" if case.result == "passed" else short(case.message))
            for line in case.lines:  # as tests/attention/kernels prints it: "operators: cudnn 12, flash2 3"
                if line.startswith("operators: "):
                    for name, calls in re.findall(r"(\w+) (\d+)", line):
                        self.operators[name] = self.operators.get(name, 0) + int(calls)
        cases, current = read.cases.values(), read.current
        if step.result in ("skipped", "left out", "began"):
            result, seconds, why = self.not_ended(step)
            left = read.found - (read.ended - read.ended_before)
            if read.found:
                why += "; %d of its cases are left%s" % (left, " from %s on" % current.name if current else "")
            self.add(step.name, step.part, result, seconds, why)
            return
        code = int(step.result)
        why = step.reason or SIGNALS.get(code, "exit code %d" % code)
        if code == UNFINISHED:
            why = "not all of its cases could be run"
        if not cases and not code:
            self.add(step.name, step.part, "failed", step.seconds, "it ended with exit code 0, but left no results")
        elif not read.ran and not (code == 1 and any(c.result == "failed" for c in cases)):
            why += " in " + current.name if current else ""
            self.add(step.name, step.part, "failed", step.seconds, "\n".join([why, tail("" if short(step.last[1]) else step.last[0], step.last[1])]))
        elif code and not any(c.result == "failed" for c in cases):
            self.add(step.name, step.part, "failed", step.seconds, "\n".join([why, tail(*step.last)]))

    def read_devices(self):
        lines = [l for l in self.journal.text("gpus.csv").splitlines() if l.strip()]
        reader = csv.DictReader(lines, skipinitialspace=True)
        self.devices = [{str(k): v for k, v in row.items() if isinstance(v, str)} for row in reader]

    def read_clocks(self):
        """Summarizes the readings of each GPU under load, that is, with at least half of its highest power, for each call
        of run.sh."""
        by_gpu, calls = {}, 0
        for line in self.journal.text("clocks.csv").splitlines():
            calls += line.startswith("call ")
            try:
                gpu, sm, memory, celsius, watts = [float(v) for v in line.split(",")]
            except ValueError:
                continue
            name = "%d" % gpu if calls < 2 else "%d, call %d" % (gpu, calls)
            by_gpu.setdefault(name, []).append((sm, memory, celsius, watts))
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

    def read_training(self):
        for path, text in sorted(self.journal.files.items()):
            if not path.startswith("metrics/"):
                continue
            lines = [o for o in objects(text) if is_number(o.get("tokens_per_second")) and o["tokens_per_second"] > 0]
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
            "format": "annulus-gpu-report-2",
            "calls": self.journal.calls,
            "facts": self.facts,
            "gpus": self.devices,
            "clocks": self.clocks,
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "skipped": self.count("skipped"),
            "left_out": self.count("left out"),
            "goals_met": sum(r["met"] is True for r in self.ratios),
            "goals_missed": sum(r["met"] is False for r in self.ratios),
            "invalid": sum(bool(r.get("invalid")) for r in self.ratios),
            "results": self.results,
            "ratios": self.ratios,
            "figures": self.figures,
            "operators": self.operators,
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
                "gpu %s under load" % gpu, c["sm_mhz_least"], c["sm_mhz_most"], c["sm_mhz_median"], c["memory_mhz_median"],
                c["celsius_most"], c["watts_most"], c["readings"]))
        if self.ratios:
            lines += ["", "ratios, lower is better" + " " * 24 + "ratio   quartiles        goal"]
            lines += [self.ratio_line(r) for r in self.ratios]
        if self.figures:
            lines += ["", "figures" + " " * 42 + "best     median"]
            lines += [self.figure_line(f) for f in self.figures]
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
        sections = [line for section in self.not_passed() for line in section]
        return "\n".join(lines + sections + ["", tables(self), "", self.last_line(), ""])

    @staticmethod
    def ratio_line(r):
        goal = "" if r["met"] is None else "%.3f %s" % (r["goal"], "met" if r["met"] else "MISSED")
        if r.get("invalid"):
            goal = "INVALID: %s" % r["invalid"]
        return "  %-43s %7.3f   %.3f to %.3f   %s" % (r["name"], r["ratio"], r["low"], r["high"], goal)

    @staticmethod
    def figure_line(f):
        operators = ", ".join(filter(None, [f.get("operators", ""), "INVALID: " + f["invalid"] if f.get("invalid") else ""]))
        return "  %-40s %12.5g %10.5g %s%s" % (f["name"], f["value"], f["median"], f["unit"], operators and "  " + operators)

    def not_passed(self):
        """The lines about each result other than "passed", the most important last."""
        sections = []
        for result, title in (("skipped", "skipped"), ("left out", "left out"), ("failed", "FAILED")):
            found = [r for r in self.results if r["result"] == result]
            if not found:
                continue
            lines = ["", "%s: %d" % (title, len(found))]
            by_reason = {}
            for r in found:
                by_reason.setdefault(r["reason"], []).append(r["name"])
            for reason, names in by_reason.items():
                shown = names if len(names) <= 6 else names[:5] + ["and %d more" % (len(names) - 5)]
                lines += ["  " + n for n in shown]
                lines += ["      " + l for l in reason.splitlines()]
            sections.append(lines)
        return sections

    def last_line(self):
        last = "%d passed, %d failed, %d skipped" % (self.count("passed"), self.count("failed"), self.count("skipped"))
        if self.count("left out"):
            last += ", %d left out" % self.count("left out")
        missed = sum(r["met"] is False for r in self.ratios)
        met = sum(r["met"] is True for r in self.ratios)
        invalid = sum(bool(r.get("invalid")) for r in self.ratios)
        if met or missed or invalid:
            last += "; goals: %d met, %d missed" % (met, missed) + (", %d ratios INVALID" % invalid if invalid else "")
        return last

    def summary(self):
        """What is printed: first of the failures, then of the rest as much as there is place for, and the tables and the
        counts in any case."""
        end = "\n".join(["", "", tables(self), "", "the whole report: " + self.path("report.txt"), self.last_line(), ""])
        kept, room = [], MOST_PRINTED - len(end)
        for lines in reversed(self.not_passed()):
            said = []
            for i, line in enumerate(lines):
                room -= len(line) + 1
                if room < 200:
                    said.append("... %d more lines in report.txt" % (len(lines) - i))
                    break
                said.append(line)
            kept = said + kept
        return "\n".join(kept) + end

    def said(self, step):
        lines = [self.ratio_line(r) for r in self.ratios if r["step"] == step]
        of_ratios = " ".join(lines)
        lines += [self.figure_line(f) for f in self.figures if f["step"] == step and f["name"] not in of_ratios]
        return "".join(line[:200] + "\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--said", metavar="STEP")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not os.path.isdir(options.folder):
        sys.exit("report.py: expected a folder that run.sh filled, and %s is none" % options.folder)
    report = Report(options.folder)
    if options.table:
        print(tables(report))
        return
    # Each file is replaced as a whole, because the report is made repeatedly and the process may be killed meanwhile.
    for name, said in (("report.json", json.dumps(report.json(), indent=1) + "\n"), ("report.txt", report.text())):
        with open(report.path(name + ".new"), "w") as f:
            f.write(said)
        os.replace(report.path(name + ".new"), report.path(name))
    sys.stdout.write(report.said(options.said) if options.said else report.summary())
    sys.exit(1 if report.count("failed") else 0)


if __name__ == "__main__":
    main()
