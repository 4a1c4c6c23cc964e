#!/usr/bin/env python3
"""./annulus test --mutants [NAME...] [BAZEL OPTIONS]: checks that the tests are able to fail.

Each tests/mutants/NAME.patch plants one fault. It is applied to a copy of the tree with its uncommitted changes
(.bazel/copy-for-mutants, never to the tree itself), and the test named in its first lines must fail by an assertion:

    # What is wrong with it: one sentence.
    # Killed by: //tests/attention/kernels:kernel_parts_test --test_filter=Merge.AnyOrderOfPartsGivesTheWhole

There may be several lines "Killed by", each of whose tests must fail, and options of Bazel after a target, such as
--config=tsan. These count as failures: a mutant that survives or does not compile, a patch that does not fit the tree,
and a named test that does not exist or fails without the patch. The last line is "N passed, N failed".

    --list     shows the mutants, what is wrong with them and what kills them
    --check    checks only that each patch fits the tree and that the named tests exist; builds nothing (a test runs it)

Called by tools/test.sh.
"""
import argparse
import difflib
import fcntl
import fnmatch
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import test_report  # noqa: E402

FOLDER = "tests/mutants"
# Two folders deep, because Bazel takes a folder beside its own links for one of its outputs, and one of these links is
# named like the tree's folder.
COPY = ".bazel/copy-for-mutants/tree"
# Files that a build needs and that git ignores; tools/setup.sh or the user writes them.
SETUP = [".bazelrc.deps", ".bazelrc.user"]
INTERRUPTED = 130
# Messages that count as failed assertions although GoogleTest does not report them.
ASSERTIONS = re.compile(r"(WARNING|ERROR): \w*Sanitizer|: runtime error: |Assertion [`'].*' failed")


class Unfit(Exception):
    """A patch that cannot be read, or that does not fit the tree."""


class Killer:
    """A line "Killed by": a target, a GoogleTest filter (or ""), and other options of Bazel."""

    def __init__(self, words):
        self.target = words[0]
        self.filter = "".join(w.split("=", 1)[1] for w in words[1:] if w.startswith("--test_filter="))
        self.options = tuple(w for w in words[1:] if not w.startswith("--test_filter="))

    def __str__(self):
        return " ".join((self.target,) + self.options + ((self.filter,) if self.filter else ()))

    def names(self, case):
        return not self.filter or any(fnmatch.fnmatchcase(case, pattern) for pattern in self.filter.split(":"))


