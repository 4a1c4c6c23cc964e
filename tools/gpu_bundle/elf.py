"""Reads what ELF programs and libraries need, with binutils' readelf, and changes the search path and the required
versions in copies of them. Used by collect.py, bundle_test.py and tools/install.py."""

import re
import struct
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
    versions = [(0,)]
    for entry in re.findall(r"Name: (\S+)\s+Flags: (\S.*?)\s+Version", readelf("-V", path)):
        match = re.fullmatch(family + r"_([0-9.]+)", entry[0])
        if match and "WEAK" not in entry[1]:
            versions.append(tuple(int(n) for n in match.group(1).split(".")))
    return max(versions)


def symbols_of(path, version):
    """The names of the undefined symbols of one version, such as "GLIBC_2.36"."""
    return set(re.findall(r" UND (\w+)@" + re.escape(version) + r"\b", readelf("--dyn-syms", path)))


class Patch:
    """A 64-bit little-endian ELF file that is changed in memory; save() writes it."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as f:
            self.data = bytearray(f.read())
        assert self.data[:6] == b"\x7fELF\x02\x01", path
        offset, size, count, names = (
            struct.unpack_from("<Q", self.data, 0x28)[0], *struct.unpack_from("<HHH", self.data, 0x3A))
        self.sections = []
        for i in range(count):
            fields = struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * size)
            self.sections.append({"type": fields[1], "offset": fields[4], "size": fields[5], "link": fields[6], "info": fields[7]})

    def save(self):
        with open(self.path, "wb") as f:
            f.write(self.data)

    def of_type(self, kind):
        return next((s for s in self.sections if s["type"] == kind), None)

    def string(self, section, at):
        begin = section["offset"] + at
        return self.data[begin:self.data.index(0, begin)].decode()

    def weaken(self, version):
        """Makes a version of symbols weak, so that the loader accepts a C library without it and takes the symbols from
        any library that defines them."""
        need = self.of_type(0x6FFFFFFE)
        strings = self.sections[need["link"]]
        at = need["offset"]
        for _ in range(need["info"]):
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + first
            for _ in range(count):
                _, flags, _, name, step = struct.unpack_from("<IHHII", self.data, entry)
                if self.string(strings, name) == version:
                    struct.pack_into("<H", self.data, entry + 4, flags | WEAK)
                entry += step
            at += following

    def set_run_path(self, path):
        """Replaces the file's search path for libraries, that of the machine it was built on, which must be at least as
        long."""
        dynamic = self.of_type(6)
        strings = self.sections[dynamic["link"]]
        for at in range(dynamic["offset"], dynamic["offset"] + dynamic["size"], 16):
            tag, value = struct.unpack_from("<QQ", self.data, at)
            if tag in (15, 29):
                old = self.string(strings, value)
                assert len(path) <= len(old), self.path
                begin = strings["offset"] + value
                self.data[begin:begin + len(old)] = path.encode() + b"\0" * (len(old) - len(path))
