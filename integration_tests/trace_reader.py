"""Reads a file in Chrome's trace event format and checks it against what the format's document says, knowing nothing of the
program that wrote it. Used by trace_test.py and train_ends_test.py.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from decimal import Decimal

# The fields that events of each phase must have, besides name, ph, pid and tid.
FIELDS = {"X": {"ts", "dur"}, "b": {"ts", "cat", "id2"}, "e": {"ts", "cat", "id2"}, "s": {"ts", "cat", "id"},
          "f": {"ts", "cat", "id"}, "M": {"args"}}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name", "thread_sort_index": "sort_index"}


class Trace:
    """spans: complete events; each has `within`, the names of the spans of its thread that contain it, outermost first.
    messages: pairs of the events (begin, end) of what may overlap. names: by (pid, tid), pid alone for a process."""

    def __init__(self, path, arrows=True):
        with open(path, encoding="utf-8") as f:
            whole = json.load(f, parse_float=Decimal, object_pairs_hook=self.without_repeats)
        assert whole["displayTimeUnit"] in ("ms", "ns")
        self.about = whole["otherData"]
        self.names, self.spans, self.messages, self.flows = {}, [], [], []
        asynchronous, flows = {}, {}
        for event in whole["traceEvents"]:
            self.check(event)
            key = (event.get("cat"), event.get("id") or (event["pid"], event.get("id2", {}).get("local")))
            phase = event["ph"]
            if phase == "M":
                self.name(event)
            elif phase == "X":
                self.spans.append(event)
            elif phase == "b":
                assert key not in asynchronous, event
                asynchronous[key] = event
            elif phase == "e":
                begin = asynchronous.pop(key)
                assert (begin["name"], begin["pid"]) == (event["name"], event["pid"]) and begin["ts"] <= event["ts"], event
                self.messages.append((begin, event))
            else:
                flows.setdefault(key, []).append(event)
        assert not asynchronous, asynchronous
        self.nest()
        assert arrows or not flows
        for events in flows.values():
            self.join(events)
        for pid, tid in {(e["pid"], e["tid"]) for e in self.spans}:
            assert pid in self.names and (pid, tid) in self.names, (pid, tid)

    @staticmethod
    def without_repeats(pairs):
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    @staticmethod
    def check(event):
        assert event["ph"] in FIELDS, event
        assert FIELDS[event["ph"]] | {"name", "pid", "tid"} <= event.keys(), event
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert all(isinstance(event[key], (int, Decimal)) and event[key] >= 0 for key in ("ts", "dur") if key in event), event
        assert event["ph"] != "f" or event["bp"] == "e", event

    def name(self, event):
        value = event["args"][METADATA[event["name"]]]
        if not event["name"].endswith("_name"):
            return
        key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
        assert key not in self.names, event
        self.names[key] = value

    def nest(self):
        open_spans, last = {}, {}
        for span in self.spans:
            thread = (span["pid"], span["tid"])
            assert span["ts"] >= last.get(thread, 0), span  # in the order of time, and outer ones first
            last[thread] = span["ts"]
            stack = open_spans.setdefault(thread, [])
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= span["ts"]:
                if stack[-1]["ts"] == span["ts"] and span["dur"] == 0:
                    break  # both take no time
                stack.pop()
            assert not stack or span["ts"] + span["dur"] <= stack[-1]["ts"] + stack[-1]["dur"], (span, stack[-1])
            span["within"] = [outer["name"] for outer in stack]
            stack.append(span)

    def join(self, events):
        assert len(events) == 2, events
        begin, end = sorted(events, key=lambda e: e["ph"], reverse=True)
        assert (begin["ph"], end["ph"]) == ("s", "f") and begin["ts"] <= end["ts"] and begin["pid"] != end["pid"], events
        for event in events:  # it is drawn from and to the spans that are there
            assert any(s["pid"] == event["pid"] and s["tid"] == event["tid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
                       for s in self.spans), event
        self.flows.append((begin, end))

    def ranks(self):
        return sorted(key for key in self.names if isinstance(key, int))

    def spans_of(self, rank, name, thread="main"):
        return [s for s in self.spans if s["pid"] == rank and s["name"] == name and self.names[rank, s["tid"]] == thread]

    def sends(self, rank, span=None):
        """The messages that a rank sends; with `span` those that begin in it."""
        return [b for b, _ in self.messages if b["pid"] == rank and b["name"] == "send"
                and (span is None or span["ts"] <= b["ts"] < span["ts"] + span["dur"])]
