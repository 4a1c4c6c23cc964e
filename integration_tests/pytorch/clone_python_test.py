#!/usr/bin/env python3
"""Tests that the Python in a clone imports torch and annulus after `./annulus torch`, although set-up leaves out NVIDIA's
libraries: tools/cuda_stubs.py makes stubs of them among those of torch.

    clone_python_test.py CUDA_STUBS TORCH
"""

import os
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()

SITE = os.environ["PYTHONPATH"]
STUBS = os.path.abspath(sys.argv.pop())
sys.path.append(os.path.dirname(STUBS))
import cuda_stubs  # noqa: E402

PROGRAM = """
import torch, annulus
x = torch.ones(1, 4, 1, 8)
print(annulus.attention(x, x, x).sum().item(), torch.cuda.is_available())
"""


class ClonePython(unittest.TestCase):
    def setUp(self):
        """Makes the folders of a virtual environment with links to the files of the real one."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = os.path.join(folder.name, "site-packages")
        self.lib = os.path.join(self.site, "torch", "lib")
        self.nvidia = os.path.join(self.site, "nvidia", "cu13", "lib")
        for real, made, skipped in [
            (os.path.join(SITE, "torch"), os.path.join(self.site, "torch"), {"lib"}),
            (os.path.join(SITE, "torch", "lib"), self.lib, set()),
            (os.path.join(SITE, "nvidia"), os.path.join(self.site, "nvidia"), {"cu13"}),
            (os.path.join(SITE, "nvidia", "cu13", "lib"), self.nvidia, set()),
        ]:
            os.makedirs(made, exist_ok=True)
            for name in os.listdir(real) if os.path.isdir(real) else []:
                path = os.path.join(real, name)
                if name not in skipped and not (cuda_stubs.NVIDIA.match(name) and cuda_stubs.is_stub(path)):
                    os.symlink(path, os.path.join(made, name))
        self.before = set(os.listdir(self.lib))

    def python(self, program):
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        env["PYTHONPATH"] = os.pathsep.join([os.path.join(os.getcwd(), "python"), self.site, SITE])
        return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)

    def make(self):
        subprocess.run([sys.executable, STUBS, "--beside", self.lib], check=True)
        return sorted(set(os.listdir(self.lib)) - self.before)

    def test_imports_torch_and_annulus(self):
        without = self.python("import torch")
        if without.returncode == 0:
            self.skipTest("this machine has all of NVIDIA's libraries that torch loads")
        made = self.make()
        self.assertRegex(without.stderr, "(" + "|".join(made) + "): cannot open shared object file")
        done = self.python(PROGRAM)
        self.assertEqual((done.stdout, done.returncode), ("32.0 False\n", 0), done.stderr)

        # A second time there is nothing to make; a library that has been installed meanwhile is taken instead.
        times = {name: os.stat(os.path.join(self.lib, name)).st_mtime_ns for name in made}
        self.assertEqual(self.make(), made)
        self.assertEqual({name: os.stat(os.path.join(self.lib, name)).st_mtime_ns for name in made}, times)
        open(os.path.join(self.nvidia, made[0]), "wb").close()
        self.assertEqual(self.make(), made[1:])

        call = f"import ctypes; ctypes.CDLL({os.path.join(self.lib, made[-1])!r}).annulus_stub()"
        ended = self.python(call)
        self.assertLess(ended.returncode, 0)
        self.assertIn(f"annulus_stub was called, which is in {made[-1]}, but that is not installed here", ended.stderr)


if __name__ == "__main__":
    torch_python.main()
