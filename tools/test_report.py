#!/usr/bin/env python3
"""Reads what Bazel wrote about a run (--build_event_json_file) and prints a summary, whose last line is "N passed, N
failed".

GoogleTest's cases count one each, and other tests count as one. Failing tests are shown with their output, skipped ones
with their number and reasons. A target that could not be built is a failure. Called by tools/test.sh, cuda/build.sh and
examples.sh; used by tools/mutants.py and the GPU bundle. Exits with 1 after a failure and with 4 if there was nothing
to run.

A test that does not use GoogleTest skips itself with a line "SKIPPED: reason" (and exit code 0), or, if CI should have
what the test lacks, with "SKIPPED, A FAILURE IN CI: reason". Cases that Python's unittest skips within a test, or a
GoogleTest program that a test starts, are listed by what these print; the test then counts as passed if any of its cases
has run.
"""
import argparse
import collections
import json
import os
import re
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

LINES_SHOWN = 120
SLOWEST_SHOWN = 8
GTEST_ROOT = re.compile(r"<\?xml[^>]*>\s*<testsuites\s[^>]*name=")
INCOMPATIBLE = "//bazel:incompatible"
# What unittest says with verbosity=2: "test_it (__main__.ItTest.test_it) ... skipped 'no GPU'", where the first line of a
# docstring or the output of the case may stand between, and "  test_it (...) (n=1) ... skipped 'no GPU'" for a part of it.
# At its end it says "Ran 3 tests in 0.1s" and "OK (skipped=1)".
UNITTEST_CASE = re.compile(r"^ *(\w+) \(((?:[\w<>]+\.)*\w+)\)( [\[(].*?)?(?=$| \.\.\.)")
UNITTEST_SKIP = re.compile(r"""(?:^|\.\.\. )skipped (['"])(.*)\1$""")
UNITTEST_RAN = re.compile(r"^Ran (\d+) tests? in ", re.M)
UNITTEST_SKIPPED = re.compile(r"^(?:OK|FAILED) \((?:.*, )?skipped=(\d+)", re.M)
# What GoogleTest says about a case; its ranks or runs may say it several times.
GTEST_SKIP = re.compile(r"^\[  SKIPPED \] ([\w/]+\.[\w/]+)(?:, where .*)? \(\d+ ms\)$", re.M)
GTEST_REASON = re.compile(r"^\S+:\d+: Skipped\n(.*)$", re.M)


def path_of(uri):
    parsed = urllib.parse.urlparse(uri)
    return urllib.parse.unquote(parsed.path) if parsed.scheme == "file" else None


def text_of(path):
    try:
        with open(path, errors="replace") as f:
            return f.read()
    except (OSError, TypeError):
        return ""


class Case:
    """One GoogleTest case: its result ("passed", "failed", "skipped"), and the reason or message."""

    def __init__(self, name, result, message=""):
        self.name, self.result, self.message = name, result, message


def gtest_cases(path):
    """The cases in GoogleTest's test.xml, or None if Bazel wrote the file, as it does for other tests."""
    text = text_of(path)
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        # Otherwise all of its cases would count as one.
        return [Case("test.xml cannot be read: %s" % error, "failed")] if GTEST_ROOT.match(text) else None
    if root.get("name") is None:  # the root of Bazel's own file has no name
        return None
    cases = []
    for suite in root.iter("testsuite"):
        for case in suite.iter("testcase"):
            if case.get("status") == "notrun":
                continue  # disabled, or left out by a filter
            name = "%s.%s" % (case.get("classname"), case.get("name"))
            failures = case.findall("failure")
            skipped = case.find("skipped")
            if failures:
                cases.append(Case(name, "failed", "\n".join(f.text or f.get("message", "") for f in failures)))
            elif skipped is not None or case.get("result") == "skipped":
                message = (skipped.text or skipped.get("message") or "") if skipped is not None else ""
                # The message begins with "file:line", which is removed.
                lines = [l for l in message.strip().split("\n") if not re.fullmatch(r"\S+:\d+", l.strip())]
                cases.append(Case(name, "skipped", " ".join(lines).strip()))
            else:
                cases.append(Case(name, "passed"))
    return cases


