#!/usr/bin/env python3
"""Opens pages of `annulus report` in a headless Chromium, from files: no errors of scripts, nothing is loaded, and the pictures are
there, on a phone and on a desk, light and dark. Part of --all. report_pages_test.py PATH/annulus"""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import chromium
import report_runs

ANNULUS = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else ""
LIMIT = 60
BAD = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
PICTURES = """[...document.querySelectorAll("figure")].map(f => [f.querySelector("h3").firstChild.textContent,
  [...f.querySelectorAll("svg .data")].filter(d => { const b = d.getBBox(); return b.width + b.height > 0; }).length])"""


def lines(page):
    return dict(page.value(PICTURES))


@unittest.skipUnless(chromium.find(), "there is no Chromium")
class ReportPagesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        cls.whole = report_runs.write(cls.folder, "whole-001", log=report_runs.warnings())
        for step, gain in ((1000, 0.0), (2000, 0.25)):
            report_runs.evaluation(cls.whole, step, gain)
        cls.nan = report_runs.write(cls.folder, "nan-001", end=1400, resume_at=0, seed=2, slow=False, broken=range(1210, 1300, 10),
                                    log="2026-11-28T03:00:00.000000Z error node1 rank 0 [train] the loss was not finite " + BAD + "\n")
        cls.page = chromium.Chromium()

    @classmethod
    def tearDownClass(cls):
        cls.page.close()
        shutil.rmtree(cls.folder)

    def show(self, *runs, width=1280, scheme="light"):
        path = os.path.join(self.folder, "page.html")
        subprocess.run([ANNULUS, "report", *runs, "--out", path], check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
        self.page.show(path, width, scheme=scheme)
        self.assertEqual(self.page.value("document.body.dataset.ready"), "yes")
        self.assertEqual(self.page.errors(), [])
        asked = [e["params"]["request"]["url"] for e in self.page.events if e.get("method") == "Network.requestWillBeSent"]
        self.assertEqual([u for u in asked if u != "file://" + path], [])

    def test_pictures_are_there_at_every_width(self):
        expected = {"Loss": 2, "Validation by source": 2, "Learning rate": 1, "Gradient norm": 2, "Skipped updates": 1, "Tokens per second": 1,
                    "Model FLOPs utilization": 1, "Where time goes": 7, "Computing, rank by rank": 800, "Memory of ranks": 3,
                    "Planned memory of a rank": 5, "Loss by position": 2, "Tokens by source": 2}
        for width, scheme in ((1280, "light"), (390, "dark")):
            with self.subTest(width=width):
                self.show(self.whole, width=width, scheme=scheme)
                self.assertEqual(lines(self.page), expected)
                self.assertEqual(self.page.value("document.documentElement.scrollWidth"), width)
                self.assertEqual(self.page.value("document.querySelectorAll('figure details').length"), len(expected))

    def test_slow_ranks_and_links_are_said_as_they_are(self):
        self.show(self.whole)
        self.assertEqual(
            self.page.value("""[...[...document.querySelectorAll(".card")].find(c => c.querySelector("h3")?.textContent === "Slow ranks")
              .querySelectorAll("tbody tr")].map(r => [...r.children].map(c => c.textContent))"""),
            [["720", "rank 5 on node2 takes 24 % longer than the median since step 700; of its time it waited for data 12 %, plans 3 %"],
             ["1310", "rank 5 is no longer slower than the others"],
             ["1500", "the link from rank 1 on node1 to rank 2 is slow: ranks wait 34 % of their time since step 1,480"],
             ["1700", "the link from rank 1 to rank 2 keeps the ranks waiting no longer"]])

    def test_measures_of_ranks_have_names_and_an_order(self):
        self.show(self.whole)
        names = self.page.value("""[...[...document.querySelectorAll(".card")].find(c => c.querySelector("h3")?.textContent.startsWith("All ranks"))
          .querySelectorAll("tbody tr")].map(r => r.children[0].textContent)""")
        self.assertEqual(names[0], "computing")
        self.assertNotIn("_", "".join(names), "a key of metrics.jsonl is not a name")
        parts = [i for i, name in enumerate(names) if name.startswith("of it, ")]
        self.assertEqual([names.index("memory") + 1 + i for i in range(len(parts))], parts)

    def test_what_is_held_stands_beside_what_is_planned(self):
        self.show(self.whole)
        self.page.value("document.querySelectorAll('figure details').forEach(d => d.open = true)")
        rows = self.page.value("""(async () => { await new Promise(r => setTimeout(r, 100));
          return [...[...document.querySelectorAll("figure")].find(f => f.querySelector("h3").textContent.startsWith("Planned memory"))
              .querySelectorAll("tbody tr")].map(r => [...r.children].map(c => c.textContent)); })()""")
        self.assertEqual([row[:2] + row[3:] for row in rows],
                         [["activations", "38 GB", "37 GB"], ["gradients", "5 GB", "–"], ["optimizer", "11 GB", "–"], ["weights", "5 GB", "5 GB"],
                          ["working", "6 GB", "–"], ["together", "65 GB", ""]])

    def test_light_and_dark_differ(self):
        colours = []
        for scheme in ("light", "dark"):
            self.show(self.whole, scheme=scheme)
            colours.append(self.page.value("getComputedStyle(document.body).backgroundColor"))
        self.assertNotEqual(*colours)

    def test_figures_under_the_pointer_and_by_keys(self):
        self.show(self.whole)
        x, y = self.page.value("(b => [b.left + b.width * 0.9, b.top + b.height / 2])(document.querySelector('figure svg[role=img]').getBoundingClientRect())")
        self.page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tip = "document.querySelector('.tip:not([hidden])').textContent"
        self.assertRegex(self.page.value(tip), r"^step 1,\d+0.*training\d\.\d+")
        self.page.value("document.querySelector('figure svg[role=img]').focus()")
        self.page.call("Input.dispatchKeyEvent", type="keyDown", key="End", code="End")
        self.assertIn("step 2,000", self.page.value(tip))

    def test_a_table_lies_behind_each_picture(self):
        self.show(self.whole)
        counts = self.page.value("""(async () => { const all = [...document.querySelectorAll("figure details")];
          all.forEach(d => d.open = true); await new Promise(r => setTimeout(r, 100));
          return all.map(d => d.querySelectorAll("tbody tr").length); })()""")
        self.assertTrue(all(1 < n <= 200 for n in counts), counts)

    def test_other_axes_and_smoothing(self):
        self.show(self.whole)
        before = lines(self.page)
        for name, value in (("Over", "tokens"), ("Over", "hours"), ("Smoothing", "0.9")):
            self.page.value("""(() => { const s = [...document.querySelectorAll(".tools label")].find(l => l.textContent.startsWith("%s")).querySelector("select");
              s.value = "%s"; s.dispatchEvent(new Event("change")); })()""" % (name, value))
            self.assertEqual(lines(self.page), before)
        self.assertEqual(self.page.errors(), [])

    def test_a_run_that_failed_with_numbers_that_are_none(self):
        self.show(self.nan)
        self.assertEqual(self.page.value("document.querySelector('.state').textContent"), "failed")
        banners = self.page.value("[...document.querySelectorAll('.banner')].map(b => b.textContent)")
        self.assertIn("the loss was not finite " + BAD, banners)
        self.assertTrue(any("in 9 logged steps" in b for b in banners), banners)
        self.assertEqual(self.page.value("document.querySelector('figure .note.bad').textContent"),
                         "training: not a finite number at 9 steps, first at 1,210, last at 1,290 (marked at the top)")
        # Text of a run is text: it neither ran nor became an element.
        self.assertEqual(self.page.value("[document.title.includes('broken'), document.querySelectorAll('script').length, document.images.length]"),
                         [False, 2, 0])

    def test_two_runs_lie_over_each_other(self):
        self.show(self.whole, self.nan)
        self.assertEqual(lines(self.page)["Loss"], 4)
        self.assertEqual(self.page.value("document.querySelectorAll('.overview tbody tr').length"), 2)

    def test_the_policy_stops_what_is_not_the_page_s_own(self):
        self.show(self.whole)
        self.page.value("""(() => { const s = document.createElement("script"); s.textContent = "document.title = 'broken'"; document.body.append(s); })()""")
        self.assertNotEqual(self.page.value("document.title"), "broken")


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    unittest.main()
