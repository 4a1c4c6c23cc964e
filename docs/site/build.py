#!/usr/bin/env python3
"""Builds the site of the documents: build.py --program ANNULUS --work FOLDER [--jobs N]. Prints the path of its first page.

It puts copies of the pages (README.md, CONTRIBUTING.md, docs, and what they link to) into FOLDER/pages, beside pages that it
makes: the subcommands from their --help, the package for Python from its docstrings, the public headers from their comments.
Sphinx makes FOLDER/html of them. A linked source file becomes a page that shows it. Called by tools/docs.sh, with the Python
that has Sphinx, Breathe, MyST and Furo (docs/site/requirements.txt); Doxygen must be installed.
"""

import argparse
import ast
import glob
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".cu": "cpp", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".json": "json",
             ".bzl": "python", ".sbatch": "bash"}
PICTURES = (".svg", ".png")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def is_page(path):
    return path.endswith(".md") and os.path.isfile(os.path.join(ROOT, path))


def place_of(path):
    """Where the site has the page of a file: README.md is the first page, other pages keep their places."""
    return "index.md" if path == "README.md" else path if path.endswith(".md") else "sources/%s.md" % path


def rewritten(page, text, seen):
    """The text of a page, with links to what the site has. Adds the files that it links to to `seen`."""

    def link(match):
        target = match.group(2)
        if not target or re.match(r"[a-z]+:", target):
            return match.group()
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        real = os.path.join(ROOT, path)
        if os.path.isdir(real):
            path = path + "/README.md" if os.path.exists(real + "/README.md") else path
        elif not os.path.isfile(real):
            return match.group()
        if path not in seen:
            seen.append(path)
        if path.endswith(PICTURES):
            return match.group()
        to = os.path.relpath(place_of(path), os.path.dirname(place_of(page)) or ".")
        return match.group(1) + to + (match.group(3) or "") + match.group(4)

    return LINK.sub(link, text)


def source_page(path):
    """A page that shows a file, or lists a folder. The search leaves it out."""
    head = "---\norphan: true\nnosearch: true\n---\n# %s\n\n" % path
    real = os.path.join(ROOT, path)
    if os.path.isdir(real):
        text, language = "\n".join(sorted(os.listdir(real))), "text"
    else:
        text, language = read(path), LANGUAGES.get(os.path.splitext(path)[1], "text")
        if os.path.basename(path) in ("BUILD", "BUILD.bazel", "WORKSPACE"):
            language = "python"
        elif text.startswith("#!/bin/bash"):
            language = "bash"
    fence = "`" * (max([2] + [len(run) for run in re.findall(r"`+", text)]) + 1)
    return head + "%s{code-block} %s\n%s\n%s\n" % (fence, language, text, fence)


class Pages:
    """The folder that Sphinx reads."""

    def __init__(self, folder):
        self.folder, self.written = folder, set()

    def write(self, path, text):
        place = os.path.join(self.folder, path)
        self.written.add(os.path.normpath(place))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8") as f:
            f.write(text)

    def copy(self, path):
        place = os.path.join(self.folder, path)
        self.written.add(os.path.normpath(place))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copyfile(os.path.join(ROOT, path), place)

    def remove_others(self):
        for path in glob.glob(os.path.join(glob.escape(self.folder), "**"), recursive=True):
            if os.path.isfile(path) and os.path.normpath(path) not in self.written:
                os.remove(path)


def navigation(names):
    """(heading, pages) of docs/index.md: each page below the heading (`**Start**`) whose list links it. The index itself, and what
    it links outside of lists, is the overview."""
    page = "docs/index.md"
    overview, groups, placed = [page], [], {"README.md", page}
    for line in read(page).split("\n"):
        heading = re.match(r"\*\*(.*)\*\*$", line)
        if heading:
            groups.append((heading.group(1), []))
        for match in LINK.finditer(line):
            path = os.path.normpath(os.path.join(os.path.dirname(page), match.group(2)))
            if path in names and path not in placed:
                placed.add(path)
                (groups[-1][1] if groups and line.startswith("- ") else overview).append(path)
    return [("Overview", overview), *groups, ("More", [n for n in names if n not in placed])]


def public_headers():
    """{target: headers} of the targets that programs may use, by their visibility."""
    found = {}
    for build in sorted(glob.glob(os.path.join(ROOT, "*", "**", "BUILD"), recursive=True)):
        package = os.path.relpath(os.path.dirname(build), ROOT)
        if package.split("/")[0] in ("tests", "integration_tests", "bazel", "examples"):
            continue
        for node in ast.parse(open(build, encoding="utf-8").read()).body:
            call = getattr(node, "value", None)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("cc_part", "cc_library"):
                given = {k.arg: k.value for k in call.keywords}
                if "//visibility:public" in ast.unparse(given.get("visibility", ast.Constant(""))):
                    name = ast.literal_eval(given["name"])
                    default = [name + ".h"] if call.func.id == "cc_part" and "srcs" not in given else []
                    headers = ast.literal_eval(given["hdrs"]) if "hdrs" in given else default
                    if headers:
                        found["//%s:%s" % (package, name)] = [package + "/" + h for h in headers]
    return found


def with_included(headers):
    found = list(headers)
    for header in found:
        for name in re.findall(r'(?m)^#include "(?:annulus/)?([^"]+)"', read(header)):
            if name not in found and os.path.isfile(os.path.join(ROOT, name)):
                found.append(name)
    return found


def forwarded(header):
    """Returns the header that another one only includes, under a second name; itself for all others."""
    code = re.sub(r"(?m)//.*$", "", read(header)).split()
    return code[3].strip('"').removeprefix("annulus/") if code[:3] == ["#pragma", "once", "#include"] and len(code) == 4 else header


