"""Turns a line of JSON, or a row of Parquet, into tokens of which some count as targets, and says with which weights. Used by work.py and the
workers of pool.py, for `annulus tokenize` with --loss, --chat or --weight. The terms are those of TRL and axolotl.

  --loss completion   "prompt" and "completion": what follows the prompt counts
  --loss assistant    "messages": the turns of the assistant count
  --chat              values are lists of messages, to which the tokenizer's chat template is applied (chat.py)
  --weight FIELD      the weight of a line, and of a message with --loss assistant
  --trees, --group    lines are groups of rollouts, or rollouts of groups (trees.py)

Prompt and completion are one text for the tokenizer, unless a token would lie in both: then each is tokenized by itself, so
that the prompt's tokens are those that a model is given when it is asked to complete it.
"""

import itertools
import json
import math
import struct
from dataclasses import dataclass

from chat import Chat
from errors import INPUT, USAGE, Refused

FIELDS = {"all": "text", "completion": "completion", "assistant": "messages"}
LISTS = {"text": "texts", "completion": "completions", "messages": "conversations"}  # the fields' names with --trees
MOST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]  # fp32


def is_plain(options):
    """Whether documents are texts of which every token counts, so that nothing here is needed."""
    return options.loss == "all" and not options.chat and options.weight is None and not makes_trees(options)


def makes_trees(options):
    return options.trees or options.group is not None


def settle(options):
    """Fills in what the options imply. Raises Refused for options that exclude each other."""
    options.chat = options.chat or options.loss == "assistant"
    options.one = "messages" if options.chat and options.loss == "all" else FIELDS[options.loss]
    if options.field is None:
        options.field = LISTS[options.one] if options.trees else options.one
    options.marks = options.loss != "all" or options.weight is not None or makes_trees(options)
    if options.trees and options.group is not None:
        raise Refused(USAGE, "--trees takes a line for a group of rollouts, and --group a line for a rollout: give one of them")
    if makes_trees(options) and options.format != "annulus":
        raise Refused(USAGE, f"--{'trees' if options.trees else 'group'} needs --format annulus: other formats have no place for "
                             "prefix trees")
    if options.chat and options.specials_as_text:
        raise Refused(USAGE, "--specials-as-text would read the marks of the chat template as text: leave it out")
    if (options.loss != "all" or makes_trees(options)) and options.weight is None:
        options.weight = "weight"


def fields(options):
    """Returns the fields that a record may have besides options.field, or None if documents are texts."""
    if is_plain(options):
        return None
    return [name for name in (options.prompt, options.weight, options.group) if name] + ["tools", "chat_template_kwargs"]


def require_records(options, inputs):
    for one in inputs:
        if one.kind == "text":
            what = (f"--loss {options.loss}" if options.loss != "all" else "--chat" if options.chat else "--trees" if options.trees
                    else "--group" if options.group is not None else "--weight")
            raise Refused(INPUT, f"{one.path}: {what} takes JSONL, a JSON object a line, or Parquet, not text (--kind jsonl for "
                                 "files with other names)")


@dataclass(frozen=True)
class Document:
    ids: list
    runs: list  # (count, weight) of neighbouring ids with the same weight; None where every token counts
    text_bytes: int
    tree: object = None  # a trees.Tree if the document is a tree of rollouts


def runs_of(weights):
    """Returns [(count, weight)] of neighbours with the same weight."""
    return [(sum(1 for _ in run), weight) for weight, run in itertools.groupby(weights)]


