#!/usr/bin/env python3
"""Draws docs/pictures/report.png: the beginning of a page of `annulus report`, in a headless Chromium.

    docs/pictures/draw_report.py PATH/annulus
"""

import base64
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "tools"))
import chromium  # noqa: E402
import report_runs  # noqa: E402

WIDTH, HEIGHT = 1000, 640


def main(annulus):
    with tempfile.TemporaryDirectory() as folder:
        run = report_runs.write(folder, "pretrain-001", log=report_runs.warnings())
        path = os.path.join(folder, "report.html")
        subprocess.run([annulus, "report", run, "--out", path], check=True, stdout=subprocess.DEVNULL)
        page = chromium.Chromium()
        try:
            page.show(path, WIDTH, HEIGHT)
            picture = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
        finally:
            page.close()
    with open(os.path.join(HERE, "report.png"), "wb") as f:
        f.write(picture)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
