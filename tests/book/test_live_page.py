"""The live kernels in a browser: what an editor starts with, what its runs say, how it is used."""

import html
import inspect
import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import live
import live_page
import notebooks
import numpy as np
import pytest
from live_texts import FIVE, MASKED, MODULES, OPTIONS, PAGES, SHOWN, of_masked, with_syntax_errors
from notebooks import BOOK

# ---- what an editor starts with

CELLS = [
    "x = 1\ny = x.exp()",
    "%matplotlib inline\n@triton.jit\ndef kernel(y):\n    pass  # shown\n\n\nz = 1",
    "def kernel(y): ...\n\n\ndef launch(x):\n    return x",
    "def kernel(:",
]

KERNEL = "@triton.jit\ndef kernel(y):\n    pass  # shown"
LAUNCHED = "\n\n\ndef softmax(x):\n    y = torch.empty_like(x)\n    kernel[(1,)](y)\n    return y"


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("<!-- live kernel launch -->", f"{KERNEL}\n\n\ndef launch(x):\n    return x"),
        ('<!-- live kernel {"launch": "kernel[(1,)](y)"} -->', f"{KERNEL}{LAUNCHED}"),
        ('<!-- live y\n{"def": "f(x)"} -->', "def f(x):\n    x = 1\n    y = x.exp()\n    return y"),
    ],
)
def test_editor_starts_with_the_code_of_its_page(comment, code):
    found = live_page.composed(comment, CELLS)
    assert found["code"] == f"{live_page.HEAD}\n\n{code}" and not found["hint"]
    called = code.rpartition("def ")[2].split("(")[0]
    assert found["options"] == {"reference": live.SOFTMAX, "name": "a softmax", "function": called}


def test_editor_takes_options_and_needs_code_that_the_page_shows():
    comment = '<!-- live launch {"reference": "", "inputs": "M,N N", "hint": "Try."} -->'
    found = live_page.composed(comment, CELLS)
    options = {"reference": "", "name": "a softmax", "inputs": "M,N N", "function": "launch"}
    assert found["options"] == options
    assert found["hint"] == "Try."
    exam = '<!-- live launch {"exam": "naive.LOGS", "reads": "2MN"} -->'
    assert live_page.composed(exam, CELLS)["options"]["moves"] == "reads 2MN, writes MN"
    for comment in ("<!-- live none -->", '<!-- live x {"def": "f(x)"} -->'):
        with pytest.raises(LookupError, match="no code on this page"):
            live_page.composed(comment, CELLS)


def test_each_editor_judges_what_its_page_asks_for():
    """Results and traffic of the code that it starts with, or of the solution of its exercise."""
    for page, start in offered():
        options = {**start["options"], "modules": MODULES}
        text = PAGES.get(f"{page} {options['function']}", start["code"])
        *_, last = live.run(text, options)
        assert last.get("right"), (page, last)
        *_, last = live.run(text, {**options, "moves": "reads MN, writes 9MN"})
        assert last["text"] == "Right, but the exercise asks for one that reads MN, writes 9MN."


# ---- in a browser

OPEN = (Path(__file__).parent / "live_editor.js").read_text("utf-8")


def offered():
    """What the editors of all chapters start with, by page."""
    intro = (BOOK / "intro.md").read_text("utf-8")
    for comment in live_page.COMMENT.finditer(intro):
        yield "intro", live_page.composed(comment[0], notebooks.PYTHON.findall(intro))
    for path in sorted(BOOK.glob("*.ipynb")):
        pieces, text = [], notebooks.markdown(notebook := notebooks.load(path))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                pieces += notebooks.PYTHON.findall(cell.source)
                continue
            shown = [it.get("data", {}).get("text/markdown", "") for it in cell.outputs]
            pieces += [cell.source, *notebooks.PYTHON.findall("".join(shown))]
        for comment in live_page.COMMENT.finditer(text):
            yield path.stem, live_page.composed(comment[0], pieces, path.stem)


def probe(text, options):
    """The counts of a run with its steps, then the numbers of its result; or its error."""
    try:
        with live.Imports(text, options):
            program, kept = live.Program(text, options), []
            call = program.call
            program.call = lambda *args: kept.append(call(*args)) or kept[-1]
            found = live.counts_of(program, program.tensors(live.SHAPE))
            numbers = [str(it) for x in live.sizes_in(kept[0][0]) for it in x.numbers()]
            return {**found, "numbers": numbers}
    except Exception as error:
        return live.error_of(error, text)


@pytest.fixture(scope="module")
def engine(browser):
    """`probe` in a worker of the browser."""
    text = f"import live\n{inspect.getsource(probe)}live.run = lambda *given: [probe(*given)]"
    parts = [*live_page.worker(), f"__BRYTHON__.runPythonSource({json.dumps(text)});"]
    page = browser.folder / "engine.html"
    page.write_text("<!doctype html><script src='engine.js'></script>", "utf-8")
    (browser.folder / "engine.js").write_text(f"const PARTS = {json.dumps(parts)};", "utf-8")
    assert browser.open(page.as_uri()) == []
    browser.run("window.worker = new Worker(URL.createObjectURL(new Blob(PARTS)));")
    return lambda texts: browser.run(OPEN + f"return answers({json.dumps(texts)});")


