"""A real browser, without a window and without a network."""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
)  # fmt: skip


def dump_dom(page, folder, *options):
    """The HTML of a file after its scripts ran. folder: where the browser may write its profile.

    Skips the test where there is no browser.
    """
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not program:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
    return subprocess.run(
        [program, *OPTIONS, *options, f"--user-data-dir={folder / 'profile'}", page.as_uri()],
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
