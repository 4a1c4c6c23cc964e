#!/usr/bin/env python3
"""Collects the bundle for a machine with a GPU from what Bazel built. Called by tools/gpu_bundle.sh.

    collect.py --query                              prints what to ask `bazel query --output=xml`, whose answer is TESTS.xml
    collect.py --targets TESTS.xml                  prints the Bazel targets that the bundle needs, one per line
    collect.py --tests TESTS.xml --bin FOLDER OUT   fills OUT from the outputs of Bazel in FOLDER

TESTS.xml has the tests tagged gpu, and the groups of files that they name. The bundle holds

    run.sh  *.sh  *.py  MANIFEST  bundle.env    how to run it, what is in it, what it was built with
    bin/    tests/  tests.tsv  expected.json    the program; tests, how each is started, what those of ranks should say
    lib/                                        libraries that are not LibTorch's, NVIDIA's or the C library's
    mpi/                                        Open MPI's runtime
    configs/  benchmarks/  text/  runfiles/     configurations, FlexAttention's benchmark, a text, files that tests read
"""

import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import typing
import xml.etree.ElementTree as ElementTree

import elf

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
LIMIT = 60 << 20
QUERY = r'let tests = attr(tags, "\bgpu\b", tests(//...)) in $tests + kind("filegroup rule", deps($tests))'
PROGRAM = "//launcher:annulus"
BENCHMARKS = "//benchmarks/program:annulus_bench"  # beside PROGRAM, which executes it for `annulus bench`

# Libraries that the machine must have: glibc and g++'s runtime (of which the bundle needs at most the versions OLDEST),
# LibTorch with its OpenMP runtime (of which a process must have only one), and those of NVIDIA's driver and wheels.
SYSTEM = re.compile(r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|resolv|util|stdc\+\+|gcc_s))\.so(\.\d+)*")
TORCH = re.compile(r"lib(torch\w*|c10\w*|shm|caffe2_\w+|gomp)\.so(\.\d+)*")
NVIDIA = re.compile(r"lib(cu|nccl|nvshmem|nvidia|nvrtc|nvJitLink|nvToolsExt)[\w-]*\.so(\.\d+)*")
OLDEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30)}  # Ubuntu 22.04

# Libraries of networks and batch systems, and of OpenSHMEM. Plugins of Open MPI that need one are left out.
NETWORKS = re.compile(r"lib(fabric|uc[pst]|ucm|ibverbs|rdmacm|psm2?|infinipath|nl-\w+|oshmem|pmi2?|flux-\w+)[.-]")


# Open MPI's settings for ranks on one machine, possibly more than it has cores, without a network or ssh.
MPI_SETTINGS = """btl = self,%s
pml = ob1
plm_rsh_agent = false
btl_base_warn_component_unused = 0
mca_base_component_show_load_errors = 0
hwloc_base_binding_policy = none
rmaps_base_oversubscribe = 1
mpi_yield_when_idle = 1
"""


def fail(text):
    sys.exit("tools/gpu_bundle.sh: " + text)


LIMITS = {"short": 60, "moderate": 300, "long": 900, "eternal": 3600}  # Bazel's time limits in seconds
TIMEOUTS = {"small": "short", "medium": "moderate", "large": "long", "enormous": "eternal"}


class Part(typing.NamedTuple):
    """The cases of a test that are one step of a part of run.sh."""

    name: str
    label: str
    cases: str = ""  # a filter of GoogleTest; empty: all
    limit: int = 3600  # seconds for the step if the test itself allows more
    processes: int = 1  # that run its cases at once. No case may need more than an eighth of a GPU's memory


KERNELS = "//tests/attention/kernels:gpu_kernel_test"
# The steps in the order in which they run. All other tests belong to "others", too, and come after these: first those
# of one process, then those of several ranks, which may hang because they wait for one another. NCCL may hang with one
# process as well.
PARTS = [
    Part("operators", KERNELS, "-*Merge*", processes=4),  # cuDNN prepares each shape for seconds, on one core
    Part("merges", KERNELS, "*Merge*"),
    Part("others", "//tests/model/gpu:gpu_ops_on_gpu_test"),
    Part("others", "//tests/training:gpu_training_test"),
    Part("others", "//integration_tests:gpu_job_test"),
    Part("others", "//tests/comm:nccl_device_test", limit=60),
    Part("others", "//tests/comm:nccl_test", limit=60),
    Part("memcheck", KERNELS, "*Merge*"),
    Part("memcheck", "//tests/model/gpu:gpu_ops_on_gpu_test"),
]
SCRIPTS = ["cases.py", "journal.py", "machine.sh", "measure.sh", "processes.py", "ranks.py", "report.py",
           "run.sh", "stuck.py", "tables.py"]  # of this folder, for the other machine