class Targets:
    """What is made of the lines. Loads the chat template if there is to be one. Raises Refused."""

    def __init__(self, tokenizer, options, begin, end):
        self.tokenizer, self.begin, self.end = tokenizer, begin, end
        self.loss, self.field, self.prompt, self.weight = options.loss, options.field, options.prompt, options.weight
        self.format = options.format
        self.trees, self.group = makes_trees(options), options.group
        self.one = {"messages": "conversation"}.get(options.one, options.one)  # what a rollout is, for messages
        self.special_tokens = not options.no_special_tokens
        self.chat = Chat(tokenizer) if options.chat else None

    def document(self, record, where):
        """Returns the Document of a JSON object. `where()` names its place."""
        weight = self.weight_of(record, where, "line")
        of_end = weight
        if self.chat is None:
            ids, weights, size = self.completion(record, where) if self.loss == "completion" else self.text(record, where)
            weights = [w * weight for w in weights]
        else:
            ids, weights, size = self.conversation(record, where, weight)
            last = self.messages(record, self.field, where)[-1]
            if self.loss == "assistant":
                of_end = weight * self.weight_of(last, where, "message") if last["role"] == "assistant" else 0.0
        if self.begin is not None and (not ids or ids[0] != self.begin):
            ids, weights = [self.begin, *ids], [weight if self.loss == "all" else 0.0, *weights]
        if self.end is not None and (not ids or ids[-1] != self.end):
            ids, weights = [*ids, self.end], [*weights, of_end]
        runs = [(count, self.narrow(w, where)) for count, w in runs_of(weights)]
        other = next((w for _, w in runs if w not in (0, 1)), None)
        if other is not None and self.format != "annulus":
            raise Refused(INPUT, f"{where()}: the weight {other:g} needs --format annulus: beside {self.format}'s tokens stands only "
                                 "whether each counts")
        return Document(ids, runs, size)

    # ---- Fields.

    def value(self, record, field, option, where):
        if field not in record:
            raise Refused(INPUT, f"{where()} has no field \"{field}\": {option} takes one of {', '.join(record)}")
        return record[field]

    def text_of(self, record, field, option, where):
        value = self.value(record, field, option, where)
        if not isinstance(value, str):
            chat = "; --chat takes messages" if isinstance(value, list) else ""
            raise Refused(INPUT, f"{where()}: the field \"{field}\" is {json.dumps(value)[:40]}, but a text is expected{chat}")
        return value

    def messages(self, record, field, where):
        option = "--prompt" if self.loss == "completion" and field == self.prompt else "--field"
        value = self.value(record, field, option, where)
        sound = isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
        if not sound:
            raise Refused(INPUT, f"{where()}: the field \"{field}\" is {json.dumps(value)[:40]}, but a list of messages is "
                                 'expected, [{"role": "user", "content": "..."}, ...]')
        return value

    def weight_of(self, of, where, what):
        if self.weight is None or of.get(self.weight) is None:
            return 1.0
        weight = of[self.weight]
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= MOST:
            raise Refused(INPUT, f"{where()}: the weight of a {what}, \"{self.weight}\", is {json.dumps(weight)[:40]}, but a "
                                 "number from 0 on is expected; --weight names another field")
        return float(weight)

    @staticmethod
    def narrow(weight, where):
        """Returns the nearest number of fp32. A weight above 0 stays above 0."""
        if weight > MOST or math.isnan(weight):
            raise Refused(INPUT, f"{where()}: the weight {weight:g} is above what fp32 holds")
        return struct.unpack("<f", struct.pack("<f", weight))[0] or (2.0 ** -149 if weight > 0 else 0.0)

    # ---- Texts.

    def text(self, record, where):
        text = self.text_of(record, self.field, "--field", where)
        ids = list(self.tokenizer.encode([text])[0])
        return ids, [1.0] * len(ids), len(text.encode())

    def completion(self, record, where):
        prompt = self.text_of(record, self.prompt, "--prompt", where)
        completion = self.text_of(record, self.field, "--field", where)
        ids, before = self.tokenizer.behind.encode_parts(prompt, completion, self.special_tokens)
        return ids, [0.0] * before + [1.0] * (len(ids) - before), len((prompt + completion).encode())

    # ---- Messages.

    def conversation(self, record, where, weight):
        tools, more = record.get("tools"), record.get("chat_template_kwargs") or {}
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError:
                pass  # refused below
        if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
            raise Refused(INPUT, f"{where()}: \"tools\" is {json.dumps(tools)[:40]}, but a list of JSON schemas is expected")
        if not isinstance(more, dict):
            raise Refused(INPUT, f"{where()}: \"chat_template_kwargs\" is {json.dumps(more)[:40]}, but an object is expected")
        messages = self.messages(record, self.field, where)
        before = self.messages(record, self.prompt, where) if self.loss == "completion" else []
        given, all_of_them = (tools or None, more, where), before + messages
        weights = [weight * self.weight_of(m, where, "message") if m["role"] == "assistant" else 0.0 for m in all_of_them]
        bare = [{k: v for k, v in m.items() if k != self.weight} for m in all_of_them]  # a template may show what it is given
        if self.loss == "assistant" and self.chat.marks(tools or None):
            return self.by_marks(bare, weights, given)
        whole = self.chat.render(bare, *given)
        if self.loss == "all":
            spans = [(0, len(whole), weight)]
        elif self.loss == "completion":
            spans = [(self.beginning(bare, len(before), whole, given, prompt=True), len(whole), weight)]
        else:
            spans = []
            for i, message in enumerate(bare):
                if message["role"] != "assistant":
                    continue
                if i == 0:
                    raise Refused(INPUT, f"{where()} begins with an answer: where that begins in the text of a chat template is "
                                         "known only if the template marks it by {% generation %} and {% endgeneration %}")
                spans.append((self.beginning(bare, i, whole, given, prompt=True),
                              self.beginning(bare, i + 1, whole, given, prompt=False), weights[i]))
        ids, offsets = self.chat.encode(whole, where)
        of_tokens, left = [0.0] * len(ids), 0
        for begin, end, value in spans:
            while left < len(ids) and offsets[left][1] <= begin:
                left += 1
            at = left
            while at < len(ids) and offsets[at][0] < end:
                of_tokens[at] = value
                at += 1
        return ids, of_tokens, len(whole.encode())

    def beginning(self, messages, count, whole, given, prompt):
        """Returns where the text of the first `count` messages ends in that of all. With `prompt` it includes what the template
        writes before an answer."""
        if count == len(messages):
            return len(whole)
        what = "the message before an answer" if count == 1 else f"the first {count} messages by themselves"
        text = self.chat.render(messages[:count], *given, what=what, prompt=prompt)
        if not whole.startswith(text):
            raise Refused(INPUT, f"{given[2]()}: with the chat template of {self.chat.folder} the text of the first {count} of "
                                 f"{len(messages)} messages is not the beginning of the text of all, so it does not show where "
                                 "answers begin: mark them in the template by {% generation %} and {% endgeneration %}")
        return len(text)

    def by_marks(self, messages, weights, given):
        ids, marked = self.chat.encode_marked(messages, *given)
        runs, of_turns = runs_of(marked), [w for w, m in zip(weights, messages) if m["role"] == "assistant"]
        if sum(1 for _, mark in runs if mark) != len(of_turns):
            if len(set(of_turns)) > 1:
                raise Refused(INPUT, f"{given[2]()}: its {len(of_turns)} answers have different weights, but the chat template "
                                     f"marks {sum(1 for _, mark in runs if mark)} stretches of text as answers")
            of_turns = itertools.repeat(of_turns[0] if of_turns else 0.0)
        of_tokens, turns = [], iter(of_turns)
        for count, mark in runs:
            of_tokens += [next(turns) if mark else 0.0] * count
        return ids, of_tokens, len(self.chat.render(messages, *given).encode())
