"""Dense attention in PyTorch by the definitions in docs/explanation/attention.md. The tests of python/ops/ compare with it."""

import torch


def count(pattern, queries, keys):
    """Returns how often each (query, key) pair is counted: [queries, keys], the same for every head."""
    q = torch.arange(queries).unsqueeze(1)
    k = torch.arange(keys).unsqueeze(0)
    kind = pattern["kind"]
    if kind == "full":
        m = torch.ones(queries, keys)
    elif kind == "causal":
        m = (k <= q).double()
    elif kind == "window":
        after, before = (pattern[side] == -1 for side in ("left", "right"))  # whether the side is open
        m = ((after | (k >= q - pattern["left"])) & (before | (k <= q + pattern["right"]))).double()
    elif kind == "documents":
        number = torch.repeat_interleave(torch.arange(len(pattern["documents"])), torch.tensor(pattern["documents"]))
        m = (number.unsqueeze(1) == number.unsqueeze(0)).double()
    elif kind == "blocks":
        m = ((q // pattern["block"] - k // pattern["block"]).abs() <= pattern["window_blocks"]).double()
    elif kind == "union":
        m = sum(count(p, queries, keys) for p in pattern["of"])
    else:
        raise ValueError(kind)
    return m * (k <= q) if pattern.get("causal") else m


def text(pattern):
    """Returns the pattern as TOML."""

    def value(v):
        if isinstance(v, dict):
            return text(v)
        if isinstance(v, list):
            return "[" + ", ".join(map(value, v)) + "]"
        return {True: "true", False: "false"}[v] if isinstance(v, bool) else repr(v)

    return "{ " + ", ".join(f"{k} = {value(v)}" for k, v in pattern.items()) + " }"


def scores(q, k, pattern):
    """Returns the scores and the logarithms of the counts in sum: [B, H, n, m]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    score = q.transpose(1, 2) @ k.transpose(-1, -2) / q.shape[3] ** 0.5
    return score + count(pattern, q.shape[1], k.shape[2]).log().to(q)


def attention(q, k, v, pattern):
    """Computes attention: q [B, n, H, D], k and v [B, m, Hk, D] -> [B, n, H, D]."""
    v = v.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    return (torch.softmax(scores(q, k, pattern), -1) @ v).transpose(1, 2)


def lse(q, k, pattern):
    """Computes the logarithm of the softmax's denominators: [B, H, n]."""
    return torch.logsumexp(scores(q, k, pattern), -1)