class Test:
    """How a test is started: kind "gtest", "mpi" with a number of ranks, or "script" in Python."""

    def __init__(self, rule, groups):
        """A test of Bazel's, whose data may name groups of files: label -> the labels in it."""
        self.label = rule.get("name")
        self.kind = {"cc_test": "gtest", "_mpi_run_test": "mpi", "sh_test": "script"}.get(rule.get("class"), "")
        values = {e.get("name"): e for e in rule if e.get("name")}
        text = lambda name, default: values[name].get("value") if name in values and values[name].get("value") else default
        items = lambda name: [e.get("value") for e in values[name]] if name in values else []
        self.binary = text("binary", self.label)
        self.source = None
        if self.kind == "script":
            self.source = path_of(items("srcs")[0])
            if not self.source.endswith(".py"):
                self.kind = ""
        self.ranks = int(text("np", "1"))
        self.limit = LIMITS[text("timeout", TIMEOUTS[text("size", "medium")])]
        if self.kind == "mpi":
            self.limit = min(self.limit, int(text("mpi_timeout", "50")) + 10)  # mpirun ends the ranks 10 s earlier
        self.args = [self.placed(a) for a in items("args")]
        self.mpi_args = items("mpi_args")
        self.files = [path_of(l) for l in within(items("data"), groups)]
        self.env = ["%s=%s" % (e[0].get("value"), e[1].get("value")) for e in values.get("env", [])]
        self.expect_exit = int(text("expect_exit", "0"))
        self.expect_once = items("expect_once")
        self.forbid = items("forbid")

    @property
    def name(self):
        return self.label.lstrip("/").replace("/", ".").replace(":", ".")

    @property
    def program(self):
        """The path of the program that is built for it; None for a script."""
        return None if self.kind == "script" else path_of(self.binary)

    def placed(self, argument):
        """The argument with each label replaced by its path in the bundle."""

        def place(match):
            label = match.group(1)
            if label.startswith(":"):
                label = self.label.split(":")[0] + label
            if label == PROGRAM:
                return '"$bundle/bin/annulus"'
            if os.path.isfile(os.path.join(ROOT, path_of(label))):
                return path_of(label)
            self.tools = sorted(set(getattr(self, "tools", [])) | {label})
            return '"$bundle/tests/%s"' % in_tests(path_of(label))

        return re.sub(r"\$\((?:rootpath|location) ([^)]*)\)", place, argument)

    def parts(self):
        """(name, part, kind, processes, limit, arguments) of each step that runs this test: one, or one for each of its
        PARTS. A test of several ranks has as many processes."""
        for part in [p for p in PARTS if p.label == self.label] or [Part("others", self.label)]:
            name = self.name if part.name == "others" else "%s.%s" % (self.name, part.name)
            kind = "memcheck" if part.name == "memcheck" else self.kind
            chosen = ["'--gtest_filter=%s'" % part.cases] if part.cases else []
            yield name, part.name, kind, max(self.ranks, part.processes), min(self.limit, part.limit), self.args + chosen

    @property
    def place(self):
        """Where its first step stands among all steps, to sort by."""
        own = [i for i, p in enumerate(PARTS) if p.label == self.label]
        return (own or [len(PARTS)])[0], self.kind == "mpi", self.label

    def targets(self):
        return {*([] if self.kind == "script" else [self.binary]), *getattr(self, "tools", [])}


def path_of(label):
    return label.lstrip("/").replace(":", "/").lstrip("/")


def within(labels, groups):
    """The labels, with each group replaced by what is in it; groups may hold groups."""
    for label in labels:
        yield from within(groups[label], groups) if label in groups else [label]


def in_tests(path):
    return path.replace("/", ".")