@pytest.mark.browser
def test_browser_computes_as_cpython(engine):
    """Which computes as Triton does: what pages offer and show, solutions, and wrong kernels."""
    texts = [(it["code"], it["options"]) for _, it in offered()]
    texts += [(PAGES[name], OPTIONS[name]) for name in PAGES]
    for function, text in SHOWN.values():
        texts.append((text, {"function": function.__name__, "modules": MODULES}))
    for dtype in ("float16", "bfloat16"):
        texts.append((SHOWN["tiled softmax"][1], {"dtype": dtype, "modules": MODULES}))
    every = " + ".join(f"tl.{it}(tl.where(mask, x * x, 1.0))" for it in live.UNARY)
    texts.append((of_masked("    numerator =", f"    x = {every}\n    numerator ="), {}))
    for (text, options), found in zip(texts, engine(texts), strict=True):
        expected = probe(text, options)
        numbers = [list(map(float, it.pop("numbers"))) for it in (found, expected)]
        np.testing.assert_allclose(*numbers, 2e-6)
        assert found == expected and found["reads"] > 0


@pytest.mark.browser
@pytest.mark.parametrize("name", FIVE)
def test_browser_names_the_line_of_a_syntax_error(engine, name):
    lines, texts = zip(*with_syntax_errors(FIVE[name]), strict=True)
    for line, found in zip(lines, engine([(it, {}) for it in texts]), strict=True):
        assert found["line"] == line and found["message"].startswith("this is no Python: ")


# ---- the editor

LIMIT, METHOD = "SECONDS = 10;", "Network.requestWillBeSent"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *text):
        """Not to the terminal."""


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>page</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<link rel="stylesheet" href="memtraffic.css"><article class="bd-content"><div class="live"
data-live="{}"></div></article><div style="height: 3000px"></div><script src="pages.js"></script>"""


@pytest.fixture(scope="module", params=["file", "http"])
def editor(request, browser, tmp_path_factory):
    """A function that opens a page with one editor, and limits the seconds of its runs."""
    folder, script = tmp_path_factory.mktemp("editor"), live_page.script()
    for name in ("pages.js", "memtraffic.css"):
        shutil.copy(BOOK / "_static" / name, folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{server.server_port}"
        address = there if request.param == "http" else folder.as_uri()

        def open_page(code, seconds=10, **options):
            assert LIMIT in script
            limited = script.replace(LIMIT, f"SECONDS = {seconds};")
            (folder / "live.js").write_text(limited, "utf-8")
            data = {"code": code, "options": {"reference": live.SOFTMAX, **options}, "hint": "Try."}
            page = PAGE.format(html.escape(json.dumps(data)))
            (folder / "page.html").write_text(page, "utf-8")
            browser.show(1280)
            assert browser.open(f"{address}/page.html") == []

        yield open_page
        server.shutdown()


def requests(browser):
    """The files that the open page has asked for, but for itself; no worker's text."""
    found = [it["params"]["request"]["url"] for it in browser.events if it.get("method") == METHOD]
    return [it.rpartition("/")[2] for it in found[1:] if it[:5] not in ("blob:", "data:")]


def on_files(test):
    return pytest.mark.browser(pytest.mark.parametrize("editor", ["file"], indirect=True)(test))


@on_files
def test_editor_loads_one_file_when_it_is_opened_and_runs_its_code(editor, browser):
    for _, data in offered():
        editor(data["code"], **data["options"])
        assert len(requests(browser)) == 2
        browser.run(OPEN + "await open();")
        assert requests(browser)[2:] == ["live.js"]
        counts, formula, verdict = live.run(data["code"], data["options"])
        first, second, third = browser.run(OPEN + "return said();")
        assert first.lower().startswith(f"{formula['text']} solved at 2 × 4, ".lower())
        assert first.endswith(f"{formula['note']}.")
        assert second.startswith(f"At 4 × 8 it {counts['text']}. Line ")
        assert third == f"{'✓' if verdict['right'] else '✗'} {verdict['text']}"
        assert browser.complaints() == []


FUNCTION = "def f(x):\n    "
SAID = {  # the start of what is said of a text at last, or of its traffic
    f"{FUNCTION}while x.shape[1] != 8: pass\n    return x": "Stopped after 2 seconds: what stands",
    f"{FUNCTION}return f(x)": "Line 2: the functions call one another without end.",
    of_masked("x_ptr + offsets", "x_ptr + 8 + offsets"): "Line 11: program 3 reads element 32 of",
    of_masked(', mask=mask, other=-float("inf")'): "Reads MN, writes MN, at powers of two alone",
}  # fmt: skip


