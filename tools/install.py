#!/usr/bin/env python3
"""Copies what Bazel built to a folder from which annulus runs without Bazel. Called by tools/install.sh.

    install.py --check PREFIX                          exits with 2 if PREFIX may not be installed to
    install.py --bin FOLDER --sources LIST PREFIX      fills PREFIX; LIST has the labels of headers, and of sources that
                                                       users compile, one per line

PREFIX holds

    bin/annulus          the command: a script that starts the program beside it
    libexec/             the programs; they find their libraries in ../lib, wherever the folder is
    lib/                 libannulus.so, libannulus_mpi_faults.so, the libraries of LibTorch, and in a build for CUDA those of NVIDIA's wheels
    include/annulus/     annulus's headers for C++, which are included as "annulus/..."; those of tests as "annulus/testing/..."
    share/annulus/testing/    the sources and programs of tests, for CMake
    lib/cmake, lib/pkgconfig    what CMake's find_package and pkg-config read
    share/annulus/       configurations, documents, licenses, the tokenizer; MANIFEST lists what is installed
"""

import argparse
import glob
import hashlib
import os
import re
import shutil
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "tools"))
import elf  # noqa: E402

MANIFEST = os.path.join("share", "annulus", "MANIFEST")
TITLE = "annulus, installed by ./annulus install"
# Libraries that every system has: those of the C library and of g++'s runtime.
SYSTEM = re.compile(r"(ld-linux-[\w-]+|lib(c|m|dl|pthread|rt|resolv|util|stdc\+\+|gcc_s))\.so(\.\d+)*")
# Libraries of the system that are copied as well: their names change with each release of a distribution.
CARRIED = re.compile(r"lib(spdlog|fmt)\.so\.[\d.]+")
SYSTEM_FOLDERS = ["/usr/local/lib", *sorted(glob.glob("/usr/lib/*-linux-gnu")), "/usr/lib64", "/usr/lib"]
# A header of the tree includes others by their paths in the tree.
INCLUDE = re.compile(r'(?m)^#include "([^"]+)"')
# The headers of tests are in one folder for users (include_prefix in their BUILD files).
TESTING = re.compile(r"^(comm|attention)/testing/")
# Libraries that only Python needs.
PYTHON = re.compile(r"lib(torch_python|shm\w*|nnapi\w*)\.so")

COMMAND = """#!/bin/bash
# The command annulus, from a folder that `./annulus install` made. The folder may be moved and copied as a whole.
# ANNULUS_ISA=baseline/avx2/avx512/avx512bf16/amx: the newest vector instructions that may be used.
# ANNULUS_PYTHON: the Python that has the libraries which the README lists, for `tokenize`, `sample` and `report --tensorboard`.
set -euo pipefail
here=$(dirname "$(dirname "$(readlink -f "${{BASH_SOURCE[0]}}")")")
export ANNULUS_SCRIPT="$here/bin/annulus" ANNULUS_PROGRAM="${{ANNULUS_PROGRAM:-$0}}"

{isa}

{run_program}

if [[ ${{1-}} == tokenizer || ${{1-}} == follower ]]; then
  exec "${{ANNULUS_PYTHON:-python3}}" -B "$here/share/annulus/python/$1" "${{@:2}}"
fi
program=$here/libexec/annulus
run_program "$@"
"""

README = """annulus {version}, LibTorch {torch}, {cuda}

    bin/annulus doctor                               shows what is wrong with this host, and what to do
    bin/annulus launch -n 2 train CONFIG             CONFIG: one of share/annulus/configs, or yours
    bin/annulus launch --hosts a:8,b:8 train CONFIG

The folder may be moved or copied as a whole; every host of a job needs the same one at the same path (a shared file
system, a copy on each host, or a container image). Hosts also need

    Open MPI {mpi} (mpirun and its libraries; Debian, Ubuntu: apt-get install openmpi-bin)
    {system}
    NVIDIA's driver if they compute on GPUs
    at least {glibc} of the C library and {glibcxx} of g++'s runtime

Making tokens needs a Python with the packages {wheels};
ANNULUS_PYTHON names it. Chat templates need {chat}, too. For your own programs in C++ there are include/annulus and lib/libannulus.so, which CMake's
find_package(annulus) and pkg-config find (share/annulus/docs/reference/cpp.md). `report --tensorboard` and `--wandb` need what
share/annulus/python/follower/requirements.txt and requirements-wandb.txt list.
share/annulus/docs/how-to/clusters.md says how to start jobs on several hosts, with Slurm and in Kubernetes.
"""


