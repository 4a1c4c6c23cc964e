#!/usr/bin/env python3
"""Checks the tree against the rooms of docs/architecture.md: which room uses which, Bazel's visibility, and sizes.

The table under "Rooms" is parsed. Its first column names rooms (folders with their own files); its third column names
the rooms whose headers the files of a room may include, separated by commas, or is `all`. An arrow points down the
table. The test checks that

- each `#include "..."` stays in its room or follows an arrow of the page;
- a target depends directly on the targets whose headers it includes, so that Bazel checks their visibility;
- a target is visible only to the rooms that the page allows, or is public if docs/embedding.md offers it to users;
- the files that CONTRIBUTING.md names under "Where is ...?" exist;
- no room has more than 25 files, and no file that is written by hand more than 500 lines, except those listed below.

It reads the working tree: arrows_test.py PATH/docs/architecture.md.
"""

import ast
import os
import re
import sys
import unittest

PAGE = "docs/architecture.md"
ROOMS = "bazel/rooms.bzl"
USERS = "users()"  # a function of rooms.bzl: the rooms that the page allows
OFFER = "docs/embedding.md"
GUIDE = "CONTRIBUTING.md"
MOST_FILES = 25
MOST_LINES = 500
WRITTEN = (".cc", ".h", ".cu", ".py", ".sh", ".bzl", ".md")
# Rooms and files above the limits, each with its reason.
LARGE_ROOMS = {
    "integration_tests": "a file for each thing that several processes are tried for",
    "launcher": "a file for each verb",
    "tests/mutants": "one small patch for each planted fault, listed by a tool",
}
LARGE_FILES = {
}
# Rooms whose files may use everything, and which no other room may use.
ABOVE_ALL = ("tests", "integration_tests", "examples")
NOT_OURS = ("third_party", "runs")  # and every folder whose name begins with a dot or with bazel-


def read_tree(root):
    """Returns {path: text} of all files of the tree; text is None for kinds of files that are not checked."""
    files = {}
    for folder, folders, names in os.walk(root):
        inside = os.path.relpath(folder, root)
        folders[:] = [f for f in folders if not f.startswith((".", "bazel-", "__pycache__"))
                      and not (inside == "." and f in NOT_OURS)]
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.normpath(os.path.join(inside, name))
            text = None
            if name.endswith(WRITTEN) or name in ("BUILD", "annulus"):
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    text = f.read()
            files[path] = text
    return files


class Table:
    """The table of rooms, as the page has it."""

    def __init__(self, text):
        self.order = []  # rooms, from the top
        self.uses = {}   # room: the rooms that it may use, or None for all
        self.faults = []
        section = re.search(r"^## Rooms\n(.*?)(?=^## )", text, re.S | re.M)
        rows = re.findall(r"^\|(.*)\|$", section.group(1), re.M) if section else []
        if not rows:
            self.faults.append("%s has no table under \"## Rooms\"" % PAGE)
        for row in rows[2:]:
            cells = [c.strip() for c in row.split("|")]
            if len(cells) != 3:
                self.faults.append("expected three columns: |%s|" % row)
                continue
            uses = None if cells[2] == "all" else [u.strip() for u in cells[2].split(",") if u.strip()]
            for room in re.findall(r"`([^`]+)/`", cells[0]):
                self.order.append(room)
                self.uses[room] = uses
        for i, room in enumerate(self.order):
            for used in self.uses[room] or ():
                if used not in self.uses:
                    self.faults.append("`%s/` may use \"%s\": there is no such room in the table" % (room, used))
                elif used in self.order[:i + 1]:
                    self.faults.append("`%s/` may use %s, which stands above it: arrows point down" % (room, used))

    def allows(self, room, used):
        if room == used:
            return True
        if room.split("/")[0] in ABOVE_ALL:
            return used.split("/")[0] not in ABOVE_ALL or room.split("/")[0] != "examples"
        if used.split("/")[0] in ABOVE_ALL or room not in self.uses:
            return False
        return self.uses[room] is None or used in self.uses[room]


