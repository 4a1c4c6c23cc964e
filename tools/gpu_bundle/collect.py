#!/usr/bin/env python3
"""Collects the bundle for a machine with a GPU from what Bazel built. Called by tools/gpu_bundle.sh.

    collect.py TESTS.xml BIN OUT     fills OUT. TESTS.xml is what `bazel query --output=xml` says of the tests with the tag
                                     gpu, and BIN has what Bazel built

The bundle holds

    run.py  report.py  steps.json  built.json     how it is run, in which steps, and what it was built with
    files/               programs, scripts and configurations, at their paths in the repository
    lib/                 libraries that are not LibTorch's, NVIDIA's or the C library's
    mpi/                 Open MPI's runtime
    MANIFEST             the SHA-256 of each file, for `sha256sum -c`
"""

import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
import xml.etree.ElementTree as ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(HERE))
import elf  # noqa: E402

LIMIT = 60 << 20  # bytes of the bundle: it is copied to machines that are lent for minutes

# Libraries that the machine must have: glibc and g++'s runtime (of which the bundle needs at most the versions OLDEST),
# LibTorch with its OpenMP runtime (of which a process must have only one), and those of NVIDIA's driver and wheels.
SYSTEM = re.compile(r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|resolv|util|stdc\+\+|gcc_s))\.so(\.\d+)*")
TORCH = re.compile(r"lib(torch\w*|c10\w*|shm|caffe2_\w+|gomp)\.so(\.\d+)*")
NVIDIA = re.compile(r"lib(cu|nccl|nvshmem|nvidia|nvrtc|nvJitLink|nvToolsExt)[\w-]*\.so(\.\d+)*")
OLDEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30)}  # Ubuntu 22.04

# Plugins of Open MPI that are left out: those of OpenSHMEM, and those that need libraries of networks or batch systems.
SHMEM = re.compile(r"mca_(scoll|sshmem|spml|memheap|atomic)_")
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


class Order(typing.NamedTuple):
    """A test, or a share of its cases, as a step of run.py."""

    name: str
    label: str
    part: str
    limit: int  # seconds
    cases: str = ""  # a filter of GoogleTest; empty: all
    shards: int = 1  # processes that share the cases. No case may need more than an eighth of a GPU's memory


KERNELS = "//tests/attention/kernels:gpu_kernel_test"
# The tests in the order in which they run: those whose failure would explain that of others come first. All other tests
# come after them, among these those of several ranks, which may hang because they wait for one another.
ORDER = [
    Order("merges", KERNELS, "kernels", 60, "*Merge*"),
    Order("operators", KERNELS, "kernels", 150, "-*Merge*", shards=4),  # cuDNN prepares each shape for seconds, on one core
    Order("model kernels", "//tests/runtime/model/gpu:gpu_ops_on_gpu_test", "kernels", 60),
    Order("training steps", "//tests/runtime/training:gpu_training_test", "training", 100),
    Order("jobs", "//integration_tests:gpu_job_test", "training", 120),
    Order("nccl on a device", "//tests/comm:nccl_device_test", "nccl", 60),
    Order("nccl between ranks", "//tests/comm:nccl_processes_test", "nccl", 60),
]
OTHERS = 60  # seconds for each other test


def step(name, parts, command, limit, **more):
    """A step of run.py, which describes its members."""
    return {"name": name, "parts": parts, "command": command, "limit": limit, **more}


def bench(part, limit, *words):
    command = ["annulus", "bench", "gpu", "--part", part, *words]
    return step("bench " + part, ["bench", part], command, limit, gpu=True)


MODEL = ["--config", "configs/llama-1b.toml"]
BENCHMARKS = [  # in order of worth; the limits are for what hangs, and allow more than a benchmark is expected to take
    bench("dense", 130),
    bench("train", 180, *MODEL),
    bench("ring", 130),
    bench("patterns", 130),
    bench("longest", 200, *MODEL, "--seconds", "{seconds}"),
]


def fail(text):
    sys.exit("tools/gpu_bundle.sh: " + text)


