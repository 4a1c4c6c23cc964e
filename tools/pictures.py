#!/usr/bin/env python3
"""Draws pictures of docs: tools/pictures.py [--check] [--program PATH] [FOLDER, default docs/pictures].

With --program, annulus itself draws fit.svg, plan.svg and rings.svg (docs/explanation/memory.md and attention.md,
docs/how-to/clusters.md), by the commands below.

ring-steps.svg: causal attention over 4 ranks and 16 tokens on a ring, once in the contiguous and once in the zigzag layout. The
colour of a pair says at which step of the ring it is computed (docs/explanation/attention.md, "ring": in step t rank r computes with the keys
of rank r - t).

patterns.svg: a mask of each kind of pattern and map, by its definition (docs/explanation/attention.md).

masks.svg: four masks over 4 ranks in the zigzag layout, coloured like ring-steps.svg, with the number of key rows that a
group-cast sends (README.md).

loss.svg: the losses of the README's first command, from docs/pictures/quickstart.csv.

speed.svg: attention on one core over LibTorch's, and training over eager PyTorch's, from tables of
benchmarks/results (README.md, docs/explanation/performance.md).

long.svg: CPU seconds and memory of attention against the length, from what `bench seeds --long` printed
(benchmarks/results/machine-c.md; docs/explanation/performance.md).

layers.svg: the layers and packages of bazel/layers.bzl, and the way of a training step through them (docs/internals/architecture.md).

tests/tools/pictures_test.py checks that the files are what this draws.
"""

import argparse
import ast
import math
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RANKS, TOKENS = 4, 16
CELL, LEFT, TOP, GAP = 18, 96, 96, 70
# Of steps 0 to 3: colours after Okabe and Ito, which people with colour blindness can tell apart.
STEPS = ("#0072b2", "#009e73", "#e69f00", "#d55e00")
# Pictures stand on the page's own background, light or dark.
ON_PAGE = """<style>
:root { color-scheme: light dark } text { font-family: sans-serif; font-size: 12px; fill: #57606a } .line { stroke: #57606a; fill: none }
.masked { fill: #888; fill-opacity: 0.13 } path.masked { stroke: #888; stroke-opacity: 0.13 } .on-colour { fill: #fff; font-size: 11px }
@media (prefers-color-scheme: dark) { text { fill: #9aa4af } .line { stroke: #9aa4af } }
</style>"""


def contiguous(position):
    return position * RANKS // TOKENS


def zigzag(position, tokens=TOKENS):
    chunk = position * 2 * RANKS // tokens
    return min(chunk, 2 * RANKS - 1 - chunk)


def step_of(query_rank, key_rank):
    return (query_rank - key_rank) % RANKS


def svg(width, height, parts, head=(), extra=""):
    return "\n".join(['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d"%s>' % (
        width, height, width, height, extra), *head, ON_PAGE, *parts, "</svg>", ""])


def element(name, numbers, extra):
    return "<%s %s%s" % (name, " ".join('%s="%g"' % (key, round(value, 1)) for key, value in numbers.items()), extra)


def rect(x, y, width, height, look):
    return element("rect", {"x": x, "y": y, "width": width, "height": height}, " %s/>" % look)


BOLD = ' font-weight="bold"'


def text(x, y, words, anchor="start", extra=""):
    return element("text", {"x": x, "y": y}, ' text-anchor="%s"%s>%s</text>' % (anchor, extra, words))


def key(x, y, colour, words, size=12):
    """A square of a colour (None: masked), and what it stands for."""
    return rect(x, y, size, size, 'fill="%s"' % colour if colour else 'class="masked"') + text(x + size + 6, y + size - 2, words)


def line(points, colour):
    return '<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>' % (colour, " ".join("%.1f,%.1f" % p for p in points))


def cells(left, top, size, rows):
    """Squares, a pixel apart: rows of colours, None for masked. A run of equal squares in a row is one dashed line, and the lines of a
    colour are one path, so that pictures of thousands of squares are small."""
    paths = {}
    for r, row in enumerate(rows):
        for c, colour in enumerate(row):
            runs = paths.setdefault(colour, [])
            if runs and runs[-1][0] == r and runs[-1][1] + runs[-1][2] == c:
                runs[-1][2] += 1
            else:
                runs.append([r, c, 1])
    return ['<path stroke-width="%d" stroke-dasharray="%d 1" %s d="%s"/>' % (
        size - 1, size - 1, 'stroke="%s"' % colour if colour else 'class="masked"', "".join("M%d %.1fh%d" % (
            left + c * size, top + r * size + (size - 1) / 2, n * size - 1) for r, c, n in runs))
        for colour, runs in sorted(paths.items(), key=lambda item: item[0] or "")]


