#!/usr/bin/env python3
"""Measures compiled FlexAttention with the patterns of `annulus bench gpu --part patterns`, for comparison: the shapes,
the masks and the way of measuring are the same. It needs a GPU, and the Python that runs it needs torch and triton. No
hardware has run it yet.

    flex_attention.py [--length 32768] [--heads 64] [--kv-heads 8] [--head-dim 128] [--rounds 7]

Prints a table and, after each measurement, a line of JSON: {"bench": "flex_attention", "device": ..., "figures": [{"name",
"unit", "value", "median"}]}. A pattern that fails is said and does not keep the others from being measured. The forward
is that of training, which keeps its logsumexp, as that of annulus always does. If n branches of the dilated pattern count a pair, its weight is multiplied by n (log n is added to its score). The
active blocks are drawn by the same rule as in annulus, but with Python's generator: there are as many, in other places.
"""

import argparse
import json
import math
import random
import statistics
import sys

ROUND_SECONDS = 0.02
WARM_UPS = 3


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 32768), ("heads", 64), ("kv-heads", 8), ("head-dim", 128), ("rounds", 7)):
        parser.add_argument("--" + name, type=int, default=default, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    if min(vars(options).values()) < 1 or options.heads % options.kv_heads:
        parser.error("expected sizes of at least 1 and a --heads that is a multiple of --kv-heads")
    return options


def random_blocks(blocks, density):
    """Returns the active key blocks of each query block: its own, and others as far as the density asks for them."""
    draw = random.Random(20251121)
    rows = []
    for i in range(blocks):
        row = density * blocks
        wanted = min(int(row * (i + 1)) - int(row * i), blocks)
        others = [j for j in range(blocks) if j != i]
        rows.append([i] + draw.sample(others, max(0, wanted - 1)))
    return rows


def patterns(torch, options, device):
    """Returns a list of (name, mask_mod, score_mod or None, whether the mask differs between heads)."""
    length = options.length
    window = max(1, length // 8)

    def in_window(b, h, q, k):
        return (q >= k) & (q - k < window)

    branches = [(max(1, length // 16 * rate), rate) for rate in (1, 2, 4, 8, 16)]

    def count(h, q, k):
        total = torch.zeros_like(q)
        for segment, rate in branches:
            total = total + (
                (q // segment == k // segment) & (q % segment % rate == h % rate) & (k % segment % rate == h % rate)
            ).to(total.dtype)
        return total

    def in_branch(b, h, q, k):
        return count(h, q, k) > 0

    def weighted(score, b, h, q, k):
        return score + torch.log(count(h, q, k).to(torch.float32))

    size = 128 if length >= 4096 else 16
    blocks = (length + size - 1) // size
    dense = torch.zeros(blocks, blocks, dtype=torch.bool)
    for i, row in enumerate(random_blocks(blocks, 0.1)):
        dense[i, row] = True
    dense = dense.to(device)

    def in_blocks(b, h, q, k):
        return dense[q // size, k // size]

    return [("window %d" % window, in_window, None, False), ("dilated", in_branch, weighted, True),
            ("blocks, density 0.1", in_blocks, None, False)]


def measure(torch, call, rounds):
    def timed(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times

    once = [timed(1) for _ in range(WARM_UPS)][-1]
    times = min(100, max(1, math.ceil(ROUND_SECONDS / once)))
    return [timed(times) for _ in range(rounds)]


def main():
    options = parse()
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError as error:
        sys.exit("flex_attention.py: FlexAttention cannot be imported (%s); install PyTorch 2.5 or newer" % error)
    if not torch.cuda.is_available():
        print("SKIPPED: torch finds no GPU")
        return
    torch.manual_seed(1)
    device = torch.device("cuda")
    made = lambda heads: torch.randn(
        1, heads, options.length, options.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = made(options.heads), made(options.kv_heads), made(options.kv_heads)
    dout = torch.randn_like(q)
    grouped = options.heads != options.kv_heads
    attend = torch.compile(flex_attention, dynamic=False)
    device_name = torch.cuda.get_device_name()
    failed = False
    print("FlexAttention of torch %s, %d tokens, heads %d:%d of %d, bf16, %s\n" % (
        torch.__version__, options.length, options.heads, options.kv_heads, options.head_dim, device_name))
    print("  %-20s  %-9s  %10s" % ("pattern", "direction", "ms"))
    for name, mask, score, by_head in patterns(torch, options, device):
        try:
            block_mask = create_block_mask(mask, None, options.heads if by_head else None, options.length, options.length,
                                           device=device, _compile=True)
            run = lambda: attend(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=grouped)
            out = run()
            calls = {"forward": run, "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)}
            for direction, call in calls.items():
                seconds = measure(torch, call, options.rounds)
                figure = {"name": "FlexAttention, %s %s" % (name, direction), "unit": "s", "value": min(seconds),
                          "median": statistics.median(seconds)}
                print("  %-20s  %-9s  %10.3f" % (name, direction, 1e3 * min(seconds)))
                print(json.dumps({"bench": "flex_attention", "device": device_name, "figures": [figure]}), flush=True)
        except Exception as error:  # of the compiler, or too little memory
            failed = True
            print("  %-20s  failed: %s: %s" % (name, type(error).__name__, error), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
