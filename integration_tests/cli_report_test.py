#!/usr/bin/env python3
"""Tests `annulus report`, `train --report` and run.tensorboard as a user types them."""

import json
import os
import re
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402


class ReportTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        cli.write_tiny_run(self.folder, 4, checkpoint={"every": 2})

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as f:
            f.write(text)

    def fake_run(self, name, metrics='{"step":1,"loss":2.5,"seconds":1}\n'):
        self.write(f"runs/{name}/config.toml", cli.tiny_config(4))
        if metrics is not None:
            self.write(f"runs/{name}/metrics.jsonl", metrics)

    def data(self, path):
        """The data that a page holds."""
        with open(self.path(path)) as f:
            page = f.read()
        return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))

    def stand_in(self):
        """A script in place of ./annulus whose `follower` keeps its words in the file `words`."""
        words = self.path("words")
        self.write("script", '#!/bin/bash\n[[ $1 == follower ]] || exit 1\nprintf "%%s\\n" "$@" >%s\ntouch %s.done\nexit 5\n' % (words, words))
        os.chmod(self.path("script"), 0o755)
        return self.path("script")

    def words(self):
        """What the stand-in was given, once it has started."""
        until = time.monotonic() + cli.LIMIT
        while not os.path.exists(self.path("words.done")) and time.monotonic() < until:
            time.sleep(0.01)
        with open(self.path("words")) as f:
            return f.read().splitlines()

    def train(self, *words, **env):
        code, out, err = self.annulus("train", "config.toml", *words, **env)
        self.assertEqual(code, 0, err)
        return out + err

    def test_a_run_and_its_report(self):
        self.train("--report")
        run, = self.data("runs/tiny-001/report.html")["runs"]
        self.assertEqual((run["state"]["kind"], run["step"], run["steps"]), ("complete", 4, 4))
        with open(self.path("runs/tiny-001/metrics.jsonl")) as f:
            losses = [line["loss"] for line in map(json.loads, f) if "loss" in line]
        self.assertEqual(len(losses), 4)
        for shown, loss in zip(run["columns"]["loss"]["y"], losses):
            self.assertAlmostEqual(shown, loss, delta=1e-5 * abs(loss))
        self.assertEqual([c["step"] for c in run["checkpoints"]], [2, 4])

        os.remove(self.path("runs/tiny-001/report.html"))
        code, out, err = self.annulus("report", "tiny")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("runs/tiny-001/report.html  (", out)
        again, = self.data("runs/tiny-001/report.html")["runs"]
        self.assertEqual({k: again[k] for k in ("columns", "state", "checkpoints")}, {k: run[k] for k in ("columns", "state", "checkpoints")})

    def test_a_run_that_goes_on_and_is_stopped(self):
        running = self.start("train", "config.toml", "--report", "--set", "run.steps=1000000", "--set", "checkpoint.every=1000000")
        running.wait_for("step 1/1,000,000")
        code, _, err = self.annulus("report", "tiny-001", "--out", "now.html")
        self.assertEqual(code, 0, err)
        self.assertEqual(self.data("now.html")["runs"][0]["state"]["kind"], "running")
        running.signal(signal.SIGINT)
        running.finish()
        self.assertEqual(self.data("runs/tiny-001/report.html")["runs"][0]["state"]["kind"], "stopped")

    def test_a_run_that_fails(self):
        code, _, err = self.annulus("train", "config.toml", "--report", "--set", "optimizer.lr=1e12", "--set", "optimizer.clip=0",
                                    "--set", "optimizer.skips=2", "--set", "run.steps=50")
        self.assertEqual(code, 2, err)
        for path in ("runs/tiny-001/report.html", "later.html"):
            if path == "later.html":
                self.annulus("report", "tiny", "--out", path)
            run, = self.data(path)["runs"]
            self.assertEqual(run["state"]["kind"], "failed")
            self.assertIn("were not finite in 2 steps in a row", run["state"]["text"])
            self.assertIn(None, run["columns"]["loss"]["y"])

    def test_runs_laid_over_each_other(self):
        self.fake_run("a-001")
        self.fake_run("b-001")
        code, out, err = self.annulus("report", "a", "runs/b-001")
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out, r"^report.html  \(.*of 2 runs\)")
        self.assertEqual([r["name"] for r in self.data("report.html")["runs"]], ["a-001", "b-001"])

    def test_half_a_line_at_the_end_is_said(self):
        self.fake_run("half-001", '{"step":1,"loss":2.5}\n{"step":2,"lo')
        self.assertEqual(self.annulus("report", "half")[0], 0)
        run, = self.data("runs/half-001/report.html")["runs"]
        self.assertEqual(run["columns"]["loss"], {"x": [1], "y": [2.5]})
        self.assertTrue(any("ends within a line" in note for note in run["notes"]))

    def test_mistakes(self):
        self.fake_run("none-001", None)
        self.fake_run("empty-001", "")
        self.fake_run("other-001", "this is\nno JSON\n")
        self.fake_run("good-001")
        os.mkdir(self.path("folder"))
        for code, pattern, *words in (
                (2, "which run"),
                (3, 'no run "nope"', "nope"),
                (3, "not a run folder", "./folder"),
                (3, "metrics.jsonl cannot be read.*nothing to show yet", "none"),
                (3, "holds no line yet", "empty"),
                (3, "none of its 2 lines", "other"),
                (3, "holds no line yet", "good", "empty"),
                (2, "--follow is for", "good", "--follow"),
                (2, "take one run", "good", "empty", "--tensorboard"),
                (2, "--out is for the page", "good", "--wandb", "--out", "x"),
                (8, "nowhere", "good", "--out", "nowhere/x.html"),
                (9, "are started by the script", "good", "--tensorboard")):
            with self.subTest(words=words):
                self.assert_refused(code, pattern, "report", *words)
        left = [os.path.join(f, n) for f, _, names in os.walk(self.folder) for n in names if n.endswith(".html") or ".tmp" in n]
        self.assertEqual(left, [])

    def test_other_viewers_are_the_follower_s(self):
        self.fake_run("good-001")
        code, _, _ = self.annulus("report", "good", "--tensorboard", "--wandb", "--follow", ANNULUS_SCRIPT=self.stand_in())
        self.assertEqual(code, 5)
        self.assertEqual(self.words(), ["follower", "--run=runs/good-001", "--tensorboard", "--wandb", "--follow", "--version=0.1.0"])

    def test_a_follower_beside_a_run_that_it_cannot_harm(self):
        told = self.train("--set", "run.tensorboard=true", ANNULUS_SCRIPT=self.stand_in())  # it ends with an error at once
        self.assertNotIn("TensorBoard", told)
        first, run, *rest = self.words()
        self.assertEqual((first, run, rest[:2]), ("follower", "--run=runs/tiny-001", ["--tensorboard", "--follow"]))
        self.assertRegex(rest[2], r"^--parent=\d+$")
        self.assertTrue(os.path.exists(self.path("runs/tiny-001/logs/tensorboard.log")))
        self.assertIn("no event files for TensorBoard are written", self.train("--set", "run.tensorboard=true"))


if __name__ == "__main__":
    cli.main()
