#!/usr/bin/env python3
"""Tests a bundle as far as a machine without a GPU can. Called by `tools/gpu_bundle.sh --ci`; the last line is "N
passed, N failed".

    bundle_test.py BUNDLE

Stubs replace NVIDIA's libraries (tools/cuda_stubs.py). Namespaces hide the machine's own Open MPI and its
network. tests/tools/gpu_bundle_test.py tests what run.py does with steps that fail, crash or hang.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import collect
import elf

BUNDLE = os.path.abspath(sys.argv.pop(1))
RUN = os.path.join(BUNDLE, "run.py")
TORCH = os.environ.get("LIBTORCH") or collect.bazel_config()["TORCH_ROOT"]

# The same as `ip link set lo up`, without the program ip: SIOCSIFFLAGS with IFF_UP | IFF_LOOPBACK.
LOOPBACK = """python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 9))'"""


def files_of(bundle):
    return [os.path.join(folder, name) for folder, _, names in os.walk(bundle) for name in names]


class BundleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="annulus bundle ")  # a name with a space
        cls.work = cls.folder.name
        os.chmod(cls.work, 0o755)
        cls.stubs = os.path.join(cls.work, "stubs")
        subprocess.run([sys.executable, os.path.join(collect.ROOT, "tools", "cuda_stubs.py"),
                        os.path.join(TORCH, "lib"), cls.stubs], check=True)
        with open(os.path.join(BUNDLE, "steps.json")) as f:
            cls.steps = json.load(f)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_command(self, *command, **env):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "ANNULUS_", "OPAL_", "BAZEL", "TEST_"))}
        kept.update({"LIBTORCH": TORCH, "LD_LIBRARY_PATH": self.stubs, **env})
        return subprocess.run(command, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL, env=kept, cwd=self.work)

    def test_its_manifest_says_what_is_in_it(self):
        done = subprocess.run(["sha256sum", "--check", "--strict", "MANIFEST"], cwd=BUNDLE, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(len(done.stdout.splitlines()) + 1, len(files_of(BUNDLE)))

    def test_programs_need_nothing_of_the_machine_that_built_them(self):
        inside = set(os.listdir(os.path.join(BUNDLE, "lib")))
        self.assertFalse([n for n in inside if n.startswith("libgomp")],
                         "LibTorch has an OpenMP runtime, and two in one process are a fault")
        programs = [path for path in files_of(BUNDLE) if elf.is_elf(path)]
        self.assertGreater(len(programs), 50)
        for path in programs:
            with self.subTest(path):
                for name in elf.needed(path):
                    elsewhere = any(known.fullmatch(name) for known in (collect.SYSTEM, collect.TORCH, collect.NVIDIA))
                    self.assertTrue(elsewhere or name in inside, name)
                self.assertTrue(all(p.startswith("$ORIGIN/") for p in elf.run_path(path)))
                for family, oldest in collect.OLDEST.items():
                    self.assertLessEqual(elf.newest(path, family), oldest)
        for path in set(files_of(os.path.join(BUNDLE, "files"))) - set(programs):
            with open(path) as f:
                self.assertNotIn(collect.bazel_config()["MPIRUN"], f.read(), path)

    def test_each_test_for_gpus_is_a_step_and_the_operators_come_first(self):
        tagged = subprocess.run(["bazel", "query", "--noshow_progress", r'attr(tags, "\bgpu\b", tests(//...))'],
                                cwd=collect.ROOT, capture_output=True, text=True, check=True).stdout.split()
        tests = [s for s in self.steps if "tests" in s["parts"]]
        programs = {re.sub(r"(\.sh)?$", "", s["command"][0], count=1) for s in tests}
        self.assertEqual(programs, {"./" + collect.path_of(label) for label in tagged})
        parts = [s["parts"][1] for s in tests]
        self.assertEqual(list(dict.fromkeys(parts)), ["kernels", "training", "nccl"])
        self.assertEqual([s["parts"][0] for s in self.steps],
                         ["tests"] * len(tests) + ["bench"] * len(collect.BENCHMARKS) + ["memcheck"])

    def test_without_a_gpu_all_skips_also_from_a_read_only_folder_for_another_user(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has a GPU")
        bundle = os.path.join(self.work, "a bundle")
        shutil.copytree(BUNDLE, bundle)
        out = tempfile.mkdtemp(prefix="report ", dir=self.work)
        user = []
        if os.geteuid() == 0 and shutil.which("setpriv"):
            os.chown(out, 65534, 65534)
            user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        subprocess.run(["chmod", "-R", "a-w,a+rX", bundle], check=True)
        try:
            done = self.run_command(*user, os.path.join(bundle, "run.py"), "--out", out)
        finally:
            subprocess.run(["chmod", "-R", "u+w", bundle], check=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout.splitlines()[-1], r"^\d+ passed, 0 failed, \d+ skipped, 0 left out$")
        with open(os.path.join(out, "results.jsonl")) as f:
            entries = {e["step"]: e for e in map(json.loads, f) if "step" in e}
        self.assertEqual(set(entries), {"doctor", *(s["name"] for s in self.steps)})
        self.assertEqual(entries["doctor"]["result"], "passed")
        for step in self.steps:
            entry = entries[step["name"]]
            if step.get("kind") == "gtest":  # that of NCCL has a case for machines without a GPU
                self.assertIn("skipped", {case[1] for case in entry["cases"]} | ({"skipped"} if "nccl" in step["name"] else set()))
            else:
                self.assertEqual(entry["result"], "skipped", entry)
                self.assertTrue(entry["reason"])

    def test_the_program_takes_the_options_of_the_benchmarks(self):
        for step in collect.BENCHMARKS:
            with self.subTest(step["name"]):  # 9: there is no GPU; a wrong option is 2
                words = [w.replace("{seconds}", "8").replace("configs/", os.path.join(BUNDLE, "files/configs/")) for w in step["command"]]
                done = self.run_command(RUN, "--", *words)
                self.assertIn(done.returncode, (0, 9), done.stdout + done.stderr)
                self.assertNotIn("is a separate program", done.stderr)

    def test_two_ranks_start_without_the_machines_open_mpi_and_without_a_network(self):
        attend = ["annulus", "launch", "-n", "2", "attend", "--random", "queries=300,heads=4,kv_heads=2,seed=7", "--check"]
        if subprocess.run(["unshare", "-mn", "true"], capture_output=True).returncode:
            self.skipTest("namespaces are not permitted here")
        inside = set(os.listdir(os.path.join(BUNDLE, "lib")))
        folders = ["/usr/lib/x86_64-linux-gnu/openmpi", "/usr/share/openmpi", "/etc/openmpi", "/usr/lib/x86_64-linux-gnu/pmix2"]
        files = [shutil.which(n) for n in ("mpirun", "orterun", "orted", "mpirun.openmpi", "ompi_info")]
        files += [path for name, path in collect.system_libraries().items()
                  if name in inside and re.match(r"lib(mpi|open-|pmix|hwloc|event|mca_|munge|toml|xxhash|spdlog|fmt)", name)]
        hide = ["mount --bind /dev/null '%s'" % p for p in sorted({os.path.realpath(p) for p in files if p})]
        hide += ["mount -t tmpfs none '%s'" % p for p in folders if os.path.isdir(p)]
        program = " && ".join(hide + [LOOPBACK, '! /usr/bin/orterun --version 2>/dev/null', 'exec "$@"'])
        done = self.run_command("unshare", "-mn", "bash", "-c", program, "bash", RUN, "--", *attend)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 ranks", done.stdout + done.stderr)


if __name__ == "__main__":
    program = unittest.main(argv=sys.argv, verbosity=2, exit=False, testRunner=unittest.TextTestRunner(stream=sys.stdout, verbosity=2))
    result = program.result
    failed = len(result.failures) + len(result.errors)
    print("%d passed, %d failed" % (result.testsRun - failed - len(result.skipped), failed))
    sys.exit(1 if failed else 0)
