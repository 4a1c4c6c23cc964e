"""The numbers of a line of metrics.jsonl by name. The last part of a name is the key in docs/reference/formats.md; the first
one groups names, as viewers do."""

import math

GROUPS = (("validation_", "validation"), ("exposed_", "waiting"), ("checkpoint", "checkpoints"), ("slow_", "ranks"),
          ("tokens_per_second", "speed"), ("model_flops_utilization", "speed"), ("seconds", "speed"), ("plan", "program"),
          ("offloaded_bytes", "program"))


def group(key):
    return next((name for begin, name in GROUPS if key.startswith(begin)), "training")


def number(value):
    """A number as a float, null (a number that JSON cannot write) as NaN, anything else as None."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def scalars(values):
    """Yields (name, number) for each number of a line."""
    if "rewound_from" in values:  # its other numbers are of a step that is gone
        values = {"rewound_from": values["rewound_from"]}
    for key, value in values.items():
        if key in ("step", "memory_plan", "started"):
            continue
        if isinstance(value, dict):
            for name, row in value.items():
                for inner, one in (row.items() if isinstance(row, dict) else ((None, row),)):
                    if number(one) is not None:
                        yield "/".join(filter(None, (key, name, inner))), number(one)
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if number(one) is not None:
                    yield f"{key}/{i}", number(one)
        elif number(value) is not None:
            yield f"{group(key)}/{key}", number(value)
