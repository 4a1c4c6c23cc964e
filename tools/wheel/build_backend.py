"""What pip, uv and build call in a clone (pyproject.toml, PEP 517): the wheel of ./annulus wheel.

Name, version and dependencies are known before anything is compiled, so that a torch that does not fit is an error at
once. Nothing is installed on the machine here: that is set-up's part, and set-up may need root.
"""

import os
import re
import shutil
import subprocess
import sys

import wheel


class UnsupportedOperation(Exception):
    """What PEP 517 expects of a hook that cannot do what it is for."""


def _read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def _need_setup():
    """Ends the build with what to do if set-up has not found or installed all that a wheel needs."""
    try:
        levels = re.findall(r"(?m)^level (\d+)$", _read(".bazel/setup"))
    except FileNotFoundError:
        levels = []
    if not levels or int(levels[-1]) < 1:
        sys.exit(f"annulus: a wheel is built with a compiler, Bazel and LibTorch, which set-up has not looked for in {os.getcwd()}.\n"
                 "It installs what is missing (on Debian and Ubuntu, as root or with sudo). Run this there, and then pip again:\n"
                 "  tools/setup.sh --tests")


def _environment():
    """The caller's environment without what a front end added for this process: a search path for modules, and folders of
    programs that are gone after the build and that set-up would take for the machine's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")}
    own = os.path.join(sys.prefix, "bin") if sys.prefix != sys.base_prefix else None
    folders = kept.get("PATH", os.defpath).split(os.pathsep)
    kept["PATH"] = os.pathsep.join(f for f in folders if f != own and "/pip-build-env-" not in f)
    return kept


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _need_setup()
    version, text = wheel.metadata(re.search(r"(?m)^torch_version=(.+)$", _read("tools/setup.sh")).group(1), wheel.origin())
    name = f"annulus-{version}.dist-info"
    os.makedirs(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w", encoding="utf-8") as file:
        file.write(text)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _need_setup()
    done = subprocess.run(["./annulus", "wheel"], stdout=subprocess.PIPE, text=True, env=_environment())
    if done.returncode != 0:
        sys.exit(done.returncode)  # the reason is on standard error, which the front end shows
    path = done.stdout.split("\n")[-2]
    shutil.copy(path, wheel_directory)
    return os.path.basename(path)


def build_sdist(sdist_directory, config_settings=None):
    raise UnsupportedOperation("annulus has no source distribution. In a clone, make a wheel: `pip wheel --no-deps .`, or `python -m build --wheel`")