def cases_in(log):
    """The skipped cases of what a test that is not itself a GoogleTest program has run, by its output, and whether it has
    run nothing else."""
    skipped, case, parts = [], None, False
    for line in log.split("\n"):
        case = UNITTEST_CASE.match(line) or case
        reason = UNITTEST_SKIP.search(line)
        if case and reason:
            name, path, part = case.groups()
            of = path.removesuffix("." + name).rpartition(".")[2]  # since 3.11 the path ends with the case
            skipped.append(Case("%s.%s%s" % (of, name, part or ""), "skipped", reason.group(2)))
            parts = parts or part is not None
    said = sum(int(n) for n in UNITTEST_SKIPPED.findall(log))
    if said > len(skipped):
        name = "%d cases" % (said - len(skipped))
        skipped.append(Case(name, "skipped", "no reason given: the test's unittest.main lacks verbosity=2"))
    nothing_else = said > 0 and not parts and said >= sum(int(n) for n in UNITTEST_RAN.findall(log))
    names = set()
    for found in GTEST_SKIP.finditer(log):
        if found.group(1) in names:
            continue
        names.add(found.group(1))
        before = log.rfind("[ RUN      ] " + found.group(1), 0, found.start())
        reason = GTEST_REASON.search(log, max(before, 0), found.start())
        skipped.append(Case(found.group(1), "skipped", reason.group(1).strip() if reason else ""))
    return skipped, nothing_else or (bool(names) and not said and "[       OK ] " not in log)


class Run:
    """The contents of the event file of one run."""

    def __init__(self, events_path):
        self.kinds = {}  # label -> "cc_test rule"
        self.tags = {}
        self.results = collections.defaultdict(dict)  # label -> (run, shard) -> list of attempts
        self.summaries = {}
        self.broken = []  # labels that could not be built
        self.incompatible = []
        self.problems = []  # (label or pattern, message), for example for BUILD files that cannot be read
        self.built = 0
        self.exit_code = None
        self.options = ""
        for line in text_of(events_path).splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # an incomplete line: Bazel was killed
            self.add(event)

    def add(self, event):
        kind, key = next(iter(event["id"].items()))
        label = key.get("label", "") if isinstance(key, dict) else ""
        aborted = "aborted" in event
        abortion = event.get("aborted", {})  # empty for an unknown reason
        if kind == "started":
            self.options = event.get("started", {}).get("optionsDescription", "")
        elif kind == "targetConfigured" and not aborted:
            self.kinds[label] = event.get("configured", {}).get("targetKind", "")
            self.tags[label] = event.get("configured", {}).get("tag", [])
        elif kind == "testResult" and not aborted:
            where = (key.get("run", 1), key.get("shard", 1))
            self.results[label].setdefault(where, []).append(event["testResult"])
        elif kind == "testSummary" and not aborted:
            self.summaries[label] = event["testSummary"].get("overallStatus", "")
        elif kind == "targetCompleted" and not aborted:
            if event["completed"].get("success"):
                self.built += 1
            elif label not in self.broken:
                self.broken.append(label)
        elif kind == "buildFinished" and not aborted:
            self.exit_code = event["finished"].get("exitCode", {}).get("code", 0)
        elif abortion.get("reason") == "SKIPPED":
            if label and label not in self.incompatible:
                self.incompatible.append(label)
        elif abortion and abortion.get("reason") not in ("NO_BUILD", "INCOMPLETE", "USER_INTERRUPTED"):
            name = label or " ".join(key.get("pattern", [])) if isinstance(key, dict) else kind
            if kind == "targetCompleted" and label and label not in self.broken:
                self.broken.append(label)
            elif kind in ("pattern", "configuredLabel", "unconfiguredLabel", "targetConfigured") and name:
                self.problems.append((name, abortion.get("description", "").strip()))

    def is_test(self, label):
        return self.kinds.get(label, "").endswith("_test rule") or label in self.results


