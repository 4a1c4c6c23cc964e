#!/usr/bin/env python3
"""Makes stub libraries in place of NVIDIA's, so that Python's torch can be imported without them.

    cuda_stubs.py FOLDER_OF_TORCH_LIBRARIES OUTPUT_FOLDER
    cuda_stubs.py --beside FOLDER_OF_TORCH_LIBRARIES

PyTorch's usual wheel loads cuBLAS, cuDNN and others (3 GB) even if there is no GPU. For each library that the wheel needs
and this machine lacks, this makes one of the same name whose functions say that they are stubs and end the process.

`--beside` puts them among the libraries of torch, where the loader looks last: what is installed later is taken instead.
It removes those that are not needed any more, and makes none for the driver (libcuda), which torch loads only for a GPU.
`./annulus torch` does this for the torch in .venv. torch_stubs.bzl makes a folder for tests in Python that import torch,
as does the test of the bundle for GPU machines.
"""

import os
import re
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import elf  # noqa: E402

NVIDIA = re.compile(r"lib(cu|nccl|nvshmem|nv)\w*\.so")
DRIVER = "libcuda.so"
MARK = "annulus_stub"  # a function that every stub has

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
static void missing(const char* name) {
  fprintf(stderr, "annulus: %%s was called, which is in %(library)s, but that is not installed here. A stub stands in for "
    "it, so that torch can be imported and compute on CPUs. For a GPU, install torch with all that it depends on.\\n", name);
  abort();
}
void %(mark)s(void) { missing("%(mark)s"); }
"""


def is_stub(path):
    if not os.path.isfile(path) or os.path.getsize(path) > 1 << 22:  # no need to read cuBLAS
        return False
    with open(path, "rb") as file:
        return MARK.encode() in file.read()


def found(name, folder):
    """Returns whether the loader finds a library where the wheel looks: beside torch, in nvidia/*/lib, or in the system."""
    site = os.path.join(folder, "..", "..")
    nvidia = os.path.join(site, "nvidia")
    places = [folder] + [os.path.join(nvidia, d, "lib") for d in (os.listdir(nvidia) if os.path.isdir(nvidia) else [])]
    paths = [os.path.join(p, name) for p in places]
    if any(os.path.exists(p) and not is_stub(p) for p in paths):
        return True
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    return re.search(r"^\s*" + re.escape(name) + " ", known, re.M) is not None


def libraries(folder):
    for file in sorted(os.listdir(folder)):
        path = os.path.join(folder, file)
        if re.search(r"\.so(\.|$)", file) and os.path.isfile(path) and not (NVIDIA.match(file) and is_stub(path)):
            yield path


def lacking(folder):
    """Returns the names of NVIDIA's libraries that those in the folder need and this machine lacks."""
    needed = {n for path in libraries(folder) for n in elf.needed(path)}
    return {n for n in needed if NVIDIA.match(n) and not found(n, folder)}


def make(folder, names, out):
    """Makes stubs of these names, with all the symbols that the libraries in the folder take from them."""
    wanted = {name: {"": set()} for name in names}  # library -> {version or "": symbols}
    unversioned = set()
    for path in libraries(folder):
        # "File: libcublas.so.13" is followed by the symbol versions that come from it.
        library_of = {}
        library = ""
        for line in elf.readelf("-V", path).splitlines():
            match = re.search(r"File: (\S+)", line)
            if match:
                library = match.group(1)
            match = re.search(r"Name: (\S+)\s+Flags", line)
            if match and library:
                library_of[match.group(1)] = library
        for name, version in re.findall(r" UND (\w+)(?:@(\S+))?", elf.readelf("--dyn-syms", path)):
            library = library_of.get(version)
            if library in wanted:
                wanted[library].setdefault(version, set()).add(name)
            elif not version and re.match(r"cu|nccl|nvshmem|nvtx", name):
                unversioned.add(name)
    for versions in wanted.values():  # the file does not say to which version a symbol belongs
        versions[""] |= unversioned
    with tempfile.TemporaryDirectory(dir=out) as work:
        for name, versions in wanted.items():
            base = os.path.join(work, name)
            with open(base + ".c", "w") as f:
                f.write(SOURCE % {"library": name, "mark": MARK})
                for symbol in sorted(set().union(*versions.values())):
                    f.write(f'void {symbol}(void) {{ missing("{symbol}"); }}\n')
            named = {v: s for v, s in versions.items() if v}
            with open(base + ".map", "w") as f:
                for version, symbols in named.items():
                    f.write("%s { global: %s };\n" % (version, " ".join(s + ";" for s in sorted(symbols))))
            script = ["-Wl,--version-script=" + base + ".map"] if named else []
            options = ["-shared", "-fPIC", "-fno-builtin", "-w", "-Wl,-soname," + name, *script]
            subprocess.run(["gcc", *options, "-o", base, base + ".c"], check=True)
            os.replace(base, os.path.join(out, name))


def beside(folder):
    wanted = {name for name in lacking(folder) if not name.startswith(DRIVER)}
    there = {name for name in os.listdir(folder) if NVIDIA.match(name) and is_stub(os.path.join(folder, name))}
    for name in there - wanted:
        os.remove(os.path.join(folder, name))
    if wanted - there:
        make(folder, wanted - there, folder)


def main():
    if sys.argv[1] == "--beside":
        return beside(sys.argv[2])
    folder, out = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    make(folder, lacking(folder), out)


if __name__ == "__main__":
    main()
