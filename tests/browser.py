"""A real browser, without a window and without a network."""

import html
import json
import os
import re
import select
import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
)  # fmt: skip


def program():
    """The browser that is here. Skips the test where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
    return found


def dump_dom(page, folder, *options):
    """The HTML of a file after its scripts ran. folder: where the browser may write its profile.

    Skips the test where there is no browser.
    """
    return subprocess.run(
        [program(), *OPTIONS, *options, f"--user-data-dir={folder / 'profile'}", page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=120,
        text=True,
    ).stdout


def run_script(folder, scripts, script, body="", *options):
    """What `script` gives the function `done` on a page with `body`, once `scripts` have loaded.

    folder: where the page and the browser's profile are written. scripts: paths. Fails where a
    script on the page does.
    """
    tags = "".join(f'<script src="{path.as_uri()}"></script>' for path in scripts)
    page = folder / "page.html"
    page.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>page</title>
<pre id="done"></pre>{body}
<script>const wrong = [], pre = document.getElementById("done");
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
const done = (found) => pre.textContent = JSON.stringify({{ found, wrong }});</script>
{tags}<script>addEventListener("load", () => {{ {script} }});</script></html>""",
        encoding="utf-8",
    )
    [text] = re.findall(r'<pre id="done">(.*?)</pre>', dump_dom(page, folder, *options), re.S)
    assert text, "the page's script did not come to its end"
    answer = json.loads(html.unescape(text))
    assert answer["wrong"] == []
    return answer["found"]


class Browser:
    """A browser that is steered: it opens pages one after the other, in a form that can change.

    folder: where the browser may write its profile. Use it in a `with` statement. Skips the test
    where there is no browser.
    """

    def __init__(self, folder):
        options = [it for it in OPTIONS if it != "--dump-dom"]
        their_in, self.to = os.pipe()
        self.back, their_out = os.pipe()
        # The browser reads at 3 and writes at 4; each message ends with a zero byte.
        start = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        flags = [*options, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
        self.process = subprocess.Popen(
            ["bash", "-c", start, program(), *flags],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self.rest, self.number, self.events = b"", 0, []
        self.session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait(30)
        os.close(self.to)
        os.close(self.back)

    def ask(self, method, **parameters):
        """The answer to a command of the DevTools protocol; events that come first are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
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

    def open(self, address):
        """Opens a page and waits until it is loaded. Returns the events meanwhile."""
        self.events = []
        self.ask("Page.navigate", url=address)
        while not any(it.get("method") == "Page.loadEventFired" for it in self.events):
            self.events.append(self.receive())
        self.run("new Promise((done) => setTimeout(done, 50))")  # what scripts do after it
        return self.events

    def show(self, width, media="screen", dark=False):
        """Changes the width in pixels, the medium and whether the reader prefers a dark page."""
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def run(self, script):
        """The value of a script's last expression, for which a promise is awaited."""
        how = dict(expression=script, returnByValue=True, awaitPromise=True)
        answer = self.ask("Runtime.evaluate", **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")
