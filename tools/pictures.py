#!/usr/bin/env python3
"""Draws pictures of docs: tools/pictures.py [--check] [FOLDER, default docs].

ring-steps.svg: causal attention over 4 ranks and 16 tokens on a ring, once in the contiguous and once in the zigzag layout. The
colour of a pair says at which step of the ring it is computed (docs/attention.md, "ring": in step t rank r computes with the keys
of rank r - t).

layers.svg: the layers and packages of bazel/layers.bzl, and the way of a training step through them (docs/architecture.md).

tests/tools/pictures_test.py checks that the files are what this draws.
"""

import ast
import os
import re
import sys

RANKS, TOKENS = 4, 16
CELL, LEFT, TOP, GAP = 18, 96, 96, 70
STEPS = ("#2b6cb0", "#38a169", "#d69e2e", "#c05621")  # of steps 0 to 3
FONT = 'font-family="sans-serif" font-size="12" fill="#222"'


def contiguous(position):
    return position * RANKS // TOKENS


def zigzag(position):
    chunk = position * 2 * RANKS // TOKENS
    return min(chunk, 2 * RANKS - 1 - chunk)


def step_of(query_rank, key_rank):
    return (query_rank - key_rank) % RANKS


def text(x, y, words, anchor="start", extra=""):
    return '<text x="%d" y="%d" text-anchor="%s" %s%s>%s</text>' % (x, y, anchor, FONT, extra, words)


