"""A headless Chromium, controlled through two pipes by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol/),
so that neither a port nor a package is needed. Used by site_pages_test.py, report_pages_test.py and
docs/pictures/draw_report.py."""

import json
import os
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find():
    """The path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One page. Messages are JSON, each with a zero byte behind it; Chromium reads file 3 and writes file 4."""

    def __init__(self):
        self.home = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        to_read, self.to = os.pipe()
        self.source, to_write = os.pipe()
        # The shell gives the pipes the numbers that Chromium expects. Root may not use the sandbox, and the pages are ours.
        command = ["bash", "-c", 'exec "$@" 3<&%d 4>&%d' % (to_read, to_write), "chromium", find(), "--headless=new", "--no-sandbox",
                   "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
                   "--user-data-dir=" + self.home, "about:blank"]
        self.log = tempfile.TemporaryFile("w+", dir=self.home)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                        pass_fds=(to_read, to_write), env=dict(os.environ, HOME=self.home))
        os.close(to_read)
        os.close(to_write)
        self.rest, self.last, self.session, self.events = b"", 0, None, []
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def close(self):
        os.close(self.to)
        os.close(self.source)
        self.process.terminate()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def receive(self):
        while b"\0" not in self.rest:
            got = os.read(self.source, 1 << 16)
            if not got:
                self.process.wait()
                self.log.seek(0)
                raise RuntimeError("Chromium has ended: " + self.log.read())
            self.rest += got
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def call(self, method, **given):
        """The result of a method. Events that come before it are kept in `events`."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": given}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise RuntimeError("%s: %s" % (method, answer["error"]))
                return answer["result"]
            self.events.append(answer)

    def show(self, path, width, height=900, scheme="light"):
        """Loads a file in a window of this width, for a reader who prefers the colours `scheme`. `events` are then those of the page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events = []
        self.call("Page.navigate", url="file://" + path)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.receive())

    def value(self, script):
        """The value of an expression of JavaScript in the page, as JSON can hold it."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError("%s: %s" % (script, done["exceptionDetails"]))
        return done["result"].get("value")

    def errors(self):
        """What the page has reported as errors since it was shown, as texts."""
        found = []
        for event in self.events:
            method, given = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
                found.append(" ".join(str(a.get("value", a.get("description"))) for a in given["args"]))
            elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
                found.append("%s %s" % (given["entry"]["text"], given["entry"].get("url", "")))
            elif method == "Network.loadingFailed":
                found.append("a file could not be loaded: " + given["errorText"])
        return found
