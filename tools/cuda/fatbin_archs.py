#!/usr/bin/env python3
"""Prints for which GPUs a binary has CUDA code: `sm_80 sm_90` is machine code for these architectures (also for 90a),
`compute_80` is PTX, from which a driver makes machine code for any newer one.

    tools/cuda/fatbin_archs.py FILE...

Used by tools/cuda/build.sh, because a machine that only compiles may lack cuobjdump. nvcc embeds fat binaries: a header
(magic number, version, size of the header, size of what follows), then entries, each with a header of its own (kind, ...,
size of the header, size of the code, ..., architecture).
"""

import struct
import sys

MAGIC = struct.pack("<I", 0xBA55ED50)
KINDS = {1: "compute", 2: "sm"}


def architectures(content):
    """The set of names like "sm_80" of all entries."""
    found = set()
    at = content.find(MAGIC)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", content, at + 4)
        end = at + header + size
        if version == 1 and header >= 16 and end <= len(content):
            entry = at + header
            while entry + 32 <= end:
                kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", content, entry)
                if entry_header < 32:
                    break
                arch = struct.unpack_from("<I", content, entry + 28)[0]
                if kind in KINDS:
                    found.add(f"{KINDS[kind]}_{arch}")
                entry += entry_header + entry_size
        at = content.find(MAGIC, at + 4)
    return found


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    for path in sys.argv[1:]:
        with open(path, "rb") as file:
            print(" ".join(sorted(architectures(file.read()))))


if __name__ == "__main__":
    main()
