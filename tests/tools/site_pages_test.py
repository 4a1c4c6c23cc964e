#!/usr/bin/env python3
"""Pages of ./annulus docs in a browser: site_pages_test.py PATH/docs/index.md. On a wide and on a narrow screen no page is wider than the
window, all pictures are loaded and nothing is reported as an error, and on a dark page pictures are dark."""

import os
import sys
import unittest

import built_site
import chromium

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(sys.argv.pop(1))))
# Those with pictures, with the widest tables and code, and one made from each kind of source.
PAGES = ("index", "docs/index", "docs/long-context", "docs/internals/architecture", "docs/explanation/attention",
         "docs/explanation/memory", "docs/explanation/performance", "docs/how-to/clusters",
         "docs/reference/configuration", "benchmarks/results/machine-d", "reference/subcommands", "reference/python",
         "reference/cpp/comm-communicator", "genindex")
WIDTHS = (1280, 390)
# On a narrow screen .content scrolls by itself, so that the page would not show that it is too wide.
TOO_WIDE = """[document.documentElement, ...document.querySelectorAll(".content")].map(e => e.scrollWidth - e.clientWidth)"""
PICTURES = """[...document.images].map(i => { const box = i.getBoundingClientRect(); return {
    src: i.getAttribute("src"), width: i.complete ? i.naturalWidth : 0,
    box: {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}}; })"""
# The mean brightness, from 0 to 255, of a picture in base64.
BRIGHTNESS = """(async () => {
    const picture = await createImageBitmap(await (await fetch("data:image/png;base64,%s")).blob());
    const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
    canvas.drawImage(picture, 0, 0);
    const bytes = canvas.getImageData(0, 0, picture.width, picture.height).data;
    let sum = 0;
    for (let i = 0; i < bytes.length; i += 4) sum += bytes[i] + bytes[i + 1] + bytes[i + 2];
    return sum / (bytes.length / 4 * 3);
})()"""


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not chromium.find():
            raise unittest.SkipTest("no Chromium: one of %s is expected on PATH" % ", ".join(chromium.NAMES))
        cls.html = built_site.build(ROOT, cls)
        cls.browser = chromium.Chromium()
        cls.addClassCleanup(cls.browser.close)

    def each_page(self, widths, scheme="light"):
        """Shows one page after the other, and yields what is shown, for messages."""
        for page in PAGES:
            for width in widths:
                self.browser.show(os.path.join(self.html, page + ".html"), width, scheme=scheme)
                yield "%s, %d pixels wide, %s" % (page, width, scheme)

    def test_no_page_is_wider_than_the_window(self):
        too_wide = {shown: self.browser.value(TOO_WIDE) for shown in self.each_page(WIDTHS)}
        self.assertEqual({shown: pixels for shown, pixels in too_wide.items() if max(pixels) > 0}, {})

    def test_pictures_are_loaded_and_nothing_is_an_error(self):
        seen = set()
        for shown in self.each_page(WIDTHS):
            for picture in self.browser.value(PICTURES):
                seen.add(os.path.basename(picture["src"]))
                self.assertGreater(picture["width"], 0, "%s: %s" % (shown, picture["src"]))
            self.assertEqual(self.browser.errors(), [], shown)
        self.assertEqual(seen, {n for n in os.listdir(os.path.join(ROOT, "docs", "pictures")) if n.endswith(".svg")})

    def test_pictures_are_dark_on_a_dark_page_and_light_on_a_light_one(self):
        for scheme, low, high in (("light", 128, 255), ("dark", 0, 127)):
            for shown in self.each_page(WIDTHS[:1], scheme):
                for picture in self.browser.value(PICTURES):
                    shot = self.browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=picture["box"])["data"]
                    self.assertTrue(low <= self.browser.value(BRIGHTNESS % shot) <= high, "%s: %s" % (shown, picture["src"]))


if __name__ == "__main__":
    unittest.main()
