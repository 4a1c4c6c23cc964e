#!/usr/bin/env python3
"""Tests `annulus plan --out` and `annulus prove`: a plan that was written is proved, a changed one is refused, and so it is
with plans that were made elsewhere."""

import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

PLAN = ["plan", "--ranks", "4", "--length", "4099", "--heads", "8", "--kv-heads", "2", "--pattern"]
CAUSAL = "{ kind = 'causal', documents = [1000, 3099] }"


def all_gather(ranks, length):
    """A plan as somebody else may make it: each rank owns every ranks-th position, sends all others its keys, and gets the
    gradients back that the others have for them. A query sees the keys up to its own."""
    spans = [[r, ranks, len(range(r, length, ranks))] for r in range(ranks)]
    programs = []
    for r in range(ranks):
        others = [o for o in range(ranks) if o != r]
        of = lambda kind, o: {"kind": kind, "rows": [{"positions": [spans[o]]}]}
        # Buffers 2, 3, ...: of each other rank, keys of the forward, keys of the backward, gradients for it and from it.
        buffers = [{"kind": "own-kv"}, {"kind": "own-grad"}]
        number = {}
        for o in others:
            for name, buffer in [("kv", of("kv", o)), ("again", of("kv", o)), ("for", of("grad", o)), ("from", of("grad", r))]:
                number[name, o] = len(buffers)
                buffers.append(buffer)

        def tile(o, buffer, grad=None):
            rows = lambda p: [0, 1, spans[p][2]]
            return {"queries": spans[r], "query_rows": rows(r), "buffer": buffer, "keys": spans[o], "key_rows": rows(o),
                    "hi": 0, **({} if grad is None else {"grad_buffer": grad})}

        def exchange(name):
            return {"sends": [{"peer": o, "buffer": 0} for o in others],
                    "receives": [{"peer": o, "buffer": number[name, o]} for o in others]}

        programs.append({
            "queries": [spans[r]],
            "buffers": buffers,
            "forward": [{**exchange("kv"), "tiles": [tile(r, 0)]}, {"tiles": [tile(o, number["kv", o]) for o in others]}],
            "backward": [
                {**exchange("again"), "zero": [1], "tiles": [tile(r, 0, 1)]},
                {"zero": [number["for", o] for o in others],
                 "tiles": [tile(o, number["again", o], number["for", o]) for o in others]},
                {"sends": [{"peer": o, "buffer": number["for", o]} for o in others],
                 "receives": [{"peer": o, "buffer": number["from", o]} for o in others],
                 "adds": [[1, number["from", o]] for o in others]},
            ],
        })
    problem = {"heads": 6, "kv_heads": 3, "queries": length, "ranks": ranks,
               "pattern": [{"queries": [0, 1, length], "keys": [0, 1, length], "hi": 0}]}
    return {"annulus_plan": 1, "problem": problem, "programs": programs}