class Target:
    def __init__(self, package, call, default):
        words = {k.arg: k.value for k in call.keywords}
        self.kind = call.func.id
        self.package = package
        self.name = ast.literal_eval(words["name"])
        self.label = "//%s:%s" % (package, self.name)

        def texts(key):  # with what bazel/unit.bzl adds for builds with and without CUDA
            return [n.value for k in (key, "cuda_" + key, "cpu_" + key) if k in words for n in ast.walk(words[k])
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                    and not n.value.startswith(("//bazel:with_", "//conditions:"))]

        self.headers = ["%s/%s" % (package, f) for f in texts("hdrs")]
        self.files = self.headers + ["%s/%s" % (package, f) for f in texts("srcs")]
        self.deps = [full_label(package, d.replace("@annulus//", "//")) for d in texts("deps") + texts("binary")]
        self.visibility = texts("visibility") if "visibility" in words else default


def full_label(package, label):
    if label.startswith(":"):
        return "//%s%s" % (package, label)
    if label.startswith("//") and ":" not in label:
        return "%s:%s" % (label, label.rsplit("/", 1)[-1])
    return label


def read_targets(files):
    targets = []
    for path, text in files.items():
        if os.path.basename(path) != "BUILD":
            continue
        package, default = os.path.dirname(path), ["//visibility:private"]
        calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        for call in calls:
            if call.func.id == "package":
                default = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant)]
                if any(isinstance(n, ast.Name) and n.id == "users" for n in ast.walk(call)):
                    default = [USERS]
        for call in calls:
            words = {k.arg: k.value for k in call.keywords}
            if call.func.id.startswith(("cc_", "cuda_")) and isinstance(words.get("name"), ast.Constant):
                targets.append(Target(package, call, default))
    return targets


def includes(files):
    """Yields (file, header) for each include of a header of the tree."""
    for path, text in files.items():
        if not path.endswith((".cc", ".h", ".cu")):
            continue
        for header in re.findall(r'^\s*#\s*include "([^"]+)"', text, re.M):
            if header in files:
                yield path, header


def check_arrows(files):
    table = Table(files[PAGE])
    faults = list(table.faults)
    folders = {os.path.dirname(p) for p, t in files.items() if p.endswith((".cc", ".h", ".cu"))}
    for folder in sorted(folders):
        if folder not in table.uses and folder.split("/")[0] not in ABOVE_ALL:
            faults.append("%s/ is not in the table of rooms (%s)" % (folder, PAGE))
    for room in table.order:
        if not any(p.startswith(room + "/") for p in files):
            faults.append("the table of rooms (%s) has `%s/`, which is not there" % (PAGE, room))
    for path, header in includes(files):
        room, used = os.path.dirname(path), os.path.dirname(header)
        if not table.allows(room, used):
            faults.append("%s includes %s: %s may not use %s (%s)" % (path, header, room, used, PAGE))
    return faults


def check_deps(files):
    """Returns each include whose target is not a direct dependency."""
    faults = []
    targets = read_targets(files)
    owners, by_label = {}, {t.label: t for t in targets}
    for target in targets:
        for path in target.files:
            owners.setdefault(path, []).append(target)
    wanted = {}
    for path, header in includes(files):
        wanted.setdefault(path, []).append(header)
    for target in targets:
        reached = set(target.files)
        for dep in target.deps:
            if dep in by_label:
                reached.update(by_label[dep].headers)
        for path in target.files:
            for header in wanted.get(path, ()):
                if header not in reached and owners.get(header):
                    faults.append("%s (%s) includes %s: add %s to its deps" % (
                        target.label, path, header, " or ".join(o.label for o in owners[header] if header in o.headers) or
                        "a target with it in hdrs"))
    return faults


