#!/usr/bin/env python3
"""Checks the prompts of `annulus evaluate --task` against their definitions, written here once more.

Each prompt is read as a user would: its parts are taken from its text or ids, what they say is worked out, and must be
the answer. The whole prompt is then written again from these parts, and must be the same, so templates, order and
lengths are compared, too. One more piece of haystack must not fit.

The definitions of RULER's tasks are those of its paper (arXiv:2404.06654) and of its repository, NVIDIA/RULER; what is
different here is stated in runtime/tasks/task_text.h and in the files task_*.cc.
"""

import collections
import itertools
import json
import math
import os
import re
import subprocess
import sys
import unittest

PRINT = os.path.realpath(sys.argv.pop(1))

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NIAH = ("Some special magic {things} are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the {things} afterwards.\n{context}\nWhat are all the special magic {things} for {query} mentioned in "
        "the provided text? The special magic {things} for {query} mentioned in the provided text are")
VT = ("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
      "Find all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
      "variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: ")
CWE = ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
       "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top "
       "10 words that appear most often in the list are:")
FWE = ("Read the following coded text and track the frequency of each coded word. Find the three most frequently "
       "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
       "are the three most frequently appeared words in the above coded text? Answer: According to the coded text "
       "above, the three most frequently appeared words are:")
WORD = r"[a-z]+(?:-[a-z]+){1,2}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
FORMS = {"words": WORD, "numbers": r"[1-9][0-9]{6}", "uuids": UUID}
# task: (haystack, keys, values, number of keys, of values of each, of keys that are asked for)
NIAH_TASKS = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
ESSAY = "\n\n".join(
    "Chapter %d.  It was said (by whom?) that %d ships left at %d o'clock!\n\"None came back.\" So they waited,\tand "
    "the l\u00e4ngste Tag of year %d ended without a word from anybody who had been on board of them"
    % (i, 3 * i + 2, i % 12 + 1, 1800 + i) + (".\u201d" if i % 3 else "") for i in range(40))