def panel(left, name, owner):
    """One layout: a row for each query, a column for each key; queries are sorted by their rank."""
    out = [text(left + TOKENS * CELL // 2, 28, name, "middle", BOLD)]
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
    out += cells(left, TOP, CELL, [[STEPS[step_of(owner(query), owner(key))] if key <= query else None for key in order]
                                   for query in order])
    for rank in range(1, RANKS):
        at = sum(1 for p in order if owner(p) < rank) * CELL
        out.append('<path class="line" d="M%.1f %.1fh%dM%.1f %.1fv%d"/>' % (
            left, TOP + at - 0.5, TOKENS * CELL, left + at - 0.5, TOP, TOKENS * CELL))
    return out


def ring_steps():
    side = TOKENS * CELL
    second = LEFT + side + GAP + LEFT - 20
    width, height = second + side + 20, TOP + side + 50
    out = panel(LEFT, "contiguous", contiguous) + panel(second, "zigzag", zigzag)
    x, y = LEFT, TOP + side + 20
    out.append(text(x, y + 12, "computed at step"))
    x += 122
    for words, colour in [*zip("0123", STEPS), ("masked", None)]:
        out.append(key(x, y, colour, words, CELL))
        x += 54
    return svg(width, height, out)


MASK_TOKENS, MASK_CELL = 24, 7


def dilated(query, key):
    """Causal attention in segments of 8 with rate 1, and of 24 with rate 3."""
    return key <= query and (query // 8 == key // 8 or query % 3 == key % 3 == 0)


MASKS = (("causal", lambda q, k: k <= q), ("window of 6", lambda q, k: q - 6 < k <= q),
         ("documents of 10, 6 and 8", lambda q, k: k <= q and (q >= 10) == (k >= 10) and (q >= 16) == (k >= 16)),
         ("dilated (LongNet)", dilated))


def owner_of(position):
    """The rank that owns a position in the zigzag layout of MASK_TOKENS tokens."""
    return zigzag(position, MASK_TOKENS)


def rows_needed(mask):
    """The number of (key row, rank) pairs in which the rank needs a row of another rank."""
    return sum(any(mask(q, k) for q in range(MASK_TOKENS) if owner_of(q) == rank)
               for k in range(MASK_TOKENS) for rank in range(RANKS) if rank != owner_of(k))


def masks():
    side, gap, top = MASK_TOKENS * MASK_CELL, 27, 44
    width, height = 26 + len(MASKS) * (side + gap) - gap, top + side + 62
    out, every = [], MASK_TOKENS * (RANKS - 1)
    for i, (name, mask) in enumerate(MASKS):
        left = 26 + i * (side + gap)
        out.append(text(left + side // 2, 16, name, "middle", BOLD))
        out.append(text(left + side // 2, 34, "%d of %d rows are sent" % (rows_needed(mask), every), "middle"))
        out += cells(left, top, MASK_CELL, [[STEPS[step_of(owner_of(q), owner_of(k))] if mask(q, k) else None
                                            for k in range(MASK_TOKENS)] for q in range(MASK_TOKENS)])
    chunk = side // (2 * RANKS)
    for i in range(2 * RANKS):
        out.append(text(18, top + i * chunk + chunk // 2 + 4, owner_of(i * MASK_TOKENS // (2 * RANKS)), "end"))
    y = top + side + 20
    out.append(text(26, y, "Rows: queries, with the rank that owns them. Columns: keys. A colour is the step of the ring at which a pair"
                           " is computed:"))
    out += [key(26 + 76 * step, y + 14, colour, "step %d" % step) for step, colour in enumerate(STEPS)]
    return svg(width, height, out)


def blocks(active):
    """A causal map over blocks of 2 tokens."""
    return lambda q, k: k <= q and active(q // 2, k // 2)


def tree(lengths, parents):
    """Nodes in depth-first order; a token sees those before it on the path from its root."""
    node = [n for n, length in enumerate(lengths) for _ in range(length)]

    def path(n):
        return {n} | (path(parents[n]) if parents[n] >= 0 else set())

    return lambda q, k: k <= q and node[k] in path(node[q])


def near(reach):
    return lambda q, k: abs(q - k) <= reach


# Of bigbird's random blocks, an example: 1 for each query block.
DRAWN = (0, 0, 0, 0, 1, 2, 3, 1, 5, 2, 6, 4)
# Each kind of pattern and map in 24 tokens, with what docs/explanation/attention.md says that it counts.
PATTERNS = (
    ("full", lambda q, k: True), ("causal", lambda q, k: k <= q), ("window, left 5, right 0", lambda q, k: q - 5 <= k <= q),
    ("window, 2 sink tokens", lambda q, k: k <= q and (q - 5 <= k or k < 2)),
    ("documents, causal", dict(MASKS)["documents of 10, 6 and 8"]),
    ("causal, 4 keys padding", lambda q, k: k <= q and not 8 <= k < 12), ("dilated, 2 branches", dilated),
    ("tree", tree((8, 6, 4, 6), (-1, 0, 1, 0))),
    ("union of 2 windows", lambda q, k: q - 8 <= k <= q or abs(q - k) <= 3),
    ("blocks, local", blocks(near(2))),
    ("blocks, dilated", blocks(lambda q, k: q - k <= 6 and (q - k) % 2 == 0)),
    ("blocks, global-local", blocks(lambda q, k: near(1)(q, k) or k < 1)),
    ("blocks, bigbird", blocks(lambda q, k: near(1)(q, k) or k < 1 or k == DRAWN[q])),
    ("blocks, strided", blocks(lambda q, k: near(1)(q, k) or k % 4 == 3)),
    ("blocks, hierarchical", blocks(lambda q, k: near(1)(q, k) or (q - k <= 4 and k % 2 == 1) or k % 4 == 3)))


def patterns():
    side, gap, across, size = MASK_TOKENS * 6, 16, 5, 6
    rows = -(-len(PATTERNS) // across)
    width, height = across * (side + gap) + 8, rows * (side + 34) + 24
    head = ["<title>The kinds of patterns</title>",
            "<desc>A square for each kind, with 24 queries from top to bottom and 24 keys from left to right; coloured: counted pairs."
            " %s.</desc>" % ", ".join("%s: %d pairs" % (name, sum(mask(q, k) for q in range(MASK_TOKENS) for k in range(MASK_TOKENS)))
                                      for name, mask in PATTERNS)]
    out = []
    for i, (name, mask) in enumerate(PATTERNS):
        left, top = 8 + i % across * (side + gap), 22 + i // across * (side + 34)
        out.append("<g><title>%s</title>" % name)
        out.append(text(left, top - 6, name))
        out += cells(left, top, size, [[STEPS[0] if mask(q, k) else None for k in range(MASK_TOKENS)] for q in range(MASK_TOKENS)])
        out.append("</g>")
    out.append(text(8, height - 8, "Rows: 24 queries. Columns: 24 keys. Coloured: counted. Maps have blocks of 2 tokens and are causal."))
    return svg(width, height, out, head, ' role="img"')


def loss():
    """Training and validation loss in bits per byte over the steps, from docs/pictures/quickstart.csv."""
    path = os.path.join(ROOT, "docs", "pictures", "quickstart.csv")
    with open(path, encoding="utf-8") as f:
        rows = [line.strip().split(",") for line in f if not line.startswith("#")][1:]
    width, height, left, top, right, bottom = 800, 230, 44, 14, 20, 34
    last, low, high = max(int(r[0]) for r in rows), 2.0, 8.0
    x = lambda step: left + (width - left - right) * step / last
    y = lambda bits: top + (height - top - bottom) * (high - bits) / (high - low)
    out = []
    for bits in range(int(low), int(high) + 1):
        out.append('<path class="line" stroke-opacity="0.25" d="M%d %.1fH%d"/>' % (left, y(bits), width - right))
        out.append(text(left - 8, y(bits) + 4, bits, "end"))
    for step in range(0, last + 1, 500):
        out.append(text(x(step), height - 12, step, "middle"))
    for column, colour, name in ((1, STEPS[0], "single training batches"), (2, STEPS[3], "validation")):
        out.append(line([(x(int(r[0])), y(float(r[column]))) for r in rows if r[column]], colour))
        out.append(key(width - 320, top + 18 * column, colour, name + ", bits per byte"))
    out.append(text(x(250), height - 12, "steps", "middle"))
    return svg(width, height, out)


def table_after(page, words):
    """The rows of the first table after these words in a page of benchmarks/results, without its head, as lists of cells."""
    path = os.path.join(ROOT, "benchmarks", "results", page)
    with open(path, encoding="utf-8") as f:
        table = re.search(r"(?:^\|.*\n)+", f.read().split(words, 1)[1], re.M).group(0)
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.strip().split("\n")[2:]]


def bars(left, title, rows, most, line_at):
    """Horizontal bars [(name, colour, value)] from `left` on, with a line at the value 1 that names what it is."""
    wide, high, out = 200, 17, [text(left, 16, title, "start", BOLD)]
    one = left + 150 + wide / most
    for i, (name, colour, value) in enumerate(rows):
        y = 30 + i * (high + 5)
        out.append(text(left + 142, y + 13, name, "end"))
        out.append(rect(left + 150, y, wide * value / most, high, 'fill="%s"' % colour))
        out.append(text(left + 156 + wide * value / most, y + 13, "%.2f" % value))
    end = 30 + len(rows) * (high + 5)
    return out + ['<path class="line" d="M%.1f 24V%d"/>' % (one, end), text(one, end + 14, line_at, "middle")]


def speed():
    sets = (("AVX-512", STEPS[0], "Machine D, AVX-512 (annulus"), ("AVX2", STEPS[1], "Machine D, AVX2 (`ANNULUS_ISA=avx2`"))
    attention = []
    for mask in ("causal 1024 x 64", "causal 4096 x 64", "causal 4096 x 128", "full 4096 x 128"):
        for _, colour, words in sets:
            row = next(r for r in table_after("machine-d.md", words) if r[0] == mask + " fp32")
            attention.append((mask if colour == STEPS[0] else "", colour, float(row[1]) / float(row[3])))
    training = []
    for title, page, words in (("AMD EPYC (D)", "machine-d.md", "Machine D, 2026-11-25, "),
                               ("Intel Xeon (E)", "machine-e.md", "Machine E, 2026-11-27, ")):
        for name, colour, _ in sets:
            row = next(r for r in table_after(page, words) if r[0] == name)
            ratios = sorted(float(v) for v in row[2].split(","))
            training.append((title if colour == STEPS[0] else "", colour, ratios[len(ratios) // 2]))
    out = bars(0, "Attention, forward, one core (D): speed over LibTorch's", attention, 3.0, "LibTorch")
    out += bars(410, "Training: CPU seconds over eager PyTorch's, median", training, 1.25, "PyTorch")
    out += [text(0, 246, "fp32, length x head size; longer is better"), text(410, 170, "shorter is better")]
    out += [key(560 + 90 * i, 200, colour, name) for i, (name, colour, _) in enumerate(sets)]
    return svg(800, 252, out)


def long_rows():
    """The calls that `bench seeds --long` printed, by pattern: lists of (tokens, CPU seconds, MB added)."""
    path = os.path.join(ROOT, "benchmarks", "results", "machine-c.md")
    with open(path, encoding="utf-8") as f:
        printed = f.read().split("bench seeds --long", 1)[1].split("```", 2)[1]
    rows = {}
    for tokens, pattern, cpu, added in re.findall(
            r"(?m)^ +([\d,]+)  (\S.*?) {2,}[\d.e+]+ +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)(?: +[\d.e-]+ %)?$", printed):
        rows.setdefault(pattern, []).append((int(tokens.replace(",", "")), float(cpu), float(added)))
    return rows


def growth(left, title, column, rows, colours):
    """One panel with logarithmic axes: the numbers of a column against the tokens, a line for each pattern."""
    wide, high, top = 320, 190, 30
    tokens, values = [r[0] for c in rows.values() for r in c], [r[column] for c in rows.values() for r in c]
    spans = [(math.floor(math.log10(min(v))), math.ceil(math.log10(max(v)))) for v in (tokens, values)]
    scale = lambda v, span, size: size * (math.log10(v) - span[0]) / (span[1] - span[0])
    x, y = lambda v: left + 50 + scale(v, spans[0], wide), lambda v: top + high - scale(v, spans[1], high)
    out = [text(left, 16, title, "start", BOLD)]
    for power in range(spans[1][0], spans[1][1] + 1):
        out.append('<path class="line" stroke-opacity="0.25" d="M%d %.1fH%d"/>' % (left + 50, y(10 ** power), left + 50 + wide))
        out.append(text(left + 44, y(10 ** power) + 4, "{:,g}".format(10 ** power), "end"))
    for power in range(spans[0][0], spans[0][1] + 1):
        tokens_text = "%dM" % 10 ** (power - 6) if power >= 6 else "{:,}".format(10 ** power)
        out.append(text(x(10 ** power), top + high + 18, tokens_text, "middle"))
    for (pattern, calls), colour in zip(rows.items(), colours):
        points = [(x(c[0]), y(c[column])) for c in calls]
        out.append(line(points, colour))
        out += ['<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>' % (px, py, colour) for px, py in points]
    return out


def long():
    rows, colours = long_rows(), STEPS + ("#805ad5",)
    out = growth(0, "CPU seconds, forward and backward, by tokens in a row", 1, rows, colours)
    out += growth(410, "MB that a process adds, by tokens in a row", 2, rows, colours)
    out += [key(50 + 150 * i, 266, colour, pattern) for i, (pattern, colour) in enumerate(zip(rows, colours))]
    return svg(800, 290, out)


# The way of a training step, by the numbers of docs/internals/architecture.md ("The path of a training step").
STEP = [("1", "launcher/launch"), ("2", "launcher/topology"), ("2", "comm/bootstrap"), ("3", "runtime/training"),
        ("3", "runtime/data"), ("4", "runtime/model"), ("5", "attention/execution"), ("5", "attention/kernels"),
        ("6", "runtime/training/state")]
BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW = 150, 26, 176, 36


def read_layers():
    """The levels of layers, and the packages of each layer, those that use nothing first."""
    path = os.path.join(ROOT, "bazel", "layers.bzl")
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
    out = [text(20, 22, "Code uses layers to its left, and inside its own layer what bazel/layers.bzl lists, which stands above it.")]
    at = {}
    for column, level in enumerate(levels):
        x, y = 16 + COLUMN * column, 56
        for layer in level:
            tall = ROW * len(packages[layer])
            out.append(text(x + BOX_WIDTH // 2, y, layer + "/", "middle", BOLD))
            out.append(rect(x - 8, y + 8, BOX_WIDTH + 16, tall + 4, 'rx="6" class="masked"'))
            for i, package in enumerate(packages[layer]):
                top = y + 14 + ROW * i
                at[package] = (x, top + BOX_HEIGHT // 2)
                out.append(rect(x, top, BOX_WIDTH, BOX_HEIGHT, 'rx="4" class="line"'))
                name = package[len(layer) + 1:] + "/" if package != layer else "files of its own"
                out.append(text(x + 26, top + 17, name))
            y += tall + ROW
    points = [(at[package][0] + 13, at[package][1]) for _, package in STEP]
    out.append('<polyline points="%s" fill="none" stroke="#0072b2" stroke-opacity="0.45" stroke-width="2"/>' % " ".join(
        "%d,%d" % point for point in points))
    for (number, _), (x, y) in zip(STEP, points):
        out.append('<circle cx="%d" cy="%d" r="9" fill="#0072b2"/>' % (x, y))
        out.append(text(x, y + 4, number, "middle", ' class="on-colour"'))
    return svg(width, height, out)


PICTURES = {"layers.svg": layers, "long.svg": long, "loss.svg": loss, "masks.svg": masks, "patterns.svg": patterns, "ring-steps.svg": ring_steps,
            "speed.svg": speed}


NODE = "tests/launcher/topology/testdata/h200_node.xml"
BY_PROGRAM = {
    "fit.svg": "fit configs/plan/8b.toml --ranks 8 --device-memory 141GB",
    "plan.svg": "plan --ranks 4 --length 65536 --heads 32 --kv-heads 8 --schedule ring --machine h100 --no-proof",
    "rings.svg": "topology --xml %s --xml %s -n 16" % (NODE, NODE),
}


def draw_by_program(program, folder):
    for name, command in BY_PROGRAM.items():
        subprocess.run([os.path.abspath(program), *command.split(), "--svg", os.path.abspath(os.path.join(folder, name))], cwd=ROOT,
                       stdout=subprocess.DEVNULL, check=True)


def main(words):
    parser = argparse.ArgumentParser(description="Draws pictures of docs.")
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--program", help="the program annulus, to draw its pictures as well")
    parser.add_argument("folder", nargs="?", default=os.path.join(ROOT, "docs", "pictures"))
    options = parser.parse_args(words)
    check, folder = options.check, options.folder
    if options.program:
        draw_by_program(options.program, folder)
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
