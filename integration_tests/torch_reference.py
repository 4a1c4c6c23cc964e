"""Dense attention in PyTorch by the definitions in docs/attention.md. The tests of torch_ops/ compare with it."""

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
        m = ((k >= q - pattern["left"]) & (k <= q + pattern["right"])).double()
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


def attention(q, k, v, pattern):
    """Computes attention: q [B, n, H, D], k and v [B, m, Hk, D] -> [B, n, H, D]."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    score = q.transpose(1, 2) @ k.transpose(-1, -2) / q.shape[3] ** 0.5
    p = torch.softmax(score + count(pattern, q.shape[1], k.shape[2]).log().to(q), -1)
    return (p @ v).transpose(1, 2)