def fail(code, text):
    print("annulus: " + text, file=sys.stderr)
    sys.exit(code)


def read(*names):
    with open(os.path.join(ROOT, *names)) as f:
        return f.read()


def installed(prefix):
    """The paths of the files of an existing installation; none if the folder is empty or does not exist."""
    if os.path.lexists(prefix) and not os.path.isdir(prefix):
        fail(2, prefix + " is not a folder: name one to install to")
    if not os.path.isdir(prefix) or not os.listdir(prefix):
        return []
    try:
        with open(os.path.join(prefix, MANIFEST)) as f:
            lines = f.read().splitlines()
    except OSError:
        lines = []
    if lines[:1] != [TITLE]:
        fail(2, prefix + " holds something other than an installation of annulus: name a separate folder, such as " +
             os.path.join(prefix, "annulus"))
    paths = [line.split("  ", 1)[1] for line in lines if re.match(r"[0-9a-f]{64}  ", line)]
    return [p for p in paths if not os.path.isabs(p) and ".." not in p.split("/")]


class Prefix:
    """The folder that is installed to. Files are written under another name and renamed, so that a running job keeps
    the files that it has open."""

    def __init__(self, prefix):
        self.prefix = prefix
        self.files = {}  # path -> SHA-256

    def _make_folders(self, path):
        """Makes a folder of the installation, and those above it. An earlier installation may have made them with a umask
        that keeps other users out."""
        if path:
            self._make_folders(os.path.dirname(path))
            os.makedirs(os.path.join(self.prefix, path), exist_ok=True)
            os.chmod(os.path.join(self.prefix, path), 0o755)
        else:
            os.makedirs(self.prefix, exist_ok=True)

    def _place(self, path, mode, write):
        place = os.path.join(self.prefix, path)
        try:
            self._make_folders(os.path.dirname(path))
            write(place + ".new")
            os.chmod(place + ".new", mode)
            os.replace(place + ".new", place)
        except OSError as error:
            if os.path.exists(place + ".new"):
                os.remove(place + ".new")
            fail(8, "cannot write %s: %s" % (place, error.strerror))
        with open(place, "rb") as f:
            self.files[path] = hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else \
                hashlib.sha256(f.read()).hexdigest()

    def add(self, source, path, mode=0o644):
        self._place(path, mode, lambda to: shutil.copyfile(source, to))

    def write(self, path, text, mode=0o644):
        def write(to):
            with open(to, "w") as f:
                f.write(text)

        self._place(path, mode, write)

    def add_source(self, path, headers):
        """Adds a source of the tree. It includes headers by their paths in the tree; here those are below annulus/."""
        with open(os.path.join(ROOT, path)) as f:
            text = f.read()
        here = TESTING.sub("testing/", path)
        self.write(("include/annulus/" if path in headers else "share/annulus/") + here, INCLUDE.sub(
            lambda m: m.group(0) if m.group(1) not in headers else '#include "annulus/%s"' % TESTING.sub("testing/", m.group(1)),
            text))

    def add_package_file(self, name, path, values):
        """Adds a file of tools/package, in which @NAME@ stands for values[NAME]."""
        self.write(path, re.sub("@([A-Z_]+)@", lambda m: values[m.group(1)], read("tools", "package", name)))

    def add_program(self, source, path, run_path):
        def write(to):
            shutil.copyfile(source, to)
            os.chmod(to, 0o755)
            elf.set_run_path(to, run_path)

        self._place(path, 0o755, write)


