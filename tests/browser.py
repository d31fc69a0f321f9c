"""A real browser, without a window and without a network."""

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
