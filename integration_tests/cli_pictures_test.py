#!/usr/bin/env python3
"""Tests `plan --svg`, `fit --svg` and `topology --svg`: pictures that Python's parser reads, that have what the plan has, beside a
table or JSON, and paths that cannot be written."""

import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
CONFIG = cli.FIT_CONFIG


class PicturesTest(cli.CliTest):
    def drawn(self, *args):
        """Runs a command with --svg; returns its output, the root of the picture, and the titles of what is in it."""
        path = self.path("picture.svg")
        code, out, err = self.annulus(*args, "--svg", path)
        self.assertEqual(code, 0, err)
        root = ElementTree.parse(path).getroot()
        self.assertEqual(root.tag, SVG + "svg")
        self.assertEqual(root.get("role"), "img")
        self.assertTrue(root.find(SVG + "title").text and root.find(SVG + "desc").text)
        self.assertIn("prefers-color-scheme: dark", root.find(SVG + "style").text)
        names = {element.tag for element in root.iter()}
        self.assertFalse(names & {SVG + "script", SVG + "a", SVG + "image", SVG + "foreignObject"})
        width, height = (float(root.get(side)) for side in ("width", "height"))
        for box in root.iter(SVG + "rect"):
            x, y, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
            self.assertTrue(0 <= x <= x + w <= width and 0 <= y <= y + h <= height, box.attrib)
        self.assertEqual(os.listdir(os.path.dirname(path)).count("picture.svg"), 1)
        return out, root, [title.text for title in root.iter(SVG + "title")]

    def test_a_plan_has_the_tiles_and_transfers_of_its_json(self):
        plan = self.path("plan.json")
        out, _, titles = self.drawn("plan", "--ranks", "4", "--length", "4099", "--heads", "1", "--schedule", "ring", "--json",
                                    "--out", plan)
        with open(plan, encoding="utf-8") as file:
            programs = json.load(file)["programs"]
        for way in ("forward", "backward"):
            said = [re.match(r"rank (\d+), %s step (\d+): (\w+) ([\d,]+)" % way, title) for title in titles]
            said = [match.groups() for match in said if match]
            for rank, program in enumerate(programs):
                for step, content in enumerate(program[way]):
                    here = {does: amount for r, s, does, amount in said if (int(r), int(s)) == (rank, step)}
                    self.assertEqual(int(here.get("computes", "0")), len(content.get("tiles", [])), (way, rank, step))
                    self.assertEqual("sends" in here, bool(content.get("sends")), (way, rank, step))
                    self.assertEqual("receives" in here, bool(content.get("receives")), (way, rank, step))
        pairs = json.loads(out)["pairs"]
        of_ranks = [re.fullmatch(r"rank \d+ computes ([\d,]+) pairs?", title) for title in titles]
        self.assertEqual(sum(int(match[1].replace(",", "")) for match in of_ranks if match), pairs)

    def test_a_million_tokens_over_64_ranks(self):
        out, root, titles = self.drawn("plan", "--ranks", "64", "--length", "1048576", "--heads", "8", "--schedule", "ring",
                                       "--machine", "h100", "--no-proof")
        self.assertIn("predicted on h100", out)
        words = " ".join(text.text for text in root.iter(SVG + "text"))
        self.assertIn("8 of 64 ranks are shown: 0, ", words)
        self.assertIn("The first 16 of 64 steps are shown.", words)
        self.assertLess(os.path.getsize(self.path("picture.svg")), 500000)
        self.assertIn("step 63: ", " ".join(titles))

    def test_fit_has_the_bytes_of_its_rows(self):
        with open(self.path("small.toml"), "w", encoding="utf-8") as file:
            file.write(CONFIG)
        out, root, titles = self.drawn("fit", self.path("small.toml"), "--ranks", "4", "--device-memory", "100MB", "--json")
        fits = json.loads(out)["fits"]
        for fit in fits:
            names = {"all": "all kept", "recompute": "recompute", "offload": "+ offload", "optimizer": "+ optimizer offload"}
            parts = [t for t in titles if t.startswith("shard %d, %s: " % (fit["shard"], names[fit["keeps"]]))]
            kinds = [kind for kind, amount in fit["bytes"].items() if kind != "total" and amount * 400 > fit["bytes"]["total"]]
            for kind in kinds:
                self.assertEqual(sum(": %s " % kind in part for part in parts), 1, (fit, parts))
        words = [text.text for text in root.iter(SVG + "text")]
        self.assertIn("a GPU has 100.0 MB", words)

    def test_topology_has_a_line_of_the_legend_for_each_style(self):
        _, root, _ = self.drawn("topology", "-n", "2", "--device", "cpu")
        gray = [path.get("stroke-dasharray", "") for path in root.iter(SVG + "path")
                if path.get("marker-end") and path.get("stroke") == "#5c6670"]
        self.assertEqual(len(gray), len(set(gray)))

    def test_a_path_that_cannot_be_written_is_said_before_anything_is_planned(self):
        # A plan and a memory plan that would fail: what is said is about the path.
        plan = ["plan", "--ranks", "8", "--length", str(2**40), "--heads", "1"]
        with open(self.path("huge.toml"), "w", encoding="utf-8") as file:
            file.write(CONFIG.replace("dim = 256", "dim = 255"))
        fit = ["fit", self.path("huge.toml"), "--ranks", "4", "--device-memory", "1GB"]
        for command in (plan, fit):
            code, out, err = self.annulus(*command, "--svg", self.path("missing/picture.svg"))
            self.assertEqual((code, out), (8, ""), err)
            self.assertIn("--svg", err)
            code, out, err = self.annulus(*command, "--svg", self.path("."))
            self.assertEqual((code, out), (2, ""), err)
        code, _, err = self.annulus("plan", "--ranks", "2", "--length", "64", "--heads", "1", "--out", self.path("a"),
                                    "--svg", self.path("a"))
        self.assertEqual(code, 2)
        self.assertIn("--svg and --out name the same file", err)
        self.assertFalse(os.path.exists(self.path("a")))


if __name__ == "__main__":
    cli.main()