@on_files
def test_editor_says_one_sentence_of_what_fails_and_runs_again(editor, browser):
    editor(f"{FUNCTION}while True: pass", seconds=2, reference="", modules=MODULES)
    [said] = browser.run(OPEN + "await open(); return said();")
    assert said == "Stopped after 2 seconds: nothing is counted yet. Does a loop run without end?"
    for text, sentence in SAID.items():
        said = browser.run(OPEN + f"return run({json.dumps(text)});")
        assert any(it.startswith(sentence) for it in (said[0], said[-1])), (text, said)
        marked = browser.run(OPEN + "return all('.live-line.bad').length;")
        assert marked == sentence.startswith("Line ")
        said = browser.run(OPEN + "return run('def f(x): return x.exp()');")
        assert said[0].startswith("Reads MN, writes MN Solved at ")
    assert browser.complaints() == []


KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "End": 35, "ArrowDown": 40, "z": 90}
CONTROL = 2


def press(browser, *keys, held=0):
    for key in keys:
        how = dict(key=key, code=key, windowsVirtualKeyCode=KEYS[key], modifiers=held)
        browser.ask("Input.dispatchKeyEvent", type="rawKeyDown", **how)
        browser.ask("Input.dispatchKeyEvent", type="keyUp", **how)


@on_files
def test_editor_is_used_by_keyboard_alone(editor, browser):
    """Enter keeps the indentation, Tab adds to it, all can be undone; Escape, then Tab, leaves."""
    code = "def f(x):\n    if 0 <x.dim():\n        pass\n    return x.softmax(1)"
    editor(code)
    browser.run(OPEN + 'button("Edit").focus();')
    browser.ask("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r")
    browser.run(OPEN + "await until(idle);")
    focus = "return document.activeElement.tagName + document.activeElement.textContent;"
    value = "return document.querySelector('textarea').value;"
    assert browser.run(focus) == "TEXTAREA"
    press(browser, "ArrowDown", "End", "Enter")
    browser.ask("Input.insertText", text="y = 1")
    press(browser, "Enter", "Tab")
    browser.ask("Input.insertText", text="z")
    lines = browser.run(value).split("\n")
    assert lines[2:4] == ["        y = 1", "            z"] and len(lines) == 6
    shown = browser.run(OPEN + "return [find('.live-text pre').textContent, !!find('.old')];")
    assert shown == ["\n".join(lines) + "\n", True]
    browser.run(OPEN + "find('textarea').setSelectionRange(20, 45);")
    for held in (0, 8, 0):  # with Shift it goes back
        press(browser, "Tab", held=held)
    lines = browser.run(value).split("\n")
    assert [len(it) - len(it.lstrip()) for it in lines][1:4] == [8, 12, 16]
    press(browser, *["z"] * 9, held=CONTROL)
    assert browser.run(value) == code
    press(browser, "Enter", held=CONTROL)
    assert browser.run(OPEN + "await until(idle); return said();")[-1].startswith("✓")
    press(browser, "Escape", "Tab")
    assert browser.run(focus) == "BUTTONRun"
    press(browser, "Tab", held=8)
    assert browser.run(focus) == "TEXTAREA"
    press(browser, "Tab")
    assert browser.run(focus) == "TEXTAREA" and browser.run(value) != code


@pytest.mark.browser
def test_editor_stops_resets_and_copies(editor, browser):
    editor(MASKED)
    found = browser.run(OPEN + "await open(); return stopResetCopy();")
    right = "✓ A softmax: right at 6 matrices."
    assert found == [True, ["Stopped."], "Run", True, right, MASKED, "Copied"]


@on_files
def test_editor_shows_each_step(editor, browser):
    """Its sentence, its line, and the elements it touches; what each line moves stands after it."""
    editor(MASKED)
    script = "await open(); return [all('.live-note'), steps(), all('figcaption')];"
    notes, (first, *rest), captions = browser.run(OPEN + script)
    assert list(map(str.strip, notes)) == ["← reads 32", "← writes 32"]
    assert first == ["Nothing has moved yet.", 0, 0, "x 4 × 8not touched yet"]
    for number, (step, found) in enumerate(zip(next(live.run(MASKED))["steps"], rest, strict=True)):
        assert found[1:3] == [step["line"], len(step["offsets"])]
        assert found[0].startswith(f"Step {number + 1} of 8: program {number // 2}, line ")
    assert "line 11 reads elements 8 to 15 of x_ptr, which is x." in rest[2][0]
    assert captions == ["x 4 × 8read once", "y_ptr 4 × 8written once"]
    part = "await run('def f(x): return x[:, :2].exp()'); return all('figcaption')[0];"
    assert browser.run(OPEN + part) == "x 4 × 824 of 32 elements not read, the others once"


@on_files
def test_editor_on_a_phone_and_on_paper(editor, browser):
    """A phone does not zoom in, the result comes into view; nothing on paper is to be pressed."""
    editor(MASKED)
    browser.show(390)
    size, in_view, fits = browser.run(OPEN + "await open(); return onPhone();")
    assert size >= 16 and in_view and fits
    browser.show(700, "print")
    shown = "return [...document.querySelectorAll('button, small, input')].filter((it) =>"
    assert browser.run(f"{shown} it.checkVisibility()).map((it) => it.outerHTML);") == []
    browser.show(1280)
