#!/usr/bin/env python3
"""Checks the tree against bazel/layers.bzl: which layer and package uses which, Bazel's visibility, and sizes.

The test checks that

- each `#include "..."` goes to a layer on the left, or inside its own layer where layers.bzl lists it; what layers.bzl
  lists is used, makes no circle, and is not more than MOST_USES;
- a target depends directly on the targets whose headers it includes, so that Bazel checks their visibility, and on
  nothing of its own package that is not there;
- a target is visible only to packages that layers.bzl allows, or is public if docs/reference/cpp.md offers it to users;
- no two types of the product have one name in one namespace, which a program that links both could not tell apart;
- the targets WITHOUT_LIBTORCH reach no LibTorch through their dependencies;
- the files that docs/internals/where.md names exist;
- no package has more than 25 names (a header with its sources is one), no file that is written by hand more than 500
  lines, except those listed below.

It reads the working tree: layers_test.py PATH/docs/index.md.
"""

import ast
import os
import re
import sys
import unittest

LAYERS = "bazel/layers.bzl"
USERS = "users()"  # a function of layers.bzl: the packages that it allows
MOST_USES = 110
OFFER = "docs/reference/cpp.md"
GUIDE = "docs/internals/where.md"
MOST_FILES = 25
MOST_LINES = 500
WRITTEN = (".cc", ".h", ".cu", ".py", ".sh", ".bzl", ".md")
# Packages and files above the limits, each with its reason.
LARGE_PACKAGES = {
    "integration_tests": "a file for each thing that several processes are tried for",
    "tests/mutants": "one small patch for each planted fault, listed by a tool",
}
LARGE_FILES = {
}
# Packages whose files may use everything, and which no other package may use.
ABOVE_ALL = ("tests", "integration_tests", "examples")
# Plans, configurations and descriptions are also made where there is no LibTorch.
WITHOUT_LIBTORCH = ("//comm/testing:fault_plan", "//attention/pattern:pattern", "//attention/plan:plan", "//attention/proof:verifier", "//attention/modules:rotary_spec",
                    "//runtime/model:description", "//runtime/config:config", "//launcher/topology:topology",
                    "//runtime/tasks:tasks", "//runtime/report:live_report", "//common/simd:simd", "//memory:storage", "//memory:charge", "//memory:caches")
NOT_OURS = ("runs",)  # and every folder whose name begins with a dot or with bazel-


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


class Layers:
    """The order of the layers and what may use what, as bazel/layers.bzl has it."""

    def __init__(self, text):
        value = lambda name: ast.literal_eval(re.search(r"^%s = ([\[{].*?^[\]}])" % name, text, re.S | re.M).group(1))
        self.levels = {layer: i for i, level in enumerate(value("LAYERS")) for layer in level}
        self.uses, self.inside = value("USES"), value("INSIDE")
        self.faults = []
        done, waits = set(), dict(self.uses)
        while waits:  # takes away what uses only what was taken away before
            free = [p for p, used in waits.items() if all(u in done or u not in waits for u in used)]
            if not free:
                self.faults.append("%s: these use one another in a circle: %s" % (LAYERS, ", ".join(sorted(waits))))
                break
            done.update(free)
            for p in free:
                del waits[p]
        for package, used in self.uses.items():
            for u in used:
                if u.split("/")[0] != package.split("/")[0]:
                    self.faults.append("%s: %s is of another layer than %s, and needs no line" % (LAYERS, u, package))
        count = sum(len(used) for used in self.uses.values())
        if count > MOST_USES:
            self.faults.append("%s: expected at most %d dependencies inside of layers, got %d" % (LAYERS, MOST_USES, count))

    def allows(self, package, used):
        mine, other = package.split("/")[0], used.split("/")[0]
        if package == used:
            return True
        if mine in ABOVE_ALL:
            return other not in ABOVE_ALL or mine != "examples"
        if mine not in self.levels or other not in self.levels:
            return False
        if mine == other:
            return used in self.uses.get(package, ())
        return self.levels[other] < self.levels[mine] and used not in self.inside


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

        srcs, hdrs = texts("srcs"), texts("hdrs")
        if self.kind == "cc_part" and "srcs" not in words and "hdrs" not in words:
            srcs, hdrs = srcs + [self.name + ".cc"], [self.name + ".h"]
        self.headers = ["%s/%s" % (package, f) for f in hdrs]
        self.files = self.headers + ["%s/%s" % (package, f) for f in srcs]
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
        of_units = {}  # of each unit, what it uses of other packages for all its parts
        for call in calls:
            words = {k.arg: k.value for k in call.keywords}
            if call.func.id == "cc_unit":
                deps = [n.value for n in ast.walk(words["deps"]) if isinstance(n, ast.Constant)] if "deps" in words else []
                name = words["name"].value if "name" in words else "unit"
                of_units[name] = [full_label(package, d) for d in deps if not d.startswith(":")]
        for call in calls:
            words = {k.arg: k.value for k in call.keywords}
            if call.func.id.startswith(("cc_", "cuda_")) and isinstance(words.get("name"), ast.Constant):
                targets.append(Target(package, call, default))
                if call.func.id == "cc_part":
                    targets[-1].deps += of_units[words["unit"].value if "unit" in words else "unit"]
    return targets


