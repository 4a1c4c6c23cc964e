#!/usr/bin/env python3
"""Tests the log as a user sees it: levels, JSON, job.log, the log files of a run, the removal of old log folders."""

import fcntl
import glob
import json
import os
import re
import shutil
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

RECORD = re.compile(r"^(\S+T\S+Z) (debug|info|warn|error) (\S+) (launcher|rank (\d+)|ranks [\d, -]+) (.*)$")
PROGRESS = re.compile(r"^step \d+/\d+  loss .*$")

# Acts as three ranks on another host. Each logs a warning that all give, and one of its own.
WARNING_RANKS = cli.RANKS_ELSEWHERE + """
ranks = [connect(rank) for rank in range(3)]
for rank, control in enumerate(ranks):
    for i, message in enumerate(["all ranks know it", f"rank {rank} knows it"]):
        record = {"time": f"2026-01-01T00:00:0{5 - rank}.00000{i}Z", "level": "warn", "host": f"node{rank}", "rank": rank,
                  "module": "train", "message": message}
        send(control, record=json.dumps(record), shown=True, of_one=False)
    send(control, exit=0)
for control in ranks:
    control.close()
"""

# Acts as two ranks on another host, which the job numbers in the opposite order. Each prints an error line at once. Rank 1
# of mpirun sends what is no record, and fails.
RENUMBERED_RANKS = cli.RANKS_ELSEWHERE + """
controls = [connect(rank) for rank in range(2)]
errors = [connect(rank, "err") for rank in range(2)]
for rank in range(2):
    send(controls[rank], host=f"node{rank}")
    send(controls[rank], rank=1 - rank)
    errors[rank].sendall(f"of mpirun's rank {rank}\\n".encode())
send(controls[1], record="no record", shown=True, of_one=False)
send(controls[1], error="3 4 data no text", reported=False)
send(controls[0], error="3 4 data on rank 0: no text", reported=False, cause=0)
for connection in controls + errors:
    connection.close()
sys.exit(3)
"""