def check_visibility(files):
    table = Table(files[PAGE])
    offered = {full_label("", l) for l in re.findall(r"`@annulus(//[^`]+)`", files[OFFER])}
    packages = {os.path.dirname(p) for p in files if os.path.basename(p) == "BUILD"}
    faults = []
    rooms = ast.literal_eval(re.search(r"^ROOMS = (\{.*?^\})", files[ROOMS], re.S | re.M).group(1))
    for room in sorted(set(rooms) | {r for r in table.order if r in packages}):
        said = table.uses.get(room)
        if said is not None and (room in rooms or said) and sorted(said) != sorted(rooms.get(room, ["(nothing)"])):
            faults.append("%s may use, by %s: %s; by %s: %s" % (
                room, PAGE, ", ".join(sorted(said)), ROOMS, ", ".join(sorted(rooms.get(room, ["(nothing)"])))))
        if room not in table.uses:
            faults.append("%s has %s, which is no row of %s" % (ROOMS, room, PAGE))
    for target in read_targets(files):
        room = target.package
        if room.split("/")[0] in ABOVE_ALL or room not in table.uses:
            continue
        for grant in target.visibility:
            if grant in ("//visibility:private", USERS):
                continue
            if grant == "//visibility:public":
                if target.label not in offered and target.kind != "cc_binary":
                    faults.append("%s is public, but %s does not offer it" % (target.label, OFFER))
                continue
            inside = full_label(room, grant)[2:]
            package, kind = inside.split(":")
            who = [p for p in packages if p == package or kind == "__subpackages__" and (p + "/").startswith(package + "/")]
            if not who:
                faults.append("%s is visible to %s, which is not there" % (target.label, grant))
            for user in who:
                if not table.allows(user, room) and user != room:
                    faults.append("%s is visible to %s: %s may not use %s (%s)" % (target.label, grant, user, room, PAGE))
    return faults


def check_named_files(files):
    """Returns the files that CONTRIBUTING.md names under "Where is ...?" and that do not exist."""
    section = re.search(r"^## Where is ...\?\n(.*?)(?=^## )", files[GUIDE], re.S | re.M)
    if not section:
        return ["%s has no section \"Where is ...?\"" % GUIDE]
    return ["%s: %s is not there" % (GUIDE, name) for name in re.findall(r"`([\w./-]+/[\w.-]*)`", section.group(1))
            if name not in files and not any(path.startswith(name) for path in files if name.endswith("/"))]


def check_sizes(files, large_rooms=None, large_files=None):
    large_rooms = LARGE_ROOMS if large_rooms is None else large_rooms
    large_files = LARGE_FILES if large_files is None else large_files
    here = os.path.basename(__file__)
    lines = {path: text.count("\n") for path, text in files.items() if text is not None}
    counts = {}
    for path in files:
        counts[os.path.dirname(path)] = counts.get(os.path.dirname(path), 0) + 1
    faults = ["%s has %d lines, more than %d: divide it, or say in %s why not" % (path, n, MOST_LINES, here)
              for path, n in lines.items() if n > MOST_LINES and path not in large_files]
    faults += ["%s/ has %d files, more than %d: divide it, or say in %s why not" % (room, n, MOST_FILES, here)
               for room, n in counts.items() if n > MOST_FILES and room not in large_rooms]
    faults += ["%s is small enough or gone: it needs no exception in %s" % (path, here)
               for path in large_files if lines.get(path, 0) <= MOST_LINES]
    faults += ["%s/ is small enough or gone: it needs no exception in %s" % (room, here)
               for room in large_rooms if counts.get(room, 0) <= MOST_FILES]
    return faults


ROOT = os.path.dirname(os.path.dirname(os.path.realpath(sys.argv.pop(1)))) if len(sys.argv) > 1 else ""
FILES = read_tree(ROOT) if ROOT else {}


class Rooms(unittest.TestCase):
    def none(self, faults):
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_includes_follow_the_arrows_of_the_page(self):
        self.none(check_arrows(FILES))

    def test_includes_come_from_direct_dependencies(self):
        self.none(check_deps(FILES))

    def test_visibility_follows_the_page(self):
        self.none(check_visibility(FILES))

    def test_guide_names_existing_files(self):
        self.none(check_named_files(FILES))

    def test_rooms_and_files_stay_within_their_limits(self):
        self.none(check_sizes(FILES))


