#!/usr/bin/env python3
"""Tests a bundle as far as a machine without a GPU can. Called by `tools/gpu_bundle.sh --ci`; the last line is "N
passed, N failed".

    bundle_test.py BUNDLE

Stubs replace NVIDIA's libraries (integration_tests/cuda_stubs.py), and a folder replaces /dev in tests that need GPUs.
If namespaces are permitted, they hide the machine's own Open MPI and its network.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import unittest

import collect
import elf

BUNDLE = os.path.abspath(sys.argv.pop(1))
TORCH = os.environ.get("LIBTORCH") or collect.bazel_config()["TORCH_ROOT"]
ROOM = collect.ROOT


# The same as `ip link set lo up`, without the program ip: SIOCSIFFLAGS with IFF_UP | IFF_LOOPBACK.
LOOPBACK = """python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 9))'"""


def run(*command, env=None, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, env=env, **options)


class BundleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="annulus bundle ")  # a name with a space
        cls.work = cls.folder.name
        os.chmod(cls.work, 0o755)
        cls.stubs = os.path.join(cls.work, "stubs")
        subprocess.run([sys.executable, os.path.join(ROOM, "integration_tests", "cuda_stubs.py"),
                        os.path.join(TORCH, "lib"), cls.stubs], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def environment(self, **extra):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "ANNULUS_", "OPAL_", "SLURM_", "BAZEL", "TEST_"))}
        env.update({"LIBTORCH": TORCH, "LD_LIBRARY_PATH": self.stubs, **extra})
        return {k: v for k, v in env.items() if v is not None}

    def copy(self, name):
        """The path of a copy of the bundle, which the test may change."""
        path = os.path.join(self.work, name)
        shutil.copytree(BUNDLE, path)
        return path

    def start(self, *args, bundle=BUNDLE, **extra):
        out = tempfile.mkdtemp(prefix="report ", dir=self.work)
        done = run(os.path.join(bundle, "run.sh"), "--out", out, *args, env=self.environment(**extra), cwd=self.work)
        with open(os.path.join(out, "report.json")) as f:
            return done, json.load(f)

    def details(self, out, name):
        """The text of a file in details.tar.gz, such as the output of a step."""
        with tarfile.open(os.path.join(out, "details.tar.gz")) as tar:
            return tar.extractfile("./" + name).read().decode()

    def interruptible(self, *command, **options):
        """Starts a command with the default action of Ctrl-C, which a background job of a script would ignore."""
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)

    def of(self, report, result):
        return {r["name"]: r["reason"] for r in report["results"] if r["result"] == result}

    # ---- What is in it.

    def test_it_is_small_and_its_manifest_says_what_is_in_it(self):
        with open(os.path.join(BUNDLE, "MANIFEST")) as f:
            listed = {m.group(2): int(m.group(1)) for m in re.finditer(r"^ *(\d+)  (.+)$", f.read(), re.M)}
        found = {}
        for folder, _, files in os.walk(BUNDLE):
            for name in files:
                path = os.path.join(folder, name)
                found[os.path.relpath(path, BUNDLE)] = os.path.getsize(path)
        del found["MANIFEST"]
        self.assertEqual(listed, found)
        self.assertLess(sum(found.values()), collect.LIMIT)

    def test_the_parts_of_a_test_are_all_of_its_cases(self):
        def cases(words):
            test = os.path.join(BUNDLE, "tests", words[3])
            listed = run(os.path.join(BUNDLE, "run.sh"), "--", test, "--gtest_list_tests", *arguments(words[9]),
                         env=self.environment(), cwd=self.work)
            self.assertEqual(listed.returncode, 0, listed.stderr)
            return re.findall(r"^  (\S+)", listed.stdout, re.M)

        arguments = lambda text: [] if text == "-" else shlex.split(text)
        with open(os.path.join(BUNDLE, "tests.tsv")) as f:
            rows = [line.rstrip("\n").split("\t") for line in f]
        for label in {part.label for part in collect.PARTS if part.cases and part.name != "memcheck"}:
            of = [r for r in rows if r[3] == collect.in_tests(collect.path_of(label)) and r[1] != "memcheck"]
            each = [cases(r) for r in of]
            self.assertTrue(all(each), of)
            self.assertEqual(sorted(sum(each, [])), sorted(cases(of[0][:9] + ["-"])))

    def test_every_library_is_in_it_or_on_every_machine(self):
        self.assertEqual(collect.unresolved(BUNDLE), [])
        self.assertFalse([n for n in os.listdir(os.path.join(BUNDLE, "lib")) if n.startswith("libgomp")],
                         "LibTorch has an OpenMP runtime, and two in one process are a fault")

    def test_no_program_looks_into_this_machines_folders_or_needs_its_c_library(self):
        seen = 0
        for folder, _, files in os.walk(BUNDLE):
            for path in (os.path.join(folder, name) for name in files):
                if not elf.is_elf(path):
                    continue
                seen += 1
                self.assertTrue(all(p.startswith("$ORIGIN/") for p in elf.run_path(path)), path)
                for family, oldest in collect.OLDEST.items():
                    self.assertLessEqual(elf.newest(path, family), oldest, path)
        self.assertGreater(seen, 50)

    def test_making_it_again_gives_the_same_files(self):
        # Bazel builds nothing again; only the copies are made again.
        xml = os.path.join(self.work, "tests.xml")
        query = run("bazel", "query", "--noshow_progress", "--output=xml", collect.QUERY, cwd=ROOM)
        with open(xml, "w") as f:
            f.write(query.stdout)
        again = os.path.join(self.work, "again")
        done = run(os.path.join(ROOM, "tools", "gpu_bundle", "collect.py"), "--tests", xml, "--bin",
                   os.path.join(ROOM, ".bazel", "bin"), again, cwd=ROOM)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(run("diff", "-r", BUNDLE, again).stdout, "")

    # ---- run.sh without a GPU.

    def test_without_a_gpu_tests_skip_and_the_report_says_why(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has a GPU")
        done, report = self.start()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(report["failed"], 0, done.stdout)
        with open(os.path.join(BUNDLE, "tests.tsv")) as f:
            kinds = [line.split("\t")[2] for line in f]
        self.assertEqual(kinds, sorted(kinds, key=lambda kind: kind == "mpi"), "tests of ranks, which may hang, come last")
        skipped = self.of(report, "skipped")
        with open(os.path.join(BUNDLE, "tests.tsv")) as f:
            for line in f:
                name = line.split("\t")[0]
                self.assertTrue(any(s.startswith(name) for s in skipped), name)
        for name in ("attend-check", "bench-dense", "train-quickstart", "bench-train", "flex-attention", "scaling"):
            self.assertEqual(skipped[name], "this machine has no GPU")
        self.assertTrue(all(skipped.values()), skipped)
        self.assertIn("doctor", self.of(report, "passed"))
        self.assertEqual(done.stdout.splitlines()[-1], "%d passed, 0 failed, %d skipped" % (report["passed"], report["skipped"]))
        self.assertTrue(report["facts"]["libtorch"].startswith(report["facts"]["built with"].split()[1].rstrip(",")))

    def test_without_libtorch_everything_is_skipped(self):
        tools = os.path.join(self.work, "no torch")
        os.makedirs(tools)
        for name in ("python3", "python3.12"):  # -S: no site-packages
            path = os.path.join(tools, name)
            with open(path, "w") as f:
                f.write('#!/bin/sh\nexec %s -S "$@"\n' % shutil.which("python3"))
            os.chmod(path, 0o755)
        done, report = self.start(LIBTORCH=None, PATH=tools + ":" + os.environ["PATH"])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((report["passed"], report["failed"]), (0, 0))
        self.assertIn("no LibTorch", report["facts"]["cannot run"])
        self.assertIn("no LibTorch", self.of(report, "skipped")["start"])

    def test_another_libtorch_is_refused(self):
        torch = os.path.join(self.work, "other", "torch")
        os.makedirs(os.path.join(torch, "lib"))
        open(os.path.join(torch, "lib", "libtorch_cpu.so"), "w").close()
        with open(os.path.join(torch, "version.py"), "w") as f:
            f.write("__version__ = '2.9.1+cu130'\n")
        _, report = self.start("--only", "tests", LIBTORCH=torch)
        self.assertRegex(report["facts"]["cannot run"], r"LibTorch 2\.9\.1 in .*, but this bundle was built with \d+\.\d+\.\d+")
        devices = self.gpus(1)
        done, report = self.start("--only", "tests", LIBTORCH=torch, ANNULUS_BUNDLE_DEVICES=devices)
        self.assertEqual(done.returncode, 1, "on a machine with a GPU that is a fault")
        self.assertEqual(report["failed"], 1)
        # The right version for another CUDA: in Python's package, and in an unpacked LibTorch.
        version = report["facts"]["built with"].split()[1].rstrip(",")
        open(os.path.join(torch, "lib", "libtorch_cuda.so"), "w").close()
        package = "__version__ = '%s+cu126'\ndebug = False\ncuda: Optional[str] = '12.6'\n" % version
        for name, text in (("version.py", package), ("build-version", version + "+cu126\n")):
            if name == "build-version":
                os.remove(os.path.join(torch, "version.py"))
            with open(os.path.join(torch, name), "w") as f:
                f.write(text)
            _, report = self.start("--only", "tests", LIBTORCH=torch)
            self.assertRegex(report["facts"]["cannot run"], r"is for CUDA 12, but this bundle was built for CUDA \d+")

    def test_it_runs_from_a_read_only_folder_for_another_user_and_an_older_c_library(self):
        bundle = self.copy("a bundle")
        run("chmod", "-R", "a-w,a+rX", bundle)
        try:
            command = [os.path.join(bundle, "run.sh"), "--only", "tests", "--out"]
            env = self.environment(ANNULUS_BUNDLE_ENTROPY="1")
            if os.geteuid() == 0 and shutil.which("setpriv"):
                out = tempfile.mkdtemp(prefix="report ", dir=self.work)
                os.chown(out, 65534, 65534)
                done = run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command, out, env=env, cwd="/")
            else:
                done, _ = self.start("--only", "tests", bundle=bundle, ANNULUS_BUNDLE_ENTROPY="1")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(" 0 failed", done.stdout)
        finally:
            run("chmod", "-R", "u+w", bundle)

    def test_bad_options_are_refused(self):
        for args in (["--only", "all"], ["--minutes", "0"], ["--limit", "x"], ["--what"], ["--"]):
            done = run(os.path.join(BUNDLE, "run.sh"), *args, env=self.environment(), cwd=self.work)
            self.assertEqual(done.returncode, 2, args)
            self.assertTrue(done.stderr.startswith("run.sh: "), done.stderr)

    # ---- run.sh with simulated GPUs: which commands it starts, and what it reports about how they end.

    def gpus(self, count):
        devices = tempfile.mkdtemp(prefix="dev", dir=self.work)
        for name in ["nvidiactl"] + ["nvidia%d" % i for i in range(count)]:
            open(os.path.join(devices, name), "w").close()
        return devices

    def script(self, path, text):
        with open(path, "w") as f:
            f.write("#!/bin/bash\n" + text)
        os.chmod(path, 0o755)

    def test_a_test_that_crashes_hangs_or_vanishes_is_recorded_and_the_rest_runs(self):
        bundle = self.copy("faulty")
        self.script(os.path.join(bundle, "tests", "crash"), 'echo "[ RUN      ] A.b"\nkill -SEGV $$\n')
        self.script(os.path.join(bundle, "tests", "hang"), "trap '' TERM\nexec tail -f /dev/null --pid=$PPID\n")
        self.script(os.path.join(bundle, "tests", "silent"), "exit 0\n")
        with open(os.path.join(bundle, "tests.tsv")) as f:
            real = next(line for line in f if "\tgtest\t" in line)
        with open(os.path.join(bundle, "tests.tsv"), "w") as f:
            for name in ("crash", "hang", "silent", "missing"):
                f.write("%s\tothers\tgtest\t%s\t1\t0\t60\t-\t-\t-\n" % (name, name))
            f.write(real)
        done, report = self.start("--only", "tests", "--limit", "20", bundle=bundle)
        self.assertEqual(done.returncode, 1)
        failed = self.of(report, "failed")
        self.assertEqual(set(failed), {"crash A.b", "crash", "hang", "silent", "missing"}, done.stdout)
        self.assertTrue(failed["crash A.b"].startswith("segmentation fault\n"), failed)
        self.assertIn("did not end within 20 s", failed["hang"])
        self.assertIn("exit code 0; its cases were not run", failed["silent"])
        self.assertIn("cannot be started", failed["missing"])
        self.assertTrue(any(r["name"].startswith(real.split("\t")[0]) for r in report["results"]))

    def test_ctrl_c_ends_it_and_what_it_started_and_the_report_stands(self):
        bundle = self.copy("interrupted")
        mark = os.path.join(self.work, "pid")
        os.mkfifo(mark)
        self.script(os.path.join(bundle, "tests", "hang"), 'echo $$ >"%s"\nexec tail -f /dev/null --pid=$PPID\n' % mark)
        with open(os.path.join(bundle, "tests.tsv"), "w") as f:
            f.write("hang\tothers\tgtest\thang\t1\t0\t300\t-\t-\t-\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                out = tempfile.mkdtemp(prefix="report ", dir=self.work)
                started = self.interruptible(os.path.join(bundle, "run.sh"), "--only", "tests", "--out", out, env=self.environment())
                pid = int(run("timeout", "60", "cat", mark).stdout)
                started.send_signal(number)
                self.assertEqual(started.wait(timeout=60), 130)
                self.assertFalse(os.path.exists("/proc/%d" % pid))
                with open(os.path.join(out, "report.json")) as f:
                    report = json.load(f)
                self.assertIn("doctor", self.of(report, "passed"))
                self.assertIn("ended from outside", self.of(report, "left out")["hang"])
                self.assertEqual(sorted(os.listdir(out)), ["details.tar.gz", "journal.tsv", "report.json", "report.txt"])
                self.assertIn("attention kernels", self.details(out, "logs/doctor.1.out"))

    def test_tests_of_ranks_and_scripts_are_started_as_bazel_starts_them(self):
        bundle = self.copy("kinds")
        self.script(os.path.join(bundle, "tests", "ranks"), 'echo "rank of $WANT_SIZE: $1 $MODE"\nexit 3\n')
        os.makedirs(os.path.join(bundle, "runfiles", "some"), exist_ok=True)
        with open(os.path.join(bundle, "runfiles", "some", "script.py"), "w") as f:
            f.write("import os, sys\nprint(os.getcwd(), *sys.argv)\n")
        with open(os.path.join(bundle, "tests.tsv"), "w") as f:
            f.write("ranks\tothers\tmpi\tranks\t2\t3\t60\tMODE=on\t--tag-output\t'an argument'\n")
            f.write("script\tothers\tscript\tsome/script.py\t1\t0\t60\t-\t-\t\"$bundle/bin/annulus\" some/file\n")
        with open(os.path.join(bundle, "expected.json"), "w") as f:
            json.dump({"ranks": {"exit": 3, "once": ["<stdout>:rank of 2: an argument on"], "forbid": []}}, f)
        out = tempfile.mkdtemp(prefix="report ", dir=self.work)
        done = run(os.path.join(bundle, "run.sh"), "--only", "tests", "--out", out, env=self.environment(), cwd=self.work)
        with open(os.path.join(out, "report.json")) as f:
            failed = self.of(json.load(f), "failed")
        self.assertEqual(set(failed), {"ranks"}, done.stdout)
        self.assertIn("2 lines hold, instead of one", failed["ranks"])
        self.assertEqual(self.details(out, "logs/script.1.out").strip(), " ".join([
            os.path.join(bundle, "runfiles"), os.path.join(bundle, "runfiles", "some", "script.py"),
            os.path.join(bundle, "bin", "annulus"), "some/file"]))

    def test_what_it_would_start_on_two_gpus_is_what_the_program_takes(self):
        bundle = self.copy("recorded")
        calls = os.path.join(self.work, "calls")
        self.script(os.path.join(bundle, "bin", "annulus"), 'printf "%%s\\0" "$@" >>"%s"; printf "\\n" >>"%s"\n' % (calls, calls))
        done, report = self.start(bundle=bundle, ANNULUS_BUNDLE_DEVICES=self.gpus(2), PATH="/usr/bin:/bin")
        skipped = self.of(report, "skipped")
        self.assertIn("this machine has 2 GPUs", skipped.get("scaling-4", ""), done.stdout + done.stderr)
        with open(calls) as f:
            lines = [l.split("\0")[:-1] for l in f.read().split("\n") if l]
        words = {" ".join(l[:2]) for l in lines}
        self.assertTrue({"version", "doctor", "bench gpu", "launch -n"} <= words, words)
        # FlexAttention is skipped without triton, and the report says so.
        self.assertIn("flex-attention", skipped)
        self.assertEqual([l[l.index("--part") + 1] for l in lines if "--part" in l], ["dense", "ring", "train", "patterns", "longest"])
        # The program may refuse because there is no GPU (exit code 9), but never because of its options (2).
        for line in lines:
            with self.subTest(" ".join(line)):
                real = run(os.path.join(BUNDLE, "run.sh"), "--", "annulus", *line, env=self.environment(), cwd=self.work)
                self.assertIn(real.returncode, (0, 9), real.stdout + real.stderr)
                self.assertNotIn("is a separate program", real.stderr)  # the bundle has the benchmarks, too

    # ---- MPI.

    def test_two_ranks_start_without_the_machines_open_mpi_and_without_a_network(self):
        hidden = ["/usr/lib/x86_64-linux-gnu/openmpi", "/usr/share/openmpi", "/etc/openmpi", "/usr/lib/x86_64-linux-gnu/pmix2"]
        blocked = [shutil.which(n) for n in ("mpirun", "orterun", "orted", "mpirun.openmpi", "ompi_info")]
        inside = set(os.listdir(os.path.join(BUNDLE, "lib")))
        for name, path in collect.system_libraries().items():
            if name in inside and re.match(r"lib(mpi|open-|pmix|hwloc|event|mca_|munge|toml|xxhash|spdlog|fmt)", name):
                blocked.append(path)
        hide = ["mount --bind /dev/null '%s'" % p for p in sorted({os.path.realpath(p) for p in blocked if p})]
        hide += ["mount -t tmpfs none '%s'" % p for p in hidden if os.path.isdir(p)]
        attend = ["annulus", "launch", "-n", "2", "attend", "--random", "queries=300,heads=4,kv_heads=2,seed=7", "--check"]
        command = [os.path.join(BUNDLE, "run.sh"), "--", *attend]
        if run("unshare", "-mn", "true").returncode == 0:
            program = " && ".join(hide + [LOOPBACK, '! /usr/bin/orterun --version 2>/dev/null', 'exec "$@"'])
            command = ["unshare", "-mn", "bash", "-c", program, "bash", *command]
            done = run(*command, env=self.environment(), cwd=self.work)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("2 ranks", done.stdout + done.stderr)
            return
        # Namespaces are not permitted here: the dynamic loader's log says what is loaded.
        done = run(*command, env=self.environment(LD_DEBUG="files", LD_DEBUG_OUTPUT=os.path.join(self.work, "loaded")), cwd=self.work)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        loaded = "".join(collect.said("cat", os.path.join(self.work, n)) for n in os.listdir(self.work) if n.startswith("loaded"))
        for path in re.findall(r"calling init: (\S+)", loaded):
            if re.search(r"lib(mpi|open-|pmix)|mca_", path):
                self.assertTrue(path.startswith(BUNDLE), path)


class Result(unittest.TextTestResult):
    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


if __name__ == "__main__":
    loader = unittest.defaultTestLoader
    suite = loader.loadTestsFromNames(sys.argv[1:], sys.modules[__name__]) if sys.argv[1:] else loader.loadTestsFromTestCase(BundleTest)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result).run(suite)
    failed = len(result.failures) + len(result.errors)
    for test, reason in result.skipped:
        print("skipped: %s: %s" % (test.id(), reason))
    print("%d passed, %d failed" % (result.passed, failed))
    sys.exit(1 if failed else 0)
