"""Reads a folder that run.sh filled: the steps that the journal names with their output, and facts. report.py uses it.

The folder holds

    journal.tsv          lines "bundle DIGEST", "call DATE", "fact NAME VALUE" and
                         "step NAME ATTEMPT PART KIND RESULT SECONDS REASON", where RESULT is "began", an exit code,
                         "skipped" or "left out"
    details.tar.gz       logs/NAME.ATTEMPT.out and .err of the steps that have ended, .nccl where NCCL wrote a log,
                         metrics/NAME.jsonl of training runs, gpus.csv and clocks.csv of nvidia-smi, machine/: settings,
                         libraries and what the driver told the kernel
    running.out, .err    the output of the last step that began, if details.tar.gz does not have it yet
    clocks.csv           while run.sh runs

A call of run.sh that is killed leaves a step that began and never ended. Later calls append to the journal.
"""

import os
import tarfile


def text_of(path):
    try:
        with open(path, errors="replace") as f:
            return f.read()
    except OSError:
        return ""


class Step:
    """A step with all of its attempts; `result` is that of the last one."""

    def __init__(self, name):
        self.name, self.part, self.kind, self.result, self.seconds, self.reason = name, "", "", "", 0, ""
        self.attempts = []  # (output, errors) of each attempt
        self.nccl = ""  # NCCL's log of the last attempt

    @property
    def output(self):
        return "\n".join(output for output, _ in self.attempts)  # a killed attempt may have left half a line

    @property
    def last(self):
        """The output and the errors of the last attempt."""
        return self.attempts[-1] if self.attempts else ("", "")


class Journal:
    def __init__(self, folder):
        self.folder = folder
        self.files = {}  # of details.tar.gz: name -> text
        self.facts = {}  # of the latest call
        self.calls = []  # dates
        self.steps = {}  # name -> Step, in the order in which they began
        self._read_details()
        attempts = {}  # name -> numbers of its attempts
        latest = None
        for line in text_of(os.path.join(folder, "journal.tsv")).split("\n")[:-1]:  # a killed call may leave half a line
            kind, *fields = line.split("\t")
            if kind == "call":
                self.calls.append(fields[0])
                self.facts = {}
            elif kind == "fact":
                self.facts[fields[0]] = fields[1] if len(fields) > 1 else ""
            elif kind == "step" and len(fields) >= 6:
                name, attempt, part, step_kind, result, seconds = fields[:6]
                step = self.steps.setdefault(name, Step(name))
                step.part, step.kind, step.result, step.seconds = part, step_kind, result, int(seconds or 0)
                step.reason = fields[6] if len(fields) > 6 else ""
                if result == "began":
                    attempts.setdefault(name, []).append(attempt)
                    latest = (name, attempt)
        for name, numbers in attempts.items():
            for attempt in numbers:
                log = "logs/%s.%s." % (name, attempt)
                if (name, attempt) == latest and not any(log + stream in self.files for stream in ("out", "err")):
                    said = [text_of(os.path.join(folder, "running." + stream)) for stream in ("out", "err")]
                else:
                    said = [self.files.get(log + stream, "") for stream in ("out", "err")]
                self.steps[name].attempts.append(tuple(said))
                self.steps[name].nccl = self.files.get(log + "nccl", "")

    def _read_details(self):
        try:
            with tarfile.open(os.path.join(self.folder, "details.tar.gz")) as tar:
                for member in tar:
                    if member.isfile():
                        self.files[os.path.normpath(member.name)] = tar.extractfile(member).read().decode(errors="replace")
        except (OSError, tarfile.TarError, EOFError):
            pass  # there is none yet

    def text(self, name):
        """The text of a file of the folder or, if it is not there, of details.tar.gz."""
        return text_of(os.path.join(self.folder, name)) or self.files.get(name, "")
