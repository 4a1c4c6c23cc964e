#!/usr/bin/env python3
"""Tests that a call that was killed, interrupted or stopped by a full disk continues with the same command and makes
the same files as an uninterrupted call, and that it refuses folders and inputs that do not belong together."""

import ctypes
import os
import resource
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()


class Resume(support.Test):
    def setUp(self):
        super().setUp()
        # Every kind of input, so that a call can be stopped within each of them.
        texts = support.texts(5000, seed=4)
        fifth = len(texts) // 5
        support.write_jsonl(self.path("a.jsonl"), texts[:fifth])
        support.write_jsonl(self.path("b.jsonl.gz"), texts[fifth:2 * fifth])
        support.write_parquet(self.path("c.parquet"), texts[2 * fifth:3 * fifth])
        support.write_jsonl(self.path("d.jsonl.zst"), texts[3 * fifth:])
        for i, text in enumerate(support.NASTY):
            self.write(f"e{i:02d}.txt", text)
        self.options = ["--input", "[a-e]*", "--shard-tokens", "15000"]
        self.documents = texts + support.NASTY

    def whole(self):
        self.tokenize(*self.options, output="whole")
        return support.contents(self.path("whole"))

    def state(self):
        return os.path.exists(self.path("out/.tokenizing.json"))

    def end_after(self, shards, number, processes="2"):
        """Starts the call, sends it a signal once so many shards exist, and waits for its end."""
        os.makedirs(self.path("out"), exist_ok=True)
        process = self.start(self.words(*self.options, "--processes", processes))
        support.wait_for(self.path(f"out/shard-{shards - 1:05d}.tokens"), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=support.LIMIT)
        self.assertTrue(self.state(), "the call had finished: the signal came too late")
        return process.returncode, out, err

    def require_same_as_whole(self):
        whole = self.whole()
        made = support.contents(self.path("out"))
        self.assertEqual(made.keys(), whole.keys())
        for name in whole:
            self.assertTrue(made[name] == whole[name], name)

    def test_resumes_after_being_killed(self):
        for shards in (1, 15, 30):
            code, _, _ = self.end_after(shards, signal.SIGKILL)
            self.assertEqual(code, -signal.SIGKILL)
        out = self.tokenize(*self.options, "--processes", "3")
        self.assertRegex(out, r"^going on after \d+ finished shards\n")
        self.require_same_as_whole()
        self.assertTrue(support.read_folder(self.path("out"))[0] == support.library_ids("llama3", self.documents))

    def test_resumes_after_an_interrupt(self):
        for shards, number, expected in ((2, signal.SIGINT, 130), (25, signal.SIGTERM, 143)):
            code, out, err = self.end_after(shards, number)
            self.assertEqual(code, expected)
            self.assertRegex(err, r"^annulus: interrupted; \d+ finished shards are kept: the same command goes on after them\n$")
            self.assertFalse([n for n in os.listdir(self.path("out")) if n.endswith(".tmp")])
        self.tokenize(*self.options)
        self.require_same_as_whole()

    def test_resumes_after_reaching_a_file_size_limit(self):
        """A limit on file sizes fails like a full disk, but needs no disk; one of the later shards exceeds it."""
        self.write("d.txt", "large " * 300_000)
        full = ["--format", "megatron"]

        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

        code, out, err = self.run_words(self.words(*self.options, *full), preexec_fn=limited)
        self.assertEqual(code, 8, err)
        self.assertRegex(err, r"^annulus: \[tokenize\] .* could not be written: .* \(is the disk full\?\); \d+ finished shards are "
                              r"kept: the same command goes on after them\n$")
        self.assertTrue(self.state())
        self.assertFalse([n for n in os.listdir(self.path("out")) if n.endswith(".tmp")])
        self.options += full
        self.tokenize(*self.options)
        self.require_same_as_whole()

    def test_resumes_after_filling_a_disk(self):
        os.mkdir(self.path("disk"))
        libc = ctypes.CDLL(None, use_errno=True)
        where = self.path("disk").encode()
        if libc.mount(b"tmpfs", where, b"tmpfs", 0, b"size=400k") != 0:
            self.skipTest(f"no tmpfs may be mounted here: {os.strerror(ctypes.get_errno())}")
        self.addCleanup(libc.umount2, where, 2)
        code, _, err = self.run_words(self.words(*self.options, output="disk/out"))
        self.assertEqual(code, 8, err)
        self.assertIn("No space left on device", err)
        self.assertEqual(libc.mount(b"tmpfs", where, b"tmpfs", 32, b"size=64m"), 0)  # MS_REMOUNT
        self.assertIn("going on after", self.tokenize(*self.options, output="disk/out"))
        self.assertTrue(support.contents(self.path("disk/out")) == self.whole())

    def test_leaves_nothing_when_no_shard_is_finished(self):
        self.write("bad.jsonl", "{\n")
        self.refused(3, "bad.jsonl, line 1 is not JSON", self.words("--input", "bad.jsonl"))
        self.assertFalse(os.path.exists(self.path("out")))

    def test_repeating_a_finished_command_does_nothing(self):
        first = self.whole()
        out = self.tokenize(*self.options, output="whole")
        self.assertRegex(out, r"holds all shards of these inputs already: [\d,]+ tokens of [\d,]+ documents")
        self.assertTrue(support.contents(self.path("whole")) == first)

    def test_refuses_changed_inputs(self):
        self.end_after(2, signal.SIGKILL)
        with open(self.path("e00.txt"), "w") as f:
            f.write("longer")
        before = support.contents(self.path("out"))
        self.refused(3, "e00.txt has changed since tokenizing into .*out began", self.words(*self.options))
        os.remove(self.path("e00.txt"))
        self.refused(3, "out holds shards of an unfinished call of other input files", self.words(*self.options))
        after = support.contents(self.path("out"))
        self.assertTrue(all(after[name] == before[name] for name in after))

    def test_refuses_other_tokenizers_and_settings(self):
        self.tokenize("--input", "e00.txt", "--input", "e06.txt")
        one = ["--input", "e00.txt", "--input", "e06.txt"]
        self.refused(3, "out holds the shards of another tokenizer, llama3 .*choose another --output",
                     self.words(*one, kind="qwen2"))
        self.refused(3, r"out holds the shards that were made with shard_tokens = 100000000, but this call has 5",
                     self.words(*one, "--shard-tokens", "5"))
        self.refused(3, "out holds the shards of other input files", self.words("--input", "e06.txt"))

    def test_does_not_replace_unrelated_files(self):
        os.mkdir(self.path("out"))
        self.write("out/train-00000.bin", "mine")
        self.refused(3, "train-00000.bin exists already", self.words(*self.options))
        self.assertEqual(support.contents(self.path("out")), {"train-00000.bin": b"mine"})

    def test_refuses_folder_in_use(self):
        import fcntl

        os.mkdir(self.path("out"))
        held = os.open(self.path("out"), os.O_RDONLY)
        self.addCleanup(os.close, held)
        fcntl.flock(held, fcntl.LOCK_EX)
        self.refused(7, "another process is making the shards in .*out", self.words(*self.options))

    def test_killed_worker_ends_the_call(self):
        os.mkdir(self.path("out"))
        process = self.start(self.words(*self.options, "--processes", "1"))
        support.wait_for(self.path("out/shard-00000.tokens"), process)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
            workers = [int(pid) for pid in f.read().split()]
        self.assertEqual(len(workers), 1)
        os.kill(workers[0], signal.SIGKILL)
        _, err = process.communicate(timeout=support.LIMIT)
        self.assertEqual(process.returncode, 8, err)
        self.assertRegex(err, r"was ended by signal 9: was it out of memory\? Try a smaller --processes; \d+ finished shard")
        self.tokenize(*self.options)
        self.require_same_as_whole()


if __name__ == "__main__":
    support.main()
