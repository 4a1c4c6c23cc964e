"""Processes that turn units of the input into tokens, one a core. Used by work.py.

They are forked from the coordinator, which has read the tokenizer, and hold no state: they may be killed at any time,
and end by themselves when the coordinator is gone.
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


def processors():
    return len(os.sched_getaffinity(0))


def encode_unit(reader, tokenizer, task, width, begin, end):
    """(tokens as bytes, and of each document its length, the hash of its tokens, the bytes of its text)."""
    texts = reader.documents(task)
    tokens, lengths, hashes, sizes = array("I"), array("q"), array("Q"), array("Q")
    for text, ids in zip(texts, tokenizer.encode(texts)):
        if begin is not None and (not ids or ids[0] != begin):
            ids = [begin, *ids]
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        document = array("I", ids)
        tokens.extend(document)
        lengths.append(len(ids))
        hashes.append(xxhash.xxh3_64_intdigest(document))
        sizes.append(len(text.encode("utf-8")))
    content = tokens.tobytes()
    if width == 2 and content:
        content = memoryview(content).cast("H")[::2].tobytes()  # the lower halves
    return content, lengths, hashes, sizes


def work(connection, tokenizer, inputs, field, replace, width, begin, end, check):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the coordinator answers them
    tasks = queue.SimpleQueue()

    def receive():
        # Takes tasks while a result is being sent, so that neither side waits for the other for ever.
        try:
            while True:
                tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    reader = Reader(inputs, field, replace)
    while True:
        number, task = tasks.get()
        try:
            result = encode_unit(reader, tokenizer, task, width, begin, end)
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
    """`processes` workers. `check(inputs, task, result)` may refuse a result, in the worker."""

    DEPTH = 2  # units that a worker has at a time, so that it need not wait for the next

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
        for end in others:  # a worker that held them would keep the others from seeing the coordinator's end
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
        """What has come, waiting for so long at most."""
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
        raise Refused(RESOURCE, f"a process that makes tokens {how}{hint}")

    def close(self):
        for process in self.workers.values():
            process.kill()
        for connection, process in self.workers.items():
            process.join()
            connection.close()
        self.workers = {}
