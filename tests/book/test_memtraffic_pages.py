"""The Sphinx extension of the book: pages made from docstrings and recordings."""

import ast
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("docutils", reason="Sphinx is not installed")

import memtraffic_pages as pages

ROOT = Path(__file__).resolve().parents[2]


def described(source):
    [node] = ast.parse(textwrap.dedent(source)).body
    return "\n".join(pages.describe("m.f", node))


def test_describe_function():
    text = described('''
        def f(x: int, *rest: int, option: str = "a") -> int:
            """Adds numbers. A `b` is kept.

            >>> f(1, 2)
            3

            x: the first. rest: the
            others.
            option (a letter): how. Raises ValueError for an unknown option.

            Counts from 0.
            """
    ''')
    assert text.startswith("``````{py:function} m.f(x: int, *rest: int, option: str='a') -> int\n")
    assert "Adds numbers. A `b` is kept.\n" in text
    assert "```pycon\n>>> f(1, 2)\n3\n```\n" in text
    for entry in ("`x`\n: the first.", "`rest`\n: the others.", "`option` (a letter)\n: how."):
        assert f"\n{entry}\n" in text
    assert "\nRaises ValueError for an unknown option.\n" in text
    assert text.rstrip("`\n").endswith("Counts from 0.")


def test_describe_dataclass():
    text = described('''
        @dataclass(frozen=True, kw_only=True)
        class C(Base):
            """A thing.

            size: in bytes.
            """

            size: int
            name: str = ""
            parts: list[int] = field(default_factory=list)

            def grow(self, by: int) -> None:
                """Adds bytes. by: how many."""

            def _private(self): ...

            @property
            def empty(self) -> bool:
                """Whether there is nothing."""
    ''')
    assert text.startswith("``````{py:class} m.f(*, size: int, name: str = '', ")
    assert "parts: list[int] = list())\n" in text
    assert "Bases: `Base`" in text and "`size`\n: in bytes." in text
    assert "`````{py:method} grow(by: int) -> None\n" in text and "`by`\n: how many." in text
    assert "`````{py:property} empty\n:type: bool\n" in text
    assert "_private" not in text


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """Recordings of the published GPU, and of another one that lacks a rung."""
    facts = {"driver": "1", "cuda": "13.0", "torch": "2", "triton": "3"}
    entry = {"date": "2026-01-02", "commit": "0123456789abcdef"}
    ladders = {
        "a-gpu": ("A", "copy,1000\nnaive,100\n"),
        "nvidia-h200": ("H200", "copy,4000\nnaive,1000\nfused,3900\n"),
    }
    for folder, (gpu, ladder) in ladders.items():
        (tmp_path / folder).mkdir()
        machine = facts | {"gpu": gpu, "experiments": {"ladder": entry, "roof": entry}}
        (tmp_path / folder / "machine.json").write_text(json.dumps(machine), "utf-8")
        (tmp_path / folder / "ladder.csv").write_text(f"impl,gb_per_s\n{ladder}", "utf-8")
    monkeypatch.setattr(pages, "RECORDINGS", tmp_path)


def test_describe_ladder_of_two_gpus(two_gpus):
    assert list(pages.describe_ladder()) == [
        "| rung | H200 | A |",
        "| --- | --- | --- |",
        "| copy | 4000 GB/s, 100 % | 1000 GB/s, 100 % |",
        "| naive | 1000 GB/s, 25 % | 100 GB/s, 10 % |",
        "| fused | 3900 GB/s, 98 % | – |",
        "",
    ]


@pytest.mark.parametrize("address", ["", "https://github.com/owner/name"])
def test_buttons_need_an_address(address):
    config = SimpleNamespace(html_theme_options={"repository_url": address})
    pages.add_repository(None, config)
    options = config.html_theme_options
    buttons = {options["use_repository_button"], options["use_issues_button"]}
    assert buttons == {bool(address)} == {bool(options["launch_buttons"])}
