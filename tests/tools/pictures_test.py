#!/usr/bin/env python3
"""tools/pictures.py draws what docs shows, and its layouts are those of docs/explanation/attention.md: pictures_test.py SCRIPT PICTURE."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

SCRIPT, PICTURE = sys.argv.pop(1), sys.argv.pop(1)
SPEC = importlib.util.spec_from_file_location("pictures", SCRIPT)
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)


class Pictures(unittest.TestCase):
    def check(self, folder):
        return subprocess.run([sys.executable, SCRIPT, "--check", folder], capture_output=True, text=True, check=False)

    def test_docs_has_what_the_script_draws(self):
        done = self.check(os.path.dirname(PICTURE))
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_an_outdated_picture_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "ring-steps.svg"), "w", encoding="utf-8") as f:
                f.write("<svg/>")
            done = self.check(folder)
        self.assertEqual(done.returncode, 1)
        self.assertIn("ring-steps.svg is not what", done.stdout)

    def test_pairs_of_each_rank_are_those_of_the_guide(self):
        def pairs(owner):
            return [sum(q + 1 for q in range(pictures.TOKENS) if owner(q) == r) for r in range(pictures.RANKS)]

        self.assertEqual(pairs(pictures.contiguous), [10, 26, 42, 58])
        self.assertEqual(pairs(pictures.zigzag), [34, 34, 34, 34])

    def test_rows_that_masks_need_are_those_of_the_definition(self):
        # Causal, zigzag over 4 ranks, chunks of 3: the ranks that see a key are those that own a later chunk.
        sees = [len({pictures.owner_of(q) for q in range(k, pictures.MASK_TOKENS)} - {pictures.owner_of(k)})
                for k in range(pictures.MASK_TOKENS)]
        self.assertEqual(pictures.rows_needed(dict(pictures.MASKS)["causal"]), sum(sees))
        self.assertEqual(pictures.rows_needed(lambda q, k: q == k), 0)
        self.assertEqual(pictures.rows_needed(lambda q, k: True), pictures.MASK_TOKENS * (pictures.RANKS - 1))

    def test_the_gallery_has_each_kind_of_pattern_and_map_and_their_pairs(self):
        root = ElementTree.fromstring(pictures.patterns())
        names = [g.find("{*}title").text for g in root.iter("{http://www.w3.org/2000/svg}g")]
        for kind in ("full", "causal", "window", "documents", "dilated", "tree", "union", "local", "global-local", "bigbird", "strided",
                     "hierarchical", "sink", "padding"):
            self.assertTrue(any(kind in name for name in names), kind)
        pairs = {name: sum(mask(q, k) for q in range(24) for k in range(24)) for name, mask in pictures.PATTERNS}
        self.assertEqual((pairs["full"], pairs["causal"]), (576, 300))
        self.assertEqual(pairs["documents, causal"], 55 + 21 + 36)
        self.assertEqual(pairs["window, left 5, right 0"], 24 * 6 - 15)

    def test_runs_of_squares_are_all_squares(self):
        rows = [["a", "a", None, "b"], [None, "a", "a", "a"]]
        drawn = {}
        for line in pictures.cells(10, 20, 6, rows):
            path = ElementTree.fromstring(line)
            drawn[path.get("stroke")] = [(float(y), int(x), int(w)) for x, y, w in re.findall(r"M(\d+) ([\d.]+)h(\d+)", path.get("d"))]
        self.assertEqual(drawn, {"a": [(22.5, 10, 11), (28.5, 16, 17)], "b": [(22.5, 28, 5)], None: [(22.5, 22, 5), (28.5, 10, 5)]})


if __name__ == "__main__":
    unittest.main()
