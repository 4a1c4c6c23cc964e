#!/usr/bin/env python3
"""Tests `annulus launch` with real processes: output, exit codes, signals, and what it leaves behind."""

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402


# Acts as two ranks on another host. The launcher is stopped while both report how they end.
RANKS_THAT_END = cli.RANKS_ELSEWHERE + """
ranks = [connect(rank) for rank in range(2)]
launcher = os.getppid()
os.kill(launcher, signal.SIGSTOP)
while open(f"/proc/{launcher}/stat").read().rpartition(")")[2].split()[0] != "T":
    pass
send(ranks[0], exit=7)
ranks[1].close()
os.kill(launcher, signal.SIGCONT)
sys.exit(137)
"""


class LaunchTest(cli.CliTest):
    def logs(self):
        folders = glob.glob(self.path("runs/logs/*"))
        self.assertEqual(len(folders), 1, folders)
        logs = {}
        for path in glob.glob(folders[0] + "/*"):
            with open(path) as f:
                logs[os.path.basename(path)] = f.read()
        return logs

    def test_output_is_merged_and_kept_rank_by_rank(self):
        code, out, err = self.annulus("launch", "-np", "3", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(
            sorted(re.sub(r" on \S+", "", line) for line in out.splitlines()),
            ["[rank 1] rank 1 of 3", "[rank 2] rank 2 of 3", "rank 0 of 3"],
        )
        self.assertEqual(
            sorted(err.splitlines()),
            ["[rank 1] standard error of rank 1", "[rank 2] standard error of rank 2", "standard error of rank 0"],
        )
        logs = self.logs()
        for rank in range(3):
            self.assertIn(f"rank {rank} of 3", logs[f"rank-{rank}.log"])
            self.assertIn(f"standard error of rank {rank}", logs[f"rank-{rank}.log"])
        self.assertIn("launch -np 3 selftest print", logs["launch.log"])

    def test_ranks_exchange_messages(self):
        code, out, err = self.annulus("launch", "-n", "3", "selftest", "exchange")
        self.assertEqual((code, out), (0, "3 ranks exchanged over mpi: all arrived\n"), err)
        self.assertEqual(self.annulus("selftest", "exchange")[0], 0)

    def test_log_dir_and_relative_paths(self):
        code, _, err = self.annulus("launch", "-n", "1", "--log-dir", "here/logs", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertTrue(os.path.exists(self.path("here/logs/rank-0.log")))
        self.assertFalse(os.path.exists(self.path("runs")))

    def test_logs_of_an_earlier_job_are_kept(self):
        for _ in range(2):
            self.assertEqual(self.annulus("launch", "-n", "2", "--log-dir", "logs", "selftest", "print")[0], 0)
        found = sorted(os.path.relpath(f, self.folder) for f in glob.glob(self.path("logs/**/rank-0.log"), recursive=True))
        self.assertEqual(len(found), 2, found)
        self.assertIn("logs/rank-0.log", found)

    def test_lost_log_lines_are_reported_once(self):
        """/dev/full takes the place of a full disk."""
        missing = "annulus: lines are missing in the log file "
        for logs, full, words, code, *test in [
            ("one", ["rank-1.log"], "one/rank-1.log: No space left on device", 0, "print"),
            ("two", ["rank-1.log", "launch.log"], "two/rank-1.log: No space left on device (and in 1 other)", 0, "print"),
            ("ends", ["launch.log"], "ends/launch.log: No space left on device", 42, "exit", "--rank", "1", "--code", "42"),
        ]:
            os.makedirs(self.path(logs))
            for name in full:
                os.symlink("/dev/full", os.path.join(self.path(logs), name))
            got, out, err = self.annulus("launch", "-n", "2", "--log-dir", logs, "selftest", *test)
            self.assertEqual(got, code, err)
            self.assertEqual(err.count(missing), 1, err)
            self.assertIn(missing + words + "\n", err)
            self.assertEqual("[rank 1] rank 1 of 2" in out, code == 0, "the terminal shows it all the same")

    def test_returns_exit_code_of_the_failed_rank(self):
        run = self.start("launch", "-n", "3", "selftest", "exit", "--rank", "1", "--code", "42")
        code, err = run.finish()
        self.assertEqual(code, 42)
        self.assertIn("annulus: rank 1 ended with exit code 42\n", err)
        self.assertNotIn("mpirun", err)  # mpirun's long message goes to the log only
        self.assertIn("mpirun.log", self.logs())

    def test_error_of_a_failed_rank_is_shown_once(self):
        run = self.start("launch", "-n", "2", "selftest", "fail", "--rank", "1")
        code, err = run.finish()
        self.assertEqual(code, 3)
        self.assertIn("annulus: rank 1: [selftest] this rank was told to fail", err)
        self.assertEqual(err.count("told to fail"), 1, err)
        self.assertIn("told to fail", self.logs()["rank-1.log"])

    def test_selftest_refuses_a_missing_rank(self):
        """Otherwise no rank would fail, and all would wait."""
        for test in ("exit", "fail", "kill"):
            self.assert_refused(2, "--rank 1: there is no such rank, only rank 0", "selftest", test, "--rank", "1")
        run = self.start("launch", "-n", "2", "selftest", "fail", "--rank", "9")
        code, err = run.finish()
        self.assertEqual(code, 2, err)
        self.assertIn("--rank 9: there is no such rank, only ranks 0 to 1", err)
        self.assertEqual(err.count("no such rank"), 1, err)

    def test_killed_rank_ends_the_job(self):
        run = self.start("launch", "-n", "2", "selftest", "kill", "--rank", "1")
        code, err = run.finish()
        self.assertEqual(code, 137)
        self.assertIn("annulus: rank 1 was ended by signal 9", err)

    def test_sigpipe_ends_the_rank(self):
        code, err = self.start("launch", "-n", "2", "selftest", "kill", "--rank", "1", "--signal", "13").finish()
        self.assertEqual(code, 141, err)

    def stopped_by(self, number, code):
        run = self.start("launch", "-n", "2", "selftest", "stop")
        run.wait_for("rank 0 waits", "[rank 1] rank 1 waits")
        run.signal(number)
        got, err = run.finish()
        self.assertEqual(got, code, err)
        self.assertIn("annulus: stopped", err)
        for rank in range(2):  # they were asked to end, not killed
            self.assertIn(f"rank {rank} stops", self.logs()[f"rank-{rank}.log"])
        session = re.search(r"_local_tmpdir_base (\S+)", self.logs()["launch.log"]).group(1)
        self.assertFalse(os.path.exists(session), "left in shared memory")

    def test_ctrl_c_lets_ranks_finish(self):
        self.stopped_by(signal.SIGINT, 130)

    def test_sigterm_lets_ranks_finish(self):
        self.stopped_by(signal.SIGTERM, 143)

    def test_second_ctrl_c_kills_ranks_that_ignore_signals(self):
        run = self.start("launch", "-n", "2", "selftest", "hang", "--deaf")
        run.wait_for("rank 0 waits", "[rank 1] rank 1 waits")
        run.signal(signal.SIGINT)
        self.assertIn("Ctrl-C again", run.process.stderr.readline())
        run.signal(signal.SIGINT)
        code, _ = run.finish()
        self.assertEqual(code, 130)

    def test_grace_period_kills_ranks_that_ignore_signals(self):
        run = self.start("launch", "-n", "2", "--timeout-grace", "0.2", "selftest", "hang", "--deaf")
        run.wait_for("rank 0 waits", "[rank 1] rank 1 waits")
        run.signal(signal.SIGTERM)
        code, err = run.finish()
        self.assertEqual(code, 143)
        self.assertIn("did not stop within 0.2 s", err)

    def test_ranks_die_with_a_killed_launcher(self):
        run = self.start("launch", "-n", "2", "selftest", "hang", "--deaf")
        run.wait_for("rank 0 waits", "[rank 1] rank 1 waits")
        self.assertGreaterEqual(len(cli.processes_with(run.mark)), 4)  # launcher, mpirun, ranks
        run.signal(signal.SIGKILL)
        run.process.wait()
        deadline = time.monotonic() + cli.LIMIT
        while cli.processes_with(run.mark):
            self.assertLess(time.monotonic(), deadline, "ranks outlive their launcher")
        # The next launch removes what a killed launcher left behind.
        self.assertEqual(self.annulus("launch", "-n", "1", "selftest", "print")[0], 0)

    def test_closed_output_stops_the_job(self):
        run = self.start("launch", "-n", "1", "selftest", "spin")
        run.wait_for("still here")
        run.process.stdout.close()
        run.process.stdout = open(os.devnull)
        code, err = run.finish()
        self.assertEqual(code, 141, err)

    def test_dry_run_starts_nothing(self):
        code, out, err = self.annulus("launch", "-n", "2", "--dry-run", "selftest", "print")
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out, r"placement of 2 ranks")
        self.assertRegex(out, r"mpirun -np 2 .* selftest print\n")
        self.assertFalse(os.path.exists(self.path("runs")))

    def test_more_ranks_than_cores(self):
        many = str(os.cpu_count() + 2)
        code, out, err = self.annulus("launch", "-n", many, "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(len(out.splitlines()), int(many))

    def test_passes_options_to_mpirun(self):
        code, out, err = self.annulus("launch", "-n", "1", "--mpi-args", "-x 'CLI_SAID=two words'", "--dry-run", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertIn("-x 'CLI_SAID=two words'", out)
        self.assert_refused(2, "--mpi-args", "launch", "-n", "1", "--mpi-args", "'open", "selftest", "print")

    def test_reports_mpirun_failure_before_any_rank_started(self):
        code, _, err = self.annulus("launch", "-n", "1", "--mpi-args", "--no-such-option", "selftest", "print")
        self.assertNotEqual(code, 0)
        self.assertIn("before any rank started", err)
        self.assertIn("no-such-option", err)

    def test_refuses_missing_or_foreign_mpirun(self):
        self.assert_refused(9, "mpirun not found.*MPIRUN", "launch", "-n", "1", "selftest", "print", MPIRUN="/nowhere/mpirun")
        self.assert_refused(9, "should be Open MPI", "launch", "-n", "1", "selftest", "print", MPIRUN="/bin/true")

    def test_refuses_more_ranks_than_open_files_allow(self):
        done = subprocess.run(
            ["bash", "-c", 'ulimit -n 200 && exec "$@"', "bash", cli.ANNULUS, "launch", "-n", "40", "selftest", "print"],
            cwd=self.folder, env=cli.environment(), capture_output=True, text=True, timeout=cli.LIMIT)
        self.assertEqual(done.returncode, 8, done.stderr)
        self.assertIn("the launcher of 40 ranks needs 224 open files, but this process may have 200; use ulimit -n 4096", done.stderr)
        self.assertFalse(os.path.exists(self.path("runs")), "nothing has started")

    def test_killed_rank_on_another_host_comes_before_later_errors(self):
        """When the launcher looks, both have arrived: rank 0's complaint and the end of rank 1's connection."""
        code, _, err = self.annulus("launch", "-n", "2", "--mpi-args", "--host elsewhere", "selftest", "print",
                                    MPIRUN=self.write_mpirun(RANKS_THAT_END))
        self.assertEqual(code, 137, err)
        self.assertIn("annulus: rank 1 was ended by signal 9 (Killed)\nannulus: rank 0 failed after it\n", err)

    def test_refuses_launch_inside_a_rank(self):
        inside = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        self.assert_refused(2, "inside a rank", "launch", "-n", "1", "selftest", "print", **inside)

    def test_runs_under_plain_mpirun(self):
        if shutil.which("mpirun") is None:
            self.skipTest("no mpirun on PATH")
        short = tempfile.TemporaryDirectory(dir="/dev/shm")  # Open MPI's sockets need a short path
        self.addCleanup(short.cleanup)
        temporary = short.name
        done = subprocess.run(
            ["mpirun", "--oversubscribe", "--mca", "btl_vader_backing_directory", temporary, "-np", "2", cli.ANNULUS, "selftest", "print"],
            cwd=self.folder,
            env=cli.environment(
                OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", TMPDIR=temporary, HOME=temporary
            ),
            capture_output=True,
            text=True,
            timeout=cli.LIMIT,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(line.split(" on ")[0] for line in done.stdout.splitlines()), ["rank 0 of 2", "rank 1 of 2"])


class CommandLineTest(cli.CliTest):
    def test_single_process_subcommands_refuse_ranks(self):
        for subcommand in (("inspect", "run"), ("plan", "--length", "64", "--ranks", "2")):
            for rank in ("0", "1"):
                rank_of = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
                code, out, err = self.annulus(*subcommand, **rank_of)
                self.assertEqual((code, out), (2, ""), err)
                self.assertEqual("runs in one process, but this is a job of 2 ranks" in err, rank == "0", err)

    def test_help_lists_script_subcommands_only_in_a_clone(self):
        # The script of a clone can do more than that of an installation.
        os.mkdir(self.path("tools"))
        open(self.path("tools/install.sh"), "w").close()
        for script, clone in ((None, False), (self.path("bin/annulus"), False), (self.path("annulus"), True)):
            code, out, _ = self.annulus("--help", ANNULUS_SCRIPT=script)
            self.assertEqual(code, 0)
            for word in ("test", "examples", "torch", "install", "setup"):
                self.assertEqual(re.search(rf"^  {word} {{2,}}\S", out, re.M) is not None, clone, out)

    def test_hints_name_the_program_as_typed(self):
        _, _, err = self.annulus("plan", "--lenght", "3", ANNULUS_PROGRAM="my tools/annulus")
        self.assertIn("`'my tools/annulus' plan --help`", err)

    def test_refuses_invalid_command_lines(self):
        for pattern, *args in [
            ("whole number of ranks.*\"0\"", "launch", "-n", "0", "selftest", "print"),
            ("whole number of ranks.*\"-1\"", "launch", "-n", "-1", "selftest", "print"),
            ("whole number of ranks.*\"abc\"", "launch", "-n", "abc", "selftest", "print"),
            ("whole number of ranks.*\"2x\"", "launch", "-np", "2x", "selftest", "print"),
            ("whole number of ranks.*\"99999999999999999999\"", "launch", "-n", "99999999999999999999", "selftest", "print"),
            ("number of ranks, -n N", "launch", "selftest", "print"),
            ("needs a subcommand", "launch", "-n", "2"),
            ("did you mean \"selftest\"", "launch", "-n", "2", "selftst"),
            ("did you mean \"--dry-run\"", "launch", "-n", "2", "--dryrun", "selftest", "print"),
            ("did you mean \"--code\"", "launch", "-n", "2", "selftest", "exit", "--cod", "3"),
            ("in one process", "launch", "-n", "2", "topology"),
            ("launch: --hosts is empty", "launch", "--hosts", "", "-n", "2", "selftest", "print"),
            ("topology: --hosts is empty", "topology", "--hosts", ""),
            ("train: --init is empty", "launch", "-n", "2", "train", "x.toml", "--init", ""),
            ("train: --resume is empty", "train", "--resume", ""),
            ("export: argument 1 is empty", "export", "", "out"),
            ("sample: argument 1 is empty", "sample", ""),
            ("attend: --output is empty", "attend", "--random", "queries=8", "--output="),
            ("unknown subcommand \"\"", ""),
            ("did you mean \"topology\"", "topologie"),
            ("did you mean \"print\"", "selftest", "prnt"),
            ("--code is an option of exit, and the test is exchange", "selftest", "exchange", "--code", "5", "--deaf"),
            ("--deaf is an option of hang, and the test is stop", "launch", "-n", "2", "selftest", "stop", "--deaf"),
            ("--rank is an option of exit, fail, kill and stall, and", "selftest", "print", "--rank", "0"),
            ("--signal is an option of kill, and the test is exit", "selftest", "exit", "--signal", "9"),
            ("--signal 18 .*does not end a process", "selftest", "kill", "--signal", "18"),
            ("--signal 19 .*does not end a process", "launch", "-n", "2", "selftest", "kill", "--signal", "19"),
            ("--signal 32 .*does not end a process", "selftest", "kill", "--signal", "32"),
            ("ranks are started by `.* launch -n 2 attend ...`", "attend", "--random", "queries=8", "-n", "2"),
            ("ranks are started by `.* launch -n 4 train ...`", "train", "configs/quickstart.toml", "-np", "4"),
            ("ranks are started by `.* launch -n N bench ring ...`", "bench", "ring", "--np"),
            ("--stuck-after takes seconds from 1 to 86400, or 0", "launch", "-n", "2", "--stuck-after", "0.5", "selftest", "print"),
            ("timeout-grace", "launch", "-n", "2", "--timeout-grace", "-1", "selftest", "print"),
            ("-n", "topology", "-n", "0"),
            ('attend: --seed: expected a whole number of at least 0, got "-1"', "attend", "--random", "queries=3", "--seed", "-1"),
            ("--random, queries: is given twice", "attend", "--random", "queries=3,queries=4"),
            ('bench ring: --heads: expected a whole number of at least 1, got "-3"', "bench", "ring", "--heads", "-3"),
        ]:
            self.assert_refused(2, pattern, *args)

    def test_full_disk_of_standard_output_is_an_error(self):
        """The disk is full; some output fails line by line, long before the end."""
        with open(self.path("text.txt"), "w") as f:
            f.write("all work and no play " * 200)
        config = self.path("small.toml")
        with open(config, "w") as f:
            f.write(
                '[data]\ntrain = ["text.txt"]\ncontext = 64\nbatch = 1\n[run]\nsteps = 2\n'
                "[model]\nlayers = 1\ndim = 16\nheads = 2\n[optimizer]\nlr = 0.01\n"
            )
        for args in [
            ("--help",),
            ("version",),
            ("doctor",),
            ("topology",),
            ("plan", "--length", "64", "--ranks", "2", "--heads", "1"),
            ("attend", "--random", "queries=8,heads=1,dim=4"),
            ("selftest", "print"),
            ("selftest", "exchange"),
            ("train", "--help-config"),
            ("train", config),
            ("launch", "-n", "1", "selftest", "print"),
            ("launch", "-n", "1", "selftest", "spin"),
            ("launch", "-n", "1", "--dry-run", "selftest", "print"),
        ]:
            with self.subTest(args=args), open("/dev/full", "w") as full:
                done = subprocess.run(
                    [cli.ANNULUS, *args],
                    cwd=self.folder,
                    env=cli.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=full,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=cli.LIMIT,
                )
                self.assertEqual(done.returncode, 8, done.stderr)
                self.assertRegex(done.stderr, r"(?m)^annulus: \[output\] standard output could not be written( in full;.*|: No space left on device; free some space or write elsewhere)$")

    def test_closed_pipe_ends_without_an_error(self):
        for ignored in (True, False):
            reader, writer = os.pipe()
            os.close(reader)
            done = subprocess.run(
                [cli.ANNULUS, "selftest", "print"],
                env=cli.environment(),
                stdout=writer,
                stderr=subprocess.PIPE,
                text=True,
                timeout=cli.LIMIT,
                restore_signals=not ignored,  # Python ignores SIGPIPE
            )
            os.close(writer)
            self.assertEqual(done.returncode, 141 if ignored else -signal.SIGPIPE, done.stderr)
            self.assertNotIn("annulus:", done.stderr)

    def test_help_shows_an_example_for_every_subcommand(self):
        code, out, _ = self.annulus("--help")
        self.assertEqual(code, 0)
        listed = re.findall(r"^  (\w+) {2,}\S", out, re.M)
        self.assertLessEqual({"launch", "checkpoint", "version"}, set(listed))  # also the longest name
        for subcommand in listed:
            code, out, err = self.annulus(subcommand, "--help")
            self.assertEqual(code, 0, err)
            self.assertRegex(out, r"Examples?\b.*:\n(?s:.*)/annulus .*" + subcommand, subcommand)  # the program as it was typed
            for line in re.findall(r"^ +\S*/annulus (launch .*selftest.*|topology.*|doctor|version|selftest.*)$", out, re.M):
                code, _, err = self.annulus(*line.split())
                self.assertEqual(code, 0, f"{line}: {err}")

    def test_topology_shows_placement_and_refuses_bad_files(self):
        code, out, err = self.annulus("topology", "-n", "2")
        self.assertEqual(code, 0, err)
        self.assertIn("placement of 2 ranks", out)
        with open(self.path("broken.xml"), "w") as f:
            f.write("<topology>")
        self.assert_refused(3, "broken.xml", "topology", "--xml", "broken.xml")
        self.assert_refused(3, "missing.xml", "topology", "--xml", "missing.xml")

    def test_doctor_shows_components_and_caches(self):
        code, out, err = self.annulus("doctor")
        self.assertEqual(code, 0, err)
        for word in ("LibTorch", "Open MPI", "device", "backend", "kernel"):
            self.assertIn(word, out)
        self.assertIn("pool: freed memory kept for reuse, at most 1,024 MiB", out)
        self.assertRegex(out, r"(?m)^  kernel scratch +what kernels")
        self.assertIn("caches: 1,792 MiB together", out)
        operators = ("pattern texts", "selected programs", "block maps")
        for name in ("programs", "patterns", "compositions", "rotary tables", *operators):
            self.assertRegex(out, rf"(?m)^  {name} +at most [\d.]+ MiB: \w")
        self.assertNotRegex(out, r"(?m)\b0 (hits|misses|entries)|\b0\.0 (of|MiB)")  # this process has used no cache
        code, out, err = self.annulus("doctor", ANNULUS_CACHES_MIB="448")
        self.assertIn("caches: 448 MiB together", out)
        self.assertRegex(out, r"(?m)^  programs +at most 128\.0 MiB: ")
        code, out, err = self.annulus("doctor", ANNULUS_CACHES_MIB="0")
        self.assertRegex(out, r"caches: 0 MiB together .*\n\Z")
        for variable in ("ANNULUS_CACHES_MIB", "ANNULUS_POOL_MIB"):
            code, out, err = self.annulus("doctor", **{variable: "many"})
            self.assertEqual(code, 2)
            self.assertIn(variable, err)


if __name__ == "__main__":
    cli.main()
