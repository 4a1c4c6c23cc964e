#!/usr/bin/env python3
"""The site of ./annulus docs, read as files: site_test.py PATH/docs/index.md. Every link and anchor leads somewhere, nothing is loaded
from a network, and the search knows the pages and references. It builds the site where Doxygen, .venv-docs and the program are."""

import glob
import html.parser
import os
import re
import sys
import unittest
import urllib.parse

import built_site

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(sys.argv.pop(1))))
LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("object", "data")}


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        with open(path, encoding="utf-8") as f:
            self.feed(f.read())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif (tag, name) in LOADED:
                self.loaded.append(value or "")
            elif tag == "a" and name == "href":
                self.links.append(value or "")


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.html = built_site.build(ROOT, cls)
        paths = glob.glob(os.path.join(cls.html, "**", "*.html"), recursive=True)
        cls.pages = {p: Page(p) for p in paths}

    def none(self, faults):
        self.assertFalse(faults, "\n" + "\n".join(faults[:50]))

    def test_links_and_anchors_lead_somewhere(self):
        faults = []
        for path, page in self.pages.items():
            for link in page.links + page.loaded:
                parts = urllib.parse.urlsplit(link)
                if parts.scheme or link.startswith("//"):
                    continue
                to = os.path.normpath(os.path.join(os.path.dirname(path), urllib.parse.unquote(parts.path))) if parts.path else path
                anchor = urllib.parse.unquote(parts.fragment)
                if not os.path.isfile(to):
                    faults.append("%s: %s is not there" % (os.path.relpath(path, self.html), link))
                elif anchor and to in self.pages and anchor not in self.pages[to].ids:
                    faults.append("%s: there is no anchor %s" % (os.path.relpath(path, self.html), link))
        self.none(faults)

    def test_the_sidebar_has_the_groups_of_the_index(self):
        with open(os.path.join(ROOT, "docs", "index.md"), encoding="utf-8") as f:
            index = f.read()
        with open(os.path.join(self.html, "index.html"), encoding="utf-8") as f:
            captions = re.split(r'class="caption-text">', f.read())[1:]
        groups = {c.split("<")[0]: re.findall(r'class="toctree-l1"><a class="reference internal" href="([^"]+)"', c) for c in captions}
        for heading, pages in re.findall(r"(?m)^\*\*(.+)\*\*\n\n((?:- .*\n)+)", index):
            linked = [os.path.normpath("docs/" + p) + ".html" for p in re.findall(r"(?m)^- \[[^]]+\]\((\S+)\.md\)", pages)]
            self.assertTrue(linked)
            self.assertEqual(groups[heading], linked)

    def test_nothing_is_loaded_from_a_network(self):
        faults = ["%s: %s" % (os.path.relpath(p, self.html), link) for p, page in self.pages.items() for link in page.loaded
                  if re.match(r"(https?:)?//", link)]
        for path in glob.glob(os.path.join(self.html, "**", "*.css"), recursive=True):
            with open(path, encoding="utf-8") as f:
                faults += ["%s: %s" % (path, u) for u in re.findall(r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^\"')]+)", f.read())]
        self.none(faults)

    def test_the_search_knows_pages_and_references(self):
        with open(os.path.join(self.html, "searchindex.js"), encoding="utf-8") as f:
            index = f.read()
        for word in ("zigzag", "shift_labels", "AttentionCall", "annulus train", "reference/python"):
            self.assertIn(word, index)

    def test_links_to_sources_show_them_and_no_page_is_left_as_markdown(self):
        self.assertTrue(glob.glob(os.path.join(self.html, "sources", "**", "*.html"), recursive=True))
        self.none(["%s: %s" % (p, link) for p, page in self.pages.items() for link in page.links if re.search(r"^[^:]*\.md(#|$)", link)])


if __name__ == "__main__":
    unittest.main()
