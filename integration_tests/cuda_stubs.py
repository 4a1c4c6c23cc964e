#!/usr/bin/env python3
"""Makes stub libraries in place of NVIDIA's, so that Python's torch can be imported without them.

    cuda_stubs.py FOLDER_OF_TORCH_LIBRARIES OUTPUT_FOLDER

PyTorch's usual wheel loads cuBLAS, cuDNN and others (3 GB) even if there is no GPU. For each library that the wheel needs
and this machine lacks, this makes one of the same name whose functions end the process if they are called. Used by
torch_stubs.bzl for tests in Python that import torch, and by the test of the bundle for GPU machines.
"""

import os
import re
import subprocess
import sys

NVIDIA = re.compile(r"lib(cu|nccl|nvshmem|nv)\w*\.so")


def read(option, path):
    return subprocess.run(["readelf", option, "-W", path], check=True, capture_output=True, text=True).stdout


def found(name, folder):
    """Returns whether the loader finds a library where the wheel looks: beside torch, in nvidia/*/lib, or in the system."""
    site = os.path.join(folder, "..", "..")
    nvidia = os.path.join(site, "nvidia")
    places = [folder] + [os.path.join(nvidia, d, "lib") for d in (os.listdir(nvidia) if os.path.isdir(nvidia) else [])]
    if any(os.path.exists(os.path.join(p, name)) for p in places):
        return True
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    return re.search(r"^\s*" + re.escape(name) + " ", known, re.M) is not None


def main():
    folder, out = sys.argv[1:]
    wanted = {}  # library -> {version or "": symbols}
    unversioned = set()
    for file in sorted(os.listdir(folder)):
        path = os.path.join(folder, file)
        if not re.search(r"\.so(\.|$)", file) or not os.path.isfile(path):
            continue
        needed = [n for n in re.findall(r"\(NEEDED\).*\[(.*)\]", read("-d", path)) if NVIDIA.match(n)]
        for name in needed:
            if name not in wanted and not found(name, folder):
                wanted[name] = {"": set()}
        # "File: libcublas.so.13" is followed by the symbol versions that come from it.
        library_of = {}
        library = ""
        for line in read("-V", path).splitlines():
            match = re.search(r"File: (\S+)", line)
            if match:
                library = match.group(1)
            match = re.search(r"Name: (\S+)\s+Flags", line)
            if match and library:
                library_of[match.group(1)] = library
        for name, version in re.findall(r" UND (\w+)(?:@(\S+))?", read("--dyn-syms", path)):
            library = library_of.get(version)
            if library in wanted:
                wanted[library].setdefault(version, set()).add(name)
            elif not version and re.match(r"cu|nccl|nvshmem|nvtx", name):
                unversioned.add(name)
    for versions in wanted.values():  # the file does not say to which version a symbol belongs
        versions[""] |= unversioned
    os.makedirs(out, exist_ok=True)
    for name, versions in wanted.items():
        base = os.path.join(out, name)
        with open(base + ".s", "w") as f:
            for symbol in sorted(set().union(*versions.values())):
                f.write(f".globl {symbol}\n.type {symbol}, @function\n{symbol}: ud2\n")
            f.write('.section .note.GNU-stack,"",@progbits\n')
        named = {v: s for v, s in versions.items() if v}
        with open(base + ".map", "w") as f:
            for version, symbols in named.items():
                f.write("%s { global: %s };\n" % (version, " ".join(s + ";" for s in sorted(symbols))))
        script = ["-Wl,--version-script=" + base + ".map"] if named else []
        subprocess.run(["gcc", "-shared", "-nostdlib", "-o", base, base + ".s", "-Wl,-soname," + name, *script], check=True)
        os.remove(base + ".s")
        os.remove(base + ".map")


if __name__ == "__main__":
    main()