def includes(files):
    """Yields (file, header) for each include of a header of the tree."""
    for path, text in files.items():
        if not path.endswith((".cc", ".h", ".cu")):
            continue
        for header in re.findall(r'^\s*#\s*include "([^"]+)"', text, re.M):
            if header in files:
                yield path, header


def check_includes(files):
    layers = Layers(files[LAYERS])
    faults = list(layers.faults)
    taken = set()
    for folder in sorted({os.path.dirname(p) for p, t in files.items() if p.endswith((".cc", ".h", ".cu"))}):
        if folder.split("/")[0] not in (*layers.levels, *ABOVE_ALL):
            faults.append("%s/ is in no layer of %s" % (folder, LAYERS))
    for path, header in includes(files):
        package, used = os.path.dirname(path), os.path.dirname(header)
        taken.add((package, used))
        if not layers.allows(package, used):
            faults.append("%s includes %s: %s may not use %s (%s)" % (path, header, package, used, LAYERS))
    for target in read_targets(files):  # of the subcommands, for example, the program includes nothing
        taken.update((target.package, dep[2:].split(":")[0]) for dep in target.deps)
    for package, used in layers.uses.items():
        faults += ["%s: %s uses nothing of %s any more" % (LAYERS, package, u) for u in used if (package, u) not in taken]
    return faults


def check_without_libtorch(files):
    """Returns the targets that need LibTorch although WITHOUT_LIBTORCH says that they do not."""
    deps = {}
    for target in read_targets(files):
        deps.setdefault(target.label, set()).update(target.deps)
    faults = []
    for label in WITHOUT_LIBTORCH:
        if label not in deps:
            faults.append("%s is not there" % label)
        reached, todo = set(), [label]
        while todo:
            one = todo.pop()
            if one not in reached:
                reached.add(one)
                todo += deps.get(one, ())
        faults += ["%s needs %s" % (label, one) for one in sorted(reached) if one.startswith("@sys//:torch")]
    return faults


def check_deps(files):
    """Returns each include whose target is not a direct dependency, and each dependency of the own package that is not
    there, of which Bazel does not tell (cc_part of bazel/unit.bzl passes on those of other packages only)."""
    faults = []
    targets = read_targets(files)
    there = {"//%s:%s" % (os.path.dirname(path), name) for path, text in files.items() if os.path.basename(path) == "BUILD"
             for name in re.findall(r'name = "([^"]*)"', text)}
    owners, by_label = {}, {t.label: t for t in targets}
    for target in targets:
        for path in target.files:
            owners.setdefault(path, []).append(target)
    wanted = {}
    for path, header in includes(files):
        wanted.setdefault(path, []).append(header)
    for target in targets:
        faults += ["%s depends on %s, which is not there" % (target.label, dep) for dep in target.deps
                   if dep.startswith("//%s:" % target.package) and dep not in there]
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
    layers = Layers(files[LAYERS])
    offered = {full_label("", l) for l in re.findall(r"`@annulus(//[^`]+)`", files[OFFER])}
    packages = {os.path.dirname(p) for p in files if os.path.basename(p) == "BUILD"}
    faults = []
    for target in read_targets(files):
        package = target.package
        if package.split("/")[0] not in layers.levels:
            continue
        for grant in target.visibility:
            if grant in ("//visibility:private", USERS):
                continue
            if grant == "//visibility:public":
                if target.label not in offered and target.kind != "cc_binary":
                    faults.append("%s is public, but %s does not offer it" % (target.label, OFFER))
                continue
            granted, kind = full_label(package, grant)[2:].split(":")
            who = [p for p in packages if p == granted or kind == "__subpackages__" and (p + "/").startswith(granted + "/")]
            if not who:
                faults.append("%s is visible to %s, which is not there" % (target.label, grant))
            for user in who:
                # A program is linked from what lies below its folder, though nothing there is included.
                if not layers.allows(user, package) and not package.startswith(user + "/"):
                    faults.append("%s is visible to %s: %s may not use %s (%s)" % (target.label, grant, user, package, LAYERS))
    return faults