class Libraries:
    """The libraries of LibTorch and of the log that programs need, with the libraries that those need (`own`), and those of
    the system (`system`)."""

    def __init__(self, programs):
        folders = elf.run_path(programs[0])
        self.torch = next((f for f in folders if os.path.exists(os.path.join(f, "libtorch_cpu.so"))), None)
        if not self.torch:
            fail(1, "%s does not say where LibTorch is" % programs[0])
        # Further folders in which the programs look for libraries that all hosts have, such as a site's own MPI.
        self.elsewhere = [f for f in folders if os.path.realpath(f) != os.path.realpath(self.torch)]
        self.own, self.system = {}, set()
        for program in programs:
            self._collect(program, [self.torch])
        self.cuda = "libtorch_cuda.so" in self.own
        if self.cuda:  # these libraries open others by name
            for path in sorted(glob.glob(os.path.join(self.torch, "*.so*")) +
                               glob.glob(os.path.join(self.torch, "../../nvidia/*/lib/*.so*"))):
                if not PYTHON.match(os.path.basename(path)) and os.path.basename(path) not in self.own:
                    self.own[os.path.basename(path)] = path
                    self._collect(path, [os.path.dirname(path)])

    def _collect(self, file, folders):
        for name in elf.needed(file):
            if SYSTEM.fullmatch(name) or name in self.own or name in self.system:
                continue
            places = folders + SYSTEM_FOLDERS if CARRIED.fullmatch(name) else folders
            path = next((p for p in (os.path.join(f, name) for f in places) if os.path.exists(p)), None)
            if not path:
                self.system.add(name)
                continue
            self.own[name] = path
            here = os.path.dirname(path)
            self._collect(path, [p.replace("$ORIGIN", here) for p in elf.run_path(path)] + folders)


def torch_version(folder):
    for name, pattern in (("../version.py", r"__version__ = '([^']+)'"), ("../build-version", r"(\S+)")):
        try:
            with open(os.path.join(folder, name)) as f:
                return re.search(pattern, f.read()).group(1)
        except (OSError, AttributeError):
            pass
    return "of unknown version"


def minor(version):
    return ".".join(version.split("+")[0].split(".")[:2])


def newest(files, family):
    version = max((elf.newest(f, family) for f in files), default=(0,))
    return family + "_" + ".".join(map(str, version))