class ProveTest(cli.CliTest):
    def write(self, plan, name="plan.json"):
        with open(self.path(name), "w") as f:
            json.dump(plan, f)

    def written(self, *args):
        code, out, err = self.annulus(*PLAN, CAUSAL, "--out", "plan.json", *args)
        self.assertEqual(code, 0, err)
        with open(self.path("plan.json")) as f:
            return out, json.load(f)

    def test_proves_what_plan_writes(self):
        for schedule in ("ring", "all-gather", "group-cast"):
            table, plan = self.written("--schedule", schedule)
            pairs = 8 * (1000 * 1001 // 2 + 3099 * 3100 // 2)
            proved = rf"each of {pairs:,} pairs is computed as often as it is counted, both ends of \d+ transfers agree"
            self.assertRegex(table, proved)  # the table is as without --out
            self.assertEqual((plan["problem"]["schedule"], len(plan["programs"])), (schedule, 4))
            code, out, err = self.annulus("prove", "plan.json")
            self.assertEqual(code, 0, err)
            self.assertRegex(out, proved)
            self.assertIn(f"ranks 4, schedule {schedule}\n", out)
            self.assertIn("4 ranks hold as much as the plan says\n", out)

    def test_the_table_and_json_are_as_without_a_file(self):
        _, plan = self.written("--no-proof")
        code, out, _ = self.annulus(*PLAN, CAUSAL, "--out", "again.json", "--json")
        self.assertEqual((code, json.loads(out)["proof"]["holds"]), (0, True))
        with open(self.path("again.json")) as f:
            self.assertEqual(json.load(f), plan)

    def test_pipes(self):
        made = self.annulus(*PLAN, CAUSAL, "--out", "-")
        self.assertEqual(made[0], 0, made[2])
        self.assertEqual(json.loads(made[1])["annulus_plan"], 1)
        self.assertIn("proved in", made[2])
        proof = subprocess.run([cli.ANNULUS, "prove", "-", "--json"], input=made[1], text=True, stdout=subprocess.PIPE,
                               env=cli.environment(), timeout=cli.LIMIT)
        report = json.loads(proof.stdout)
        self.assertEqual((proof.returncode, report["holds"], report["faults"]), (0, True, []))
        self.assert_refused(2, "both print to standard output", *PLAN, CAUSAL, "--out", "-", "--json")

    def test_one_changed_number_is_found(self):
        _, plan = self.written("--schedule", "ring")
        plan["programs"][2]["forward"][1]["tiles"][0]["buffer"] = 0
        self.write(plan)
        code, out, err = self.annulus("prove", "plan.json")
        self.assertEqual(code, 1, err)
        self.assertRegex(out, r"(?m)^wrong: rank 2, forward step 1: a tile takes key rows ")
        self.assertIn("the plan in plan.json is wrong, as shown above", err)
        code, out, _ = self.annulus("prove", "--json", "plan.json")
        self.assertEqual((code, json.loads(out)["holds"]), (1, False))

    def test_what_a_rank_says_that_it_holds_is_compared(self):
        _, plan = self.written()
        plan["programs"][3]["held"]["forward"]["kv"] += 1
        self.write(plan)
        code, out, _ = self.annulus("prove", "plan.json")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"(?m)^wrong: rank 3, forward: holds at most [\d,]+ rows of keys and values, not the [\d,]+ that")

    def test_proves_a_plan_that_was_made_elsewhere(self):
        for ranks, length in ((2, 64), (5, 1003)):
            self.write(all_gather(ranks, length))
            code, out, err = self.annulus("prove", "plan.json")
            self.assertEqual(code, 0, out + err)
            transfers = 3 * ranks * (ranks - 1)
            self.assertIn(f"each of {6 * length * (length + 1) // 2:,} pairs is computed", out)
            self.assertIn(f"both ends of {transfers} transfers agree", out)
            self.assertIn("pattern of 1 slice, ", out)
            self.assertNotIn("as much as the plan says", out)  # it says nothing

    def test_faults_of_a_plan_that_was_made_elsewhere(self):
        plan = all_gather(3, 100)
        plan["programs"][1]["backward"][2]["adds"].pop()
        plan["programs"][2]["forward"][0]["sends"].pop()
        self.write(plan)
        code, out, _ = self.annulus("prove", "plan.json")
        self.assertEqual(code, 1)
        self.assertIn("wrong: rank 1, forward step 0: a receive from rank 2 has no send\n", out)
        self.assertIn("wrong: rank 1, backward: the gradients in buffer 9 are lost or counted twice", out)
        _, out, _ = self.annulus("prove", "plan.json", "--faults", "1")
        self.assertEqual(out.count("wrong: "), 1)

    def test_refuses_what_is_no_plan_and_says_where(self):
        good = all_gather(2, 64)
        for change, part in [
            (lambda p: p["programs"][1]["forward"][0].update(tils=[]),
             r'plan.json: programs\[1\].forward\[0\] has an unknown key "tils"; did you mean "tiles"'),
            (lambda p: p["programs"][1].update(queries=[[0, 2, 32]]),
             r"plan.json: programs\[1\].queries has query 0, which programs\[0\] has as well"),
            (lambda p: p["problem"].update(kv_heads=4), "plan.json: problem: .*multiple of the kv heads"),
            (lambda p: p["problem"].update(queries=2**63), "plan.json: problem.queries should be a whole number"),
            (lambda p: p["programs"].pop(), "plan.json: programs should be those of all 2 ranks"),
        ]:
            plan = json.loads(json.dumps(good))
            change(plan)
            self.write(plan)
            self.assert_refused(3, part, "prove", "plan.json")
        with open(self.path("cut.json"), "w") as f:
            f.write(json.dumps(good)[:-100])
        self.assert_refused(3, "cut.json: not JSON, or cut off, at byte", "prove", "cut.json")
        huge = {"annulus_plan": 1, "problem": {"heads": 1, "queries": 2**40, "ranks": 1, "pattern": "{ kind = 'causal' }"},
                "programs": [{"queries": [[0, 1, 2**40]], "buffers": [], "forward": [{}], "backward": [{}]}]}
        self.write(huge)
        self.assert_refused(8, "the plan and its proof take at least", "prove", "plan.json")


if __name__ == "__main__":
    cli.main()