def check_named_files(files):
    """Returns the files that docs/internals/where.md names and that do not exist."""
    named = re.findall(r"`([\w./-]+/[\w.-]*|\w+\.(?:cc|h|py|cu))`", files[GUIDE])
    return ["%s: %s is not there" % (GUIDE, name) for name in named
            if name not in files and not any(path.startswith(name) for path in files if name.endswith("/"))]


def check_types(files):
    """Returns the types that are defined in more than one file of the product, outside of unnamed namespaces. Types inside other
    types do not count."""
    layers, places = Layers(files[LAYERS]), {}
    for path, text in files.items():
        if not path.endswith((".cc", ".h", ".cu")) or path.split("/")[0] not in layers.levels:
            continue
        inside = []
        for line in text.split("\n"):
            begin = re.match(r"namespace\s*([\w:]*)\s*{", line)
            if begin:
                inside.append(begin.group(1) or None)
            elif re.match(r"}\s*// (inline )?namespace", line) and inside:
                inside.pop()
            found = re.match(r"(?:template <.*> )?(?:struct|class|enum class|union) (\w+)(?: final)?(?: : [^;]*)? {", line)
            if found and None not in inside:
                places.setdefault("::".join(inside + [found.group(1)]), set()).add(path)
    return ["%s is defined in %s: rename all but one" % (name, " and ".join(sorted(paths)))
            for name, paths in sorted(places.items()) if len(paths) > 1]


def check_sizes(files, large_packages=None, large_files=None):
    large_packages = LARGE_PACKAGES if large_packages is None else large_packages
    large_files = LARGE_FILES if large_files is None else large_files
    here = os.path.basename(__file__)
    lines = {path: text.count("\n") for path, text in files.items() if text is not None}
    names = {}
    for path in files:
        names.setdefault(os.path.dirname(path), set()).add(os.path.basename(path).split(".")[0])
    counts = {package: len(of_package) for package, of_package in names.items()}
    faults = ["%s has %d lines, more than %d: divide it, or say in %s why not" % (path, n, MOST_LINES, here)
              for path, n in lines.items() if n > MOST_LINES and path not in large_files]
    faults += ["%s/ has %d files, more than %d: divide it, or say in %s why not" % (package, n, MOST_FILES, here)
               for package, n in counts.items() if n > MOST_FILES and package not in large_packages]
    faults += ["%s is small enough or gone: it needs no exception in %s" % (path, here)
               for path in large_files if lines.get(path, 0) <= MOST_LINES]
    faults += ["%s/ is small enough or gone: it needs no exception in %s" % (package, here)
               for package in large_packages if counts.get(package, 0) <= MOST_FILES]
    return faults


ROOT = os.path.dirname(os.path.dirname(os.path.realpath(sys.argv.pop(1)))) if len(sys.argv) > 1 else ""
FILES = read_tree(ROOT) if ROOT else {}


