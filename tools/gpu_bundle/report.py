"""Reads what the steps of a bundle printed, and makes one report of all that have run. Used by run.py.

The report is made from results.jsonl. Each line of it is a JSON object: one for each call with `bundle` (which bundle it is) and
`facts` (date, GPUs with driver, LibTorch, what the bundle was built from and with, system), and one for each step as it begins and as
it ends, of which the last counts: `step` (its name), `parts` (the words of --only that select it), `result` (began, passed, failed,
skipped, left out), `seconds`, `reason` (empty if there is none but its cases'), `cases` (of a GoogleTest program, for each case that
ended: name, result, seconds, message), and `measured` (the objects that `bench gpu` printed).

The report ends with what was measured, as tables for benchmarks/results/gpu.md, and the counts: whoever runs a bundle from afar
may get only the end of its output.
"""

import glob
import itertools
import json
import os
import re

SIGNALS = {-4: "illegal instruction", -6: "aborted", -7: "bus error", -8: "arithmetic fault", -9: "killed", -11: "segmentation fault"}
BEGAN = re.compile(r"\[ RUN      \] (\S+)$")
ENDED = re.compile(r"\[ *(OK|FAILED|SKIPPED) *\] ([^\s,]+).*\((\d+) ms\)$")
RESULTS = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}
NOISE = re.compile(r"(^|\s)frame #\d+: |: Skipped$")  # the stack after an error of LibTorch; where a case skipped itself


def short(lines, first, last):
    """The beginning and the end of a message."""
    lines = [l for l in lines if l.strip() and not NOISE.search(l)]
    return "\n".join(lines if len(lines) <= first + last else lines[:first] + ["..."] + lines[-last:])


def read_cases(text):
    """[name, result, seconds, message] of each case of a GoogleTest program; the result of one that never ended is None.
    Its XML would say the same, but is written only when the program ends, which one that crashes or hangs does not."""
    cases, lines = [], []
    for line in text.splitlines():
        began, ended = BEGAN.search(line), ENDED.search(line)
        if began:
            cases.append([began.group(1), None, 0, ""])
            lines = []
        elif ended and cases and cases[-1][0] == ended.group(2):
            result = RESULTS[ended.group(1)]
            message = "" if result == "passed" else short(lines, 8, 4)
            cases[-1][1:] = [result, int(ended.group(3)) / 1000, message]
        else:
            lines.append(line)
    if cases and not cases[-1][1]:
        cases[-1][3] = short(lines, 4, 8)
    return cases


def objects(text):
    """The lines of JSON that `annulus bench gpu` prints as soon as something is measured."""
    for line in text.splitlines():
        if line.startswith('{"bench"'):
            try:
                yield json.loads(line)
            except ValueError:
                pass  # the end of a line is lost if the program was killed


def read_text(path):
    """The text of a file, which is empty if there is none."""
    try:
        with open(path, errors="replace") as f:
            return f.read()
    except OSError:
        return ""


def running(out):
    """What each process of the present step printed."""
    return [read_text(path) for path in sorted(glob.glob(os.path.join(glob.escape(out), "running.*")))]


def how_ended(code):
    return SIGNALS.get(code, "exit code %s" % code)


def fault_of_program(text, code, reason):
    """Why a program of GoogleTest did not run all its cases, or failed although none of them did; "" if neither is so."""
    cases = read_cases(text)
    if re.search(r"(?m)^\[==========\] .* ran\.", text):
        good = reason or not code or any(case[1] == "failed" for case in cases)
        return "" if good else "%s\n%s" % (how_ended(code), short(text.splitlines(), 2, 8))
    how = reason or how_ended(code) + " before its end"
    if cases and not cases[-1][1]:
        return "%s, in %s\n%s" % (how, cases[-1][0], cases[-1][3])
    return "%s\n%s" % (how, short(text.splitlines(), 2, 8))


def fault_of_command(text, code, reason):
    """Why a command failed; "" if it did not."""
    return "%s\n%s" % (reason or how_ended(code), short(text.splitlines(), 2, 12)) if reason or code else ""


def outcome(step, texts, codes, reason, result_for_it="failed"):
    """The entry of results.jsonl for a step whose processes printed `texts` and ended with `codes`. A reason, such as a time
    limit, says why they did not end by themselves; that makes the result `result_for_it`."""
    gtest = step.get("kind") == "gtest"
    fault_of = fault_of_program if gtest else fault_of_command
    ended = list(itertools.zip_longest(texts, codes))
    faults = [fault_of(text, code, reason).strip() for text, code in ended] or [reason]
    cases = [case for text in texts for case in read_cases(text) if case[1]] if gtest else []
    if gtest and not any(faults) and not cases:
        faults = ["it ran no cases"]
    result = "failed" if any(faults) or any(case[1] == "failed" for case in cases) else "passed"
    skipped = None if gtest else re.search(r"(?m)^SKIPPED: (.*)", "\n".join(texts))
    if skipped and result == "passed":
        result, faults = "skipped", [skipped.group(1)]
    return {"step": step["name"], "parts": step["parts"], "result": result_for_it if reason else result, "seconds": 0,
            "reason": "\n".join(dict.fromkeys(filter(None, faults))), "cases": cases,
            "measured": [each for text in texts for each in objects(text)]}