class Planted(unittest.TestCase):
    """Plants faults in the files that were read, each of which must be found."""

    def found(self, check, changes, words):
        files = dict(FILES)
        for path, change in changes.items():
            files[path] = change(files.get(path) or "")
            self.assertNotEqual(files[path], FILES.get(path), path)
        faults = check(files)
        self.assertTrue(any(words in f for f in faults), faults)

    @staticmethod
    def include(header):
        return lambda text: '#include "%s"\n%s' % (header, text)

    @staticmethod
    def row(room, change):
        return lambda text: re.sub(r"(?m)^\| `%s/`.*$" % room, lambda m: change(m.group()), text)

    def test_finds_include_that_the_page_does_not_allow(self):
        self.found(check_arrows, {"attention/plan/plan.h": self.include("comm/communicator.h")},
                   "attention/plan may not use comm")

    def test_finds_include_of_a_higher_room(self):
        self.found(check_arrows, {"common/error.h": self.include("training/trainer.h")}, "common may not use training")

    def test_finds_benchmark_in_the_launcher(self):
        self.found(check_arrows, {"launcher/verbs.cc": self.include("benchmarks/report.h")}, "launcher may not use benchmarks")

    def test_finds_test_header_in_the_program(self):
        self.found(check_arrows, {"comm/agreement.cc": self.include("tests/comm/suite.h")}, "comm may not use tests/comm")

    def test_finds_row_that_points_up(self):
        self.found(check_arrows, {PAGE: self.row("common", lambda r: r.rsplit("|", 2)[0] + "| memory |")},
                   "which stands above it")

    def test_finds_room_without_a_row(self):
        self.found(check_arrows, {PAGE: self.row("memory", lambda r: "")}, "memory/ is not in the table")

    def test_finds_row_without_a_room(self):
        self.found(check_arrows, {PAGE: self.row("memory", lambda r: r + "\n| `pools/` | x | common |")},
                   "`pools/`, which is not there")

    def test_finds_unknown_room_in_a_row(self):
        self.found(check_arrows, {PAGE: self.row("memory", lambda r: r.rsplit("|", 2)[0] + "| common (a little) |")},
                   "no such room")

    def test_finds_missing_direct_dependency(self):
        self.found(check_deps, {"modules/BUILD": lambda t: t.replace('        "//memory:', '        "//gone:')},
                   "//memory")

    def test_finds_public_target_that_is_not_offered(self):
        self.found(check_visibility, {"attention/kernels/BUILD": lambda t: t.replace("users())", '["//visibility:public"])')},
                   "does not offer it")

    def test_finds_target_visible_to_a_forbidden_room(self):
        self.found(check_visibility, {"attention/kernels/BUILD": lambda t: t.replace("users())", '["//topology:__pkg__"])')},
                   "topology may not use attention/kernels")

    def test_finds_difference_between_the_page_and_bazel(self):
        self.found(check_visibility, {ROOMS: lambda t: t.replace('"topology": ["common"]', '"topology": ["common", "memory"]')},
                   "topology may use, by docs/architecture.md: common; by bazel/rooms.bzl: common, memory")

    def test_finds_guide_entry_that_moved(self):
        self.found(check_named_files, {GUIDE: lambda t: t.replace("`config/reading.cc`", "`config/read.cc`")},
                   "config/read.cc is not there")

    def test_finds_unneeded_exception(self):
        for exceptions in ({"large_files": {"common/error.h": "x"}}, {"large_rooms": {"common": "x"}}):
            self.assertTrue(any("needs no exception" in f for f in check_sizes(FILES, **exceptions)), exceptions)

    def test_finds_file_that_is_too_long(self):
        self.found(check_sizes, {"common/error.h": lambda t: t + "\n" * 501}, "common/error.h has")

    def test_finds_room_with_too_many_files(self):
        self.found(check_sizes, {"common/x%d.h" % i: lambda t: "//" for i in range(25)}, "common/ has")


if __name__ == "__main__":
    unittest.main()