def install(binaries, sources, prefix):
    old = installed(prefix)
    programs = {"annulus": "launcher/annulus", "annulus_bench": "benchmarks/program/annulus_bench"}
    programs = {name: os.path.realpath(os.path.join(binaries, path)) for name, path in programs.items()}
    library = os.path.realpath(os.path.join(binaries, "tools", "libannulus.so"))
    faults = os.path.realpath(os.path.join(binaries, "comm", "testing", "libannulus_mpi_faults.so"))
    libraries = Libraries([*programs.values(), library])
    out = Prefix(prefix)
    size = sum(os.path.getsize(p) for p in [*programs.values(), library, *libraries.own.values()])
    above = prefix
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    if not old and shutil.disk_usage(above).free < size + (64 << 20):
        fail(8, "%s has less than the %d MB free that the installation needs" % (above, (size >> 20) + 64))

    if not os.path.exists(os.path.join(prefix, MANIFEST)):
        out.write(MANIFEST, TITLE + "\n")  # so that an interrupted installation can be continued
        del out.files[MANIFEST]
    for name, path in libraries.own.items():
        out.add(os.path.realpath(path), "lib/" + name)
    run_path = ["$ORIGIN/../lib", *libraries.elsewhere]
    out.add_program(library, "lib/libannulus.so", ":".join(["$ORIGIN", *libraries.elsewhere]))
    out.add_program(faults, "lib/libannulus_mpi_faults.so", ":".join(libraries.elsewhere))
    for name, path in programs.items():
        out.add_program(path, "libexec/" + name, ":".join(run_path))
    headers = frozenset(s for s in sources if s.endswith(".h"))
    for source in sources:
        out.add_source(source, headers)
    for path in ("comm/testing/mpi_runner.py", "python/annulus/testing/hosts.py", "python/annulus/testing/namespaces.py"):
        out.add(os.path.join(ROOT, path), "share/annulus/testing/" + os.path.basename(path))
    script = read("annulus")
    out.write("bin/annulus", COMMAND.format(
        isa=re.search(r"(?ms)^# ANNULUS_ISA also limits LibTorch.*?^esac$", script).group(0),
        run_program=re.search(r"(?ms)^# Runs the program, whose malloc.*?^}$", script).group(0)), 0o755)
    version = re.search(r'kVersion\[\] = "([^"]+)"', read("common", "version.h")).group(1)
    torch = torch_version(libraries.torch)
    values = {"VERSION": version, "VERSION_MINOR": minor(version), "TORCH": torch, "TORCH_MINOR": minor(torch),
              # A machine that compiles may lack some of NVIDIA's libraries (bazel/system_deps.bzl).
              "LINK_OPTIONS": "-Wl,--allow-shlib-undefined" if libraries.cuda else ""}
    for name, path in (("annulus-config.cmake", "lib/cmake/annulus/"), ("annulus-config-version.cmake", "lib/cmake/annulus/"),
                       ("annulus.pc", "lib/pkgconfig/")):
        out.add_package_file(name + ".in", path + name, values)

    for folder, pattern in (("configs", "**/*"), ("docs", "**/*"), ("benchmarks/results", "*.md"), ("examples", "**/*"),
                            ("python/tokenizer", "*.py"), ("python/follower", "*.py"), ("python/follower", "*.txt")):
        for path in sorted(glob.glob(os.path.join(ROOT, folder, pattern), recursive=True)):
            # Links bazel-* are there where an example was built.
            if os.path.isfile(path) and "/bazel-" not in path and (os.path.basename(path) != "BUILD" or folder == "examples"):
                out.add(path, "share/annulus/" + os.path.relpath(path, ROOT))
    out.add(os.path.join(ROOT, "LICENSE"), "LICENSE")
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):  # docs/ links to them
        out.add(os.path.join(ROOT, page), "share/annulus/" + page)
    for path in sorted(glob.glob(os.path.join(ROOT, "python", "licenses", "*.txt"))):
        out.add(path, "share/annulus/licenses/" + os.path.basename(path))
    beside = os.path.join(libraries.torch, "..", "..")
    for pattern in ("torch-*.dist-info/**/LICENSE*", "torch-*.dist-info/**/NOTICE*", "nvidia_*.dist-info/**/License*"):
        for path in sorted(glob.glob(os.path.join(beside, pattern), recursive=True)):
            if os.path.isfile(path):
                package = os.path.relpath(path, beside).split(os.sep)[0].split("-")[0]
                out.add(path, "share/annulus/licenses/%s-%s" % (package, os.path.basename(path)))

    for package in ("libspdlog-dev", "libfmt-dev"):
        if os.path.isfile("/usr/share/doc/%s/copyright" % package):
            out.add("/usr/share/doc/%s/copyright" % package, "share/annulus/licenses/%s.txt" % package)

    files = [*programs.values(), library, *libraries.own.values()]
    cuda = "for CUDA" if libraries.cuda else "for CPUs"
    out.write("README", README.format(
        version=version, torch=torch, cuda=cuda,
        mpi="of the series that has " + next((n for n in sorted(libraries.system) if n.startswith("libmpi.")), "libmpi"),
        system=", ".join(n for n in sorted(libraries.system) if not n.startswith("libmpi.")) + " (of hwloc, in Debian: libhwloc15)",
        glibc=newest(files, "GLIBC"), glibcxx=newest(files, "GLIBCXX"),
        wheels=re.search(r"(?m)^wheels=\((.*)\)$", read("tools", "tokenizer_wheels.sh")).group(1),
        chat=" ".join(re.search(r"(?ms)^chat_wheels=\((.*?)\)$", read("tools", "tokenizer_wheels.sh")).group(1).split())))
    text = [TITLE, "annulus %s, LibTorch %s, %s" % (version, torch, cuda), ""]
    text += ["%s  %s" % (digest, path) for path, digest in sorted(out.files.items())]
    out.write(MANIFEST, "\n".join(text) + "\n")
    for path in sorted(set(old) - set(out.files)):
        try:
            os.remove(os.path.join(prefix, path))
        except FileNotFoundError:
            pass
    print("%s: annulus %s, LibTorch %s, %s; %d files, %d MB" % (
        prefix, version, torch, cuda, len(out.files),
        sum(os.path.getsize(os.path.join(prefix, p)) for p in out.files) / 1e6))
    print("  " + os.path.join(prefix, "bin", "annulus") + " doctor")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--bin", metavar="FOLDER")
    parser.add_argument("--sources", metavar="LIST", default="")
    parser.add_argument("prefix")
    options = parser.parse_args()
    if not options.prefix:
        parser.error("PREFIX is empty: name the folder to install to")
    os.umask(0o022)  # other users run what is installed, whatever the umask of who installs it
    prefix = os.path.abspath(options.prefix)
    if options.check:
        installed(prefix)
    else:
        install(options.bin, [label.lstrip("/").replace(":", "/") for label in options.sources.split()], prefix)


if __name__ == "__main__":
    main()