class LogTest(cli.CliTest):
    def lines(self, path):
        with open(path) as f:
            return f.read().splitlines()

    def job_log(self):
        paths = glob.glob(self.path("runs/logs/*/job.log"))
        self.assertEqual(len(paths), 1, paths)
        return self.lines(paths[0])

    def records(self):
        """Returns job.log's records: (time, level, rank or None, the rest)."""
        found = []
        for line in self.job_log():
            if line.startswith("    "):  # a message of several lines
                time, level, rank, rest = found[-1]
                found[-1] = (time, level, rank, rest + "\n" + line.strip())
                continue
            match = RECORD.match(line)
            self.assertTrue(match, line)
            time, level, _, _, rank, rest = match.groups()
            found.append((time, level, None if rank is None else int(rank), rest))
        return found

    def assert_merged(self, records, failed):
        """Checks that records are sorted by time, with those of the rank that failed last."""
        last = [r for r in records if r[2] == failed]
        self.assertTrue(last, records)
        self.assertEqual(records[-len(last):], last, "the lines of the rank that failed are not last")
        for part in (records[: -len(last)], last):
            times = [r[0] for r in part]
            self.assertEqual(times, sorted(times))

    def test_a_failing_rank_of_four(self):
        code, out, err = self.annulus("launch", "-n", "4", "--log-level", "debug", "selftest", "fail", "--rank", "2")
        self.assertEqual(code, 3, err)
        self.assertEqual(err.count("this rank was told to fail"), 1, err)
        records = self.records()
        self.assert_merged(records, 2)
        self.assertEqual(records[-1][1], "error")
        self.assertIn("[selftest] this rank was told to fail", records[-1][3])
        self.assertTrue(any(r[2] is None and r[3].startswith("rank 2: [selftest]") for r in records), records)
        self.assertTrue(any(r[2] is None and r[3].startswith("[launcher] process ") for r in records), records)
        for rank in range(4):
            if f"rank {rank} waits" in out:
                self.assertTrue(any(r[2] == rank and r[3].startswith("[launcher] process ") for r in records), rank)

    def test_a_rank_that_alone_finds_no_file(self):
        cli.write_tiny_run(self.folder, 3, data={"batch": 4})
        os.mkdir(self.path("other"))
        shutil.copy(self.path("config.toml"), self.path("other"))
        mpirun = self.mpirun_with_ranks_by("sh", "-c", 'test $OMPI_COMM_WORLD_RANK != 2 || cd other; exec "$@"')
        code, _, err = self.annulus("launch", "-n", "4", "--log-level", "debug", "train", "config.toml", MPIRUN=mpirun)
        self.assertEqual(code, 3, err)
        self.assertIn("text.txt", err)
        self.assert_merged(self.records(), 2)

    def test_ranks_that_the_job_numbers_otherwise(self):
        code, _, err = self.annulus("launch", "-n", "2", "--mpi-args", "--host elsewhere", "selftest", "print",
                                    MPIRUN=self.write_mpirun(RENUMBERED_RANKS))
        self.assertEqual(code, 3, err)
        self.assertIn("annulus: rank 0: [data] no text\nannulus: rank 1 failed after it\n", err)
        records = [line.split(" ", 2)[2] for line in self.job_log()]
        self.assertIn("node0 rank 1 [stderr] of mpirun's rank 0", records)
        self.assertEqual(records[-1], "node1 rank 0 [stderr] of mpirun's rank 1")
        with open(glob.glob(self.path("runs/logs/*/rank-1.log"))[0]) as f:
            self.assertIn("annulus: a record that cannot be read: no record\n", f.read())

    def test_a_killed_rank_of_four_loses_nothing(self):
        cli.write_tiny_run(self.folder, 1000000, data={"batch": 4}, checkpoint={"every": 2})
        run = self.start("launch", "-n", "4", "--log-level", "debug", "train", "config.toml", "--set", "mesh.data=2")
        run.wait_for("step ")

        def is_rank(pid):
            with open(f"/proc/{pid}/environ", "rb") as f:
                return b"OMPI_COMM_WORLD_RANK=2" in f.read().split(b"\0")

        killed = [pid for pid in cli.processes_with(run.mark) if is_rank(pid)]
        self.assertEqual(len(killed), 1)
        os.kill(killed[0], signal.SIGKILL)
        code, err = run.finish()
        self.assertEqual(code, 137, err)
        records = self.records()
        self.assert_merged(records, 2)
        for rank in range(4):
            process = [r[3] for r in records if r[2] == rank and r[3].startswith("[launcher] process ")]
            self.assertEqual(len(process), 1, records)
            with open(self.path(f"runs/tiny-001/logs/rank-{rank}.log")) as f:
                own = f.read()
            self.assertIn(process[0], own)
            self.assertIn(f" rank {rank} ", own)
        self.assertIn(f"[launcher] process {killed[0]}", [r[3] for r in records if r[2] == 2])
        self.assertTrue(any(r[2] == 0 and r[3].startswith("[train] device cpu") for r in records), records)
        ended = [r for r in records if r[2] is None and "rank 2 was ended by signal 9" in r[3]]
        self.assertEqual([r[1] for r in ended], ["error"], records)

    def test_what_ranks_print_besides_is_there(self):
        code, _, err = self.annulus("launch", "-n", "2", "selftest", "print")
        self.assertEqual(code, 0, err)
        records = self.records()
        self.assertEqual(sorted(r[2:] for r in records), [(i, f"[stderr] standard error of rank {i}") for i in range(2)])

    def test_warnings_and_progress_alone(self):
        pattern = ("--set", "model.pattern={ kind = 'full' }")
        cli.write_tiny_run(self.folder, 3, data={"batch": 4})
        for level, more, said in [
            ({"ANNULUS_LOG": "warn"}, (), []),
            ({"ANNULUS_LOG": "debug"}, ("--log-level", "warn"), []),
            ({}, ("--log-level", "warn", *pattern), ["warning: model.pattern lets a query see later keys"]),
            ({}, ("--log-level", "error", *pattern), []),
        ]:
            for launch in (("launch", "-n", "2"), ()):
                with self.subTest(level=level, more=more, launch=launch):
                    code, out, err = self.annulus(*launch, "train", "config.toml", *more, **level)
                    self.assertEqual((code, err), (0, ""), out)
                    lines = out.splitlines()
                    self.assertTrue(any(PROGRESS.match(line) for line in lines), out)
                    others = [line for line in lines if not PROGRESS.match(line)]
                    self.assertEqual(len(others), len(said), out)
                    for line, words in zip(others, said):
                        self.assertTrue(line.startswith(words), line)
        code, out, err = self.annulus("launch", "-n", "2", "--log-level", "warn", "train", "config.toml")
        self.assertEqual((code, err), (0, ""), out)
        self.assertFalse([line for line in out.splitlines() if not PROGRESS.match(line)], out)

    def test_a_quiet_run_that_is_stopped_says_how_to_go_on(self):
        cli.write_tiny_run(self.folder, 1000000)
        run = self.start("launch", "-n", "2", "--log-level", "warn", "train", "config.toml")
        run.wait_for("step ")
        run.signal(signal.SIGINT)
        code, err = run.finish()
        self.assertEqual(code, 130, err)
        self.assertRegex(err, r"(?m)^annulus: to continue from the checkpoint of step \d+: ")

    def test_json_lines(self):
        cli.write_tiny_run(self.folder, 3, data={"batch": 4})
        for launch, more, env in [(("launch", "-n", "2"), ("--log-json",), {}), (("launch", "-n", "2"), (), {"ANNULUS_LOG": "json"}),
                                  ((), ("--log-json", "--log-level", "debug"), {})]:
            with self.subTest(launch=launch, env=env):
                code, out, err = self.annulus(*launch, "train", "config.toml", *more, **env)
                self.assertEqual(code, 0, err)
                self.assertFalse([line for line in out.splitlines() if not PROGRESS.match(line)], out)
                records = [json.loads(line) for line in err.splitlines()]
                for record in records:
                    self.assertEqual(list(record), ["time", "level", "host", "rank", "module", "message"])
                self.assertTrue(any(r["message"].startswith("done: 3 steps") and r["rank"] == 0 for r in records), err)
        files = glob.glob(self.path("runs/*/logs/rank-0.log")) + glob.glob(self.path("runs/logs/*/job.log"))
        self.assertEqual(len(files), 5)
        for file in files:
            times = [json.loads(line)["time"] for line in self.lines(file)]
            self.assertTrue(times)
            self.assertEqual(times, sorted(times))
        code, _, err = self.annulus("launch", "-n", "2", "--log-json", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted((r["rank"], r["module"], r["message"]) for r in map(json.loads, err.splitlines())),
                         [(i, "stderr", f"standard error of rank {i}") for i in range(2)])
        code, _, err = self.annulus("launch", "-n", "2", "--log-json", "selftest", "fail", "--rank", "1")
        self.assertEqual(code, 3)
        last = json.loads(err.splitlines()[-1])
        self.assertEqual((last["level"], last["rank"]), ("error", None))
        self.assertIn("exit code 3", last["message"])
        code, _, err = self.annulus("sample", "no-such-run", "--log-json")
        self.assertEqual(json.loads(err)["level"], "error")

    def test_a_warning_of_all_ranks_is_shown_once(self):
        code, _, err = self.annulus("launch", "-n", "3", "--mpi-args", "--host elsewhere", "selftest", "print",
                                    MPIRUN=self.write_mpirun(WARNING_RANKS))
        self.assertEqual(code, 0, err)
        self.assertEqual(err.count("all ranks know it"), 1, err)
        for rank in range(3):
            self.assertIn(f"annulus: rank {rank} knows it\n", err)
        self.assertEqual([line.split(" ", 2)[2] for line in self.job_log()], [
            "node2 ranks 0-2 [train] all ranks know it",
            "node2 rank 2 [train] rank 2 knows it",
            "node1 rank 1 [train] rank 1 knows it",
            "node0 rank 0 [train] rank 0 knows it",
        ])

    def test_a_setting_with_which_gradients_are_wrong(self):
        code, _, err = self.annulus("version", TORCH_CUDNN_SDPA_AVOID_RECOMPILE="1")
        self.assertEqual(code, 0, err)
        self.assertIn("TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 is not heeded: with it, cuDNN's attention", err)
        self.assertNotIn("is not heeded", self.annulus("version", TORCH_CUDNN_SDPA_AVOID_RECOMPILE="0")[2])

    def test_refusals(self):
        for args, env in [(("version", "--log-level", "wran"), {}), (("launch", "-n", "2", "selftest", "print", "--log-level", "wran"), {}),
                          (("launch", "-n", "2", "--log-level", "wran", "selftest", "print"), {}),
                          (("version",), {"ANNULUS_LOG": "wran"}), (("launch", "-n", "2", "selftest", "print"), {"ANNULUS_LOG": "wran"})]:
            where = "ANNULUS_LOG" if env else "--log-level"
            self.assert_refused(2, f'{where}.*"wran".*did you mean "warn"', *args, **env)
        self.assertFalse(os.path.exists(self.path("runs")))

    def test_old_folders_are_removed(self):
        def folder(name, *files):
            os.makedirs(self.path(f"runs/logs/{name}"))
            for file in files:
                open(self.path(f"runs/logs/{name}/{file}"), "w").close()

        ours = ("launch.log", "mpirun.log", "job.log", "rank-0.log", "rank-11.log")
        for day in range(1, 8):
            folder(f"2020010{day}-000000-{day}", *ours)
        folder("20190101-000000-1", *ours, "notes.txt")  # somebody's own file
        folder("20190102-000000-1", "rank-0.log")  # no launch.log
        folder("mine", *ours)
        live = open(self.path("runs/logs/20200101-000000-1/launch.log"))
        self.addCleanup(live.close)
        fcntl.flock(live, fcntl.LOCK_EX)
        cli.write_tiny_run(self.folder, 1)
        code, _, err = self.annulus("launch", "-n", "1", "train", "config.toml", "--set", "run.keep_logs=3")
        self.assertEqual(code, 0, err)
        left = sorted(os.listdir(self.path("runs/logs")))
        self.assertEqual(left[:2] + left[-1:], ["20190101-000000-1", "20190102-000000-1", "mine"])
        self.assertEqual(left[2:-2], ["20200101-000000-1", "20200106-000000-6", "20200107-000000-7"])
        self.assertTrue(os.path.exists(self.path(f"runs/logs/{left[-2]}/job.log")))
        self.assertEqual(sorted(os.listdir(self.path("runs/logs/20190101-000000-1"))), sorted([*ours, "notes.txt"]))
        # A subcommand without a configuration, and so without run.keep_logs, removes nothing.
        self.assertEqual(self.annulus("launch", "-n", "1", "selftest", "print")[0], 0)
        self.assertEqual(len(os.listdir(self.path("runs/logs"))), len(left) + 1)


if __name__ == "__main__":
    cli.main()
