#!/usr/bin/env python3
"""Tests what `annulus plan`, `doctor`, `topology` and `bench` print, and their errors."""

import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402


# A machine whose ranks have a mebibyte of memory.
TINY = """
name = "tiny"
source = "a test"
overlap = false
memory = "1MiB"
copy = 1e9
[inside]
latency = 1e-6
bandwidth = 1e9
[kernel.fp32.forward]
rows = [64]
keys = [64]
rates = [[1e9]]
[kernel.fp32.backward]
rows = [64]
keys = [64]
rates = [[1e9]]
"""


class PlanTest(cli.CliTest):
    def test_prints_a_proved_plan_and_its_cost(self):
        code, out, err = self.annulus("plan", "--ranks", "16", "--length", "4099", "--heads", "8", "--kv-heads", "2",
                                      "--schedule", "ring")
        self.assertEqual(code, 0, err)
        pairs = 8 * (4099 * 4100 // 2)
        self.assertRegex(out, rf"proved in [\d.]+ s: each of {pairs:,} pairs is computed as often as it is counted")
        # Fifteen hops of K and V in the forward.
        self.assertRegex(out, r"forward[^\n]*\n +messages sent +30 +30\n")

    def test_plans_a_window_pattern(self):
        window = "{ kind = 'window', left = 9, right = 0 }"
        args = ["--ranks", "4", "--length", "1000", "--heads", "1", "--layout", "contiguous", "--pattern", window]
        code, out, err = self.annulus("plan", *args)
        self.assertEqual(code, 0, err)
        pairs = 1000 * 10 - 45
        # The least time: each rank needs rows of one other. All candidates stand below, with the reasons against them.
        self.assertIn("schedule group-cast", out)
        self.assertRegex(out, r"predicted on cpu, forward and backward:\n  group-cast, contiguous +[\d.]+ [mu]?s +\(compute .*\)  chosen\n")
        self.assertRegex(out, r"\n  ulysses, contiguous +refused: ")
        self.assertIn(f"{pairs:,} pairs are counted, {pairs / 1e4:.4g} % of all\n", out)
        self.assertRegex(out, rf"each of {pairs:,} pairs is computed as often as it is counted")

    def test_plans_over_inner_groups(self):
        args = ["plan", "--ranks", "6", "--length", "600", "--heads", "2", "--schedule"]
        code, out, err = self.annulus(*args, "double-ring", "--within", "3")
        self.assertEqual(code, 0, err)
        self.assertIn("schedule double-ring, ranks 6, within 3\n", out)
        self.assertIn("proved in", out)
        code, out, err = self.annulus(*args, "group-cast", "--within", "3", "--json")
        self.assertEqual(code, 0, err)
        self.assertEqual(json.loads(out)["within"], 3)
        for schedule, within, words in (("double-ring", "4", "use one of 1, 2, 3, 6, or 0"), ("ring", "3", "has no inner groups")):
            code, out, err = self.annulus(*args, schedule, "--within", within)
            self.assertNotEqual(code, 0)
            self.assertIn(words, err)

    def test_chooses_by_the_machine(self):
        args = ["plan", "--json", "--no-proof", "--ranks", "8", "--length", "262144", "--heads", "8", "--machine"]
        plan = json.loads(self.annulus(*args, "h100", "--layout", "auto", "--schedule", "ring")[1])
        self.assertEqual((plan["machine"], plan["layout"]), ("h100", "zigzag"))
        chosen = plan["candidates"][0]
        self.assertEqual((chosen["schedule"], chosen["layout"]), (plan["schedule"], "zigzag"))
        self.assertGreater(chosen["backward"]["seconds"], chosen["forward"]["seconds"])
        self.assertEqual({c["layout"] for c in plan["candidates"]}, {"zigzag", "contiguous", "striped", "balanced", "per-document"})
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tiny.toml")
            with open(path, "w", encoding="utf-8") as file:
                file.write(TINY)
            code, _, err = self.annulus(*args, path)
            self.assertEqual(code, 4, err)
            self.assertRegex(err, r"no schedule fits the memory of tiny: with .* a rank holds least, .* and it has 1.0 MB; use about \d+ ranks")
            with open(path, "w", encoding="utf-8") as file:
                file.write(TINY.replace("bandwidth = 1e9", "bandwidth = -1"))
            code, _, err = self.annulus(*args, path)
            self.assertEqual(code, 2, err)
            self.assertIn('"inside.bandwidth" should be bytes a second, from 1e3 to 1e15', err)
        code, _, err = self.annulus(*args, "h1000")
        self.assertEqual(code, 2, err)
        self.assertIn('--machine: unknown machine "h1000"; did you mean "h100"?', err)

    def test_aligns_queries_by_name(self):
        args = ["plan", "--json", "--ranks", "2", "--length", "10", "--key-length", "30", "--heads", "1", "--query-offset"]
        pairs = []
        for offset in ("bottom-right", "20", "top-left", "0"):
            code, out, err = self.annulus(*args, offset)
            self.assertEqual(code, 0, err)
            pairs.append(json.loads(out)["pairs"])
        self.assertEqual(pairs, [255, 255, 55, 55])

    def test_refuses_invalid_requests_and_says_what_is_possible(self):
        for args, code, part in [
            (["--ranks", "8", "--length", "100", "--heads", "1", "--even"], 4, "multiple of 16"),
            (["--ranks", "0", "--length", "100", "--heads", "1"], 4, "at least one rank"),
            (["--ranks", "2", "--length", "-5", "--heads", "1"], 4, "at least 0"),
            (["--ranks", "2", "--length", "100", "--heads", "6", "--kv-heads", "4"], 4, "multiple of the kv heads"),
            (["--ranks", "2", "--length", "100", "--heads", "1", "--pattern", '{ kind = "causal", documents = [99] }'], 4, "100"),
            (
                ["--ranks", "2", "--length", "100", "--heads", "1", "--pattern", '{ kind = "blocks", map = "adaptive", keep = 2 }'],
                4,
                "selected from queries and keys",
            ),
            (["--ranks", "2", "--length", "100", "--heads", "99999999"], 4, "heads must be at most 2^24"),
            (["--ranks", "2000000000", "--length", "100", "--heads", "1"], 4, "at most 1048576 ranks"),
            (["--ranks", "8", "--length", "100", "--heads", "1", "--even"], 4, "no --even on the command line"),
            (["--ranks", "2", "--length", str(2**40), "--heads", "1"], 8, "the proof of a plan of 1,099,511,627,776 positions for 2 ranks takes"),
            (["--length", "100"], 2, "plan needs --ranks, or --lengths"),
            (["--ranks", "2"], 2, "plan needs --length, or --lengths"),
            (["--ranks", "2", "--length", "100"], 2, "plan needs --heads"),
            (["--lengths", "5,9,2", "--kv-heads", "1"], 2, "plan needs --heads"),
            (["--lengths", "5,9,2", "--ranks", "2"], 2, "--lengths has 3 lengths, but --ranks says 2"),
            (["--lengths", "5,9,2", "--length", "17"], 2, "add up to 16, but --length says 17"),
            (["--lengths", "5,9,2", "--layout", "contiguous"], 2, "--layout was given as well"),
            (["--lengths", "5,-9,2"], 2, "0 or more each"),
            (["--lengths", "5,,2"], 2, 'expected a whole number, got "" in "5,,2"'),
            (["--lengths", "5,9,"], 2, "expected a whole number"),
            (["--ranks", "2", "--length", "100", "--heads", "1", "--layout", "zigzak"], 2, 'did you mean "zigzag"'),
            (["--ranks", "2", "--length", "100", "--heads", "1", "--pattern", '{ kind = "casual" }'], 2, 'did you mean "causal"'),
        ]:
            got, _, err = self.annulus("plan", *args)
            self.assertEqual(got, code, err)
            self.assertIn(part, err)


    def test_lengths_option_gives_one_length_for_each_rank(self):
        code, out, err = self.annulus("plan", "--lengths", "500,20,480", "--heads", "1")
        self.assertEqual(code, 0, err)
        self.assertIn("lengths 500 20 480, ", out)
        self.assertIn("ranks 3\n", out)
        self.assertRegex(out, rf"each of {1000 * 1001 // 2:,} pairs is computed as often as it is counted")
        same = self.annulus("plan", "--lengths", "500,20,480", "--heads", "1", "--ranks", "3", "--length", "1000")
        self.assertEqual(out.splitlines()[:2], same[1].splitlines()[:2])

    def test_json_agrees_with_the_table(self):
        sizes = ["--ranks", "4", "--length", "1000", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
        code, out, err = self.annulus("plan", *sizes, "--json")
        self.assertEqual(code, 0, err)
        plan = json.loads(out)
        _, table, _ = self.annulus("plan", *sizes)
        self.assertEqual(plan["request"], table.splitlines()[0])
        self.assertEqual((plan["ranks"], plan["pairs"]), (4, 4 * 1000 * 1001 // 2))
        self.assertTrue(plan["proof"]["holds"])
        self.assertEqual(plan["proof"]["pairs"], plan["pairs"])
        for direction in ("forward", "backward"):
            part = table[table.index(f"\n{direction} ") :]
            for key, name, unit in [
                ("messages_sent", "messages sent", 1),
                ("kv_bytes_sent", "keys and values sent, MB", 1e6),
                ("gradient_bytes_sent", "gradients sent, MB", 1e6),
                ("kv_bytes_held", "keys and values held, MB", 1e6),
                ("gradient_bytes_held", "gradients held, MB", 1e6),
            ]:
                least, most = map(float, re.search(rf"{name} +([\d.]+) +([\d.]+)\n", part).groups())
                self.assertAlmostEqual(plan[direction][key]["least"] / unit, least, delta=0.006)
                self.assertAlmostEqual(plan[direction][key]["most"] / unit, most, delta=0.006)
        code, out, err = self.annulus("plan", *sizes, "--json", "--no-proof")
        self.assertIsNone(json.loads(out)["proof"])

    def test_doctor_json_agrees_with_the_table(self):
        code, out, err = self.annulus("doctor", "--json")
        self.assertEqual(code, 0, err)
        doctor = json.loads(out)
        self.assertTrue(doctor["good"])
        _, table, _ = self.annulus("doctor")
        for part in ("found", "used"):
            for text in doctor[part].values():
                self.assertIn(text, table)
        for kernel in doctor["kernels"]:
            self.assertRegex(table, rf"\n  {re.escape(kernel['name'])} +{'yes' if kernel['found'] else 'no'}: ")
        self.assertEqual(doctor["cache_bytes"], 1792 * 2**20)
        self.assertIn("programs", doctor["caches"])
        self.assertEqual(doctor["pool"]["gradients"].keys(), {"in_use", "cached", "peak", "fragmentation"})

    def test_help_of_topology_shows_one_file_for_each_flag(self):
        code, out, err = self.annulus("topology", "--help")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"--xml FILE (?!\.\.\.)")


class BenchTest(cli.CliTest):
    def ring(self, **env):
        """Returns the numbers behind "over one process" of each row, and the whole output."""
        sizes = ["--length", "1024", "--heads", "2", "--kv-heads", "2", "--repeats", "1"]
        code, out, err = self.annulus("bench", "ring", *sizes, **env)
        self.assertEqual(code, 0, err)
        rows = {}
        for line in out.splitlines():
            found = re.match(r" +([124]|1, \w+) +([\d.]+) +([\d.]+)(.*)", line)
            if found:
                rows[found[1]] = [float(x) for x in found[4].split()]
        self.assertEqual(sorted(rows), ["1, LibTorch", "1, annulus", "2", "4"])
        return rows, out

    def test_calibrates_a_machine_and_predicts_by_it(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "here.toml")
            sizes = ["--threads", "2", "--head-dim", "16"]
            code, out, err = self.annulus("bench", "calibrate", *sizes, "--seconds", "0.001", "--heads", "1", "--out", path)
            self.assertEqual(code, 0, err)
            self.assertTrue(out.rstrip().endswith("-> " + path), out)
            code, out, err = self.annulus("bench", "plan", *sizes, "--machine", path, "--length", "512", "--rounds", "1")
            self.assertEqual(code, 0, err)
            rows = re.findall(r"^ +2  (\w+) +([\w-]+)( \(auto\))? +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)
            self.assertEqual(len({pattern for pattern, _, _ in rows}), 8, out)
            self.assertEqual(len(rows), 8 * 4, out)
            self.assertRegex(out, r"\d+ of 32 predictions within 20 % of what was measured")
            code, out, err = self.annulus("plan", "--ranks", "2", "--length", "512", "--heads", "1", "--machine", path)
            self.assertEqual(code, 0, err)
            self.assertIn("predicted on here, forward and backward:", out)

    def test_ring_starts_its_ranks_and_sends_the_planned_bytes(self):
        rows, out = self.ring()
        for ranks in ("2", "4"):
            self.assertEqual(rows[ranks][2], 1.0, out)  # the ranks lend all their blocks
            self.assertEqual(rows[ranks][3], 1.0, out)  # bytes sent over bytes planned
            self.assertGreaterEqual(rows[ranks][4], 1.0, out)  # over the lower bound

    def test_ring_without_shared_memory_copies_blocks(self):
        rows, out = self.ring(ANNULUS_SHARED_MEMORY="0")
        for ranks in ("2", "4"):
            self.assertEqual(rows[ranks][2], 0.0, out)
            self.assertEqual(rows[ranks][3], 1.0, out)
        code, _, err = self.annulus("bench", "ring", ANNULUS_SHARED_MEMORY="yes")
        self.assertNotEqual(code, 0)
        self.assertIn("ANNULUS_SHARED_MEMORY", err)

    def test_ring_with_other_patterns_compares_with_one_rank(self):
        window = "{ kind = 'window', left = 9, right = 0 }"
        sizes = ["--length", "256", "--heads", "2", "--kv-heads", "2", "--repeats", "1"]
        code, out, err = self.annulus("bench", "ring", *sizes, "--pattern", window, "--schedule", "group-cast")
        self.assertEqual(code, 0, err)
        self.assertIn("annulus on one rank", out)
        self.assertRegex(out, r"\n +4 +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +1\.000 ")  # bytes sent over bytes planned

    def test_comm_compares_with_plain_mpi(self):
        sizes = ["--smallest", "1024", "--largest", "4096", "--rounds", "1"]
        code, out, err = self.annulus("bench", "comm", *sizes, "--json", "comm.json")
        self.assertEqual(code, 0, err)
        kinds = ["exchange", "all_gather", "reduce_scatter", "all_reduce", "broadcast"]
        names = [f"comm/{kind} of {size} KiB" for kind in kinds for size in (1, 4)]
        self.assertEqual([r["name"] for r in self.report("comm.json")["ratios"]], ["comm/barrier", *names])
        for kind in kinds:
            self.assertEqual(len(re.findall(rf"^  {kind} +[14] KiB( +[\d.]+){{6}}$", out, re.M)), 2, out)
        self.assert_refused(2, "a multiple of 4", "bench", "comm", "--smallest", "6")
        self.assert_refused(2, "exchange", "bench", "comm", "--part", "exchanges")
        self.assert_refused(2, "at most 4294967296 bytes", "bench", "comm", "--largest", "8589934592")
        part = "exchange inside hosts"
        self.assert_refused(4, f'"{part}" needs several hosts.* 2 ranks on 1 host', "bench", "comm", "--part", part)

    def test_start_is_timed_from_launch_to_the_first_step(self):
        code, out, err = self.annulus("bench", "comm", "--start", "--rounds", "1")
        self.assertEqual(code, 0, err)
        for ranks in (2, 8):
            found = re.search(rf"^ +{ranks}((?: +[\d.]+){{6}})$", out, re.M)
            self.assertTrue(found, out)
            *parts, whole = [float(x) for x in found[1].split()]
            self.assertAlmostEqual(sum(parts), whole, delta=0.04)

    def test_start_refuses_options_that_it_would_ignore(self):
        start = ["bench", "comm", "--start"]
        for ranks in ("1", "2"):
            self.assert_refused(2, "run it without launch", "launch", "-n", ranks, *start)
        for ignored in (["--json", "a.json"], ["--part", "barrier"], ["--smallest", "4"], ["--largest", "4"]):
            self.assert_refused(2, "--start", *start, *ignored)

    def test_train_ends_with_a_line_of_json(self):
        code, out, err = self.annulus("bench", "train", "--repeats", "1")
        self.assertEqual(code, 0, err)
        figures = json.loads(out.splitlines()[-1])
        self.assertEqual(figures["parameters"], 3033344)
        shares = [figures[k] for k in ("share_products", "share_attention", "share_outside")]
        self.assertAlmostEqual(sum(shares), 1, places=6)
        self.assertTrue(all(0 < s < 1 for s in shares), shares)

    def test_longest_rows_are_planned_and_confirmed(self):
        sizes = ["--memory", "30MB", "--layers", "12", "--window", "32", "--rounds", "1", "--files", self.folder]
        code, out, err = self.annulus("bench", "longest", *sizes, "--json", "longest.json")
        self.assertEqual(code, 0, err)
        figures = json.loads(out.splitlines()[-1])
        self.assertEqual([k["keeps"] for k in figures["keeps"]], ["all", "recompute", "offload", "optimizer"])
        rows = [k["longest"] for k in figures["keeps"]]
        self.assertLess(rows[0], rows[1])
        self.assertLess(rows[1], rows[2])
        for k in figures["keeps"]:
            self.assertLess(abs(k["bytes_measured"] / k["bytes_planned"] - 1), 0.1, k)
        self.assertEqual(len(self.report("longest.json")["ratios"]), 6)
        self.assert_refused(2, 'a number of bytes such as 1GiB or 200MB, got "much"', "bench", "longest", "--memory", "much")
        self.assert_refused(2, "there is no folder nowhere", "bench", "longest", "--files", "nowhere")

    def report(self, name):
        with open(self.path(name)) as f:
            return json.load(f)

    def test_patterns_writes_a_report(self):
        sizes = ["--length", "256", "--heads", "2", "--dim", "8", "--rounds", "2"]
        code, out, err = self.annulus("bench", "patterns", *sizes, "--json", "patterns.json")
        self.assertEqual(code, 0, err)
        report = self.report("patterns.json")
        names = {r["name"] for r in report["ratios"]}
        self.assertLess({"patterns/causal", "patterns/dilated", "patterns/blocks, density 0.1"}, names)
        for name in names:
            self.assertIn("\n  " + name.removeprefix("patterns/") + " ", out)
        self.assertGreaterEqual(report["machine"]["cores"], 1)
        self.assertNotIn(os.uname().nodename, json.dumps(report))

        own = ["--pattern", "{ kind = 'window', left = 9, right = 0 }", "--pattern", "{ kind = 'causal' }"]
        code, out, err = self.annulus("bench", "patterns", *sizes, *own)
        self.assertEqual(code, 0, err)
        self.assertEqual(len(re.findall(r"^  \{ kind", out, re.M)), 2, out)

    def test_seeds_prints_every_row_beside_theirs(self):
        code, out, err = self.annulus("bench", "seeds", "--shorten", "64", "--rounds", "1", "--json", "seeds.json")
        self.assertEqual(code, 0, err)
        # Over processes, too, and no rank holds more than its part and two blocks.
        for ranks in (2, 4, 8, 16):
            row = re.search(rf"^  RingAttentionCorrectV2, {ranks} .*threads .* MB \(([\d.]+)\); processes .* MB \(([\d.]+)\), ", out, re.M)
            self.assertTrue(row, out)
            self.assertLessEqual(max(float(row[1]), float(row[2])), 1, out)
        names = {r["name"] for r in self.report("seeds.json")["ratios"]}
        for name in ("exponent of window of 256", "exponent of causal", "planned anew, 8192 tokens"):
            self.assertIn("seeds/" + name, names)

    def test_seeds_over_long_rows_runs_on_the_ranks_of_launch(self):
        sizes = ["--long", "--length", "1024", "--length", "2048", "--most-pairs", "1e6"]
        code, out, err = self.annulus("launch", "-n", "2", "bench", "seeds", *sizes)
        self.assertEqual(code, 0, err)
        self.assertIn("2 processes", out)
        for pattern in ("blocks, 99 % sparse", "blocks, 6 a row"):
            self.assertRegex(out, rf"(?m)^ +1,024  {pattern} +[\d.e+]+( +[\d.]+){{4}} +[\d.e-]+ %$")
        self.assertRegex(out, r"(?m)^ +2,048  causal +2\.1e\+06  left out: more pairs")
        self.assert_refused(2, "run it without launch", "launch", "-n", "2", "bench", "seeds")

    def test_compare_names_worse_ratios_and_exits_with_10(self):
        def report(name, **ratios):
            machine = {"cores": 4, "isa": "AVX512"}
            entries = [
                {"name": k, "settings": "", "ratio": v, "low": v, "high": v, "rounds": 3} for k, v in ratios.items()
            ]
            whole = {"format": "annulus-bench-1", "version": "1", "date": "", "machine": machine, "ratios": entries}
            with open(self.path(name), "w") as f:
                json.dump(whole, f)

        report("old.json", ring=1.0, causal=0.5, gone=1.0)
        report("new.json", ring=1.05, causal=0.6, added=1.0)
        code, out, err = self.annulus("bench", "compare", "old.json", "new.json")
        self.assertEqual(code, 10, err)
        self.assertRegex(err, r"got worse [^\n]*: causal\n")
        self.assertIn("only in the old file: gone", out)
        self.assertIn("only in the new file: added", out)
        for args, want in [(["new.json", "old.json"], 0), (["old.json", "new.json", "--margin", "0.3"], 0)]:
            code, out, err = self.annulus("bench", "compare", *args)
            self.assertEqual(code, want, err)

        # Beside what is kept for the same instruction set, with which one file is enough.
        code, out, err = self.annulus("bench", "compare", "new.json", "--kept", ".")
        self.assertEqual(code, 0, err)
        self.assertIn("no ratios are kept for AVX512\n", out)
        code, _, err = self.annulus("bench", "compare", "new.json", "--kept", ".", "--fail-above", "2")
        self.assertEqual(code, 3)
        self.assertIn("nothing to hold", err)
        report("ratios-avx512.json", ring=1.0, causal=0.5)
        for args in (["new.json"], ["old.json", "new.json", "--margin", "0.3"]):
            code, out, err = self.annulus("bench", "compare", *args, "--kept", ".")
            self.assertEqual(code, 0, err)
            self.assertRegex(out, r"\n  causal +0\.500 +0\.600 +\+20\.0 %\n")
        code, out, err = self.annulus("bench", "compare", "new.json", "--kept", ".", "--fail-above", "1.1")
        self.assertEqual(code, 10, err)
        self.assertRegex(err, r"more than 1\.1 times what is kept in \./ratios-avx512\.json: causal\n")

    def test_refuses_files_that_are_not_reports(self):
        with open(self.path("broken.json"), "w") as f:
            f.write('{"format": "annulus-bench-1", ')
        self.assert_refused(3, "missing.json cannot be read", "bench", "compare", "missing.json", "broken.json")
        self.assert_refused(3, "broken.json: this is not JSON", "bench", "compare", "broken.json", "broken.json")
        self.assert_refused(8, "folder of --json .*mkdir -p nowhere", "bench", "all", "--json", "nowhere/all.json")

    def test_refuses_unknown_benchmark(self):
        self.assert_refused(2, 'did you mean "ring"', "bench", "rign")
        self.assert_refused(2, r"one of ring, train, shard, save, [a-z, ]*, gpu, all or compare;", "bench")
        self.assert_refused(2, 'did you mean "--length"', "bench", "ring", "--lenght", "9")


cli.main()