class Tree(unittest.TestCase):
    def none(self, faults):
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_includes_follow_the_layers(self):
        self.none(check_includes(FILES))

    def test_types_have_names_of_their_own(self):
        self.none(check_types(FILES))

    def test_includes_come_from_direct_dependencies(self):
        self.none(check_deps(FILES))

    def test_visibility_follows_the_layers(self):
        self.none(check_visibility(FILES))

    def test_what_needs_no_libtorch_reaches_none(self):
        self.none(check_without_libtorch(FILES))

    def test_guide_names_existing_files(self):
        self.none(check_named_files(FILES))

    def test_packages_and_files_stay_within_their_limits(self):
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
    def line(old, new):
        return {LAYERS: lambda text: text.replace(old, new)}

    def test_finds_include_of_a_later_layer(self):
        self.found(check_includes, {"common/error.h": self.include("runtime/training/trainer.h")},
                   "common may not use runtime/training")

    def test_finds_include_that_the_layer_does_not_list(self):
        self.found(check_includes, {"attention/plan/plan.h": self.include("attention/kernels/choose_kernel.h")},
                   "attention/plan may not use attention/kernels")

    def test_finds_include_of_what_is_inside_of_another_layer(self):
        self.found(check_includes, {"runtime/model/model.h": self.include("attention/kernels/cpu/flash.h")},
                   "runtime/model may not use attention/kernels/cpu")

    def test_finds_benchmark_in_the_launcher(self):
        self.found(check_includes, {"launcher/subcommands.cc": self.include("benchmarks/report.h")}, "launcher may not use benchmarks")

    def test_finds_test_header_in_the_program(self):
        self.found(check_includes, {"comm/agreement.cc": self.include("tests/comm/gpu_count.h")}, "comm may not use tests/comm")

    def test_finds_circle(self):
        self.found(check_includes, self.line('"attention/plan": [', '"attention/plan": ["attention/proof", '), "in a circle")

    def test_finds_dependency_that_nothing_uses(self):
        self.found(check_includes, self.line('"comm/mpi": ["comm"]', '"comm/mpi": ["comm", "comm/nccl"]'),
                   "comm/mpi uses nothing of comm/nccl")

    def test_finds_line_about_another_layer(self):
        self.found(check_includes, self.line('"comm/mpi": ["comm"]', '"comm/mpi": ["comm", "memory"]'),
                   "memory is of another layer")

    def test_finds_folder_in_no_layer(self):
        self.found(check_includes, {"pools/pool.h": lambda text: "// A pool."}, "pools/ is in no layer")

    def test_finds_second_type_of_a_name(self):
        line = "namespace annulus {\nstruct Step final : Other {\n"
        self.assertEqual(check_types({LAYERS: FILES[LAYERS], "comm/a.h": line, "runtime/b.cc": line,
                                      "comm/c.h": "namespace annulus {\nclass Only {\n",
                                      "runtime/c.cc": "namespace annulus {\nnamespace {\nclass Only {\n"}),
                         ["annulus::Step is defined in comm/a.h and runtime/b.cc: rename all but one"])

    def test_finds_missing_direct_dependency(self):
        self.found(check_deps, {"attention/modules/BUILD": lambda t: t.replace('        "//memory:', '        "//gone:')},
                   "//memory")

    def test_finds_dependency_that_is_not_there(self):
        self.found(check_deps, {"comm/BUILD": lambda t: t.replace('":hosts"', '":gone"')}, "//comm:gone, which is not there")

    def test_finds_public_target_that_is_not_offered(self):
        self.found(check_visibility, {"attention/kernels/BUILD": lambda t: t.replace("users())", '["//visibility:public"])')},
                   "does not offer it")

    def test_finds_target_visible_to_a_forbidden_package(self):
        self.found(check_visibility, {"attention/kernels/BUILD": lambda t: t.replace("users())", '["//comm:__pkg__"])')},
                   "comm may not use attention/kernels")

    def test_finds_libtorch_where_none_should_be(self):
        self.found(check_without_libtorch, {"attention/pattern/BUILD": lambda t: t.replace("//common:error", "@sys//:torch_cpu")},
                   "needs @sys//:torch_cpu")

    def test_finds_guide_entry_that_moved(self):
        self.found(check_named_files, {GUIDE: lambda t: t.replace("`runtime/config/reading.cc`", "`runtime/config/read.cc`")},
                   "runtime/config/read.cc is not there")

    def test_finds_unneeded_exception(self):
        for exceptions in ({"large_files": {"common/error.h": "x"}}, {"large_packages": {"common": "x"}}):
            self.assertTrue(any("needs no exception" in f for f in check_sizes(FILES, **exceptions)), exceptions)

    def test_finds_file_that_is_too_long(self):
        self.found(check_sizes, {"common/error.h": lambda t: t + "\n" * 501}, "common/error.h has")

    def test_finds_package_with_too_many_names(self):
        self.found(check_sizes, {"common/x%d.h" % i: lambda t: "//" for i in range(25)}, "common/ has")


if __name__ == "__main__":
    unittest.main()
