"""Run folders with every key that a report shows, as an engineer meets them. Used by report_pages_test.py, and by tools/pictures
of the report. The numbers are drawn; nothing is trained."""

import json
import math
import os
import random

CONFIG = """[run]
name = "%(name)s"
steps = %(steps)d
[data]
train = [{ name = "web", files = ["web/*.tokens"], weight = 0.7 }, { name = "code", files = ["code/*.tokens"], weight = 0.3 }]
context = 65536
batch = 4
accumulate = 1
packing = "best-fit"
[model]
layers = 24
dim = 2048
heads = 16
dtype = "bf16"
pattern = { kind = "causal" }
[optimizer]
lr = 0.0003
schedule = "cosine"
warmup = 200
[attention]
schedule = "ring"
layout = "zigzag"
"""
TOKENS = 4 * 65536
GB = 10 ** 9


def started(step, resumed, version="0.1.0"):
    return {"step": step, "started": {"time": "2026-11-28T0%d:00:00Z" % (9 if resumed else 2), "version": version, "ranks": 8, "hosts": 2,
                                      "host": "node1", "device": "cuda: 8 GPUs of one kind", "kernel": "cudnn", "mesh": "data 1, context 8",
                                      "model_parameters": 1_300_000_000, "peak_flops": 8e15, "resumed": resumed},
            "memory_plan": {"weights": 5 * GB, "gradients": 5 * GB, "optimizer": 11 * GB, "activations": 38 * GB, "working": 6 * GB,
                            "total": 65 * GB}}


def write(root, name, steps=2000, every=10, end=None, resume_at=1200, seed=1, broken=(), lr=1.0, log="", slow=True):
    """Writes ROOT/NAME. `end`: the last step that was done. `broken`: steps whose loss is not a number."""
    draw, folder = random.Random(seed), os.path.join(root, name)
    os.makedirs(os.path.join(folder, "logs"))
    with open(os.path.join(folder, "config.toml"), "w") as f:
        f.write(CONFIG % {"name": name.rsplit("-", 1)[0], "steps": steps})
    end, lines, clock = end or steps, [started(0, False)], 0.0
    for step in range(every, end + 1, every):
        if resume_at and step - every < resume_at <= step:
            lines.append(started(resume_at, True))
            clock = 0.0
        warm = min(1, step / 200) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        loss = 2.1 + 8.5 * math.exp(-lr * step / (0.12 * steps)) + draw.gauss(0, 0.05)
        ranks = [0.9 * draw.gauss(1, 0.01) * (1.24 if r == 5 and slow and 700 <= step < 1300 else 1) for r in range(8)]
        order = sorted(range(8), key=lambda r: ranks[r])
        most, seconds = ranks[order[-1]], max(ranks) + 0.2
        speed = TOKENS / seconds
        clock += every * seconds
        waits = [0.06 + (most - ranks[0]) * 0.5, 0.05 + (most - ranks[0]) * 0.5, 0.02]
        memory = [v * GB for v in (61.2, 61.9, 62.8 + 0.4 * draw.random())]
        spread = lambda values, who: dict(zip(("least", "median", "most"), values), most_rank=who)  # noqa: E731
        bad = step in broken
        line = {"step": step, "loss": None if bad else loss, "gradient_norm": None if bad else abs(draw.gauss(0.7, 0.2)) + 2 * math.exp(-step / 150),
                "gradient_norm_median": 0.7 + 2 * math.exp(-step / 150) if step > 100 else None, "learning_rate": 3e-4 * lr * warm,
                "spikes_left_out": sum(step >= s for s in (430, 440, 1510)), "tokens": step * TOKENS, "tokens_per_second": speed,
                "exposed_communication_seconds": every * (sum(waits) + 0.01), "exposed_ring_seconds": every * waits[0],
                "exposed_reduce_seconds": every * waits[1], "exposed_gather_seconds": every * waits[2],
                "exposed_planning_seconds": 0.001 if step > every else 4, "exposed_data_seconds": every * 0.004,
                "sources": {"web": {"rows": 3 * step, "targets": round(0.7 * step * TOKENS), "documents": 40 * step, "epochs": step / 9000},
                            "code": {"rows": step, "targets": round(0.3 * step * TOKENS), "documents": 11 * step, "epochs": step / 2600}},
                "seconds": clock, "model_flops_utilization": 0.43 * 0.9 / most,
                "ranks": {"compute_seconds": spread([every * ranks[order[i]] for i in (0, 4, 7)], order[-1]), "memory_bytes": spread(memory, 3),
                          "weights_bytes": spread([4.9 * GB, 4.9 * GB, 5 * GB], 2), "activations_bytes": spread([30 * GB, 31 * GB, 37 * GB], 7),
                          "exposed_communication_seconds": spread([0.2, 0.8, 2.1], 0),
                          "exposed_ring_seconds": spread([0.1, 0.6, 1.9], 0), "clock_mhz": spread([1755, 1980, 1980], 0)},
                "rank_compute_seconds": [every * r for r in ranks]}
        lines.append(line)
        if slow and step in (720, 1310):
            lines.append({"step": step, "slow_rank": 5, "slow_host": "node2", "slow_share": 0.24, "slow_since": 700,
                          "slow_waited_for": "data 12 %, plans 3 %"} if step == 720 else {"step": step, "slow_rank_over": 5})
        if slow and step in (1500, 1700):
            lines.append({"step": step, "slow_rank": 1, "slow_host": "node1", "slow_share": 0.34, "slow_since": 1480, "slow_link_to": 2}
                         if step == 1500 else {"step": step, "slow_rank_over": 1, "slow_link_to": 2})
        if step % (20 * every) == 0:
            lines.append({"step": step, "validation_loss": loss + 0.06, "validation_sources": {"web": {"loss": loss + 0.2}, "code": {"loss": loss - 0.5}}})
        if step % (50 * every) == 0:
            at = "step-%08d" % step
            lines.append({"step": step, "checkpoint": at, "checkpoint_stopped_seconds": 0.31, "checkpoint_seconds": 11.4})
            if step > end - 100 * every:
                os.makedirs(os.path.join(folder, "checkpoints", at))
                with open(os.path.join(folder, "checkpoints", at, "manifest.json"), "w") as f:
                    json.dump({"format": "annulus-checkpoint", "version": 2, "step": step, "world": 8}, f)
    with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
        f.writelines(json.dumps(one) + "\n" for one in lines)
    with open(os.path.join(folder, "logs", "rank-0.log"), "w") as f:
        f.write("2026-11-28T02:00:00.000000Z info node1 rank 0 [train] device cuda\n" + log)
    return folder


