#!/usr/bin/env python3
"""The documents, held against the tree: README.md, CONTRIBUTING.md and the pages below docs, of the working tree.

- A path in backticks exists, and so does a test that is named.
- A command that is printed uses a subcommand or word of ./annulus, and options that its source has.
- A key of the configuration is in the table of keys (runtime/config/keys.cc).
- The exit codes of docs/how-to/troubleshooting.md are those of common/error.h.
- Pages are mentioned by links, and so are, once on each page, the configurations and examples that it names: an
  installation has them as well. Links to pages, sections and pictures work; docs/index.md leads to every page, and
  docs/questions.md from each question to its answer.
- No page is longer than 400 lines, nor all together than 39,540 words, without printed blocks.

docs_test.py PATH/docs/index.md.
"""

import importlib.util
import os
import re
import sys
import types
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(sys.argv.pop(1))))
INDEX = "docs/index.md"
QUESTIONS = "docs/questions.md"
MOST_LINES, MOST_WORDS = 400, 39540
CODES = "docs/how-to/troubleshooting.md"
SKIPPED = ("runs",)
CODE = (".cc", ".h", ".cu", ".py", ".sh", ".bzl")
# Files that a user or a job makes, and files of other programs, that look like ours.
ELSEWHERE = re.compile(r"^(runs|models|tokens|out|data|corpus|gpu-report|bench|my|path|text|shards|share|PREFIX|RUN|bin|lib|include|"
                       r"ATen|etc|usr|opt|home|scratch|site-packages|transformers|torch|quickstart[\w-]*|checkpoints|step-\w+)/")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def tree():
    paths = set()
    for folder, folders, names in os.walk(ROOT):
        inside = os.path.relpath(folder, ROOT)
        folders[:] = [f for f in folders if not f.startswith((".", "bazel-", "__pycache__"))
                      and not (inside == "." and f in SKIPPED)]
        paths.update(os.path.normpath(os.path.join(inside, n)) for n in names)
        paths.add(inside)
    return paths


PATHS = tree()
FOLDERS = {p.split("/")[0] for p in PATHS if "/" in p}
DEFECTS = "tests/attention/execution/defects.md"
PAGES = {p: read(p) for p in sorted(PATHS) if p in ("README.md", "CONTRIBUTING.md", DEFECTS) or re.fullmatch(r"docs/([\w-]+/)*[\w-]+\.md", p)}
# These name things that are gone, or of another workspace.
MORE_PAGES = {p: read(p) for p in sorted(PATHS) if p == "CHANGELOG.md" or re.fullmatch(r"(examples/\w+/README|benchmarks/results/[\w-]+)\.md", p)}
SOURCES = {p: read(p) for p in PATHS if (p.endswith(CODE) or os.path.basename(p) in ("annulus", "BUILD"))
           and os.path.isfile(os.path.join(ROOT, p))}
ALL_CODE = "\n".join(SOURCES.values())
PROGRAMS = "\n".join(text for path, text in SOURCES.items() if not path.startswith(("tests/", "integration_tests/")))


def quoted(text):
    return re.findall(r"`([^`\n]+)`", re.sub(r"(?m)^    .*$", "", text))


def paths_of(text):
    """The paths of this tree that a page names."""
    for word in quoted(text):
        if re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*/[\w.+-]*", word) \
                and (word.split("/")[0] in FOLDERS or word.endswith((".cc", ".h", ".cu"))) \
                and not ELSEWHERE.match(word) and "NAME" not in word:
            yield word


def missing_paths(pages):
    names = {os.path.basename(p) for p in PATHS}
    faults = []
    for page, text in pages.items():
        for word in paths_of(text):
            path = word.rstrip("/")
            if path not in PATHS and not any(p.rsplit(".", 1)[0] == path or p.startswith(path + ".") for p in PATHS):
                faults.append("%s: %s is not there" % (page, word))
        for word in quoted(text):
            if re.fullmatch(r"\w+_test\.(cc|py|sh)", word) and word not in names:
                faults.append("%s: there is no test file %s" % (page, word))
    return faults