def line_of(entry):
    """The entry in one line."""
    count = lambda result: sum(case[1] == result for case in entry["cases"])
    counts = ["%d %s" % (count(r), r) for r in ("passed", "failed", "skipped") if count(r)]
    return ", ".join([*(counts or [entry["result"]]), "%d s" % entry["seconds"], *entry["reason"].splitlines()[:1]])


class Results:
    """What results.jsonl says, and running.* of a step that was killed with run.py."""

    def __init__(self, out):
        self.bundle, self.facts, self.steps = "", {}, {}
        for line in read_text(os.path.join(out, "results.jsonl")).splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a run that was killed may leave half a line
            if "bundle" in entry:
                self.bundle, self.facts = entry["bundle"], entry["facts"]
            else:
                self.steps[entry["step"]] = entry
        self.killed = [outcome(dict(entry, name=entry["step"]), running(out), [], "run.py was killed during it", "left out")
                       for entry in self.steps.values() if entry["result"] == "began"]
        self.steps.update((entry["step"], entry) for entry in self.killed)

    def items(self):
        """(name, result, reason) of each case, and of each step that has none or did not end well itself."""
        for entry in self.steps.values():
            for name, result, _, message in entry["cases"]:
                yield "%s: %s" % (entry["step"], name), result, message
            if entry["reason"] or not entry["cases"]:
                yield entry["step"], entry["result"], entry["reason"]

    def measured(self):
        """What was measured on each device, named with the versions of its libraries."""
        found = {}
        for each in (each for entry in self.steps.values() for each in entry["measured"]):
            found.setdefault("%s, %s" % (each.get("device"), each.get("versions")), []).append(each)
        return found

    def exit_code(self):
        return int(any(result == "failed" for _, result, _ in self.items()))


def table(heads, rows):
    return ["", *("| %s |" % " | ".join(row) for row in [heads, ["---"] * len(heads), *rows])]


def number(value):
    return "%.4g" % value if abs(value) < 1e5 else "{:,.0f}".format(value)


def met_or_missed(ratio):
    if ratio.get("invalid"):
        return "INVALID: " + ratio["invalid"]
    if ratio.get("goal") is None:
        return ""
    return "at most %s: %s" % (number(ratio["goal"]), "met" if ratio["ratio"] <= ratio["goal"] else "missed")


def tables(device, objects_of_device):
    ratios = {r["name"]: r for o in objects_of_device for r in o.get("ratios", [])}
    figures = {f["name"]: f for o in objects_of_device for f in o.get("figures", [])}
    lines = ["", "Measured on " + device + ":"]
    if ratios:
        lines += table(["ratio", "measured", "quartiles", "goal"], [
            [name, "%.3f" % r["ratio"], "%.3f to %.3f" % (r.get("low", r["ratio"]), r.get("high", r["ratio"])), met_or_missed(r)]
            for name, r in ratios.items()])
    if figures:
        lines += table(["figure", "best", "median", "unit", "computed by"], [
            [name, number(f["value"]), number(f.get("median", f["value"])), f.get("unit", ""),
             ", ".join(filter(None, [f.get("operators"), f.get("invalid") and "INVALID: " + f["invalid"]]))]
            for name, f in figures.items()])
    return lines


def text_of(out):
    """The whole report."""
    results = Results(out)
    items = list(results.items())
    lines = ["annulus on GPUs", "", *("%-12s %s" % (name, value or "none") for name, value in results.facts.items())]
    for wanted in ("skipped", "left out", "failed"):
        by_reason = {}
        for name, result, reason in items:
            if result == wanted:
                by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = ["and %d more" % (len(names) - 6)] if len(names) > 6 else []
            lines += ["", "%s: %s" % (wanted.upper() if wanted == "failed" else wanted, ", ".join(names[:6] + more))]
            lines += ["    " + line for line in reason.splitlines()]
    for device, found in results.measured().items():
        lines += tables(device, found)
    counts = ["%d %s" % (sum(r == wanted for _, r, _ in items), wanted) for wanted in ("passed", "failed", "skipped", "left out")]
    return "\n".join(lines + ["", "the report, and what the steps printed: " + os.path.abspath(out), ", ".join(counts), ""])
