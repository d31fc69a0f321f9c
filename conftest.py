"""How the notebooks are compared: exactly where measured results are replayed; on a GPU, but for numbers with a unit."""

import importlib.util
import os
from pathlib import Path

HAS_TRITON = importlib.util.find_spec("triton") is not None
BOOK = Path(__file__).parent / "book"
NEEDS_TRITON = [
    p for p in BOOK.glob("*.ipynb") if "import triton" in p.read_text("utf-8")
]
collect_ignore = [] if HAS_TRITON else [f"book/{path.name}" for path in NEEDS_TRITON]


def pytest_addoption(parser):
    parser.addoption("--site", help="the folder of a built site to check")


def pytest_report_header(config):
    if not HAS_TRITON:
        return f"no Triton here, so skipped: {', '.join(collect_ignore)}"


def pytest_configure(config):
    if not getattr(config.option, "nbval", False):
        return
    from memtraffic import machine

    if machine.HAS_GPU:
        os.environ.setdefault("MEMTRAFFIC_MODE", "verify")
        if not config.option.nbval_sanitize_with:
            config.option.nbval_sanitize_with = str(config.rootpath / "tests/units.cfg")