def evaluation(folder, step, gain):
    """Writes what `annulus evaluate --json` would, into the run's evaluations/."""
    def bucket(begin, end):
        nats = 2.0 + 1.6 * math.exp(-math.log2(end) / 4) - gain
        return {"begin": begin, "end": end, "targets": end - begin, "nats": nats * (end - begin), "loss": nats, "perplexity": math.exp(nats), "error": 0.01}
    doubling = [bucket(0, 1)] + [bucket(2 ** i, 2 ** (i + 1)) for i in range(16)]
    source = lambda name: {"name": name, "rows": 64, "documents": 64, "all": bucket(0, 65536), "bits_per_byte": None, "doubling": doubling,  # noqa: E731
                           "even": [], "document_doubling": [], "document_even": []}
    cells = [{"task": "needle", "length": n, "depth": d, "trials": 20, "exact": max(0, 20 - i * 3 - (j == 1) * 2), "tokens": 100, "right": 90, "nats": 10.0,
              "generated": None} for i, n in enumerate((4096, 16384, 65536)) for j, d in enumerate((0.0, 0.5, 1.0))]
    os.makedirs(os.path.join(folder, "evaluations"), exist_ok=True)
    with open(os.path.join(folder, "evaluations", "step-%d.json" % step), "w") as f:
        json.dump({"format": "annulus-evaluation-1", "version": "0.1.0", "model": folder, "step": step, "ranks": 8, "context": 65536,
                   "layout": "zigzag", "dtype": "bf16", "sources": [source("web")], "tasks": cells if step > 1000 else [], "seconds": 100.0,
                   "cpu_seconds": 800.0, "forward_tokens": 10 ** 7, "stopped": False, "near_ties": 0}, f)


def warnings():
    line = "2026-11-28T0%d:%02d:00.000000Z %s node%d rank %d [%s] %s\n"
    return (line % (3, 10, "warn", 1, 0, "train", "step 428: the gradient norm was 14.2 times its running median, so this update is left out") +
            line % (3, 12, "warn", 1, 0, "train", "step 437: the gradient norm was 11.9 times its running median, so this update is left out") +
            line % (4, 30, "warn", 1, 0, "train", "rank 5 on node2 computes 24 % longer than the median since step 700; of its time it waited for data 12 %, plans 3 %, "
                    "of theirs the others waited 15 % for other ranks"))
