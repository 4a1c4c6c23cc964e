#!/usr/bin/env python3
"""Doxygen's input filter for the headers of annulus, whose comments are plain: doxygen_filter.py HEADER prints the header.

A comment directly before a declaration becomes that declaration's documentation, and so does a comment behind it in its
line. The comment that opens a file describes the file. A comment that begins with "----" names the declarations that
follow it. Comments keep their paragraphs, lists ("- ...") and indented code; all other text is shown as it is written.
Used by docs/site/Doxyfile.
"""

import re
import sys

COMMENT = re.compile(r"^(\s*)//( ?)(.*)$")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
SPECIAL = re.compile(r'[\\@&$#<>%"]')


def escaped(text):
    """The text, without anything that Doxygen would take for a command of its own. Words in backticks are code."""
    text = SPECIAL.sub(lambda m: "\\" + m.group(), text)
    return re.sub(r"`([^`]+)`", r"<tt>\1</tt>", text)


def prose(lines):
    """A line of Doxygen for each line of a comment."""
    out, code, item, after_blank = [], False, False, True  # item: in an item of a list
    for line in lines:
        indent = len(line) - len(line.lstrip())
        item = (item and indent == 2) or line.startswith("- ")
        is_code = bool(line.strip()) and indent >= 2 and not item and (code or after_blank or indent >= 4)
        if is_code and not code:
            out.append("@verbatim")
        elif code and not is_code and line.strip():
            out.append("@endverbatim")
        code = is_code or (code and not line.strip())
        if code:
            out.append(line)
        else:
            out.append(line[:indent] + escaped(line.strip()))
        after_blank = not line.strip() or line.endswith(":")
    if code:
        out.append("@endverbatim")
    return out


def block(indent, first, lines):
    """A comment for Doxygen. Its lines begin without stars, which would be shown in code."""
    return ["%s/**%s" % (indent, " " + first if first else ""), *prose(lines), indent + " */"]


def filtered(text, path):
    out, comment, group = [], [], None
    lines = text.split("\n")
    opening, column = True, None  # column: where the comment behind the line before begins

    def close_group():
        nonlocal group
        if group is not None:
            out.append(group + "///@}")
            group = None

    for i, line in enumerate(lines):
        match = COMMENT.match(line)
        if match and column is not None and len(match.group(1)) == column:
            out.append("%s///< %s" % (match.group(1), escaped(match.group(3).strip())))
            continue
        column = None
        if match:
            comment.append(match)
            continue
        if comment:
            indent, said = comment[0].group(1), [m.group(3) for m in comment]
            if opening:
                out += block("", "@file " + path, [""] + said)
            elif said[0].startswith("----"):
                close_group()
                title, _, rest = said[0].strip("- ").partition(". ")
                out += block(indent, "@name " + escaped(title.rstrip(".")), ([""] + [rest] + said[1:]) if rest else said[1:])
                out.append(indent + "///@{")
                group = indent
            elif not line.strip() or re.match(r"\s*(#|}|namespace\b)", line):
                out += [m.group() for m in comment]  # of no declaration
            else:
                out += block(indent, "", said)
            comment = []
        if line.strip():
            opening = False
        if group is not None and line.strip() and len(line) - len(line.lstrip()) < len(group):
            close_group()
        column = STRING.sub(lambda m: "_" * len(m.group()), line).find("//")  # a "//" inside a string is no comment
        code = line[:column].rstrip() if column > 0 else ""
        # A comment behind the end of a scope, an include or an opening brace says nothing of a declaration.
        if code.strip() and not re.match(r"\s*(}|#|.*\{$)", code):
            out.append("%s  ///< %s" % (code, escaped(line[column + 2 :].strip())))
        else:
            column = None
            out.append(line)
    return "\n".join(out)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as header:
        sys.stdout.write(filtered(header.read(), sys.argv[1]))
