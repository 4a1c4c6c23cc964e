#!/usr/bin/env python3
"""Tests `./annulus install`: the folder is moved to another path with a blank, and nothing of the clone is in the
environment. It trains, launches and prints its version, and CMake and pkg-config find it for a C++ program.

    install_test.py INSTALL.py ANNULUS BENCH LIBRARY FAULTS SOURCES TORCH_ROOT
"""

import glob
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import cli  # noqa: E402

TORCH, SOURCES, FAULTS, LIBRARY, BENCH, ANNULUS, INSTALL = (os.path.abspath(sys.argv.pop()) for _ in range(7))
ROOT = os.getcwd()

PROGRAM = """
#include <ATen/ops/ones.h>

#include <cstdio>

#include "annulus/attention/execution/attention.h"
#include "annulus/common/error.h"
int main() {
  try {
    std::printf("%lld\\n", static_cast<long long>(at::ones({2, 3}).numel()));
    annulus::parse_pattern("{ kind = 'causa' }", "a text");
  } catch (const annulus::Error& error) {
    std::printf("%d %s\\n", error.exit_code(), error.what());
  }
}
"""
CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(outside CXX)
find_package(annulus 0.1 REQUIRED COMPONENTS testing)
add_executable(a a.cc)
target_link_libraries(a PRIVATE annulus::annulus)
enable_testing()
annulus_add_mpi_test(NAME ranks TARGET a NP 1 2 FORBID "something else" ENVIRONMENT "A=b")
"""


def run(*command, **kwargs):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, **kwargs)


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.made = os.path.join(cls.folder, "made")
        # The layout in which Bazel puts what it builds.
        cls.bin = os.path.join(cls.folder, "bin")
        for source, path in ((ANNULUS, "launcher/annulus"), (BENCH, "benchmarks/program/annulus_bench"), (LIBRARY, "tools/libannulus.so"),
                             (FAULTS, "comm/testing/libannulus_mpi_faults.so")):
            os.makedirs(os.path.join(cls.bin, os.path.dirname(path)), exist_ok=True)
            os.symlink(os.path.realpath(source), os.path.join(cls.bin, path))
        done = cls.install(cls.made)
        assert done.returncode == 0, done.stderr
        cls.prefix = os.path.join(cls.folder, "another place; 'quoted'")
        os.rename(cls.made, cls.prefix)
        cls.annulus = os.path.join(cls.prefix, "bin", "annulus")
        # An environment without anything of the clone, of Bazel or of the test.
        cls.env = {"PATH": "/usr/bin:/bin", "HOME": cls.folder, "OMP_NUM_THREADS": "1"}

    @classmethod
    def install(cls, prefix):
        """Installs as somebody does whose new files no other user may read."""
        with open(SOURCES) as f:
            return run(sys.executable, INSTALL, "--bin", cls.bin, "--sources", f.read(), prefix,
                       preexec_fn=lambda: os.umask(0o077))

    def setUp(self):
        self.work = tempfile.mkdtemp(dir=self.folder)
        cli.write_tiny_run(self.work, 2)

    def ran(self, *args, program=None, **env):
        return run(program or self.annulus, *args, cwd=self.work, env={**self.env, **env})

    def test_prints_the_same_version(self):
        done = self.ran("version")
        self.assertEqual((done.returncode, done.stdout), (0, run(ANNULUS, "version").stdout), done.stderr)

    def test_other_users_can_run_it(self):
        places = [self.prefix]
        for folder, folders, files in os.walk(self.prefix):
            places += [os.path.join(folder, name) for name in folders + files]
        programs = ("bin", "libexec")
        for place in places:
            runs = os.path.isdir(place) or os.path.relpath(place, self.prefix).split("/")[0] in programs or re.search(r"/libannulus\w*\.so$", place)
            self.assertEqual(stat.S_IMODE(os.stat(place).st_mode), 0o755 if runs else 0o644, place)

    def test_trains(self):
        for command in (["train", "config.toml"], ["launch", "-n", "2", "train", "config.toml"]):
            done = self.ran(*command)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertRegex(done.stdout, r"(?m)^step +2")

    def test_uses_only_its_own_and_system_libraries(self):
        for name in ("annulus", "annulus_bench"):
            done = run("ldd", os.path.join(self.prefix, "libexec", name), env=self.env)
            self.assertNotIn("not found", done.stdout)
            for line in done.stdout.splitlines():
                path = line.partition("=> ")[2].rpartition(" (")[0]
                own = os.path.realpath(path).startswith(os.path.realpath(self.prefix))
                self.assertEqual(own, any(n in line.split()[0] for n in ("torch", "c10", "gomp", "cudart", "cupti", "spdlog", "fmt")), line)
                self.assertTrue(own or not path or path.startswith(("/lib", "/usr/lib")), line)
        done = self.ran("bench", "--help")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_doctor_reports_the_installed_paths(self):
        done = self.ran("doctor", "--json")
        report = json.loads(done.stdout)["hosts"][0]
        self.assertEqual(report["program"], os.path.join(self.prefix, "libexec", "annulus"))
        self.assertRegex(report["folder_digest"], r"^[0-9a-f]{32}$")
        self.assertEqual(report["libtorch_path"], os.path.join(self.prefix, "lib", "libtorch_cpu.so"))

    def write(self, name, text):
        with open(os.path.join(self.work, name), "w") as f:
            f.write(text)

    def assert_program_runs(self, path):
        done = self.ran(program=os.path.join(self.work, path))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r'^6\n2 \[\w+\] .*did you mean "causal"\?')

    def linked(self):
        """The installation by a path without a semicolon, which CMake takes for the end of a path, and without a blank, at which
        a shell divides what pkg-config prints."""
        link = os.path.join(self.work, "annulus")
        os.symlink(self.prefix, link)
        return link

    def test_cmake_finds_it(self):
        if not shutil.which("cmake", path=self.env["PATH"]):
            self.skipTest("no cmake")
        self.write("a.cc", PROGRAM)
        self.write("CMakeLists.txt", CMAKE)
        configure = ["-S.", "-Bbuild", "-DCMAKE_PREFIX_PATH=" + self.linked()]
        for wrong, words in (([], "the headers of LibTorch [0-9.+a-z]+ were not found: pass -DLIBTORCH=FOLDER"),
                             (["-DLIBTORCH=" + self.another_libtorch()], "are of LibTorch 1.13, but annulus was built")):
            done = self.ran(*configure, *wrong, program="cmake")
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(" ".join(done.stderr.split()), words)
            shutil.rmtree(os.path.join(self.work, "build"))
        for command in ([*configure, "-DLIBTORCH=" + TORCH], ["--build", "build"]):
            done = self.ran(*command, program="cmake")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assert_program_runs("build/a")
        done = self.ran("--test-dir", "build", "--output-on-failure", program="ctest")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(os.path.join(self.work, "build", "ranks.xml")) as f:
            self.assertEqual(re.findall(r'<testcase [^>]*name="([^"]*)"', f.read()), ["on 1", "on 2"])
        self.write("CMakeLists.txt", CMAKE.replace("annulus 0.1", "annulus 0.2"))
        self.assertIn("requested version", self.ran(*configure, "-DLIBTORCH=" + TORCH, program="cmake").stderr)

    def another_libtorch(self):
        folder = os.path.join(self.work, "libtorch")
        for path, text in (("ATen/core/Tensor.h", ""), ("torch/version.h", "#define TORCH_VERSION_MAJOR 1\n#define TORCH_VERSION_MINOR 13\n")):
            os.makedirs(os.path.dirname(os.path.join(folder, "include", path)), exist_ok=True)
            with open(os.path.join(folder, "include", path), "w") as f:
                f.write(text)
        return folder

    def test_pkg_config_finds_it(self):
        self.write("a.cc", PROGRAM)
        link = self.linked()
        done = self.ran("--define-variable=libtorch=" + TORCH, "--cflags", "--libs", "annulus", program="pkg-config",
                        PKG_CONFIG_PATH=os.path.join(link, "lib", "pkgconfig"))
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.ran("a.cc", "-o", "a", *shlex.split(done.stdout), program="g++")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_program_runs("a")

    def test_every_header_includes_others_where_they_are_installed(self):
        include = os.path.join(self.prefix, "include")
        headers = glob.glob(os.path.join(glob.escape(include), "annulus", "**", "*.h"), recursive=True)
        self.assertGreater(len(headers), 50)
        ours = 0
        for header in headers:
            with open(header, encoding="utf-8") as f:
                names = re.findall(r'(?m)^#include "(.*)"', f.read())
            for name in names:  # also those of Highway, by which internal headers are written
                self.assertEqual(name.startswith("annulus/"), os.path.isfile(os.path.join(include, name)), (header, name))
                self.assertFalse(os.path.exists(os.path.join(include, "annulus", name)), (header, name))
            ours += sum(name.startswith("annulus/") for name in names)
        self.assertGreater(ours, 100)

    def test_asks_for_huge_pages_as_the_clone_does(self):
        place = os.path.join(self.work, "place")
        for folder in ("bin", "libexec"):
            os.makedirs(os.path.join(place, folder))
        command = shutil.copy(self.annulus, os.path.join(place, "bin"))
        program = os.path.join(place, "libexec", "annulus")
        with open(program, "w") as f:
            f.write("#!/bin/sh\nprintenv GLIBC_TUNABLES\n")
        os.chmod(program, 0o755)
        for given, wanted in (({}, "glibc.malloc.hugetlb=1"), ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0")):
            self.assertEqual(self.ran(program=command, **given).stdout, wanted + "\n")

    def test_reinstall_replaces_only_its_own_files(self):
        readme = os.path.join(self.prefix, "README")
        stale = os.path.join(self.prefix, "share", "annulus", "MANIFEST")
        with open(stale, "a") as f:
            f.write("0" * 64 + "  share/annulus/stale\n" + "0" * 64 + "  ../outside\n")
        for path in (os.path.join(self.prefix, "share", "annulus", "stale"), os.path.join(self.folder, "outside")):
            open(path, "w").close()
        os.remove(readme)
        os.chmod(os.path.join(self.prefix, "bin"), 0o700)
        self.assertEqual(self.install(self.prefix).returncode, 0)
        self.assertTrue(os.path.exists(readme))
        self.assertEqual(stat.S_IMODE(os.stat(os.path.join(self.prefix, "bin")).st_mode), 0o755)
        self.assertFalse(os.path.exists(os.path.join(self.prefix, "share", "annulus", "stale")))
        self.assertTrue(os.path.exists(os.path.join(self.folder, "outside")))

    def test_refuses_a_folder_with_other_files(self):
        before = os.listdir(self.work)
        for prefix in (self.work, os.path.join(self.work, "config.toml")):
            for words in (["--check"], ["--bin", self.bin]):
                done = run(sys.executable, INSTALL, *words, prefix)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(prefix, done.stderr)
        self.assertEqual(os.listdir(self.work), before)

    def test_installs_configurations_and_documents(self):
        for path in ("README", "LICENSE", "share/annulus/CHANGELOG.md", "share/annulus/configs/quickstart.toml", "share/annulus/configs/cluster/mpijob.yaml",
                     "share/annulus/docs/how-to/clusters.md", "share/annulus/python/tokenizer/__main__.py", "share/annulus/python/follower/__main__.py", "share/annulus/licenses/xxhash.txt"):
            self.assertTrue(os.path.isfile(os.path.join(self.prefix, path)), path)
        done = self.ran("train", os.path.join(self.prefix, "share/annulus/configs/quickstart.toml"), "--set", "data.train=['text.txt']",
                        "--set", "run.steps=1", "--set", "data.context=64", "--set", "validation.every=0")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_links_of_installed_pages_lead_to_installed_files(self):
        folder = os.path.join(self.prefix, "share", "annulus")
        pages = glob.glob(os.path.join(folder, "**", "*.md"), recursive=True)
        links = {(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", open(page, encoding="utf-8").read())
                 if ":" not in link}
        self.assertGreater(len(links), 50)
        for page, link in sorted(links):
            self.assertTrue(os.path.exists(os.path.join(os.path.dirname(page), link)), (page, link))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