def read_tests(path):
    with open(path) as f:
        text = f.read()
    # Bazel declares XML 1.1, which Python does not read. This text is also valid XML 1.0 without the declaration.
    root = ElementTree.fromstring(re.sub(r"^<\?xml[^>]*\?>", "", text.lstrip()))
    rules = list(root.iter("rule"))
    groups = {r.get("name"): [l.get("value") for l in r.iterfind("list[@name='srcs']/label")] for r in rules
              if r.get("class") == "filegroup"}
    tests = [Test(rule, groups) for rule in rules if rule.get("name") not in groups]
    if not tests:
        fail("there is no test with the tag gpu")
    unknown = [t.label for t in tests if not t.kind]
    if unknown:
        fail("tests for GPUs must be cc_test, mpi_test, or sh_test of a Python file, which the bundle can start; these "
             "are not: " + ", ".join(unknown))
    lost = {p.label for p in PARTS} - {t.label for t in tests}
    if lost:
        fail("these tests stand in PARTS of collect.py, but none of them has the tag gpu: " + ", ".join(sorted(lost)))
    return sorted(tests, key=lambda t: t.place)


def system_libraries():
    found = {}
    for line in subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout.splitlines():
        match = re.match(r"\s+(\S+) \(libc6,x86-64.*\) => (\S+)", line)
        if match:
            found.setdefault(match.group(1), match.group(2))
    return found


def bazel_config():
    """The values that bazel/system_deps.bzl found: the members of @sys//:config.bzl."""
    base = subprocess.run(["bazel", "info", "--noshow_progress", "output_base"], cwd=ROOT, capture_output=True, text=True, check=True)
    values = {}
    with open(os.path.join(base.stdout.strip(), "external", "sys", "config.bzl")) as f:
        for line in f:
            name, _, value = line.partition(" = ")
            values[name] = value.strip().strip('"')
    return values


def first(pattern, path, default="unknown"):
    try:
        with open(path, errors="replace") as f:
            match = re.search(pattern, f.read(), re.M)
    except OSError:
        return default
    return match.group(1) if match else default