def asked(requests):
    """Returns what print_prompts says to each request."""
    lines = "".join(json.dumps(r) + "\n" for r in requests)
    run = subprocess.run([PRINT], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def pieces(text):
    return [int.from_bytes(p, "big") for p in re.findall(rb"(?s) {0,2}[A-Za-z0-9]{1,5}|.", text.encode())]


def encode(kind, text):
    return pieces(text) if kind == "pieces" else list(text.encode())


def decode(ids):
    return b"".join(i.to_bytes(max(1, (i.bit_length() + 7) // 8), "big") for i in ids).decode()


def listed(items):
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]


def sentences_of(words):
    """Joins words to sentences."""
    sentences, now = [], []
    for word in words:
        now.append(word)
        if re.search("[.!?][\"')\\]}\u2019\u201d\u00bb]*$", word) or len(now) == 64:
            sentences.append(" ".join(now))
            now = []
    return sentences + ([" ".join(now)] if now else [])


class Text:
    """A prompt of text and its answer, whose ids are those of an encoder of this file."""

    def __init__(self, test, request, reply):
        test.assertNotIn("error", reply, reply)
        self.test, self.kind, self.length = test, request["encode"], request["length"]
        ids, begin = reply["tokens"], reply["answer"]
        whole = decode(ids)
        test.assertEqual(encode(self.kind, whole), ids)
        # Tokens may be merged over the border, so the answer's text is known only after the prompt's has been read.
        self.whole, self.ids, self.begin, self.answers, self.room = whole, ids, begin, reply["answers"], reply["room"]

    def check(self, prompt, answer, decoded):
        """Compares text, border and room with the prompt as it should be; `decoded` tokens are left for an answer."""
        self.test.assertEqual(self.whole, prompt + answer)
        alone, border = encode(self.kind, prompt), 0
        while border < len(alone) and alone[border] == self.ids[border]:
            border += 1
        self.test.assertEqual(self.begin, border)
        spare = max(0, decoded - len(encode(self.kind, answer)))
        self.test.assertEqual(self.room, len(self.ids) - border + spare)
        self.test.assertLessEqual(len(self.ids) + spare, self.length)
        self.left = self.length - len(self.ids) - spare  # tokens that the haystack could still have

    def tokens(self, text):
        return len(encode(self.kind, text))


class Ids(unittest.TestCase):
    VOCABS = (6, 7, 20, 127, 128, 256, 512, 513, 50257)

    @staticmethod
    def alphabet(vocab):
        if 128 <= vocab <= 512:
            return (32, 59, 61), range(97, 123)
        return (0, 1, 2), range(3, vocab)

    def check_all(self, requests, check):
        """Calls check(request, ids, index of the answer) for each prompt; returns all ids that occur, by vocabulary."""
        seen = collections.defaultdict(set)
        for request, reply in zip(requests, asked(requests)):
            with self.subTest(**request):
                self.assertNotIn("error", reply)
                self.assertEqual(reply["answers"], [])
                self.assertEqual(reply["room"], len(reply["tokens"]) - reply["answer"])
                check(request, reply["tokens"], reply["answer"])
                seen[request.get("vocab", 256)].update(reply["tokens"])
        return seen

    def test_copy(self):
        def check(r, ids, at):
            (filler, _, equals), symbols = self.alphabet(r["vocab"])
            string = ids[1:17]
            self.assertTrue(all(i in symbols for i in string))
            self.assertEqual(ids, [equals] + string + [filler] * (r["length"] - 34) + [equals] + string)
            self.assertEqual(at, r["length"] - 16)

        seen = self.check_all([{"task": "copy", "length": n, "vocab": v, "sample": s} for v in self.VOCABS
                               for n in (34, 35, 100, 513) for s in range(12)], check)
        self.assertEqual(seen[6], {0, 2, *range(3, 6)})
        self.assertEqual(seen[256], {32, 61, *range(97, 123)}, "all letters occur")

    def test_induction(self):
        def check(r, ids, at):
            _, symbols = self.alphabet(r["vocab"])
            self.assertTrue(all(i in symbols for i in ids))
            self.assertEqual(len(ids), r["length"])
            self.assertEqual(at, len(ids) - 1)
            key = ids[-2]
            first = ids.index(key)
            self.assertEqual(ids.count(key), 2, "its first token occurs once in the body, and at the end")
            self.assertEqual(first, math.floor(r["depth"] * (r["length"] - 4) + 0.5))
            self.assertEqual(ids[-1], ids[first + 1])

        seen = self.check_all([{"task": "induction", "length": n, "vocab": v, "depth": d, "sample": s}
                               for v in self.VOCABS for n in (4, 5, 64, 301) for d in (0, 0.3, 0.5, 1)
                               for s in range(2)], check)
        self.assertEqual(seen[256], set(range(97, 123)))

    def test_kv(self):
        requests = [{"task": "kv", "length": n, "vocab": v, "depth": d, "sample": s} for v in self.VOCABS
                    for n in (60, 100, 999) for d in (0, 0.25, 1) for s in range(2)]
        requests += [{"task": "kv", "length": 300, "vocab": v, "depth": d, "pairs": p} for v in (16, 256, 50257)
                     for d in (0, 0.5, 1) for p in (2, 7, 12)]
        requests += [{"task": "kv", "length": 80000, "depth": 0.7}, {"task": "kv", "length": 45678, "vocab": 50257}]
        self.check_all(requests, self.check_kv)

    def check_kv(self, r, ids, at):
        (filler, separator, equals), symbols = self.alphabet(r.get("vocab", 256))
        words = 128 <= r.get("vocab", 256) <= 512
        key_size = 2 if words else next(k for k in range(1, 100) if len(symbols) ** k >= 16384)
        before, after, value_size = ([], [filler], 2) if words else ([equals], [separator], key_size)
        values_of = range(ord("0"), ord("9") + 1) if words else symbols
        question = key_size + len(before) + value_size
        room = r["length"] - question
        fit = room // (question + 1)
        n = r.get("pairs") or min(fit, 512 if words else 8192)
        left = 0 if n == fit else room - n * (question + 1)
        keys, values, i = [], [], 0

        def take(count):
            nonlocal i
            i += count
            return ids[i - count:i]
        for pair in range(n):
            fillers = (pair + 1) * left // n - pair * left // n
            self.assertEqual(take(fillers), [filler] * fillers)
            keys.append(tuple(take(key_size)))
            self.assertEqual(take(len(before)), before)
            values.append(tuple(take(value_size)))
            self.assertEqual(take(1), after)
            self.assertTrue(all(x in symbols for x in keys[-1]))
            self.assertTrue(all(x in values_of for x in values[-1]))
        self.assertEqual(len(set(keys)), n)
        place = keys.index(tuple(take(key_size)))
        self.assertEqual(take(len(before)), before)
        self.assertEqual(at, i)
        self.assertEqual(place, math.floor(r.get("depth", 0.5) * (n - 1) + 0.5))
        self.assertEqual(tuple(ids[at:]), values[place])
        self.assertEqual(len(ids), r["length"] if left else r["length"] - room % (question + 1))

    def test_kv_in_bytes_is_text(self):
        [reply] = asked([{"task": "kv", "length": 14, "vocab": 256, "depth": 1}])
        self.assertRegex(bytes(reply["tokens"]).decode(), r"^[a-z]{2}[0-9]{2} ([a-z]{2}[0-9]{2}) \1$")


class Needles(unittest.TestCase):
    def test_needle_at_each_depth(self):
        user = ["The code of {key} is {value}.", "At {key} they count x{value} birds and {no} more.", "{key}={value}"]
        requests = [{"task": "needle", "length": n, "depth": d, "encode": e, "haystack": h, "needles": needles,
                     "sample": s}
                    for e, n in (("pieces", 400), ("pieces", 1500), ("bytes", 2000)) for d in (0, 0.1, 0.5, 0.77, 1)
                    for h in ("", ESSAY) for needles in ([], user) for s in range(4)]
        for r, reply in zip(requests, asked(requests)):
            with self.subTest(**{k: r[k] for k in ("length", "depth", "encode", "needles", "sample")}):
                self.check(r, Text(self, r, reply))

    def check(self, r, text):
        form = r["needles"][r["sample"] % len(r["needles"])] if r["needles"] else ""
        intro, context, question = re.fullmatch("(?s)(.*?)\n(.*)\n(.*)", text.whole).groups()
        if form:
            key, = re.findall("above say about (.*?)\\?", question)
            needle = form.replace("{key}", key).replace("{value}", text.answers[0])
            before = form[:form.index("{value}")].replace("{key}", key)
            prompt = ("A fact is hidden within the following text. Make sure to memorize it. I will quiz you about it "
                      "afterwards.\n" + context + "\nWhat does the text above say about " + key + "? "
                      + before.rstrip(" "))
            answer = before[len(before.rstrip(" ")):] + text.answers[0]
        else:
            key, = re.findall("number for (.*?) mentioned in the provided text\\?", question)
            needle = "One of the special magic numbers for %s is: %s." % (key, text.answers[0])
            prompt = one(NIAH).format(things="number", context=context, query=key)
            answer = " " + text.answers[0]
        self.assertRegex(key, "^" + WORD + "$")
        self.assertRegex(text.answers[0], "^" + FORMS["numbers"] + "$")
        text.check(prompt, answer, 32)

        # The haystack without its needle is sentences that follow one another, and the needle stands between two.
        self.assertEqual(context.count(needle), 1)
        left, right = (part.strip(" ") for part in context.split(needle))
        all_sentences = sentences_of((r["haystack"] or NOISE).split())
        haystack = (left + " " + right).strip(" ")
        starts = [i for i in range(len(all_sentences)) if haystack.startswith(all_sentences[i])]
        for start in starts:
            used = []
            while len(" ".join(used)) < len(haystack):
                used.append(all_sentences[(start + len(used)) % len(all_sentences)])
            if " ".join(used) == haystack:
                break
        self.assertEqual(" ".join(used), haystack)
        places = [" ".join(used[:i]) for i in range(len(used) + 1)]
        self.assertIn(left, places)
        self.assertEqual(context, " ".join(filter(None, [left, needle, right])))
        size = list(itertools.accumulate((len(s.encode()) + 1 for s in used), initial=0)).__getitem__
        wanted = r["depth"] * size(len(used))
        self.assertEqual(places.index(left), min(range(len(used) + 1), key=lambda i: abs(size(i) - wanted)))
        self.assertLessEqual(abs(size(places.index(left)) - wanted), max(len(s.encode()) + 1 for s in used) / 2)
        self.assertLess(text.left, text.tokens(" " + all_sentences[(start + len(used)) % len(all_sentences)]))

    def test_niah(self):
        requests = [{"task": t, "length": n, "encode": e, "haystack": h, "sample": s} for t in NIAH_TASKS
                    for e, n in (("pieces", 600), ("pieces", 3000), ("bytes", 4000)) for h in ("", ESSAY)
                    for s in range(4)]
        for r, reply in zip(requests, asked(requests)):
            with self.subTest(**{k: r[k] for k in ("task", "length", "encode", "sample")}, essay=r["haystack"] != ""):
                self.check_niah(r, Text(self, r, reply))

    def check_niah(self, r, text):
        straw, key_kind, value_kind, keys, values, queries = NIAH_TASKS[r["task"]]
        needle = "One of the special magic %s for (%s) is: (%s)\\." % (value_kind, FORMS[key_kind], FORMS[value_kind])
        many = queries * values > 1
        context, query = re.fullmatch("(?s).*? afterwards\\.\n(.*)\nWhat .*? for (.*) mentioned in the provided "
                                      "text\\?.*", text.whole).groups()
        found = re.findall(needle, context)
        query_keys = re.findall(FORMS[key_kind], query)
        self.assertEqual(query, listed(query_keys))
        self.assertEqual(len(query_keys), queries)
        answers = [v for q in query_keys for k, v in found if k == q]
        self.assertEqual(len(answers), queries * values)
        self.assertEqual(text.answers, answers)
        distinct = [k for k, _ in found] if values == 1 else []
        self.assertEqual(len(set(distinct)), len(distinct), "keys differ")
        self.assertEqual(len(set(v for _, v in found)), len(found))
        form = NIAH if many else one(NIAH)
        text.check(form.format(things=value_kind if many else value_kind[:-1], context=context, query=query),
                   " " + listed(answers), 128)

        if straw == "essay":
            self.assertEqual(len(found), keys * values)
            self.check_essay(r, text, context, needle)
            return
        lines = context.split("\n")
        inserted = [line for line in lines if re.fullmatch(needle, line)]
        if straw == "noise":
            self.assertEqual(len(inserted), 1)
            self.assertEqual(set(lines) - set(inserted), {NOISE})
            self.assertNotEqual(lines[-1], inserted[0], "it is before a line of noise")
            self.assertLess(text.left, text.tokens("\n" + NOISE))
        else:
            self.assertEqual(inserted, lines)
            self.assertGreater(len(lines), 1)
            self.assertLess(text.left, max(text.tokens("\n" + line) for line in lines) + 6)  # a longer word may follow

    def check_essay(self, r, text, context, needle):
        words = (r["haystack"] or NOISE).split()
        parts = re.split(needle, context)[::3]  # between needles
        counts = [len(p.split()) for p in parts]
        total = sum(counts)
        haystack = [words[i % len(words)] for i in range(total)]
        sentences = sentences_of(haystack)
        ends = list(itertools.accumulate((len(s.split()) for s in sentences), initial=0))
        places = []
        for i in range(1, len(parts)):
            self.assertIn(sum(counts[:i]), ends, "a needle is between sentences")
            places.append(ends.index(sum(counts[:i])))
        depths = [round(100 * i / 39) for i in range(40)]
        slots = collections.Counter(len(sentences) * d // 100 for d in depths)
        for place, needles in collections.Counter(places).items():
            self.assertGreaterEqual(slots[place], needles)
        whole, at = [], 0
        for i, sentence in enumerate(sentences + [None]):
            while at < len(places) and places[at] == i:
                whole.append(re.findall("One of .*?\\.", context)[at])
                at += 1
            whole += [sentence] if sentence else []
        self.assertEqual(" ".join(whole), context)
        self.assertLess(text.left, text.tokens(" " + words[total % len(words)]))

    def test_needles_lie_everywhere(self):
        requests = [{"task": t, "length": 1800, "encode": "pieces", "sample": s}
                    for t in ("niah_single_1", "niah_multikey_2", "niah_multivalue") for s in range(150)]
        depths = collections.defaultdict(list)
        for r, reply in zip(requests, asked(requests)):
            text = decode(reply["tokens"][:reply["answer"]]).split("\n", 1)[1]
            for answer in reply["answers"]:
                depths[r["task"]].append(text.index(answer) / len(text))
        for task, all_depths in depths.items():
            with self.subTest(task=task):
                for tenth in range(9):  # the last is partly the question's
                    share = sum(tenth / 10 <= d < (tenth + 1) / 10 for d in all_depths) / len(all_depths)
                    # 150 draws or more, each in this tenth with probability of about 0.1: 5 standard deviations.
                    self.assertLess(abs(share - 0.1), 5 * math.sqrt(0.09 / 150))


def one(template):
    """RULER's template for a single value."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


class Words(unittest.TestCase):
    def test_variable_tracking(self):
        requests = [{"task": "vt", "length": n, "encode": e, "sample": s}
                    for e, n in (("pieces", 1100), ("pieces", 4000), ("bytes", 6000)) for s in range(8)]
        for r, reply in zip(requests, asked(requests)):
            with self.subTest(**r):
                text = Text(self, r, reply)
                border = text.whole.index("\n\nMemorize and track")
                shot, asked_text = text.whole[:border], text.whole[border + 2:]
                _, shot_prompt, shot_answer, shot_lines = self.chain(shot, 3)
                value, prompt, answer, lines = self.chain(asked_text, 5)
                self.assertEqual(shot, shot_prompt + shot_answer)
                self.assertNotIn("= " + value, shot)
                text.check(shot + "\n\n" + prompt, answer, 30)
                self.assertEqual(" " + " ".join(text.answers), answer)
                self.assertLess(text.left, text.tokens("\n" + NOISE))
                self.assertGreaterEqual(lines, 5)
                more = text.tokens(shot_prompt.replace("\n\n", "\n\n" + NOISE + "\n", 1))
                self.assertGreater(more, 500)
                self.assertTrue(text.tokens(shot_prompt) <= 500 or shot_lines == 5)

    def chain(self, text, letters):
        """Follows the assignments; returns value, prompt, answer and the number of lines of noise."""
        context, value = re.search("(?s)following text\\.\n\n(.*)\nQuestion: .*? the value (.*?) in the text",
                                   text).groups()
        values, noise = {}, 0
        for line in context.split("\n"):
            if line == NOISE:
                noise += 1
                continue
            name, number, other = re.fullmatch("VAR ([A-Z]{%d}) = (?:([1-9][0-9]{4})|VAR ([A-Z]+) )" % letters,
                                               line).groups()
            self.assertNotIn(name, values)
            values[name] = number or values[other]
        self.assertEqual(set(values.values()), {value})
        self.assertEqual(len(values), 5)
        self.assertEqual(context.split("\n")[-1], NOISE, "each assignment is before a line of noise")
        return value, VT.format(context=context, query=value, num_v=5), " " + " ".join(values), noise

    def common(self, text, often, seldom, words):
        context, = re.search("(?s)most often\\.\n(.*?)\nQuestion", text).groups()
        listed_words = re.findall(r"([0-9]+)\. ([a-z-]+)", context)
        self.assertEqual([int(n) for n, _ in listed_words], list(range(1, len(listed_words) + 1)))
        self.assertEqual(context, " ".join("%s. %s" % w for w in listed_words))
        counts = collections.Counter(w for _, w in listed_words)  # in the order of first occurrences
        common = [w for w, n in counts.items() if n == often]
        self.assertEqual(len(common), 10)
        self.assertEqual(set(counts.values()), {often, seldom})
        if words:
            self.assertEqual(len(counts), words)
        for word in counts:
            self.assertRegex(word, "^" + ("[a-z]+" if len(counts) <= 256 else WORD) + "$")
        answer = "".join(" %d. %s" % (i + 1, w) for i, w in enumerate(common))
        return CWE.format(context=context), answer, common, counts

    def test_common_words(self):
        sizes = set()
        requests = [{"task": "cwe", "length": n, "encode": e, "sample": s}
                    for e, n in (("pieces", 900), ("pieces", 4095), ("pieces", 4096), ("pieces", 9000), ("bytes", 8000))
                    for s in range(4)]
        for r, reply in zip(requests, asked(requests)):
            with self.subTest(**r):
                text = Text(self, r, reply)
                border = text.whole.index("\nBelow is a numbered list")
                shot, question = text.whole[:border], text.whole[border + 1:]
                short = r["length"] < 4096
                shot_prompt, shot_answer, _, _ = self.common(shot, *((3, 1, 20) if short else (10, 3, 40)))
                self.assertEqual(shot, shot_prompt + shot_answer)
                often, seldom = (6, 1) if short else (30, 3)
                prompt, answer, common, counts = self.common(question, often, seldom, None)
                text.check(shot + "\n" + prompt, answer, 120)
                self.assertEqual(text.answers, common)
                if len(counts) != 256:  # one more word would be joined of several, and so would all others
                    self.assertLess(text.left, seldom * max(text.tokens(" 12345. " + w) + 6 for w in counts))
                sizes.add(len(counts) > 256)
        self.assertEqual(sizes, {False, True})

    def test_frequent_words(self):
        requests = [{"task": "fwe", "length": n, "encode": e, "sample": s}
                    for e, n in (("pieces", 450), ("pieces", 2000), ("pieces", 9000), ("bytes", 5000))
                    for s in range(4)]
        for r, reply in zip(requests, asked(requests)):
            with self.subTest(**r):
                text = Text(self, r, reply)
                context, = re.search("(?s)coded words\\. (.*)\nQuestion", text.whole).groups()
                counts = collections.Counter(context.split(" "))
                top = [w for w, _ in counts.most_common(5)]
                self.assertEqual(top[0], "...")
                self.assertEqual(text.answers, top[1:4])
                self.assertEqual(len(set(counts[w] for w in top)), 5, "the first five differ in frequency")
                self.assertTrue(all(re.fullmatch("[a-z]{6}", w) for w in counts if w != "..."))
                text.check(FWE.format(context=context), " " + listed(top[1:4]), 50)

                ranks, zeta = (r["length"] - 50) // 50, math.pi ** 2 / 6
                expected = lambda n: [int(n / (k * k * zeta)) for k in range(1, ranks + 1)]
                got = sorted(counts.values(), reverse=True)
                got += [0] * (ranks - len(got))
                n = math.ceil(min((c + 1) * k * k * zeta for k, c in enumerate(got, 1))) - 1  # the largest possible one
                self.assertEqual(expected(n), got)
                self.assertGreaterEqual(n, 53)
                words = lambda n: sum(c * text.tokens(" abcdef" if k else " ...") for k, c in enumerate(expected(n)))
                self.assertLess(text.left, words(n + 1) - words(n))


class Draws(unittest.TestCase):
    def test_a_prompt_is_a_function_of_settings_and_sample(self):
        tasks = ["copy", "induction", "kv", "needle", *NIAH_TASKS, "vt", "cwe", "fwe"]
        base = {"length": 1500, "encode": "pieces", "sample": 2, "seed": 5, "depth": 0.4}
        changes = [{}, {}, {"sample": 3}, {"seed": 6}, {"depth": 0.9}, {"length": 3000}]
        replies = iter(asked([{**base, "task": t, **c} for t in tasks for c in changes]))
        for task in tasks:
            with self.subTest(task=task):
                first, again, sample, seed, depth, length = (next(replies)["tokens"] for _ in changes)
                self.assertEqual(first, again)
                self.assertNotEqual(first, sample)
                self.assertNotEqual(first, seed)
                self.assertEqual(first == depth, task not in ("induction", "kv", "needle"))
                self.assertNotEqual(first, length)

    def test_numbers_are_those_of_splitmix64(self):
        """The letters of a copied string, from the definition of the draws."""
        mask, step = 2 ** 64 - 1, 0x9e3779b97f4a7c15

        def mix(x):
            x = (x + step) & mask
            x = ((x ^ x >> 30) * 0xbf58476d1ce4e5b9) & mask
            x = ((x ^ x >> 27) * 0x94d049bb133111eb) & mask
            return x ^ x >> 31

        key = mix(9)
        for word in [*b"copy", 7]:  # the task and the sample
            key = mix(key ^ word)
        expected = [97 + mix((key + i * step) & mask) % 26 for i in range(16)]
        [reply] = asked([{"task": "copy", "length": 60, "seed": 9, "sample": 7}])
        self.assertEqual(reply["tokens"][reply["answer"]:], expected)


if __name__ == "__main__":
    unittest.main(verbosity=2)
