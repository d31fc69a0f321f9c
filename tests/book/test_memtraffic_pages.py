"""The Sphinx extension of the book: pages made from docstrings and recordings."""

import ast
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("docutils", reason="Sphinx is not installed")

import memtraffic_pages as pages

CLASS = '''
@dataclass(frozen=True, kw_only=True)
class C(Base):
    """A thing.

    >>> C(size=1)

    size: in bytes.
    """

    size: int
    parts: list[int] = field(default_factory=list)

    def grow(self, by: int, *rest: int, how: str = "a") -> None:
        """Adds bytes. A `b` is kept.

        by: how many. rest: the
        others.
        how (a letter): in which way. Raises ValueError for an unknown one.
        """

    def _private(self): ...

    @property
    def empty(self) -> bool: ...
'''
LINES = [
    "``````{py:class} m.C(*, size: int, parts: list[int] = list())",
    *("Bases: `Base`", "A thing.", "```pycon\n>>> C(size=1)\n```", "`size`\n: in bytes."),
    "`````{py:method} grow(by: int, *rest: int, how: str='a') -> None",
    *("Adds bytes. A `b` is kept.", "`by`\n: how many.", "`rest`\n: the others."),
    *("`how` (a letter)\n: in which way.", "Raises ValueError for an unknown one."),
    *("`````", "`````{py:property} empty\n:type: bool", "`````", "``````"),
]


def test_describe():
    [node] = ast.parse(CLASS).body
    assert "\n".join(pages.describe("m.C", node)).strip().split("\n\n") == LINES
    [function] = ast.parse("def f(x): ...").body
    assert next(pages.describe("m.f", function)) == "``````{py:function} m.f(x)"


def test_describe_ladder_of_two_gpus(tmp_path, monkeypatch):
    """Of the published GPU, and of another one that lacks a rung."""
    ladders = {
        "a-gpu": ("A", "copy,1000\nnaive,100\n"),
        "nvidia-h200": ("H200", "copy,4000\nnaive,1000\nfused,3900\n"),
    }
    for folder, (gpu, ladder) in ladders.items():
        (tmp_path / folder).mkdir()
        machine = json.dumps({"gpu": gpu, "experiments": {"ladder": {}}})
        (tmp_path / folder / "machine.json").write_text(machine, "utf-8")
        (tmp_path / folder / "ladder.csv").write_text(f"impl,gb_per_s\n{ladder}", "utf-8")
    monkeypatch.setattr(pages, "RECORDINGS", tmp_path)
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
