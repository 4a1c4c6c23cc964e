"""For tests that use torch: runs them in the Python of the torch that the library was built against.

A test begins with `torch_python.enter()`, before it imports torch. The last argument of its command line is the folder of
torch (@sys//:config.bzl); enter() removes it. It ends with `torch_python.main()`.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, _HERE)
import shards  # noqa: E402

main = shards.main


def enter():
    """Starts this program again in that Python, with stubs in place of NVIDIA's libraries (torch_stubs.bzl)."""
    if os.environ.get("ANNULUS_TORCH_PYTHON"):
        sys.path.insert(0, os.path.join(os.getcwd(), "python"))
        return
    root = sys.argv.pop()
    if not os.path.exists(os.path.join(root, "__init__.py")):
        print("SKIPPED: LIBTORCH contains no Python package")
        sys.exit(0)
    site = os.path.dirname(root)
    python = os.path.join(site, "..", "..", "..", "bin", "python3")
    # Not in TEST_TMPDIR, which all ranks of a job share.
    compiled = tempfile.mkdtemp(prefix="annulus-inductor-", dir=os.environ.get("TMPDIR"))
    # A library that was compiled with a sanitizer needs its runtime, which is loaded before all others (.bazelrc).
    preload = {"LD_PRELOAD": os.environ["ANNULUS_SANITIZER"]} if os.environ.get("ANNULUS_SANITIZER") else {}
    env = dict(
        os.environ,
        **preload,
        ANNULUS_TORCH_PYTHON="1",
        LD_LIBRARY_PATH=os.path.join(_HERE, "stubs_of_nvidia"),
        PYTHONPATH=site,
        PYTHONDONTWRITEBYTECODE="1",
        ANNULUS_TORCH_LIBRARY=os.path.join(os.getcwd(), "python", "ops", "libannulus_torch.so"),
        TORCHINDUCTOR_CACHE_DIR=compiled,
        TORCHINDUCTOR_COMPILE_THREADS="1",
        USER=os.environ.get("USER", "test"),
    )
    done = subprocess.run([python if os.path.exists(python) else sys.executable, *sys.argv], env=env)
    shutil.rmtree(compiled, ignore_errors=True)
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def need(package):
    """Ends the test if that Python lacks a package, which tools/setup.sh installs beside its own torch."""
    if importlib.util.find_spec(package) is None:
        print(f"SKIPPED: the Python of LIBTORCH has no {package}")
        sys.exit(0)
