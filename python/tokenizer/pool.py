"""Worker processes, one for each core, that turn units of the input into tokens. Used by work.py.

They are forked from the coordinator, which has loaded the tokenizer, and keep no state: they may be killed at any time,
and they exit when the coordinator is gone.
"""

import multiprocessing
import os
import queue
import signal
import threading
from array import array
from multiprocessing.connection import wait

import xxhash

from errors import INTERNAL, RESOURCE, Refused
from inputs import Reader
from targets import Document
from trees import groups, merge


def processors():
    return len(os.sched_getaffinity(0))


def encode_texts(texts, tokenizer, begin, end):
    """Yields the Document of each text."""
    for text, ids in zip(texts, tokenizer.encode(texts)):
        if begin is not None and (not ids or ids[0] != begin):
            ids = [begin, *ids]
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        yield Document(ids, None, len(text.encode("utf-8")))


def encode_records(records, targets):
    """Yields the same of JSON objects, or of groups of them."""
    if not targets.trees:
        for record, where in records:
            yield targets.document(record, where)
        return
    for group, where in groups(records, targets):
        rollouts = [targets.document(record, of_rollout) for record, of_rollout in group]
        yield merge(rollouts, lambda weight, where=where: targets.narrow(weight, where))


def encode_unit(reader, tokenizer, targets, task, width, begin, end):
    """Returns the tokens as bytes, and for each document its length, the hash of its tokens, the bytes of its text, the runs of
    its weights, None where every token counts, and its tree or None."""
    tokens, lengths, hashes, sizes, runs, trees = array("I"), array("q"), array("Q"), array("Q"), [], []
    texts = reader.documents(task)
    for document in (encode_texts(texts, tokenizer, begin, end) if targets is None else encode_records(texts, targets)):
        ids = array("I", document.ids)
        tokens.extend(ids)
        lengths.append(len(ids))
        hashes.append(xxhash.xxh3_64_intdigest(ids))
        sizes.append(document.text_bytes)
        runs.append(document.runs)
        trees.append(document.tree)
    content = tokens.tobytes()
    if width == 2 and content:
        content = memoryview(content).cast("H")[::2].tobytes()  # the lower halves
    return content, lengths, hashes, sizes, runs, trees


def work(connection, tokenizer, targets, inputs, field, records, replace, width, begin, end, check):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the coordinator handles them
    tasks = queue.SimpleQueue()

    def receive():
        # Receives tasks while a result is being sent, so that the two sides cannot block each other.
        try:
            while True:
                tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    reader = Reader(inputs, field, replace, records)
    while True:
        number, task = tasks.get()
        try:
            result = encode_unit(reader, tokenizer, targets, task, width, begin, end)
            check(inputs, task, result)
        except Refused as refused:
            result = refused
        except BaseException as error:
            result = Refused(INTERNAL, f"{inputs[task[1]].path}: {type(error).__name__}: {error}")
        try:
            connection.send((number, result))
        except OSError:
            os._exit(0)


class Pool:
    """`processes` workers. `check(inputs, task, result)`, called in the worker, may raise Refused."""

    DEPTH = 2  # units that a worker has at a time, so that it never waits for the next one

    def __init__(self, processes, *settings):
        context = multiprocessing.get_context("fork")
        self.workers, self.busy = {}, {}
        try:
            for _ in range(processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=self.child, args=([*self.workers, ours], theirs, settings), daemon=True)
                process.start()
                theirs.close()
                self.workers[ours], self.busy[ours] = process, 0
        except OSError as error:
            started = len(self.workers)
            self.close()
            raise Refused(RESOURCE, f"of {processes} processes only {started} could be started: {error.strerror}; try a "
                                    "smaller --processes")

    @staticmethod
    def child(others, connection, settings):
        for end in others:  # otherwise the other workers would not notice that the coordinator has exited
            end.close()
        work(connection, *settings)

    def has_room(self):
        return min(self.busy.values()) < self.DEPTH

    def send(self, number, task):
        connection = min(self.busy, key=self.busy.get)
        try:
            connection.send((number, task))
        except OSError:
            self.lost(connection)
        self.busy[connection] += 1

    def results(self, seconds):
        """Yields the results that have arrived; waits at most this many seconds for the first."""
        for connection in wait(list(self.workers), seconds):
            try:
                result = connection.recv()
            except (EOFError, OSError):
                self.lost(connection)
            self.busy[connection] -= 1
            yield result

    def lost(self, connection):
        process = self.workers[connection]
        process.join(5)
        code = process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = ": was it out of memory? Try a smaller --processes" if code == -signal.SIGKILL else ""
        raise Refused(RESOURCE, f"a worker process {how}{hint}")

    def close(self):
        for process in self.workers.values():
            process.kill()
        for connection, process in self.workers.items():
            process.join()
            connection.close()
        self.workers = {}