def missing_tests(pages):
    made = {(s, n) for s, n in re.findall(r"(?:TEST\w*|RC_GTEST\w*)\(\s*(\w+),\s*(\w+)", ALL_CODE)}
    suites = {s for s, _ in made}
    instances = set(re.findall(r"(?:INSTANTIATE_TEST_SUITE_P|INSTANTIATE_TYPED_TEST_SUITE_P)\(\s*\w+,\s*(\w+)", ALL_CODE))
    methods = set(re.findall(r"def (test_\w+)\(", ALL_CODE))
    faults = []
    for page, text in pages.items():
        for word in quoted(text):
            match = re.fullmatch(r"([A-Z]\w+)\.([A-Z]\w+)", word)
            if match and match.group(1) in suites | instances and match.groups() not in made:
                faults.append("%s: there is no test %s" % (page, word))
            if re.fullmatch(r"test_\w+", word) and word not in methods:
                faults.append("%s: there is no test %s" % (page, word))
    return faults


def commands(text):
    """The words of each printed command of ours, after the program's name."""
    for line in re.findall(r"(?m)^    (.*)$", text) + quoted(text):
        for command in re.findall(r"(?:^|[\s;&|(])(?:\./)?annulus ([a-z].*)", line):
            if line.strip().startswith(("./annulus", "annulus")) or "./annulus " in line:
                yield re.split(r"\s{2,}|\s[#;|&>]", command)[0].split()


def subcommands():
    table = re.findall(r'\.name = "(\w+)"', SOURCES["launcher/subcommands.cc"])
    script = re.findall(r"\b(test|install|wheel|torch|docs|examples|setup|tokenizer)\b", SOURCES["annulus"])
    return set(table) | set(script) | {"help"}


def wrong_commands(pages):
    known, faults = subcommands(), []
    for page, text in pages.items():
        for words in commands(text):
            if re.fullmatch(r"[a-z]+", words[0]) and words[0] not in known:
                faults.append("%s: `annulus %s`: there is no such subcommand" % (page, words[0]))
            for word in words:
                option = re.match(r"--[a-z][a-z0-9-]+", word)
                if option and words[0] in known and not re.search(re.escape(option.group()) + r"(?![\w-])", PROGRAMS):
                    faults.append("%s: `annulus %s`: nothing reads %s" % (page, " ".join(words), option.group()))
    return faults


def keys():
    return {"%s.%s" % pair for pair in re.findall(r'\{ANNULUS_KEY(?:_AT)?\((\w+), (\w+)[,)]', SOURCES["runtime/config/keys.cc"])}


def wrong_keys(pages):
    known, faults = keys(), []
    sections = {k.split(".")[0] for k in known}
    for page, text in pages.items():
        for word in quoted(text):
            match = re.match(r"([a-z_]+)\.([a-z_0-9]+)(?: ?=.*)?$", word)
            if match and match.group(1) in sections and "%s.%s" % match.groups() not in known:
                if not re.search(r"\.(toml|py|cc|h|md|txt|json|safetensors|bin|idx|log|svg|jsonl|yaml|sh)$", match.group().split("=")[0].strip()):
                    faults.append("%s: %s is no key of the configuration" % (page, word))
    return faults


def wrong_codes(guide):
    said = {int(n) for n in re.findall(r"(?m)^\| (\d+) \| [a-z]", guide.split("Exit codes", 1)[-1])}
    real = {int(n) for n in re.findall(r"\bk[A-Z]\w* = (\d+)", SOURCES["common/error.h"])} | {0}
    return [CODES + ": exit codes %s; common/error.h has %s" % (sorted(said), sorted(real))] if not real <= said else []