def panel(left, name, owner):
    """One layout: a row for each query, a column for each key; queries are sorted by their rank."""
    out = [text(left + TOKENS * CELL // 2, 28, name, "middle", ' font-weight="bold"')]
    out.append(text(left + TOKENS * CELL // 2, TOP - 34, "keys", "middle"))
    out.append(text(left - 26, TOP - 6, "queries", "end"))
    order = sorted(range(TOKENS), key=lambda p: (owner(p), p))
    for column, key in enumerate(order):
        out.append(text(left + column * CELL + CELL // 2, TOP - 6, str(key), "middle"))
    for rank in range(RANKS):
        first = sum(1 for p in order if owner(p) < rank)
        count = sum(1 for p in order if owner(p) == rank)
        pairs = sum(p + 1 for p in order if owner(p) == rank)
        middle = TOP + first * CELL + count * CELL // 2 + 4
        out.append(text(left - 26, middle - 7, "rank %d" % rank, "end"))
        out.append(text(left - 26, middle + 8, "%d pairs" % pairs, "end"))
        out.append(text(left + first * CELL + count * CELL // 2, TOP - 20, "rank %d" % rank, "middle"))
    for row, query in enumerate(order):
        out.append(text(left - 4, TOP + row * CELL + 13, str(query), "end"))
        for column, key in enumerate(order):
            colour = STEPS[step_of(owner(query), owner(key))] if key <= query else "#f3f3f3"
            out.append('<rect x="%d" y="%d" width="%d" height="%d" fill="%s" stroke="#fff"/>' % (
                left + column * CELL, TOP + row * CELL, CELL, CELL, colour))
    for rank in range(1, RANKS):
        at = sum(1 for p in order if owner(p) < rank) * CELL
        out.append('<path d="M%d %dh%dM%d %dv%d" stroke="#222"/>' % (
            left, TOP + at, TOKENS * CELL, left + at, TOP, TOKENS * CELL))
    return out


def ring_steps():
    side = TOKENS * CELL
    second = LEFT + side + GAP + LEFT - 20
    width, height = second + side + 20, TOP + side + 50
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">' % (
        width, height, width, height), '<rect width="100%" height="100%" fill="#fff"/>']
    out += panel(LEFT, "contiguous", contiguous) + panel(second, "zigzag", zigzag)
    x, y = LEFT, TOP + side + 20
    out.append(text(x, y + 12, "computed at step"))
    x += 122
    for step, colour in enumerate(STEPS):
        out.append('<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>' % (x, y, CELL, CELL, colour))
        out.append(text(x + CELL + 5, y + 13, str(step)))
        x += 54
    out.append('<rect x="%d" y="%d" width="%d" height="%d" fill="#f3f3f3"/>' % (x, y, CELL, CELL))
    out.append(text(x + CELL + 5, y + 13, "masked"))
    return "\n".join(out + ["</svg>", ""])


# The way of a training step, by the numbers of docs/architecture.md ("The path of a training step").
STEP = [("1", "launcher/launch"), ("2", "launcher/topology"), ("2", "comm/bootstrap"), ("3", "runtime/training"),
        ("3", "runtime/data"), ("4", "runtime/model"), ("5", "attention/execution"), ("5", "attention/kernels"),
        ("6", "runtime/training/state")]
BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW = 150, 26, 176, 36


def read_layers():
    """The levels of layers, and the packages of each layer, those that use nothing first."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bazel", "layers.bzl")
    with open(path, encoding="utf-8") as f:
        source = f.read()
    value = lambda name: ast.literal_eval(re.search(r"^%s = ([\[{].*?^[\]}])" % name, source, re.S | re.M).group(1))
    levels, uses = value("LAYERS"), value("USES")
    packages = {layer: [] for level in levels for layer in level}
    for package, used in uses.items():
        for p in used + [package]:
            if p not in packages[p.split("/")[0]]:
                packages[p.split("/")[0]].append(p)
    for layer, found in packages.items():
        depth = {}

        def deep(p):
            if p not in depth:
                depth[p] = 0
                depth[p] = max([0] + [1 + deep(u) for u in uses.get(p, ())])
            return depth[p]

        packages[layer] = sorted(found, key=deep) or [layer]
    return levels, packages


def layers():
    levels, packages = read_layers()
    rows = max(sum(len(packages[l]) + 1 for l in level) for level in levels)
    width, height = 20 + COLUMN * len(levels), 60 + ROW * rows
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">' % (
        width, height, width, height), '<rect width="100%" height="100%" fill="#fff"/>']
    out.append(text(20, 22, "Code uses layers to its left, and inside its own layer what bazel/layers.bzl lists, which stands above it."))
    at = {}
    for column, level in enumerate(levels):
        x, y = 16 + COLUMN * column, 56
        for layer in level:
            tall = ROW * len(packages[layer])
            out.append(text(x + BOX_WIDTH // 2, y, layer + "/", "middle", ' font-weight="bold"'))
            out.append('<rect x="%d" y="%d" width="%d" height="%d" rx="6" fill="#edf2f7"/>' % (
                x - 8, y + 8, BOX_WIDTH + 16, tall + 4))
            for i, package in enumerate(packages[layer]):
                top = y + 14 + ROW * i
                at[package] = (x, top + BOX_HEIGHT // 2)
                out.append('<rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="#fff" stroke="#4a5568"/>' % (
                    x, top, BOX_WIDTH, BOX_HEIGHT))
                name = package[len(layer) + 1:] + "/" if package != layer else "files of its own"
                out.append(text(x + 26, top + 17, name))
            y += tall + ROW
    points = [(at[package][0] + 13, at[package][1]) for _, package in STEP]
    out.append('<polyline points="%s" fill="none" stroke="#2b6cb0" stroke-opacity="0.45" stroke-width="2"/>' % " ".join(
        "%d,%d" % point for point in points))
    for (number, _), (x, y) in zip(STEP, points):
        out.append('<circle cx="%d" cy="%d" r="9" fill="#2b6cb0"/>' % (x, y))
        out.append('<text x="%d" y="%d" text-anchor="middle" font-family="sans-serif" font-size="11" fill="#fff">%s</text>' % (
            x, y + 4, number))
    return "\n".join(out + ["</svg>", ""])


PICTURES = {"layers.svg": layers, "ring-steps.svg": ring_steps}


def main(words):
    check = "--check" in words
    folders = [w for w in words if w != "--check"]
    folder = folders[0] if folders else os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs")
    differ = []
    for name, draw in PICTURES.items():
        path = os.path.join(folder, name)
        if not check:
            with open(path, "w", encoding="utf-8") as f:
                f.write(draw())
        elif not os.path.exists(path) or open(path, encoding="utf-8").read() != draw():
            differ.append(path)
    for path in differ:
        print("%s is not what tools/pictures.py draws: run tools/pictures.py" % path)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