class Mutant:
    """A patch: what is wrong with it, and the tests that kill it."""

    def __init__(self, path):
        self.name, self.path = os.path.basename(path)[: -len(".patch")], os.path.abspath(path)
        self.wrong, self.killers = "", []
        with open(path) as f:
            lines = f.read().split("\n")
        self._read_head(lines)
        if not self.wrong or not self.killers or not any(line.startswith("@@ ") for line in lines):
            raise Unfit('needs "# What is wrong with it: ...", "# Killed by: //TARGET ..." and a diff')

    def apply(self, root, *options):
        """Plants the fault in the tree. Raises Unfit, and changes nothing, if the patch does not fit."""
        # The copy for mutants lies within a repository, for which git would take the paths otherwise.
        environment = dict(os.environ, GIT_CEILING_DIRECTORIES=os.path.dirname(os.path.realpath(root)))
        done = subprocess.run(["git", "apply", *options, self.path], cwd=root, env=environment, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            raise Unfit("does not fit any more: re-make it (%s)" % done.stderr.strip().replace("\n", "; "))

    def _read_head(self, lines):
        at, last = 0, None
        while at < len(lines) and (lines[at].startswith("#") or not lines[at].strip()):
            text = lines[at].lstrip("#").strip()
            key, _, value = text.partition(": ")
            if key == "What is wrong with it":
                self.wrong, last = value, "wrong"
            elif key == "Killed by":
                words = shlex.split(value)
                if not words or not re.fullmatch(r"//[\w/.-]*:[\w.-]+", words[0]):
                    raise Unfit('"Killed by: %s" does not begin with a target, //FOLDER:NAME' % value)
                self.killers.append(Killer(words))
                if "-" in self.killers[-1].filter:
                    raise Unfit('"Killed by: %s": a filter names what to run, not what to leave out' % value)
                last = "killers"
            elif text and last == "wrong":
                self.wrong += " " + text
            elif text:
                raise Unfit('has a first line that says nothing: "%s"' % text)
            at += 1


def read_mutants(root, names):
    """The named mutants, or all, and a dictionary from the names of those that cannot be read to the reasons."""
    there = sorted(f[: -len(".patch")] for f in os.listdir(os.path.join(root, FOLDER)) if f.endswith(".patch"))
    for name in names:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = "did you mean %s?" % near[0] if near else "--list shows them"
            sys.exit("annulus test: no mutant %s in %s; %s" % (name, FOLDER, hint))
    mutants, bad = [], {}
    for name in names or there:
        try:
            mutants.append(Mutant(os.path.join(root, FOLDER, name + ".patch")))
        except Unfit as error:
            bad[name] = str(error)
    return mutants, bad


def whether_fits(mutant, root):
    """The reason why the patch does not fit the tree, or ""."""
    try:
        mutant.apply(root, "--check")
        return ""
    except Unfit as error:
        return str(error)


def whether_named_tests_are_there(mutant, root):
    """A message about a named test that does not exist, or "". It reads BUILD files, macros beside them and tests."""
    for killer in mutant.killers:
        package, name = killer.target[2:].split(":")
        texts, tests = [], ""
        folder = os.path.join(root, package)
        for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            if file.startswith("BUILD") or file.endswith(".bzl"):
                texts.append(test_report.text_of(os.path.join(folder, file)))
        # Tests that several programs share are in packages of their own, such as comm/testing.
        shared = {os.path.join(root, p) for text in texts for p in re.findall(r'"//([\w/]+/testing)[:"]', text)}
        for place in sorted({folder, *shared}):
            for file in sorted(os.listdir(place)) if os.path.isdir(place) else []:
                if file.endswith((".cc", ".h")):
                    tests += test_report.text_of(os.path.join(place, file))
        declared = [n for text in texts for n in re.findall(r'\bname = "([^"]+)"', text)]
        for names in (n for text in texts for n in re.findall(r"for name(?:, \w+)* in [\[{]([^]}]*)[\]}]", text)):
            declared += re.findall(r'"([^"]+)"', names)
        if not any(re.fullmatch(re.escape(n).replace("%s", ".*").replace("%d", r"\d+"), name) for n in declared):
            return "names a test that is not there: %s" % killer.target
        for pattern in killer.filter.split(":"):
            case = re.fullmatch(r"(?:\w+/)?(\w+)\.(\w+)(?:/\w+)?", pattern)  # only patterns without *
            if case and not re.search(r"\b%s,\s*%s\s*[,)]" % case.groups(), tests):
                return "names a case that is not there: %s in %s" % (pattern, killer.target)
    return ""


def check(root, names):
    mutants, bad = read_mutants(root, names)
    for mutant in mutants:
        why = whether_fits(mutant, root) or whether_named_tests_are_there(mutant, root)
        if why:
            bad[mutant.name] = why
    for name in sorted(bad):
        print("FAILED %s/%s.patch: %s" % (FOLDER, name, bad[name]))
    print("%d passed, %d failed" % (len({m.name for m in mutants} - set(bad)), len(bad)))
    return 1 if bad else 0


def copy_tree(root, copy):
    """Makes `copy` hold exactly the files that git tracks or would track, as they are now; Bazel's files stay."""
    said = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                          stdout=subprocess.PIPE, check=False)
    if said.returncode:
        sys.exit("annulus test: --mutants needs git and its repository, to know which files belong to the tree")
    files = {f for f in said.stdout.decode().split("\0") if f and os.path.lexists(os.path.join(root, f))}
    files |= {f for f in SETUP if os.path.exists(os.path.join(root, f))}
    for folder, folders, names in os.walk(copy):
        here = os.path.relpath(folder, copy)
        if here == ".":
            folders[:] = [f for f in folders if f not in (".bazel", ".venv")]
        for name in names:
            if os.path.normpath(os.path.join(here, name)) not in files:
                os.remove(os.path.join(folder, name))
    for file in files:
        source, target = os.path.join(root, file), os.path.join(copy, file)
        if os.path.isdir(source) and not os.path.islink(source):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(source):
            if not os.path.islink(target) or os.readlink(target) != os.readlink(source):
                if os.path.lexists(target):
                    os.remove(target)
                os.symlink(os.readlink(source), target)
            continue
        with open(source, "rb") as f:
            data = f.read()
        if os.path.isfile(target) and not os.path.islink(target):
            with open(target, "rb") as f:
                if f.read() == data and os.access(source, os.X_OK) == os.access(target, os.X_OK):
                    continue  # writing it would make Bazel read it again
        shutil.copy(source, target)
    if os.path.isdir(os.path.join(root, ".venv")) and not os.path.lexists(os.path.join(copy, ".venv")):
        os.symlink(os.path.join(root, ".venv"), os.path.join(copy, ".venv"))