def path_of(label):
    return label.lstrip("/").replace(":", "/").lstrip("/")


def words_of(rule):
    """The arguments of a test as Bazel passes them: a path from the repository's root for $(rootpath LABEL)."""
    package = rule.get("name").split(":")[0]

    def path(match):
        label = match.group(1)
        return path_of(package + label if label.startswith(":") else label)

    args = [e.get("value") for e in rule.iterfind("list[@name='args']/string")]
    return [word for arg in args for word in shlex.split(re.sub(r"\$\((?:rootpath|location) ([^)]*)\)", path, arg))]


def steps_of(rule, executable):
    """The steps that run a test, and where they stand among all."""
    label = rule.get("name")
    env = {e[0].get("value"): e[1].get("value") for e in rule.iterfind("dict[@name='env']/pair")}
    kind = "gtest" if rule.get("class") == "cc_test" else "plain"
    name = label.split(":")[1]
    others = Order(name, label, "nccl" if "nccl" in name else "others", OTHERS)
    for order in [o for o in ORDER if o.label == label] or [others]:
        cases = ["--gtest_filter=" + order.cases] if order.cases else []
        yield (ORDER.index(order) if order in ORDER else len(ORDER), kind != "gtest", label), step(
            order.name, ["tests", order.part], ["./" + executable, *words_of(rule), *cases], order.limit,
            kind=kind, env=env, shards=order.shards)


def read_tests(path):
    """The rules of the tests. Bazel declares XML 1.1, which Python does not read; the text is also valid XML 1.0."""
    with open(path) as f:
        root = ElementTree.fromstring(re.sub(r"^<\?xml[^>]*\?>", "", f.read().lstrip()))
    rules = list(root.iter("rule"))
    lost = {o.label for o in ORDER} - {rule.get("name") for rule in rules}
    if lost:
        fail("these tests stand in ORDER of collect.py, but none of them has the tag gpu: " + ", ".join(sorted(lost)))
    return rules