def reasons_for_skipping(labels, cuda):
    """A dictionary from labels to (reason, whether a library was not found), from one query of the dependencies."""
    reasons = {label: ("not for this configuration", False) for label in labels}
    if not labels:
        return reasons
    query = "deps(set(%s))" % " ".join(labels)
    command = ["bazel", "query", "--noimplicit_deps", "--output=graph", "--nograph:factored", "--noshow_progress", query]
    graph = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    edges = collections.defaultdict(list)
    for source, target in re.findall(r'^\s*"([^"]+)" -> "([^"]+)"', graph, re.M):
        edges[source].append(target.lstrip("@") if target.startswith("@//") else target)
    base = subprocess.run(["bazel", "info", "output_base"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    missing = {}  # target -> why it was not found; bazel/system_deps.bzl writes a line with a tab for each
    for line in text_of(os.path.join(base.stdout.strip(), "external", "sys", "missing.txt")).splitlines():
        name, _, why = line.partition("\t")
        missing["@sys//:" + name] = why
    for label in labels:
        seen, todo, culprits = {label}, [label], []
        while todo:
            node = todo.pop()
            if INCOMPATIBLE in edges[node]:
                culprits.append(node)
            for after in edges[node]:
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        only_cuda = [c for c in culprits if not c.startswith("@sys//")]
        libraries = sorted(c for c in culprits if c in missing)
        # In a build without CUDA, its libraries are not the reason.
        if only_cuda and not cuda:
            reasons[label] = ("compiled for CUDA only: needs a GPU with its driver and nvcc, or ANNULUS_CUDA=1", False)
        elif libraries:
            said = "; ".join("%s (%s)" % (c[len("@sys//:"):], missing[c]) for c in libraries)
            reasons[label] = ("not found: " + said, True)
    return reasons


def excerpt(log, cases):
    """The relevant part of a failing test's output: that of the failing cases, or else the last lines."""
    lines = log.rstrip().split("\n")
    while lines and (lines[0].startswith(("exec ${PAGER", "Executing tests from", "-----")) or not lines[0].strip()):
        lines.pop(0)
    shown = []
    for case in cases:
        begin = next((i for i, l in enumerate(lines) if re.match(r"\[ RUN +\] " + re.escape(case.name) + "$", l)), None)
        if begin is None:
            continue
        part = []
        for line in lines[begin + 1:]:
            if re.match(r"\[  FAILED  \]|\[ RUN ", line):
                break
            part.append(line)
        if len(part) > LINES_SHOWN:
            part = part[:LINES_SHOWN // 2] + ["... %d lines ..." % (len(part) - LINES_SHOWN)] + part[-LINES_SHOWN // 2:]
        shown += [lines[begin]] + part
        if len(shown) > 3 * LINES_SHOWN:
            return shown + ["... and more"]
    if shown or len(lines) <= LINES_SHOWN:
        return shown or lines
    return ["... %d lines ..." % (len(lines) - LINES_SHOWN)] + lines[-LINES_SHOWN:]


def skipped_lines(skipped):
    """Yields a line for each (test, reason); cases of one target with the same reason share a line."""
    groups = collections.OrderedDict()
    for name, reason in skipped:
        label, _, case = name.partition(" ")
        groups.setdefault((label, reason), []).append(case)
    for (label, reason), cases in groups.items():
        what = "%d cases, %s ..." % (len(cases), cases[0]) if len(cases) > 3 else ", ".join(cases)
        yield "%s: %s" % ((label + " " + what).strip(), reason)


def seconds_of(tries):
    """How long a test ran, all attempts together; None if its result came from a cache."""
    if any(t.get("cachedLocally") or t.get("executionInfo", {}).get("cachedRemotely") for t in tries):
        return None
    return sum(int(t.get("testAttemptDurationMillis", 0)) for t in tries) / 1000


def slowest_lines(seconds):
    """The targets that took longest, of a run of many: where to begin if the tests are to be faster."""
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST_SHOWN]
    return ["%5.0f s  %s" % (time, label) for label, time in slowest]


def indent(lines):
    return "\n".join("  " + l for l in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", help="the file of --build_event_json_file")
    parser.add_argument("--said", help="a file with the compiler's messages; shown if a target could not be built")
    parser.add_argument("--bazel-exit", type=int, default=0, help="Bazel's exit code")
    parser.add_argument("--ci", action="store_true",
                        help="second attempts and targets skipped because a library is missing are failures")
    parser.add_argument("--build", action="store_true",
                        help="a build without tests: a success counts as one, and each target that failed as one")
    args = parser.parse_args()
    run = Run(args.events)
    cuda = "--config=cuda" in run.options or "//bazel:cuda" in run.options

    passed, failed, skipped, failures, flaky = 0, 0, [], [], []
    left_out, seconds = 0, {}
    for label in sorted(run.kinds):
        if not run.is_test(label) or label in run.incompatible or label in run.broken or args.build:
            continue
        if not run.results[label]:
            # The test was built but not run: a filter left it out, or Bazel stopped.
            if "sweep" in run.tags.get(label, []) and label not in run.summaries:
                left_out += 1
            elif label in run.summaries:
                failed += 1
                failures.append((label, ["%s: did not run" % run.summaries[label]], ""))
            continue
        bad, log_path, attempts, said = [], "", 1, []
        for where in sorted(run.results[label]):
            tries = run.results[label][where]
            if seconds_of(tries) is not None:
                seconds[label] = seconds.get(label, 0) + seconds_of(tries)
            attempts = max(attempts, len(tries))
            result = tries[-1]
            files = {f.get("name"): path_of(f.get("uri", "")) for f in result.get("testActionOutput", [])}
            status = result.get("status", "NO_STATUS")
            log = text_of(files.get("test.log"))
            cases = gtest_cases(files.get("test.xml"))
            why = re.search(r"^SKIPPED(, A FAILURE IN CI)?: *(.*)$", log, re.M) if status == "PASSED" else None
            if cases is None or (why and not cases):
                refused = why and why.group(1) and args.ci
                cases, nothing_else = ([], False) if why else cases_in(log)
                if status != "PASSED" or not nothing_else:
                    cases.append(Case("", "failed" if refused or status != "PASSED" else "skipped" if why else "passed",
                                      why.group(2) if why else ""))
            for case in cases:
                if case.result == "skipped":
                    skipped.append(((label + " " + case.name).strip(), case.message or "no reason given"))
            passed += sum(c.result == "passed" for c in cases)
            here = [c for c in cases if c.result == "failed"]
            if status != "PASSED" and not here:
                # The test died, ran out of time, or failed after its last case.
                here = [Case("", "failed", status)]
            if here:
                bad += here
                log_path = files.get("test.log") or ""
                said += excerpt(log, here)
                if status == "TIMEOUT":
                    said.append("(ran longer than its time limit)")
        failed += len(bad)
        if bad:
            names = [c.name for c in bad if c.name]
            failures.append((label + (": " + ", ".join(names) if names else ""), said, log_path))
        elif attempts > 1 or run.summaries.get(label) == "FLAKY":
            if args.ci:
                failed += 1
                passed = max(passed - 1, 0)
                failures.append((label + ": needed a second attempt", [], ""))
            else:
                flaky.append((label, "passed, but needed a second attempt"))

    reasons = reasons_for_skipping([l for l in run.incompatible if args.ci or run.is_test(l)], cuda)
    wanting = []
    for label, (reason, library) in sorted(reasons.items()):
        if library and args.ci:
            failed += 1
            wanting.append((label, reason))
        elif run.is_test(label) and not args.build:
            skipped.append((label, reason))

    failed += len(run.broken) + len(run.problems)
    if args.bazel_exit not in (0, 4) and not failed:
        failed += 1
        failures.append(("Bazel ended with code %d" % args.bazel_exit, text_of(args.said).split("\n")[-LINES_SHOWN:], ""))
    if args.build and not failed:
        passed = 1

    for label, said, log_path in failures:
        print("\nFAILED %s" % label)
        if said:
            print(indent(said))
        if log_path:
            print("  (the whole log: %s)" % log_path)
    if run.broken or run.problems:
        said = text_of(args.said).strip()
        if said:
            print("\n" + said)
    for name, message in run.problems:
        print("\nFAILED %s%s" % (name, ": " + message if message else ""))
    if run.broken:
        print("\nFAILED, could not be built:\n" + indent(sorted(run.broken)))
    if wanting:
        print("\nFAILED, skipped because a library is missing:\n" + indent("%s: %s" % w for w in wanting))
    if skipped:
        print("\n%d skipped:\n%s" % (len(skipped), indent(skipped_lines(skipped))))
    if flaky:
        print("\n" + "\n".join("%s: %s" % f for f in flaky))
    if len(seconds) > SLOWEST_SHOWN:
        print("\nslowest of %d targets that ran:\n%s" % (len(seconds), indent(slowest_lines(seconds))))
    if left_out:
        print("\nnot run: %d long sweep%s (./annulus test --all)" % (left_out, "" if left_out == 1 else "s"))
    if args.bazel_exit == 4 or not (passed or failed or skipped):
        print("no test matches the given targets and filters")
    print("%d passed, %d failed" % (passed, failed))
    sys.stdout.flush()
    if failed:
        return 1
    return 0 if passed or skipped else 4


if __name__ == "__main__":
    sys.exit(main())