class Outcome:
    """The result of one target: "passed", "failed" (by an assertion), "broken" (does not build), "died", ..."""

    def __init__(self, result, cases=(), said=""):
        self.result, self.cases, self.said = result, list(cases), said


class Runner:
    def __init__(self, copy, options):
        self.copy, self.options, self.child = copy, options, None

    def interrupt(self, *_):
        if self.child:
            self.child.send_signal(signal.SIGINT)  # Bazel then ends its test
        raise KeyboardInterrupt

    def bazel(self, *words):
        # In a separate session, so that Ctrl-C reaches Bazel only once, through interrupt().
        self.child = subprocess.Popen(["bazel"] + list(words), cwd=self.copy, start_new_session=True, text=True,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = self.child.communicate()
        code, self.child = self.child.returncode, None
        if code in (8, 130):
            raise KeyboardInterrupt
        return said

    def test(self, targets, filters, options):
        """Runs Bazel once. Returns a dictionary from targets to Outcomes."""
        with tempfile.TemporaryDirectory() as work:
            events = os.path.join(work, "events.json")
            said = self.bazel("test", "--keep_going", "--curses=no", "--color=no", "--noshow_progress",
                              "--test_output=summary", "--build_event_json_file=" + events, *self.options, *options,
                              *(["--test_filter=" + filters] if filters else []), "--", *targets)
            run = test_report.Run(events)
            return {target: self.outcome(run, target, said) for target in targets}

    @staticmethod
    def outcome(run, target, said):
        tail = said.strip().split("\n")[-40:]
        if target in run.incompatible:
            return Outcome("skipped", said="cannot be built here")
        if target not in run.kinds:
            return Outcome("missing", said="\n".join(tail))
        if target in run.broken:
            return Outcome("broken", said="\n".join(l for l in said.split("\n") if "error" in l.lower()) or tail[-1])
        attempts = [tries[-1] for _, tries in sorted(run.results[target].items())]
        if not attempts:
            return Outcome("missing", said="\n".join(tail))
        cases, died, late, failed = [], "", False, False
        for result in attempts:
            files = {f.get("name"): test_report.path_of(f.get("uri", "")) for f in result.get("testActionOutput", [])}
            found = test_report.gtest_cases(files.get("test.xml"))
            cases += found or []
            status = result.get("status", "NO_STATUS")
            if status == "PASSED":
                continue
            log = test_report.text_of(files.get("test.log"))
            googles = run.kinds[target] == "cc_test rule"
            if status == "TIMEOUT":
                late = True
            elif not googles or any(c.result == "failed" for c in found or []) or ASSERTIONS.search(log):
                failed = True
            else:
                died = "\n".join(log.strip().split("\n")[-12:]) or status
        if failed:
            return Outcome("failed", cases)
        if died or late:
            return Outcome("died" if died else "late", cases, died)
        return Outcome("passed", cases)

    def baseline(self, mutants):
        """Runs the named tests without patches; they must exist and pass. Returns a dictionary from (target, filter,
        options) to the reason why the test cannot judge a mutant, or ""."""
        killers = {(k.target, k.filter, k.options): k for m in mutants for k in m.killers}
        groups = {}
        for killer in killers.values():
            groups.setdefault((killer.options, bool(killer.filter)), []).append(killer)
        problems = {}
        for (options, filtered), group in sorted(groups.items()):
            # One run for the whole group, in which each target runs the cases that any of the filters matches.
            filters = ":".join(sorted({k.filter for k in group})) if filtered else ""
            outcomes = self.test(sorted({k.target for k in group}), filters, options)
            for killer in group:
                outcome = outcomes[killer.target]
                named = [c for c in outcome.cases if killer.names(c.name)]
                why = ""
                if outcome.result in ("broken", "missing", "skipped"):
                    why = {"broken": "does not compile without the patch, either",
                           "missing": "is not there, or Bazel cannot run it",
                           "skipped": "cannot be built here"}[outcome.result] + "\n" + outcome.said
                elif outcome.cases and not named:
                    why = "has no case that its filter matches"
                elif any(c.result == "failed" for c in named) or (not outcome.cases and outcome.result != "passed"):
                    why = "fails without the patch, too\n" + outcome.said
                elif named and all(c.result == "skipped" for c in named):
                    why = "is skipped here: " + named[0].message
                problems[killer.target, killer.filter, killer.options] = why
        return problems

    def judge(self, mutant, problems):
        """Returns whether the mutant is killed, and a message."""
        said = []
        mutant.apply(self.copy)
        try:
            for killer in mutant.killers:
                problem = problems[killer.target, killer.filter, killer.options]
                if problem:
                    return False, "%s %s" % (killer, problem)
                outcome = self.test([killer.target], killer.filter, killer.options)[killer.target]
                if outcome.result != "failed":
                    return False, {
                        "passed": "survived: %s passes with it" % killer,
                        "broken": "does not compile\n" + outcome.said,
                        "died": "%s died without an assertion that failed\n%s" % (killer, outcome.said),
                        "late": "%s ran longer than its time limit: no assertion failed" % killer,
                    }.get(outcome.result, "%s did not run\n%s" % (killer, outcome.said))
                said.append("%s%s" % (killer.target, "".join(
                    " " + c.name for c in outcome.cases if c.result == "failed")[:160]))
        finally:
            mutant.apply(self.copy, "--reverse")
        return True, "; ".join(said)


def run_all(root, names, options):
    mutants, bad = read_mutants(root, names)
    for mutant in list(mutants):
        why = whether_fits(mutant, root)
        if why:
            bad[mutant.name] = why
            mutants.remove(mutant)
    copy = os.path.join(os.path.realpath(root), COPY)
    os.makedirs(copy, exist_ok=True)
    if os.path.realpath(copy) != copy:
        sys.exit("annulus test: %s leads to %s; the copy for mutants must be a separate folder" %
                 (copy, os.path.realpath(copy)))
    lock = open(copy + ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("annulus test: another run of the mutants uses %s; wait until it ends" % copy)
    runner = Runner(copy, options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, runner.interrupt)
    killed, interrupted = 0, False
    try:
        copy_tree(root, copy)
        if mutants:
            print("the named tests of %d mutants, without them" % len(mutants), flush=True)
            problems = runner.baseline(mutants)
        for number, mutant in enumerate(mutants, 1):
            began = time.monotonic()
            dead, said = runner.judge(mutant, problems)
            if dead:
                killed += 1
            else:
                bad[mutant.name] = said
            print("[%d/%d] %s %s (%.0f s): %s" % (number, len(mutants), "killed" if dead else "FAILED", mutant.name,
                                                  time.monotonic() - began, said.split("\n")[0]), flush=True)
    except KeyboardInterrupt:
        interrupted = True
        if runner.child:
            runner.child.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # The Bazel server of the copy is stopped, because it takes memory and is not used for anything else.
        subprocess.run(["bazel", "shutdown"], cwd=copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       check=False)
    for name in sorted(bad):
        print("\nFAILED %s: %s" % (name, bad[name].replace("\n", "\n  ")))
    if interrupted:
        print("tests: interrupted", file=sys.stderr)
        return INTERRUPTED
    print("%d passed, %d failed" % (killed, len(bad)))
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(prog="annulus test --mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of mutants (default: all)")
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.realpath(__file__))),
                        help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    names = [os.path.basename(n)[: -len(".patch")] if n.endswith(".patch") else n for n in args.names]
    if args.list:
        mutants, bad = read_mutants(args.root, names)
        for mutant in mutants:
            print("%s: %s\n    %s" % (mutant.name, mutant.wrong, "\n    ".join(str(k) for k in mutant.killers)))
        for name, why in sorted(bad.items()):
            print("%s: %s" % (name, why))
        return 1 if bad else 0
    if args.check:
        return check(args.root, names)
    return run_all(args.root, names, options)


if __name__ == "__main__":
    sys.exit(main())
