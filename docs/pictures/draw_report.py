#!/usr/bin/env python3
"""Draws docs/pictures/report.png: the beginning of the page that `annulus report` makes of a run, in a headless Chromium. The
run is that of the quickstart:

    ./annulus launch -n 2 train configs/quickstart.toml
    docs/pictures/draw_report.py PATH/annulus runs/quickstart-001
"""

import base64
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "tools"))
import chromium  # noqa: E402

WIDTH, HEIGHT = 1000, 640


def main(annulus, run):
    with tempfile.TemporaryDirectory() as folder:
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
    main(os.path.abspath(sys.argv[1]), sys.argv[2])