def anchors(text):
    """The anchors that a code host gives to the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings(text)}


def broken_links(pages):
    faults = []
    for page, text in pages.items():
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
            path = os.path.normpath(os.path.join(os.path.dirname(page), link)) if link else page
            if re.match(r"[a-z]+:", link):
                continue
            if path not in PATHS and path not in pages:
                faults.append("%s: %s is not there" % (page, link))
            elif anchor and anchor not in anchors(pages.get(path, "")):
                faults.append("%s: %s has no section #%s" % (page, path, anchor))
    return faults


def bare_mentions(pages):
    """Mentions of pages that are not links."""
    faults = []
    for page, text in pages.items():
        for word in quoted(text):
            path = next((p for p in PAGES if p == word or p.endswith("/" + word)), None)
            if path and path != page:
                faults.append("%s: `%s` should be a link" % (page, word))
    return faults


def unlinked_files(pages):
    """Configurations and examples that a page names and nowhere links."""
    faults = []
    for page, text in pages.items():
        links = {os.path.normpath(os.path.join(os.path.dirname(page), l)) for l in re.findall(r"\]\(([^)#\s]+)", text)}
        faults += ["%s: `%s` should be a link, once" % (page, word) for word in set(quoted(text))
                   if word.startswith(("configs/", "examples/")) and word.rstrip("/") in PATHS
                   and not any(l == word.rstrip("/") or l.startswith(word.rstrip("/") + "/") for l in links)]
    return faults


def joined_lines(pages):
    """Lines that a reflow has joined: a paragraph that begins with one blank, a table in one line."""
    return ["%s: \"%s\"" % (page, line[:60]) for page, text in pages.items() for line in text.split("\n")
            if re.match(r" \S", line) or re.search(r"\S \|(-+\|)+", line)]


def headings(text):
    return [h.replace("`", "") for h in re.findall(r"(?m)^#+ (.*)$", text)]


def unanswered(pages):
    """The questions without a link to their answer. (broken_links says which links lead nowhere.)"""
    rows = re.findall(r"(?m)^\| (\d+)\. .* \| (.*) \|$", pages[QUESTIONS])
    faults = [] if len(rows) >= 20 else [QUESTIONS + " has %d questions, fewer than 20" % len(rows)]
    return faults + ["%s: question %s has no link to its answer" % (QUESTIONS, n) for n, row in rows if "](" not in row]


def unlinked(pages):
    """The pages of docs that docs/index.md does not name: a reader gets to all others from there."""
    links = {os.path.normpath(os.path.join("docs", l)) for l in re.findall(r"\]\(([^)#\s]+)", pages[INDEX])}
    return ["%s has no link to %s" % (INDEX, p) for p in pages if p.startswith("docs/") and p not in links | {INDEX}]


def too_long(pages):
    """Pages that a reader does not get through, and pages that together say too much."""
    docs = {p: t for p, t in pages.items() if p.startswith("docs/") or p == "README.md"}
    faults = ["%s has %d lines, more than %d" % (p, t.count("\n"), MOST_LINES) for p, t in docs.items() if t.count("\n") > MOST_LINES]
    words = sum(len(re.sub(r"(?ms)^```.*?^```", "", t).split()) for t in docs.values())  # without what a command printed
    return faults + (["README.md and docs have %d words, more than %d: say things once, and leave out history" % (words, MOST_WORDS)]
                     if words > MOST_WORDS else [])


class Documents(unittest.TestCase):
    def none(self, faults):
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_named_files_exist(self):
        self.none(missing_paths(PAGES))

    def test_named_tests_exist(self):
        self.none(missing_tests(PAGES))

    def test_printed_commands_have_subcommands_and_options_of_the_program(self):
        self.none(wrong_commands(PAGES))

    def test_named_keys_are_keys_of_the_configuration(self):
        self.none(wrong_keys(PAGES))

    def test_exit_codes_are_those_of_the_program(self):
        self.none(wrong_codes(PAGES[CODES]))

    def test_links_lead_somewhere(self):
        self.none(broken_links(PAGES | MORE_PAGES))

    def test_no_lines_are_joined(self):
        self.none(joined_lines(PAGES | MORE_PAGES))

    def test_pages_are_mentioned_by_links(self):
        self.none(bare_mentions(PAGES))

    def test_configurations_and_examples_are_linked(self):
        self.none(unlinked_files(PAGES))

    def test_questions_have_links_to_their_answers(self):
        self.none(unanswered(PAGES))

    def test_index_leads_to_every_page(self):
        self.none(unlinked(PAGES))

    def test_pages_are_short(self):
        self.none(too_long(PAGES))

    def test_public_headers_have_a_reference(self):
        """./annulus docs needs Doxygen and Sphinx; which pages it makes of headers does not."""
        spec = importlib.util.spec_from_file_location("site_build", os.path.join(ROOT, "docs", "site", "build.py"))
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        written = {}
        headers = build.cpp_pages(types.SimpleNamespace(write=written.__setitem__))
        self.assertEqual(len(written), len(headers) + 1)
        self.assertIn("attention/oracle/oracle.h", headers)
        self.assertIn("[attention/testing/oracle.h](attention-oracle-oracle.md)", written["reference/cpp/index.md"])


class Planted(unittest.TestCase):
    """Faults that must be found."""

    def found(self, check, text, words):
        faults = check({"docs/x.md": text})
        self.assertTrue(any(words in f for f in faults), faults)

    def test_a_file_that_moved(self):
        self.found(missing_paths, "see `memory/recompute.cc`", "memory/recompute.cc is not there")
        self.found(missing_paths, "see `topology/placement.h`", "topology/placement.h is not there")

    def test_a_test_that_was_renamed(self):
        self.found(missing_tests, "`Merge.Nonsense` and `test_nothing_of_the_kind`", "test_nothing_of_the_kind")

    def test_a_subcommand_and_an_option_that_do_not_exist(self):
        self.found(wrong_commands, "    ./annulus trian configs/quickstart.toml\n", "there is no such subcommand")
        self.found(wrong_commands, "    ./annulus launch -n 2 train --no-such-thing x\n", "nothing reads --no-such-thing")

    def test_a_key_with_a_typo(self):
        self.assertIn("data.context", keys())
        self.found(wrong_keys, "`data.contxt`", "data.contxt is no key")

    def test_a_page_and_a_section_that_are_gone(self):
        self.found(broken_links, "[x](gone.md)", "gone.md is not there")
        self.found(broken_links, "[x](../README.md#gone)", "README.md has no section #gone")
        self.found(joined_lines, " | a | b | |---|---| | c | d |", "| a | b |")
        self.found(bare_mentions, "see `docs/explanation/memory.md`", "`docs/explanation/memory.md` should be a link")
        self.found(unlinked_files, "see `configs/quickstart.toml`", "`configs/quickstart.toml` should be a link")
        self.assertEqual(unlinked_files({"docs/x.md": "[`configs/quickstart.toml`](../configs/quickstart.toml)"}), [])
        pages = {QUESTIONS: "\n".join("| %d. Why? | see above |" % i for i in range(20))}
        self.assertEqual(len(unanswered(pages)), 20)

    def test_a_page_that_nothing_leads_to_and_pages_that_are_too_long(self):
        pages = {INDEX: "[x](how-to/x.md)", "docs/how-to/x.md": "word " * MOST_WORDS, "docs/y.md": "\n" * (MOST_LINES + 1)}
        self.assertEqual(unlinked(pages), [INDEX + " has no link to docs/y.md"])
        self.assertEqual(len(too_long(pages)), 2)

    def test_an_exit_code_that_is_not_said(self):
        self.assertTrue(wrong_codes("## Exit codes\n| 0 | done |\n"))


if __name__ == "__main__":
    unittest.main()
