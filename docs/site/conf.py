"""Sphinx's configuration of the site, used by docs/site/build.py. What it loads lies in the site: it opens without a network."""

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.dont_write_bytecode = True
sys.path[:0] = [HERE, os.path.join(ROOT, "python")]
import docstrings  # noqa: E402
import docutils.nodes  # noqa: E402
import stand_ins  # noqa: E402

stand_ins.install()

project = "annulus"
with open(os.path.join(ROOT, "common", "version.h"), encoding="utf-8") as file:
    release = re.search(r'kVersion\[\] = "(.*)"', file.read()).group(1)
extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
root_doc = "index"
highlight_language = "text"  # code in the pages is indented, and names no language
myst_heading_anchors = 6
breathe_projects = {"annulus": os.environ["ANNULUS_DOXYGEN"]}
breathe_default_project = "annulus"
breathe_show_include = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 90
cpp_maximum_signature_line_length = 90
# Headings of a page may skip a level; each header declares the namespace again.
suppress_warnings = ["myst.header", "duplicate_declaration.cpp"]

html_theme = "furo"
html_title = "annulus " + release
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it is read by requests, which browsers refuse for files
html_show_copyright = False


def fill_the_page(app, doctree):
    """Pictures are as wide as the page. Sphinx links those whose width is given to their files, where a reader sees them whole."""
    for image in doctree.findall(docutils.nodes.image):
        image["width"] = "100%"


def setup(app):
    app.connect("doctree-read", fill_the_page)
    app.connect("autodoc-process-docstring", docstrings.to_rst)
