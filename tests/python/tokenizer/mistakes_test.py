#!/usr/bin/env python3
"""Tests errors of tokenizing: one message with the place, the right exit code, and no incomplete output."""

import gzip
import json
import os
import resource
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()


class Mistakes(support.Test):
    def refused(self, code, pattern, *options, kind="llama3", **more):
        super().refused(code, pattern, self.words(*options, kind=kind), **more)
        self.assertFalse(os.path.exists(self.path("out")), "something is left behind")

    def test_refuses_missing_inputs(self):
        self.refused(3, r"--input none\*\.txt matches no file", "--input", "none*.txt")
        os.mkdir(self.path("sub"))
        self.refused(3, r"--input sub is a folder: name its files, --input 'sub/\*\*'", "--input", "sub")
        os.symlink("gone", self.path("link.txt"))
        self.refused(3, "link.txt cannot be read: No such file", "--input", "*.txt")

    def test_refuses_what_is_no_file(self):
        self.write("a.txt", "a")
        os.mkfifo(self.path("pipe.txt"))  # whoever opens it waits for a writer, and none comes
        for glob in ("*.txt", "pipe.txt", "**"):
            self.refused(3, r"pipe.txt is a pipe \(FIFO\), but a file is expected", "--input", glob)
        self.refused(3, "/dev/null is a device, but a file is expected", "--input", "/dev/nul[l]")
        for pipe in ("pipe.txt", "folder"):
            if pipe == "folder":
                os.mkdir(self.path("folder"))
                os.mkfifo(self.path("folder/tokenizer.json"))
            words = ["tokenize", "--tokenizer", self.path(pipe), "--input", "a.txt", "--output", self.path("out")]
            support.Test.refused(self, 3, "(is a pipe|holds no tokenizer)", words)
        os.remove(self.path("pipe.txt"))
        os.mkdir(self.path("sub"))
        self.write("sub/b.txt", "b")
        os.symlink("gone", self.path("sux"))
        self.refused(3, "sux cannot be read: No such file", "--input", "su[bx]/*.txt")
        self.tokenize("--input", "su[b]/*.txt", "--input", "**/a.txt")
        self.assertEqual(support.read_folder(self.path("out"))[0], support.library_ids("llama3", ["b", "a"]))

    def test_a_folder_on_the_way_need_not_be_readable(self):
        os.makedirs(self.path("way/below"))
        self.write("way/below/a.txt", "a")
        os.chmod(self.folder, 0o755)
        os.chmod(self.path("way"), 0o311)
        self.addCleanup(os.chmod, self.path("way"), 0o755)
        program = """if True:
            import sys
            sys.path.insert(0, sys.argv[1])
            import files
            for glob in sys.argv[2:]:
                try:
                    print(*files.matches(glob))
                except files.Refused as error:
                    print(error)
        """
        # Modes of folders do not bind root unless it gives up these capabilities.
        bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        done = subprocess.run([*bound, sys.executable, "-B", "-c", program, support.PROGRAM, "way/below/*.txt", "way/*/a.txt"],
                              cwd=self.folder, capture_output=True, text=True, timeout=support.LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr)
        read, listed = done.stdout.splitlines()
        self.assertEqual(read, "way/below/a.txt", done.stderr)
        self.assertRegex(listed, "way/, which cannot be read: Permission denied")

    def test_runs_with_closed_standard_streams(self):
        self.write("a.txt", "a " * 1000)
        self.tokenize("--input", "a.txt", output="whole")
        for i, closed in enumerate(("<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-")):
            call = [sys.executable, "-I", "-B", support.PROGRAM]
            for words, code in ((self.words("--input", "a.txt", output=f"out{i}"), 0),
                                (self.words("--input", "none", output=f"none{i}"), 3)):
                done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *call, *words], cwd=self.folder, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=support.LIMIT)
                self.assertEqual(done.returncode, code, f"{closed}: {done.stderr}")
                errors = [] if code == 0 or "2" in closed else ["annulus: [tokenize] --input none matches no file"]
                self.assertEqual(done.stderr.splitlines(), errors, closed)
            self.assertTrue(support.contents(self.path(f"out{i}")) == support.contents(self.path("whole")), closed)

    def test_refuses_empty_inputs(self):
        self.write("empty.jsonl", "")
        self.refused(3, "the input files hold no tokens: empty.jsonl", "--input", "empty.jsonl")
        self.write("empty.txt", "")
        self.refused(3, "the input files hold no tokens", "--input", "empty.txt", kind="qwen2")

    def test_refuses_malformed_json_lines(self):
        good = json.dumps({"text": "x " * 1000, "id": 1}) + "\n"
        lines = good * 1500  # enough for several units of work
        for bad, pattern in (('{"text": "a"\n', "is not JSON: Expecting"), ("[1]\n", "is not a JSON object"),
                             ('{"body": "a", "id": 2}\n', 'has no field "text": --field takes one of body, id'),
                             ('{"text": 5}\n', 'the field "text" is 5, but a text is expected'),
                             ('{"text": null}\n', 'the field "text" is null'),
                             ('{"text": "\\ud800"}\n', "half of a surrogate pair"),
                             ('{"text": ' + "7" * 5000 + "}\n", 'the field "text" is Infinity, but a text'),
                             ("[" * 100000 + "\n", "is nested too deeply: .* leave the line out")):
            content = lines + "\n" + bad + good
            for name in ("bad.jsonl", "bad.jsonl.gz") if bad == "[1]\n" else ("bad.jsonl",):
                self.write(name, gzip.compress(content.encode()) if name.endswith("gz") else content)
                self.refused(3, f"{name}, line 1502.*{pattern}", "--input", name)

    def test_numbers_of_any_size_are_json(self):
        numbers = ("7" * 5000, "-" + "7" * 50000, "1e999", "0." + "3" * 5000)
        self.write("a.jsonl", "".join(f'{{"n": {n}, "text": "a", "list": [{n}]}}\n' for n in numbers))
        self.tokenize("--input", "a.jsonl")
        self.assertEqual(support.read_folder(self.path("out"))[0], support.library_ids("llama3", ["a"] * len(numbers)))
        self.write("b.jsonl", '{"n": ' + "7" * 5000 + ', "text": "a"\n')
        super().refused(3, "b.jsonl, line 1 is not JSON: Expecting", self.words("--input", "b.jsonl", output="b"))

    def test_reports_the_first_error(self):
        good = json.dumps({"text": "x " * 1000}) + "\n"
        self.write("a.jsonl", good * 1500 + "first\n" + good * 1500 + "second\n")
        self.write("b.parquet", "no Parquet")
        for processes in ("1", "3"):
            self.refused(3, "a.jsonl, line 1501 is not JSON", "--input", "a.jsonl", "--input", "b.parquet", "--processes", processes)

    def test_refuses_or_replaces_invalid_utf8(self):
        self.write("a.txt", b"abc\xff\xfedef")
        self.refused(3, "a.txt: byte 3 is not UTF-8; .*--bad-utf8 replace", "--input", "a.txt")
        self.write("b.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n')
        self.refused(3, "b.jsonl, line 2: byte 10 is not UTF-8", "--input", "b.jsonl")
        self.write("c.jsonl", r'{"text": "a\ud800b\ud83d\ude00"}')
        self.tokenize("--input", "a.txt", "--input", "b.jsonl", "--input", "c.jsonl", "--bad-utf8", "replace")
        self.assertEqual(support.read_folder(self.path("out"))[0], support.library_ids(
            "llama3", ["abc\ufffd\ufffddef", "ok", "\ufffd", "a\ufffdb\U0001f600"]))

    def test_refuses_damaged_compressed_files(self):
        import zstandard

        content = (json.dumps({"text": "abc " * 100}) + "\n").encode() * 5000
        for name, packed in (("a.jsonl.gz", gzip.compress(content)), ("a.jsonl.zst", zstandard.compress(content))):
            self.write(name, packed[:-9])
            self.refused(3, f"{name} ends inside its compressed data: it is truncated", "--input", name)
            self.write(name, b"nothing of the kind")
            self.refused(3, f"{name} cannot be unpacked: ", "--input", name)

    def test_refuses_malformed_parquet(self):
        self.write("a.parquet", "PAR1 and nothing that is Parquet PAR1")
        self.refused(3, "a.parquet is not a Parquet file that can be read: ", "--input", "a.parquet")
        self.write("a.parquet", "")
        self.refused(3, "a.parquet is not a Parquet file that can be read: ", "--input", "a.parquet")
        support.write_parquet(self.path("b.parquet"), ["a", None, "b"])
        self.refused(3, 'b.parquet: row 1 of row group 0 has no text in the column "text"', "--input", "b.parquet")
        self.refused(3, 'b.parquet has no column "body": --field takes one of id, text', "--input", "b.parquet", "--field", "body")
        self.refused(3, 'b.parquet: the column "id" is of type int64, but text is expected', "--input", "b.parquet", "--field", "id")
        support.write_parquet(self.path("c.parquet"), support.texts(2000), rows=500)
        with open(self.path("c.parquet"), "r+b") as f:
            f.seek(1000)
            f.write(b"\xff" * 5000)
        self.refused(3, "c.parquet: the rows from 0 on of row group 0 cannot be read", "--input", "c.parquet")

    def test_refuses_missing_and_malformed_tokenizers(self):
        self.write("a.txt", "a")
        for name, content, pattern in (
                ("gone", None, "there is no tokenizer .*gone"), ("folder", "", "folder holds no tokenizer: expected tokenizer.json or"),
                ("t.json", "{}", "t.json is not a tokenizer.json that tokenizers [0-9.]+ can read"),
                ("t.model", "garbage", "t.model is not a tokenizer.model that sentencepiece [0-9.]+ can read")):
            if name == "folder":
                os.mkdir(self.path(name))
            elif content is not None:
                self.write(name, content)
            words = ["tokenize", "--tokenizer", self.path(name), "--input", "a.txt", "--output", self.path("out")]
            support.Test.refused(self, 3, pattern, words)

    def test_refuses_tokens_that_do_not_fit_the_format(self):
        self.write("a.txt", "a")
        one = ["--input", "a.txt"]
        self.refused(2, "--begin 1000 is not an id of this tokenizer: its ids are below 1000", *one, "--begin", "1000")
        self.refused(2, '--end "<eos>" is not a token of ', *one, "--end", "<eos>")
        self.refused(2, '--end "<eos>" is not a token of ', *one, "--end", "<eos>", kind="sentencepiece")
        for format in ("llmc", "nanogpt"):
            self.refused(2, f"--format {format} has no place for the boundaries of documents", *one, "--format", format)
        self.refused(2, "--begin and --end are the same token, 5", *one, "--format", "llmc", "--begin", "5", "--end", "5")
        self.refused(2, "--shard-tokens 0: expected 1 to 2147483647", *one, "--format", "llmc", "--begin", "5", "--shard-tokens", "0")
        self.write("b.txt", "a<|begin_of_text|>b")
        self.refused(3, "b.txt: the token that separates documents stands inside one", "--input", "?.txt", "--format", "llmc",
                     "--begin", "<|begin_of_text|>")
        self.tokenize("--input", "?.txt", "--format", "llmc", "--begin", "<|begin_of_text|>", "--specials-as-text")

    def test_refuses_unknown_progress_mode(self):
        self.write("a.txt", "a")
        self.refused(2, 'ANNULUS_PROGRESS: expected live, plain or none, got "loud"', "--input", "a.txt",
                     env={"ANNULUS_PROGRESS": "loud"})

    def test_reports_processes_that_cannot_start(self):
        self.write("a.txt", "a")
        pipes = 40  # the limit of open files

        def limited():
            resource.setrlimit(resource.RLIMIT_NOFILE, (pipes, pipes))

        self.refused(8, "of 100 processes only [0-9]+ could be started: Too many open files; try a smaller --processes",
                     "--input", "a.txt", "--processes", "100", preexec_fn=limited)

    def test_reports_standard_output_on_a_full_disk(self):
        self.write("a.txt", "a")
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-I", "-B", support.PROGRAM, *self.words("--input", "a.txt")], cwd=self.folder,
                                  stdout=full, stderr=subprocess.PIPE, text=True, timeout=support.LIMIT)
        self.assertEqual(done.returncode, 8, done.stderr)
        self.assertRegex(done.stderr, r"^annulus: \[tokenize\] standard output could not be written: No space left on device\n$")

    def test_refuses_output_below_a_file(self):
        self.write("a.txt", "a")
        self.write("file", "")
        support.Test.refused(self, 8, "the output folder .*file/out cannot be made: Not a directory",
                             self.words("--input", "a.txt", output="file/out"))

    def test_refuses_file_that_changes_while_it_is_read(self):
        sys.path.insert(0, support.PROGRAM)
        import inputs
        from errors import Refused

        self.write("a.txt", "before")
        self.write("a.jsonl", '{"text": "before"}\n')
        for name, task in (("a.txt", ("texts", 0, 1)), ("a.jsonl", ("lines", 0, 0, 19))):
            found = inputs.find([self.path(name)])
            reader = inputs.Reader(found, "text", False)
            self.assertEqual(reader.documents(task), ["before"])
            self.write(name, "and afterwards")
            with self.assertRaisesRegex(Refused, f"{name} has changed since tokenizing began"):
                reader.documents(task)


if __name__ == "__main__":
    support.main()
