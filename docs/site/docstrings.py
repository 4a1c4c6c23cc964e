"""Turns the plain docstrings of the package for Python into reStructuredText, for autodoc (conf.py). Paragraphs and indented
examples stay; "name: text", where names are parameters, becomes an entry of a list; words in backticks are code."""

import inspect
import re

ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def escaped(text):
    parts = re.split(r"`([^`]+)`", text)
    plain = [re.sub(r"([\\*|_])", r"\\\1", p) if i % 2 == 0 else "``%s``" % p for i, p in enumerate(parts)]
    return "".join(plain)


def parameters(thing):
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return set()


def converted(lines, names):
    out, state, blank = [], "text", True  # state: text, entry, code
    # A docstring of one sentence and an example has lost the example's indentation.
    if len(lines) > 2 and lines[0].endswith(":") and not lines[1].strip() and not any(line.startswith(" ") for line in lines):
        lines = lines[:2] + ["    " + line if line.strip() else "" for line in lines[2:]]
    for line in lines:
        indented = line.startswith("    ")
        entry = ENTRY.match(line)
        if not line.strip():
            blank = True
            out.append("")
            continue
        if entry and set(entry.group(1).split(", ")) <= names:
            out += ["", ", ".join("**%s**" % n for n in entry.group(1).split(", ")), "    " + escaped(entry.group(2))]
            state = "entry"
        elif indented and (state == "code" or (blank and state != "entry")):
            if state != "code":
                out += ["::", ""]
            state = "code"
            out.append(line)
        elif state == "entry" and not blank:
            out.append("    " + escaped(line.strip()))
        else:
            if state != "text":
                out.append("")
            state = "text"
            out.append(escaped(line.strip()))
        blank = False
    return out + [""]


def to_rst(app, what, name, thing, options, lines):
    lines[:] = converted(lines, parameters(thing))