def said(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


class Bundle:
    def __init__(self, out):
        self.out = out
        self.system = system_libraries()
        self.wanted = []  # libraries that are still to be added: (name, folders to look in first)

    def path(self, *names):
        path = os.path.join(self.out, *names)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def add(self, source, *names, mode=0o644):
        path = self.path(*names)
        shutil.copyfile(source, path)
        os.chmod(path, mode)
        return path

    def add_binary(self, source, *names, mode=0o755):
        """Adds a stripped copy that looks for its libraries in lib/ of the bundle; add_libraries adds what it needs."""
        folders = elf.run_path(source)
        self.wanted += [(name, folders) for name in elf.needed(source)]
        path = self.add(source, *names, mode=mode)
        subprocess.run(["strip", "--strip-unneeded", path], check=True)
        patch = elf.Patch(path)
        depth = len(names) - 1
        patch.set_run_path("$ORIGIN/" + "../" * depth + "lib")
        if elf.newest(path, "GLIBC") > OLDEST["GLIBC"]:
            self.lower_glibc(path, patch)
        patch.save()
        for family, oldest in OLDEST.items():
            version = elf.newest(path, family)
            if version > oldest:
                fail("%s needs %s_%s, but the bundle must run with version %s: build on an older system" % (
                    source, family, ".".join(map(str, version)), ".".join(map(str, oldest))))
        return path

    def lower_glibc(self, path, patch):
        version = "GLIBC_" + ".".join(map(str, elf.newest(path, "GLIBC")))
        symbols = elf.symbols_of(path, version)
        if symbols <= {"arc4random", "arc4random_buf"}:  # entropy.c has them
            patch.weaken(version)

    def add_libraries(self):
        while self.wanted:
            name, folders = self.wanted.pop()
            if SYSTEM.fullmatch(name) or TORCH.fullmatch(name) or NVIDIA.fullmatch(name):
                continue
            if os.path.exists(os.path.join(self.out, "lib", name)):
                continue
            places = [os.path.join(f, name) for f in folders] + [self.system.get(name, "")]
            source = next((p for p in places if os.path.isfile(p)), None)
            if not source:
                fail("the library %s is not found" % name)
            self.add_binary(os.path.realpath(source), "lib", name, mode=0o644)

    def add_mpi(self, mpirun):
        """Adds Open MPI: the programs that start ranks, its plugins and its messages. run.sh tells it where it is."""
        launcher = os.path.realpath(mpirun)
        info = shutil.which("ompi_info", path=os.path.dirname(launcher) + os.pathsep + os.environ["PATH"])
        if not info:
            fail("no ompi_info beside " + mpirun)
        where = dict(l.split(":")[1:3] for l in said(info, "--parsable", "--path", "all").splitlines() if l.count(":") >= 2)
        self.add_binary(launcher, "mpi", "bin", "mpirun")
        self.add_binary(os.path.realpath(os.path.join(os.path.dirname(launcher), "orted")), "mpi", "bin", "orted")
        plugins = sorted(glob.glob(os.path.join(where["pkglibdir"], "mca_*.so")))
        if not plugins:
            fail("no plugins of Open MPI in " + where["pkglibdir"])
        for plugin in plugins:
            if re.match(r"mca_(scoll|sshmem|spml|memheap|atomic)_", os.path.basename(plugin)):
                continue  # OpenSHMEM's
            if any(NETWORKS.match(n) for n in closure(plugin, self.system)):
                continue
            self.add_binary(plugin, "mpi", "plugins", os.path.basename(plugin), mode=0o644)
        with open(self.path("mpi", "etc", "openmpi-mca-params.conf"), "w") as f:
            f.write(MPI_SETTINGS % ("vader" if mpi_version(mpirun).startswith("4.") else "sm"))
        for text in sorted(glob.glob(os.path.join(where["pkgdatadir"], "help-*.txt"))):
            self.add(text, "mpi", "share", os.path.basename(text))

    def digest(self):
        """Tells bundles apart: run.sh goes on with a report only if the same bundle began it."""
        digest = hashlib.sha256()
        for name, _ in self.sizes():
            digest.update(name.encode() + b"\0")
            with open(os.path.join(self.out, name), "rb") as f:
                digest.update(f.read())
        return digest.hexdigest()[:16]

    def sizes(self):
        found = []
        for folder, folders, files in os.walk(self.out):
            folders.sort()
            for name in files:
                path = os.path.join(folder, name)
                found.append((os.path.relpath(path, self.out), os.path.getsize(path)))
        return sorted(found)


def closure(path, system):
    """The names of all libraries that this one needs, directly or through libraries of this machine."""
    seen, left = set(), elf.needed(path)
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            if name in system and not SYSTEM.fullmatch(name):
                left += elf.needed(system[name])
    return seen


def unresolved(out):
    """(file, library) for every needed library that is neither in the bundle nor expected on the machine."""
    inside = set(os.listdir(os.path.join(out, "lib")))
    missing = []
    for folder, _, files in os.walk(out):
        for name in files:
            path = os.path.join(folder, name)
            if elf.is_elf(path):
                missing += [(os.path.relpath(path, out), n) for n in elf.needed(path)
                            if n not in inside and not any(p.fullmatch(n) for p in (SYSTEM, TORCH, NVIDIA))]
    return sorted(missing)


def mpi_version(mpirun):
    return (said(mpirun, "--version").splitlines() or ["unknown"])[0].split(") ")[-1]


def versions(config):
    include = os.path.join(config["TORCH_ROOT"], "include", "torch")
    header = os.path.join(include, "headeronly", "version.h")
    torch = ".".join(first(r"TORCH_VERSION_%s (\d+)" % part, header) for part in ("MAJOR", "MINOR", "PATCH"))
    beside = os.path.join(os.path.dirname(config["TORCH_ROOT"]), "nvidia", "nccl", "include", "nccl.h")
    nccl = beside if os.path.exists(beside) else os.path.join(config["CUDA_HOME"], "include", "nccl.h")
    cuda = said(config["NVCC"], "--version")
    commit = said("git", "rev-parse", "HEAD") or "unknown"
    changed = bool(said("git", "status", "--porcelain"))
    return {
        "COMMIT": commit + (" and changes" if changed else ""),
        "ANNULUS": first(r'kVersion\[\] = "([^"]+)"', os.path.join(ROOT, "common", "version.h")),
        "LIBTORCH": torch,
        "CUDA": (re.findall(r"release ([0-9.]+)", cuda) or ["unknown"])[0],
        "NCCL": ".".join(first(r"NCCL_%s (\d+)" % part, nccl) for part in ("MAJOR", "MINOR", "PATCH")),
        "MPI": mpi_version(config["MPIRUN"]),
        "COMPILER": "g++ " + said("g++", "-dumpfullversion"),
        "GLIBC_OLDEST": ".".join(map(str, OLDEST["GLIBC"])),
    }


def collect(tests, binaries, out):
    config = bazel_config()
    if not config["MPIRUN"] or not config["TORCH_CUDA"]:
        fail("making a bundle needs Open MPI and a LibTorch with CUDA on this machine: run ./annulus setup")
    if os.path.exists(out):
        if os.listdir(out) and not os.path.exists(os.path.join(out, "bundle.env")):
            fail(out + " exists and is not a bundle: name another folder")
        shutil.rmtree(out)
    bundle = Bundle(out)
    bundle.add_binary(os.path.join(binaries, "launcher", "annulus"), "bin", "annulus")
    bundle.add_binary(os.path.join(binaries, path_of(BENCHMARKS)), "bin", "annulus_bench")
    rows = []
    for program in sorted({path_of(l) for t in tests for l in t.targets()}):
        bundle.add_binary(os.path.join(binaries, program), "tests", in_tests(program))
    for t in tests:
        program = t.source if t.kind == "script" else in_tests(t.program)
        for name, part, kind, processes, limit, args in t.parts():
            rows.append("\t".join([name, part, kind, program, str(processes), str(t.expect_exit), str(limit),
                                   " ".join(t.env) or "-", " ".join(t.mpi_args) or "-", " ".join(args) or "-"]))
        for path in t.files + ([t.source] if t.source else []):
            if os.path.isfile(os.path.join(ROOT, path)):
                bundle.add(os.path.join(ROOT, path), "runfiles", path)
    bundle.add_mpi(config["MPIRUN"])
    bundle.add_libraries()
    entropy = bundle.path("lib", "libannulus_entropy.so")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-s", "-Wl,-soname,libannulus_entropy.so", "-o", entropy,
                    os.path.join(HERE, "entropy.c")], check=True)
    for toml in sorted(glob.glob(os.path.join(ROOT, "configs", "*.toml"))):
        bundle.add(toml, "configs", os.path.basename(toml))
    bundle.add(os.path.join(ROOT, "benchmarks", "gpu", "flex_attention.py"), "benchmarks", "flex_attention.py")
    with open(bundle.path("text", "documents.txt"), "w") as f:  # to train on if LibTorch has no Python sources
        for path in sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")) + glob.glob(os.path.join(ROOT, "*", "*.cc"))):
            with open(path) as source:
                f.write(source.read())
    for script in SCRIPTS:
        bundle.add(os.path.join(HERE, script), script, mode=0o755)
    with open(bundle.path("tests.tsv"), "w") as f:
        f.write("".join(row + "\n" for row in rows))
    with open(bundle.path("expected.json"), "w") as f:  # for the tests that mpirun starts; report.py reads it
        json.dump({t.name: {"exit": t.expect_exit, "once": t.expect_once, "forbid": t.forbid} for t in tests
                   if t.kind == "mpi"}, f, indent=1)
    built_with = dict(versions(config), DIGEST=bundle.digest())
    with open(bundle.path("bundle.env"), "w") as f:
        f.write("".join("BUILT_%s='%s'\n" % item for item in built_with.items()))

    missing = unresolved(out)
    if missing:
        fail("these libraries are neither in the bundle nor in LibTorch or a driver: " +
             ", ".join("%s (of %s)" % (name, file) for file, name in missing))
    sizes = bundle.sizes()
    total = sum(size for _, size in sizes)
    with open(bundle.path("MANIFEST"), "w") as f:
        f.write("annulus bundle for GPUs\n\n")
        f.write("".join("%-13s %s\n" % (name.lower(), value) for name, value in built_with.items()))
        f.write("files         %d, %d bytes\n\n" % (len(sizes), total))
        f.write("".join("%10d  %s\n" % (size, name) for name, size in sizes))
    if total >= LIMIT:
        largest = sorted(sizes, key=lambda item: -item[1])[:12]
        fail("the bundle has %.1f MiB, but must have less than %d; the largest are\n" % (total / 2**20, LIMIT >> 20) +
             "\n".join("  %6.1f MiB  %s" % (size / 2**20, name) for name, size in largest))
    print("%s: %d files, %.1f MiB, %d tests for GPUs" % (out, len(sizes) + 1, total / 2**20, len(tests)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--query", action="store_true")
    parser.add_argument("--targets", metavar="TESTS.xml")
    parser.add_argument("--tests", metavar="TESTS.xml")
    parser.add_argument("--bin", metavar="FOLDER")
    parser.add_argument("out", nargs="?")
    options = parser.parse_args()
    if options.query:
        print(QUERY)
        return
    if options.targets:
        print("\n".join(sorted({PROGRAM, BENCHMARKS}.union(*(t.targets() for t in read_tests(options.targets))))))
        return
    collect(read_tests(options.tests), options.bin, options.out)


if __name__ == "__main__":
    main()
