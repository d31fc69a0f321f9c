"""A real browser, without a window and without a network, which all tests of a process share."""

import json
import os
import select
import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip

OWN = "file:", "data:", "blob:", "http://127.0.0.1:"


class Browser:
    """A browser that is steered: it opens pages one after the other, in a form that can change.

    folder: where the browser may write its profile. Skips the test where there is no browser.
    """

    def __init__(self, folder):
        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        if not program:
            pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
        self.folder = folder
        their_in, self.to = os.pipe()
        self.back, their_out = os.pipe()
        # The browser reads at 3 and writes at 4; each message ends with a zero byte.
        start = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", start, program, *OPTIONS, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self.rest, self.number, self.events, self.session = b"", 0, [], {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self):
        self.process.terminate()
        self.process.wait(30)
        os.close(self.to)
        os.close(self.back)

    def ask(self, method, **parameters):
        """The answer to a command of the DevTools protocol; events that come first are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters, **self.session}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self):
        while b"\0" not in self.rest:
            assert select.select([self.back], [], [], 60)[0], "the browser does not answer"
            found = os.read(self.back, 2**20)
            assert found, "the browser is gone"
            self.rest += found
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def show(self, width, media="screen"):
        """Changes the width in pixels and the medium."""
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", media=media)

    def open(self, address):
        """Opens a page and waits until it is loaded. Returns the complaints meanwhile."""
        self.events = []
        self.ask("Page.navigate", url=address)
        while not any(it.get("method") == "Page.loadEventFired" for it in self.events):
            self.events.append(self.receive())
        self.run("await new Promise((done) => setTimeout(done, 50))")  # what scripts do after it
        return self.complaints()

    def complaints(self):
        """What is wrong with a page since it was opened: requests to elsewhere, script errors."""
        found = []
        for event in self.events:
            match event:
                case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                    found += [] if url.startswith(OWN) else [url]
                case {"method": "Runtime.exceptionThrown", "params": said}:
                    found.append(str(said["exceptionDetails"].get("exception"))[:300])
                case {"method": "Runtime.consoleAPICalled", "params": said}:
                    bad = said["type"] in ("error", "warning", "assert")
                    found += [str(said["args"])[:300]] * bad
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as said}}:
                    found.append(said["text"])
        return found

    def run(self, script):
        """What the body of an asynchronous function returns on the page that is open."""
        whole = f"(async () => {{ {script} }})()"
        how = dict(expression=whole, returnByValue=True, awaitPromise=True)
        answer = self.ask("Runtime.evaluate", **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def run_on(self, body, scripts, script):
        """What `script` returns on a page with `body`, once `scripts`, which are paths, have run.

        Fails where a script does, or where something is asked from elsewhere.
        """
        tags = "".join(f'<script src="{path.as_uri()}"></script>' for path in scripts)
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>page</title>'
        page = self.folder / "page.html"
        page.write_text(f"{head}{body}{tags}</html>", encoding="utf-8")
        self.open(page.as_uri())
        found = self.run(script)
        assert self.complaints() == []
        return found
