#!/usr/bin/env python3
"""Tests --trace of `train`, `attend` and `plan` with a reader of its own (trace_reader.py)."""

import collections
import glob
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402
import trace_reader  # noqa: E402


class TraceTest(cli.CliTest):
    def write_run(self, steps=4, **more):
        cli.write_tiny_run(self.folder, steps, model={"layers": 2, "dim": 32, "heads": 2}, checkpoint={"every": 2},
                           data={"train": ["text.txt"], "validation_fraction": 0.2, "context": 64, "batch": 2},
                           validation={"every": 2, "batches": 1}, **more)

    def losses(self, run):
        with open(self.path(f"runs/{run}/metrics.jsonl")) as f:
            return [m["loss"] for m in map(json.loads, f) if "loss" in m]

    def test_attend_and_its_plan_lie_over_each_other(self):
        sizes = {"queries": 96, "heads": 4, "kv_heads": 2, "dim": 16}
        ranks, schedule = 3, ["--schedule", "ring", "--layout", "contiguous", "--pattern", "{ kind = 'full' }"]
        code, out, err = self.annulus("launch", "-n", str(ranks), "attend", "--random",
                                      ",".join(f"{k}={v}" for k, v in sizes.items()), *schedule, "--backward", "--check",
                                      "--trace", "run.json")
        self.assertEqual(code, 0, err)
        self.assertIn("trace: run.json (clocks of ranks agree within 0 microseconds)", out)
        code, plan, err = self.annulus("plan", "--ranks", str(ranks), "--length", "96", "--heads", "4", "--kv-heads", "2",
                                       "--head-dim", "16", "--element-bytes", "4", *schedule, "--json", "--trace", "plan.json")
        self.assertEqual(code, 0, err)
        plan = json.loads(plan)
        run, planned = trace_reader.Trace(self.path("run.json")), trace_reader.Trace(self.path("plan.json"))
        self.assertEqual(run.ranks(), list(range(ranks)))
        self.assertEqual(planned.ranks(), run.ranks())
        # The backward goes around the ring the other way.
        to = lambda rank, direction: (rank + (1 if direction == "forward" else ranks - 1)) % ranks
        for trace in (run, planned):
            for rank in range(ranks):
                self.assertEqual(trace.names[rank, 1], "main")
                for direction in ("forward", "backward"):
                    (whole,) = trace.spans_of(rank, f"attention {direction}")
                    of_plan = plan[direction]["messages_sent"]
                    sends = [m for m in trace.sends(rank, whole) if "hop" in m["args"]]
                    self.assertEqual((of_plan["least"], of_plan["most"]), (len(sends), len(sends)))
                    kinds = ("kv_bytes_sent", "gradient_bytes_sent")
                    self.assertEqual(sum(m["args"]["bytes"] for m in sends), sum(plan[direction][k]["most"] for k in kinds))
                    self.assertEqual({m["args"]["peer"] for m in sends}, {to(rank, direction)})
        hops = lambda trace: collections.Counter((s["pid"], s["within"][0], s["args"]["hop"]) for s in trace.spans if s["name"] == "hop")
        self.assertEqual(hops(run), hops(planned))
        # What is predicted is also seen, in the same places.
        places = lambda trace: {(s["pid"], s["tid"], s["within"][0], s["args"]["hop"], s["name"])
                                for s in trace.spans if s["within"][1:] == ["hop"] and s["name"] in ("tiles", "wait")}
        self.assertEqual(places(run), places(planned))
        # Each message that the plan has arrives: the two traces join the same ends.
        ends = lambda trace: collections.Counter((b["pid"], e["pid"]) for b, e in trace.flows)
        messages = {(r, to(r, d)): plan[d]["messages_sent"]["most"] for r in range(ranks) for d in ("forward", "backward")}
        self.assertEqual(ends(planned), messages)
        self.assertTrue(all(ends(run)[pair] >= messages[pair] for pair in messages))

    def test_plan_of_a_schedule_that_moves_queries(self):
        code, plan, err = self.annulus("plan", "--ranks", "4", "--length", "256", "--heads", "8", "--schedule", "ulysses-ring",
                                       "--within", "2", "--json", "--trace", "plan.json", "--machine", "h100")
        self.assertEqual(code, 0, err)
        plan, trace = json.loads(plan), trace_reader.Trace(self.path("plan.json"))
        for direction in ("forward", "backward"):
            of_plan = plan[direction]["messages_sent"]
            sent = [len(trace.sends(r, trace.spans_of(r, f"attention {direction}")[0])) for r in range(4)]
            self.assertEqual((min(sent), max(sent)), (of_plan["least"], of_plan["most"]))
        self.assertEqual(len(trace.flows), sum(len(trace.sends(r)) for r in range(4)))

    def test_train(self):
        self.write_run()
        code, out, err = self.annulus("launch", "-n", "2", "train", "config.toml", "--trace", "2-3")
        self.assertEqual(code, 0, err)
        said = re.search(r"^trace: +(\S+) \(clocks of ranks agree within 0 microseconds", out, re.M).group(1)
        self.assertEqual(os.path.relpath(said, "runs"), "tiny-001/traces/steps-2-3.json")
        self.assertEqual(os.listdir(self.path("runs/tiny-001/traces")), ["steps-2-3.json"])
        trace = trace_reader.Trace(self.path(said))
        self.assertEqual(trace.about["steps"], "2-3")
        self.assertEqual(trace.ranks(), [0, 1])
        for rank in (0, 1):
            self.assertEqual([s["args"]["of"] for s in trace.spans_of(rank, "step")], ["2", "3"])
            for name in ("forward", "backward", "update", "agree on calls"):
                of_steps = [s for s in trace.spans_of(rank, name) if s["within"][0] != "validation"]
                self.assertEqual([s["within"] for s in of_steps], [["step"]] * 2, name)
            for name, phase in (("layer forward", "forward"), ("layer backward", "backward")):
                of_steps = [s for s in trace.spans_of(rank, name) if s["within"] == ["step", phase]]
                layers = [0, 1, 0, 1] if phase == "forward" else [1, 0, 1, 0]
                self.assertEqual([s["args"]["layer"] for s in of_steps], layers)
            # Step 2 ends with validation and a checkpoint, which belong to the trace.
            self.assertEqual(len(trace.spans_of(rank, "validation")), 1)
            self.assertEqual(len(trace.spans_of(rank, "save checkpoint")), 1)
            self.assertTrue(trace.spans_of(rank, "read batch", thread="data reader"))
            tiles = [s for s in trace.spans_of(rank, "tiles") if s["within"][0] == "step"]
            self.assertTrue(all(s["within"][-1] == "hop" and {"layer", "hop"} <= s["args"].keys() for s in tiles) and tiles)
        self.assertTrue(trace.flows)
        # Results are the same bits as without a trace.
        self.assertEqual(self.annulus("launch", "-n", "2", "train", "config.toml", "--set", "run.name=plain")[0], 0)
        self.assertEqual(self.losses("tiny-001"), self.losses("plain-001"))
        # A run that has passed the steps, and a folder that cannot be written, are refused before a step is made.
        again = ["launch", "-n", "2", "train", "--resume", "tiny-001", "--set", "run.steps=6", "--trace"]
        before = os.path.getmtime(self.path("runs/tiny-001/metrics.jsonl"))
        code, _, err = self.annulus(*again, "4-5")
        self.assertEqual(code, 2, err)
        self.assertIn("--trace 4-5: the run has already made 4 steps; name steps from 5 on", err)
        os.rename(self.path("runs/tiny-001/traces"), self.path("kept"))
        with open(self.path("runs/tiny-001/traces"), "w"):
            pass
        code, _, err = self.annulus(*again, "5-6")
        self.assertEqual(code, 8, err)
        self.assertIn("runs/tiny-001/traces", err)
        self.assertEqual(os.path.getmtime(self.path("runs/tiny-001/metrics.jsonl")), before)

    def test_what_is_offloaded(self):
        self.write_run(2, memory={"offload": "file", "files": self.folder, "device_layers": 0})
        code, _, err = self.annulus("launch", "-n", "2", "train", "config.toml", "--set", "model.recompute=true", "--trace", "1-2")
        self.assertEqual(code, 0, err)
        trace = trace_reader.Trace(self.path("runs/tiny-001/traces/steps-1-2.json"))
        for rank in (0, 1):
            moved = {name: [s["args"]["bytes"] for s in trace.spans if s["pid"] == rank and s["name"] == name]
                     for name in ("write to tier", "read from tier")}
            self.assertTrue(moved["write to tier"], rank)
            self.assertEqual(sorted(moved["write to tier"]), sorted(moved["read from tier"]))

    def test_refuses_steps(self):
        self.write_run()
        for text, words in (("9-3", "the last step comes before the first; did you mean 3-9"),
                            ("3-9", "the run ends with step 4"), ("0-2", "counted from 1"), ("-3", "counted from 1"),
                            ("2-", "counted from 1"), ("two", "counted from 1"), ("1-2-3", "counted from 1")):
            for launch in ((), ("launch", "-n", "2")):
                self.assert_refused(2, re.escape(f"--trace {text}: ") + ".*" + words, *launch, "train", "config.toml",
                                    f"--trace={text}")
                if text != "9-3":
                    break
        self.assertFalse(glob.glob(self.path("runs/*")))
        self.assert_refused(8, "--trace missing/f", "attend", "--random", "queries=8", "--trace", "missing/f")
        self.assert_refused(8, "--trace missing/f", "plan", "--ranks", "2", "--length", "8", "--heads", "1", "--trace", "missing/f")
        self.assert_refused(2, "the same file", "plan", "--ranks", "2", "--length", "8", "--heads", "1", "--trace", "f", "--out", "f")


if __name__ == "__main__":
    cli.main()
