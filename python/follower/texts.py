"""What viewers show of a run beside its numbers: the configuration, the processes that trained it, and the pictures of
evaluations that lie in its folder."""

import os

PICTURES = ("", "pictures", "evaluations")  # folders below the run's
MOST_BYTES = 16 << 20  # of a picture


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return None


def configuration(run):
    """The text of the run's configuration, or None."""
    return read(os.path.join(run, "config.toml"))


def started(values):
    """What a line says of the process that began, as a table in Markdown, or None."""
    start = values.get("started")
    if not isinstance(start, dict):
        return None
    cell = lambda v: str(v).replace("|", "\\|").replace("\n", " ")  # noqa: E731
    return "\n".join(["| | |", "|---|---|", *(f"| {cell(k)} | {cell(v)} |" for k, v in start.items())])


def pictures(run):
    """Yields (name, path, time of the last change) of each picture of an evaluation."""
    for folder in PICTURES:
        try:
            names = sorted(os.listdir(os.path.join(run, folder)))
        except OSError:
            continue
        for name in names:
            path = os.path.join(run, folder, name)
            if not name.endswith((".svg", ".png")) or not os.path.isfile(path) or os.path.getsize(path) > MOST_BYTES:
                continue
            yield "/".join(filter(None, ("evaluation", folder if folder == "evaluations" else "", os.path.splitext(name)[0]))), path, os.path.getmtime(path)


def png(path):
    """The bytes of a picture as PNG, which all viewers show, with its width and height. Raises ValueError if it is none."""
    with open(path, "rb") as f:
        data = f.read()
    if path.endswith(".svg"):
        import resvg_py
        data = bytes(resvg_py.svg_to_bytes(svg_string=data.decode("utf-8"), background="white", zoom=2))
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR":
        raise ValueError("this is not a picture in PNG")
    return data, int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