def cpp_pages(pages):
    targets = public_headers()
    public = [h for headers in targets.values() for h in headers]
    headers = [h for h in with_included(public) if forwarded(h) == h]
    names = [os.path.basename(h) for h in headers]
    if len(set(names)) < len(names):
        sys.exit("build.py: public headers need different names: " + ", ".join(sorted({n for n in names if names.count(n) > 1})))

    def name(header):
        return header.removesuffix(".h").replace("/", "-")

    for header in headers:
        # Breathe finds a file by the name that Doxygen gives it: without folders, where no other has the name.
        text = "# %s\n\n```{doxygenfile} %s\n```\n" % (header, os.path.basename(header))
        pages.write("reference/cpp/%s.md" % name(header), text)
    text = "# C++\n\nThe headers of the targets that programs depend on, made from their comments.\n\n| header | target |\n|---|---|\n"
    text += "".join("| [%s](%s.md) | `@annulus%s` |\n" % (h, name(forwarded(h)), t) for t, hs in targets.items() for h in hs)
    text += "\nHeaders that these include, for the types that they name:\n\n"
    text += "".join("- [%s](%s.md)\n" % (h, name(h)) for h in headers if h not in public)
    text += "\n```{toctree}\n:hidden:\n\n%s\n```\n" % "\n".join(name(h) for h in headers)
    pages.write("reference/cpp/index.md", text)
    return headers


def python_page(pages):
    pages.write("reference/python.md", "# Python\n\n```{eval-rst}\n.. automodule:: annulus\n   :members:\n\n"
                ".. automodule:: annulus.transformers\n   :members: register, shard_batch\n\n"
                ".. automodule:: annulus.testing\n   :members:\n```\n")


def help_of(program, *words):
    environment = dict(os.environ, COLUMNS="100", ANNULUS_PROGRAM="./annulus", NO_COLOR="1")
    done = subprocess.run([program, *words, "--help"], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit("build.py: `%s --help` failed: %s" % (" ".join([program, *words]), done.stderr))
    return done.stdout.rstrip()


def subcommands_page(pages, program):
    """The subcommands are those of the program's table, in the order of the overview."""
    overview = help_of(program)
    named = re.findall(r'\.name = "(\w+)"', read("launcher/subcommands.cc"))
    shown = sorted((n for n in named if re.search(r"(?m)^\s+%s\b" % n, overview)), key=lambda n: re.search(r"(?m)^\s+%s\b" % n, overview).start())
    text = "# Subcommands\n\nWhat `./annulus --help` and the `--help` of each subcommand print.\n\n```text\n%s\n```\n" % overview
    for name in shown:
        text += "\n## annulus %s\n\n````text\n%s\n````\n" % (name, help_of(program, name))
    pages.write("reference/subcommands.md", text)


def documents(pages):
    """Copies the pages, and what they link to. Returns the pages of the navigation."""
    seen = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    seen += sorted(os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, "docs", "**", "*.md"), recursive=True))
    texts = {}
    for path in seen:  # grows
        if is_page(path):
            texts[path] = rewritten(path, read(path), seen)
        elif path.endswith(PICTURES):
            pages.copy(path)
        else:
            pages.write(place_of(path), source_page(path))
    made = ["reference/subcommands", "reference/python", "reference/cpp/index"]
    groups = [(heading, [place_of(n).removesuffix(".md") for n in names]) for heading, names in navigation(list(texts))]
    groups.append(("Made from the source", made))
    titled = {"docs/index": "All pages </docs/index>"}  # its own title is that of README.md
    for heading, names in groups:
        entries = "\n".join(titled.get(n, "/" + n) for n in names)
        texts["README.md"] += "\n```{toctree}\n:hidden:\n:caption: %s\n\n%s\n```\n" % (heading, entries)
    for path, text in texts.items():
        pages.write(place_of(path), text)


def doxygen(headers, folder):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(ROOT, "docs", "site", "Doxyfile"), encoding="utf-8") as f:
        settings = f.read() + "\nINPUT = %s\nOUTPUT_DIRECTORY = %s\n" % (" ".join(headers), folder)
    done = subprocess.run(["doxygen", "-"], input=settings, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode or "warning:" in done.stderr:
        sys.exit("build.py: Doxygen could not read the comments of the public headers:\n" + done.stderr)
    # Sphinx's C++ has no designated initializers: a default value that is written with them is left out.
    for path in glob.glob(os.path.join(glob.escape(folder), "xml", "*.xml")):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        plain = re.sub(r"<initializer>\s*=?\s*\{\s*\.(?:(?!</initializer>).)*</initializer>", "", text, flags=re.S)
        if plain != text:
            with open(path, "w", encoding="utf-8") as f:
                f.write(plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--jobs", default="auto")
    options = parser.parse_args()
    work = os.path.abspath(options.work)
    pages = Pages(os.path.join(work, "pages"))
    documents(pages)
    subcommands_page(pages, options.program)
    python_page(pages)
    doxygen(cpp_pages(pages), os.path.join(work, "doxygen"))
    pages.remove_others()
    html = os.path.join(work, "html")
    # All pages are made anew: Sphinx does not see that headers and docstrings have changed.
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-a", "-W", "--keep-going", "-j", options.jobs, "-c", os.path.join(ROOT, "docs", "site"),
               "-d", os.path.join(work, "doctrees"), pages.folder, html]
    environment = dict(os.environ, ANNULUS_DOXYGEN=os.path.join(work, "doxygen", "xml"), PYTHONDONTWRITEBYTECODE="1")
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit("build.py: the site has faults; Sphinx names them above")
    print(os.path.join(html, "index.html"))


if __name__ == "__main__":
    main()
