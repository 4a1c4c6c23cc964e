#!/usr/bin/env python3
"""Tests `annulus bench all`, which runs every benchmark but calibrate. cli_plan_test.py tests most of them one by one."""

import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402


class BenchAllTest(cli.CliTest):
    def test_all_writes_one_report_that_equals_itself(self):
        code, out, err = self.annulus("bench", "all", "--length", "256", "--rounds", "1", "--json", "all.json", limit=240)
        self.assertEqual(code, 0, err)
        with open(self.path("all.json")) as f:
            names = [r["name"] for r in json.load(f)["ratios"]]
        all_of_them = ("ring/2 ", "ring/4 ", "train/", "shard/", "longest/", "operator/", "patterns/", "attention/", "comm/", "seeds/")
        for benchmark in all_of_them:
            self.assertTrue(any(n.startswith(benchmark) for n in names), names)
        _, page, _ = self.annulus("bench", "--help")
        subcommands = re.findall(r"^  ([a-z]+) +\S", page.partition("Subcommands:")[2], re.M)
        self.assertEqual(re.findall(r"^== (\w+)", out, re.M), [n for n in subcommands if n not in ("calibrate", "all", "compare")])
        self.assertRegex(out, r"\n== gpu \n(left out: .*GPU|.*\n)")
        code, out, err = self.annulus("bench", "compare", "all.json", "all.json", "--margin", "0")
        self.assertEqual(code, 0, err)
        for name in names:
            self.assertRegex(out, re.escape(name) + r" .* same\n")


cli.main()