def output_of(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def first(pattern, path):
    with open(path, errors="replace") as f:
        match = re.search(pattern, f.read(), re.M)
    return match.group(1) if match else "unknown"


def bazel_config():
    """The values that bazel/system_deps.bzl found: the members of @sys//:config.bzl."""
    base = output_of("bazel", "info", "--noshow_progress", "output_base")
    with open(os.path.join(base, "external", "sys", "config.bzl")) as f:
        return {name: value.strip('"') for name, value in re.findall(r"(?m)^(\w+) = (.*)$", f.read())}


def system_libraries():
    listed = re.findall(r"(?m)^\s+(\S+) \(libc6,x86-64.*\) => (\S+)", output_of("/sbin/ldconfig", "-p"))
    return dict(reversed(listed))  # the first one counts


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


def check_versions(source, path):
    """Refuses a file that needs a newer C library than OLDEST, but for functions that entropy.c has."""
    newest = "GLIBC_" + ".".join(map(str, elf.newest(path, "GLIBC")))
    if elf.newest(path, "GLIBC") > OLDEST["GLIBC"] and elf.undefined(path, newest) <= {"arc4random", "arc4random_buf"}:
        elf.weaken(path, newest)
    for family, oldest in OLDEST.items():
        if elf.newest(path, family) > oldest:
            fail("%s needs %s_%s, but the bundle must run with version %s: build on an older system" % (
                source, family, ".".join(map(str, elf.newest(path, family))), ".".join(map(str, oldest))))


class Bundle:
    def __init__(self, out):
        self.out = out
        self.system = system_libraries()
        self.wanted = []  # libraries that are still to be added: (name, folders to look in first)

    def path(self, path):
        whole = os.path.join(self.out, path)
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        return whole

    def write(self, path, text):
        with open(self.path(path), "w") as f:
            f.write(text)

    def add(self, source, path):
        """Adds a copy; of a program or library one that is stripped and looks for its libraries, which add_libraries adds,
        in lib/ of the bundle."""
        copy = self.path(path)
        if os.path.exists(copy):
            return
        shutil.copyfile(source, copy)
        os.chmod(copy, 0o755 if os.access(source, os.X_OK) else 0o644)
        if elf.is_elf(copy):
            folders = elf.run_path(copy)
            self.wanted += [(name, folders) for name in elf.needed(copy)]
            subprocess.run(["strip", "--strip-unneeded", copy], check=True)
            elf.set_run_path(copy, "$ORIGIN/" + "../" * path.count("/") + "lib")
            check_versions(source, copy)

    def add_runfiles(self, binaries, label, mpirun):
        """Adds what a test starts and reads. Returns the path of what Bazel would execute: the program, a script, or for a
        test of several ranks the script that starts and judges them, which here takes the mpirun in PATH."""
        program = path_of(label)
        executable = next((p for p in (program, program + ".sh")
                           if os.path.exists(os.path.join(binaries, p + ".runfiles_manifest"))), None)
        if not executable:
            fail("Bazel has not built " + label)
        with open(os.path.join(binaries, executable + ".runfiles_manifest")) as f:
            files = dict(line.rstrip("\n").split(" ", 1) for line in f if line.startswith("annulus/"))
        for name, source in files.items():
            self.add(source, name.replace("annulus/", "files/", 1))
        script = self.path("files/" + executable)
        if executable != program:
            with open(script) as f:
                text = f.read()
            if " --mpirun=%s " % mpirun not in text:
                fail("%s does not start %s" % (executable, mpirun))
            self.write("files/" + executable, text.replace(" --mpirun=%s " % mpirun, " --mpirun=mpirun "))
        return executable

    def add_libraries(self):
        while self.wanted:
            name, folders = self.wanted.pop()
            if any(known.fullmatch(name) for known in (SYSTEM, TORCH, NVIDIA)):
                continue
            places = [os.path.join(f, name) for f in folders] + [self.system.get(name, "")]
            source = next((p for p in places if os.path.isfile(p)), None)
            if not source:
                fail("the library %s is not found" % name)
            self.add(os.path.realpath(source), "lib/" + name)

    def add_mpi(self, mpirun):
        """Adds Open MPI: the programs that start ranks, its plugins and its messages. run.py tells it where it is."""
        launcher = os.path.realpath(mpirun)
        beside = os.path.dirname(launcher)
        info = shutil.which("ompi_info", path=beside + os.pathsep + os.environ["PATH"])
        if not info:
            fail("no ompi_info beside " + mpirun)
        where = dict(re.findall(r"(?m)^path:(\w+):(.*)$", output_of(info, "--parsable", "--path", "all")))
        self.add(launcher, "mpi/bin/mpirun")
        self.add(os.path.realpath(os.path.join(beside, "orted")), "mpi/bin/orted")
        plugins = sorted(glob.glob(os.path.join(where["pkglibdir"], "mca_*.so")))
        if not plugins:
            fail("no plugins of Open MPI in " + where["pkglibdir"])
        for plugin in plugins:
            name = os.path.basename(plugin)
            if not SHMEM.match(name) and not any(NETWORKS.match(n) for n in closure(plugin, self.system)):
                self.add(plugin, "mpi/plugins/" + name)
        self.write("mpi/etc/openmpi-mca-params.conf", MPI_SETTINGS % ("vader" if mpi_version(mpirun) < "5" else "sm"))
        for text in sorted(glob.glob(os.path.join(where["pkgdatadir"], "help-*.txt"))):
            self.add(text, "mpi/share/" + os.path.basename(text))

    def write_manifest(self):
        """Returns how many bytes the bundle has, by file."""
        sizes, lines = {}, []
        for folder, _, names in os.walk(self.out):
            for path in (os.path.join(folder, name) for name in names):
                with open(path, "rb") as f:
                    data = f.read()
                name = os.path.relpath(path, self.out)
                sizes[name] = len(data)
                lines.append((name, hashlib.sha256(data).hexdigest()))
        self.write("MANIFEST", "".join("%s  %s\n" % (digest, name) for name, digest in sorted(lines)))
        return sizes


def mpi_version(mpirun):
    return (output_of(mpirun, "--version").splitlines() or ["unknown"])[0].split(") ")[-1]


def versions(config):
    header = os.path.join(config["TORCH_ROOT"], "include", "torch", "headeronly", "version.h")
    beside = os.path.join(os.path.dirname(config["TORCH_ROOT"]), "nvidia", "nccl", "include", "nccl.h")
    nccl = beside if os.path.exists(beside) else os.path.join(config["CUDA_HOME"], "include", "nccl.h")
    return {
        "annulus": first(r'kVersion\[\] = "([^"]+)"', os.path.join(ROOT, "common", "version.h")),
        "commit": output_of("git", "rev-parse", "HEAD") + (" and changes" if output_of("git", "status", "--porcelain") else ""),
        "LibTorch": ".".join(first(r"TORCH_VERSION_%s (\d+)" % part, header) for part in ("MAJOR", "MINOR", "PATCH")),
        "CUDA": (re.findall(r"release ([0-9.]+)", output_of(config["NVCC"], "--version")) or ["unknown"])[0],
        "NCCL": ".".join(first(r"NCCL_%s (\d+)" % part, nccl) for part in ("MAJOR", "MINOR", "PATCH")),
        "Open MPI": mpi_version(config["MPIRUN"]),
        "g++": output_of("g++", "-dumpfullversion"),
    }


def main():
    tests, binaries, out = sys.argv[1:]
    config = bazel_config()
    if not config["MPIRUN"] or not config["TORCH_CUDA"]:
        fail("making a bundle needs Open MPI and a LibTorch with CUDA on this machine: run ./annulus setup")
    if os.path.exists(out):
        if os.listdir(out) and not os.path.exists(os.path.join(out, "built.json")):
            fail(out + " exists and is not a bundle: name another folder")
        shutil.rmtree(out)
    bundle = Bundle(out)
    bundle.write("built.json", json.dumps(versions(config), indent=1) + "\n")  # first: it marks a bundle
    bundle.add(os.path.join(binaries, "launcher/annulus"), "files/launcher/annulus")
    # The program looks for that of its benchmarks beside itself.
    bundle.add(os.path.join(binaries, "benchmarks/program/annulus_bench"), "files/launcher/annulus_bench")
    steps = []
    for rule in read_tests(tests):
        executable = bundle.add_runfiles(binaries, rule.get("name"), config["MPIRUN"])
        steps += steps_of(rule, executable)
    steps = [each for _, each in sorted(steps, key=lambda pair: pair[0])]
    merges = steps[0]["command"]
    # It may take as long as there is time.
    memcheck = step("memcheck", ["memcheck"], ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99", *merges], 3600, gpu=True)
    bundle.write("steps.json", json.dumps([*steps, *BENCHMARKS, memcheck], indent=1) + "\n")
    bundle.add_mpi(config["MPIRUN"])
    bundle.add_libraries()
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-s", "-Wl,-soname,libannulus_entropy.so", "-o",
                    bundle.path("lib/libannulus_entropy.so"), os.path.join(HERE, "entropy.c")], check=True)
    for toml in sorted(glob.glob(os.path.join(ROOT, "configs", "*.toml"))):
        bundle.add(toml, "files/configs/" + os.path.basename(toml))
    for script in ("run.py", "report.py"):
        bundle.add(os.path.join(HERE, script), script)
    sizes = bundle.write_manifest()
    total = sum(sizes.values())
    if total >= LIMIT:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:12]
        fail("the bundle has %.1f MiB, but must have less than %d; the largest are\n" % (total / 2**20, LIMIT >> 20) +
             "\n".join("  %6.1f MiB  %s" % (size / 2**20, name) for name, size in largest))
    print("%s: %d files, %.1f MiB, %d steps" % (out, len(sizes) + 1, total / 2**20, len(steps) + len(BENCHMARKS) + 1))


if __name__ == "__main__":
    main()
