import pytest

from memtraffic.kernels.softmax import naive
from memtraffic_book import exhibits, text
from memtraffic_book.text import check_exercise, claim, glue, show_diff, show_source


@pytest.fixture
def shown(monkeypatch):
    """What is displayed: pairs of the object and the keywords."""
    calls = []
    monkeypatch.setattr(text, "display", lambda value, **options: calls.append((value, options)))
    return calls


def test_claim_is_one_output_in_two_forms_or_an_error(shown, monkeypatch, capsys):
    claim("naive reads 5MN + 2M", [0])
    assert capsys.readouterr().out == "✓ naive reads 5MN + 2M\n"
    monkeypatch.setattr(text, "get_ipython", lambda: "a notebook's")
    claim("1 < 2 holds.", True)
    mark = '<details class="claim"><summary>✓</summary>1 &lt; 2 holds.</details>'
    data = {"text/plain": "✓ 1 < 2 holds.", "text/html": mark}
    assert shown == [(data, {"raw": True})]
    for holds in (False, 0, [], None):
        with pytest.raises(AssertionError, match="it is faster"):
            claim("it is faster", holds)
    assert len(shown) == 1 and capsys.readouterr().out == ""


@pytest.mark.parametrize("found", ["3.6.0", "3.7.1", "3.9.0", "3.70.0"])
def test_claim_of_what_the_compiler_makes(found, monkeypatch, capsys):
    """Demanded of the code that the book speaks of; of another compiler's, it is told."""
    monkeypatch.setattr(text, "version", lambda name: found)
    claim("it has 5 barriers", True, of_compiler=True)
    assert capsys.readouterr().out == "✓ it has 5 barriers\n"
    if found in ("3.6.0", "3.7.1"):
        with pytest.raises(AssertionError, match="5 barriers"):
            claim("it has 5 barriers", False, of_compiler=True)
    else:
        claim("it has 5 barriers", False, of_compiler=True)
        said = f"– With Triton {found} this does not hold: it has 5 barriers\n"
        assert capsys.readouterr().out == said


def judge(answer):
    if answer == "5":
        raise AssertionError("It is 4, not 5.")
    if answer == "five":
        raise AssertionError
    return answer - 4 == 0


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (0, "✗ twice two: not yet\n"),
        ("5", "✗ twice two: not yet. It is 4, not 5.\n"),
        ("five", "✗ twice two: not yet\n"),
        ("4", "✗ twice two: not yet (TypeError: "),
    ],
)
def test_check_exercise(attempt, expected, capsys):
    check_exercise("twice two", attempt, judge)
    said = capsys.readouterr().out
    assert said.startswith(expected) and said.count("\n") == 1


def test_glue_keeps_a_value_where_myst_nb_looks(shown):
    glue("ratio", "4.0x")
    mime = "application/papermill.record/"
    [(data, options)] = shown
    assert data == {f"{mime}text/plain": "'4.0x'"}
    scrapbook = {"name": "ratio", "mime_prefix": mime}
    assert options == {"raw": True, "metadata": {"scrapbook": scrapbook}}


def test_source_and_the_difference_of_two_sources(shown):
    show_source(naive.softmax, exhibits.softmax_no_other)
    show_diff(naive.softmax, exhibits.softmax_no_other)
    show_diff(naive.softmax, naive.softmax)
    source, changed, same = (markdown.data for markdown, _ in shown)
    assert source.startswith("```python\ndef softmax(x: Tensor")
    assert "\n\n\ndef softmax_no_other(x: Tensor" in source and source.endswith("\n```")
    assert "amax(dim=1, keepdim=True)" in source
    first, *lines, last = changed.splitlines()
    assert (first, last) == ("```diff", "```")
    assert "-def softmax(x: Tensor) -> Tensor:" in lines
    assert "+def softmax_no_other(x: Tensor, block: int | None = None) -> Tensor:" in lines
    assert "-    row_max = x.amax(dim=1, keepdim=True)  # reads MN, writes M" in lines
    assert not [line for line in lines if line.startswith(("@@", "---", "+++")) or '"""' in line]
    assert not [line for line in same.splitlines() if line.startswith(("+", "-"))]
