"""Reads what ELF programs and libraries need, and changes the search path and the required versions in copies of them.
binutils' readelf does the reading. Used by tools/install.py, tools/cuda_stubs.py, tools/gpu_bundle/collect.py and
bundle_test.py."""

import re
import subprocess

WEAK = 2  # VER_FLG_WEAK


def readelf(option, path):
    return subprocess.run(["readelf", option, "-W", path], check=True, capture_output=True, text=True).stdout


def is_elf(path):
    with open(path, "rb") as f:
        return f.read(4) == b"\x7fELF"


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", path))


def run_path(path):
    return [p for text in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", readelf("-d", path)) for p in text.split(":") if p]


def newest(path, family):
    """The newest version of a family of symbols ("GLIBC", "GLIBCXX") that the file requires, or (0,) if none."""
    entries = re.findall(r"Name: %s_([0-9.]+)\s+Flags: (\S.*?)\s+Version" % family, readelf("-V", path))
    return max((tuple(map(int, version.split("."))) for version, flags in entries if "WEAK" not in flags), default=(0,))


def undefined(path, version):
    """The names of the undefined symbols of one version, such as "GLIBC_2.36"."""
    return set(re.findall(r" UND (\w+)@" + re.escape(version) + r"\b", readelf("--dyn-syms", path)))


def weaken(path, version):
    """Makes a required version of symbols weak, so that the loader accepts a library without it and takes the symbols from
    any library that defines them."""
    needs = re.search(r"Version needs section.*?Offset: 0x([0-9a-f]+)(.*)", readelf("-V", path), re.S)
    with open(path, "r+b") as f:
        for entry in re.findall(r"(?m)^ +(?:0x)?([0-9a-f]+): +Name: %s " % re.escape(version), needs.group(2)):
            f.seek(int(needs.group(1), 16) + int(entry, 16) + 4)  # vna_flags, of two bytes
            f.write(WEAK.to_bytes(2, "little"))


def set_run_path(path, new):
    """Replaces the search path for libraries, that of the machine that built the file, in its place among the strings, so
    the new one may not be longer."""
    strings = re.search(r" \.dynstr +STRTAB +[0-9a-f]+ ([0-9a-f]+) ", readelf("-S", path))
    with open(path, "r+b") as f:
        data = f.read()
        for old in set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", readelf("-d", path))):
            assert len(new) <= len(old), path
            f.seek(data.index(old.encode() + b"\0", int(strings.group(1), 16)))
            f.write(new.encode().ljust(len(old), b"\0"))
