#!/usr/bin/env python3
"""Tests the wheel, installed by pip into an empty virtual environment with a torch and an empty PATH: no compiler, no
Bazel, no MPI. In one process and under torchrun; and its error beside another version of torch. And what pip does in a
clone, where a script that prints the path of this wheel stands in for ./annulus wheel.

    wheel_test.py LIBRARY TORCH
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("auditwheel")

import torch  # noqa: E402

LIBRARY = os.path.abspath(sys.argv.pop())

# Compares with causal attention computed by its definition.
PROGRAM = """
import os, annulus, torch
import torch.distributed as dist
group = None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
torch.manual_seed(0)
whole = [torch.randn(1, 48, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
q, k, v = (t.transpose(1, 2) for t in whole)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
part = annulus.shard(whole, "zigzag", group)
out = annulus.attention(*part, layout="zigzag", group=group)
loss, wanted = out.square().sum(), want.square().sum()
got = [annulus.all_reduce(g, group=group) for g in torch.autograd.grad(loss, whole)]
for a, b in zip([out, *got], [annulus.shard(want, "zigzag", group), *torch.autograd.grad(wanted, whole)]):
    assert (a - b).abs().max() < 1e-12 * b.abs().max(), (a - b).abs().max()  # of fp64, as in exactness.py
print(f"version {annulus.__version__}: as dense attention, {annulus.size(group)} ranks", flush=True)
if group is not None:
    dist.destroy_process_group()
"""


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        out = os.path.join(cls.folder, "wheel")
        make = [sys.executable, "tools/wheel/wheel.py", "--library", LIBRARY, "--torch", torch.__version__, "--out", out,
                "--home-page", "https://somebody:secret@code.example/group/annulus.git"]
        subprocess.run(make, check=True)
        (cls.wheel,) = glob.glob(out + "/*.whl")
        env = os.path.join(cls.folder, "env")
        subprocess.run([sys.executable, "-m", "venv", env], check=True)
        cls.python = os.path.join(env, "bin", "python3")
        # The installed PyTorch is linked into the environment, because its wheel is large.
        (cls.site,) = glob.glob(env + "/lib/python3.*/site-packages")
        with open(os.path.join(cls.site, "torch.pth"), "w") as file:
            file.write(os.path.dirname(os.path.dirname(torch.__file__)) + "\n")
        install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", cls.wheel]
        subprocess.run([cls.python, *install], check=True, env=cls.environment())

    @classmethod
    def environment(cls):
        """Returns an environment without anything of this tree and without the machine's programs."""
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "USER", "OMP_NUM_THREADS") if name in os.environ}
        return kept | {"PATH": "/nonexistent", "HOME": cls.folder, "TMPDIR": cls.folder}

    def run_python(self, *arguments):
        done = subprocess.run(
            [self.python, *arguments], env=self.environment(), cwd=self.folder, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    def test_home_page_is_that_of_the_clones_origin(self):
        sys.path.insert(0, "tools/wheel")
        import wheel

        page = "Project-URL: Homepage, https://code.example/group/annulus\n"
        for address in ("https://code.example/group/annulus", "git@code.example:group/annulus.git", "ssh://git@code.example:22/group/annulus/"):
            self.assertEqual(wheel.home_page(address), page, address)
        for address in ("", "/srv/annulus", "../annulus", "file:///srv/annulus.git"):
            self.assertEqual(wheel.home_page(address), "", address)

    def test_module_prints_what_it_found(self):
        code, out, err = self.run_python("-m", "annulus")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, rf"(?m)^annulus +\d+\.\d+\.\d+, {re.escape(self.site)}/annulus/libannulus_torch\.so$")
        self.assertRegex(out, rf"(?m)^torch +{re.escape(torch.__version__)}; ")

    def test_runs_in_one_process(self):
        code, out, err = self.run_python("-c", PROGRAM)
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"^version \d+\.\d+\.\d+: as dense attention, 1 ranks$")

    def test_runs_under_torchrun(self):
        program = os.path.join(self.folder, "program.py")
        with open(program, "w") as file:
            file.write(PROGRAM)
        code, out, err = self.run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program)
        self.assertEqual(code, 0, err)
        self.assertEqual(len(re.findall("as dense attention, 2 ranks", out)), 2, out)

    def clone(self, setup):
        """Makes a folder with what pip reads of a clone, and with what set-up has written down, if anything."""
        clone = tempfile.mkdtemp(dir=self.folder)
        for path in ["pyproject.toml", "LICENSE", "common/version.h", "python/annulus/transformers.py", "tools/wheel/wheel.py",
                     "tools/wheel/build_backend.py", "tools/setup.sh", *glob.glob("python/licenses/*.txt")]:
            os.makedirs(os.path.dirname(os.path.join(clone, path)), exist_ok=True)
            shutil.copy(path, os.path.join(clone, path))
        with open(os.path.join(clone, "annulus"), "w") as script:
            script.write(f'#!/bin/bash\necho "$*; $PATH; ${{PYTHONPATH-unset}}" >>called\necho said before\necho {self.wheel}\n')
        os.chmod(script.name, 0o755)
        if setup:
            os.mkdir(os.path.join(clone, ".bazel"))
            with open(os.path.join(clone, ".bazel", "setup"), "w") as file:
                file.write(setup)
        return clone

    def pip(self, *arguments):
        return self.run_python("-m", "pip", "--disable-pip-version-check", *arguments, "--no-index", "--no-deps")

    def test_pip_makes_the_wheel_in_a_clone(self):
        clone = self.clone("level 1\ncuda 0\n")
        code, out, err = self.pip("wheel", clone, "-w", os.path.join(clone, "out"))
        self.assertEqual(code, 0, out + err)
        (made,) = glob.glob(clone + "/out/*")
        self.assertEqual(os.path.basename(made), os.path.basename(self.wheel))
        with open(made, "rb") as one, open(self.wheel, "rb") as other:
            self.assertEqual(one.read(), other.read())
        with open(clone + "/called") as file:  # once, and without what pip adds for its own processes
            self.assertEqual(file.read(), "wheel; /nonexistent; unset\n")
        code, out, err = self.pip("install", "--target", os.path.join(clone, "installed"), clone)
        self.assertEqual(code, 0, out + err)
        self.assertTrue(os.path.exists(clone + "/installed/annulus/libannulus_torch.so"))

    def test_pip_knows_the_metadata_before_it_builds(self):
        clone = self.clone("level 1\ncuda 0\n")
        code = "import sys; sys.path.insert(0, 'tools/wheel'); import build_backend; print(build_backend.prepare_metadata_for_build_wheel('.'))"
        done = subprocess.run([self.python, "-c", code], cwd=clone, env=self.environment(), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        with zipfile.ZipFile(self.wheel) as archive, open(f"{clone}/{done.stdout.strip()}/METADATA") as file:
            whole = archive.read(done.stdout.strip() + "/METADATA").decode()
            self.assertEqual(file.read(), re.sub("Project-URL: .*\n", "", whole))  # this folder has no origin
        self.assertFalse(os.path.exists(clone + "/called"))

    def test_pip_says_that_setup_has_not_run(self):
        for setup in ("", "level 0\ncuda 0\n"):
            clone = self.clone(setup)
            code, out, err = self.pip("wheel", clone, "-w", os.path.join(clone, "out"))
            self.assertEqual(code, 1)
            self.assertIn(f"set-up has not looked for in {clone}", out + err)
            self.assertIn("tools/setup.sh --tests", out + err)
            self.assertNotIn("Traceback", out + err)
            self.assertFalse(os.path.exists(clone + "/called"))

    def test_pip_says_why_the_build_failed(self):
        clone = self.clone("level 1\ncuda 0\n")
        with open(clone + "/annulus", "w") as script:
            script.write("#!/bin/bash\necho 'annulus: the build failed' >&2\nexit 1\n")
        code, out, err = self.pip("wheel", clone, "-w", os.path.join(clone, "out"))
        self.assertEqual(code, 1)
        self.assertIn("annulus: the build failed", out + err)
        self.assertNotIn("Traceback", out + err)

    def test_refuses_another_torch(self):
        stand_in = os.path.join(self.folder, "other")
        os.makedirs(os.path.join(stand_in, "annulus"))
        for path in glob.glob(self.site + "/annulus/*"):
            if not path.endswith(("_built.py", "__pycache__")):
                os.symlink(path, os.path.join(stand_in, "annulus", os.path.basename(path)))
        with open(os.path.join(stand_in, "annulus", "_built.py"), "w") as file:
            file.write('VERSION = "0.1.0"\nTORCH = "2.10.1"\n')
        code, _, err = self.run_python("-c", f"import sys; sys.path.insert(0, {stand_in!r}); import annulus; annulus.plan")
        self.assertEqual(code, 1)
        here = re.escape(torch.__version__)
        self.assertRegex(err, rf"ImportError: this wheel of annulus 0.1.0 was built for torch 2.10, but torch {here} is")

    def test_holds_only_what_it_needs(self):
        with zipfile.ZipFile(self.wheel) as archive:
            names = archive.namelist()
            (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
            library = archive.extract("annulus/libannulus_torch.so", self.folder)
        for wanted in ("annulus/__init__.py", "annulus/py.typed", "annulus/transformers.py", "annulus/testing/conformance/__main__.py"):
            self.assertIn(wanted, names)
        self.assertEqual([n for n in names if ".so" in n], ["annulus/libannulus_torch.so"])
        licenses = [os.path.basename(n) for n in names if "/licenses/" in n and not n.endswith("/")]
        for text in ["LICENSE", *glob.glob("python/licenses/*.txt")]:
            self.assertIn(os.path.basename(text), licenses)
        self.assertEqual(sorted(re.findall("^License-File: (.*)$", metadata, re.M)), sorted(licenses))
        self.assertIn("License-Expression: Apache-2.0\n", metadata)
        self.assertIn("Author: The annulus authors\n", metadata)
        self.assertIn("Project-URL: Homepage, https://code.example/group/annulus\n", metadata)
        self.assertNotIn("secret", metadata)
        minor = ".".join(torch.__version__.split(".")[:2])
        self.assertIn(f"Requires-Dist: torch=={minor}.*\n", metadata)
        self.assertIn('Requires-Dist: transformers>=4.57,<6; extra == "transformers"\n', metadata)
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        self.assertLessEqual(set(re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)), {"$ORIGIN/../torch/lib"})
        self.assertNotRegex(dynamic, "NEEDED.*(mpi|hwloc|python)")

    def test_tag_matches_auditwheel(self):
        tag = re.fullmatch(r"annulus-[\d.]+-py3-none-(manylinux_\d+_\d+_x86_64)\.whl", os.path.basename(self.wheel))
        self.assertIsNotNone(tag, self.wheel)
        show = [sys.executable, "-m", "auditwheel", "show", self.wheel]
        self.assertIn(tag.group(1), subprocess.run(show, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    unittest.main()
