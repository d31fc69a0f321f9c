"""Home-made words and telegraphic idioms, kept out of pages, figures and docstrings."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from notebooks import load

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "memtraffic"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "book").glob("*.[im]*"))
SOURCES = sorted(SRC.rglob("*.py"))

NOUN = (
    "bytes|registers|warps|waves|threads|lanes|elements|sectors|results|operations|instructions|"
    "exponentials|rows|columns|FLOP|kB|KiB|GB"
)
ONE = "thread|lane|warp|wave|SM|SIMD|program|block|element|row|second|clock|instruction|load"

# What is not written, and what stands there instead.
HOME_MADE = {
    r"\bon (?:its|their) way\b": "in flight",
    r"\b(?:loads?|bytes|elements?|sectors?|memory) (?:\w+ ){0,3}asked for\b": "requested, issued",
    r"\basked for at (?:any|once)\b": "in flight",
    r"\bpieces of (?:\d|registers?|shared|LDS|memory)": "allocation granularity",
    r"\b(?:registers?|memory|LDS) (?:in|by) pieces\b|\bknows? no\b": "allocation granularity",
    r"\bplaces for (?:\w+ )?(?:warps?|waves?|blocks?|programs?|workgroups?)\b": "slots",
    r"\bplaces? of (?:a|the|its) (?:block|warp)\b": "elements of a block, lanes of a warp",
    r"\b(?:[Tt]he|[Ii]ts) makers?\b": "the vendor",
    r"\bdeal(?:t|s|ing)? out\b": "allocated, distributed",
    r"\bcompiler (?:\w+ ){0,2}told\b|\btold (?:to )?the compiler\b": "known at compile time",
    r"\bshort formula\b": "simplified formula",
    r"\bwhat is held\b|\bheld plans?\b|\bplans? (?:is|are) held\b": "cached",
    r"^#+ By hand|\b(?:worked|counted|computed|calculated|example) by hand\b": "worked example",
    r"\blanes? (?:of|in) (?:a|the|its|each) (?:block|row|tile)\b": "elements of a block",
    r"\b(?:masked|dead) lanes?\b|\blanes? (?:that )?(?:is |are )?off\b": "masked elements",
    r"\bquarters? (?:of an SM|holds?)\b": "sub-partition",
    r"\bmore company\b|\bfor want of\b|\bforetells?\b|\bnothing over\b": "the plain word",
    r"\bis taken to (?:give|be|have)\b": "we assume that",
    r"\bOf (?:more|fewer|those|these) [^.,;]{1,40}(?: than|,)": "subject first",
    r"\bSo (?:many|much) (?:must|is|are|can|has|have)\b": "subject first",
    r"\b[Tt]here it is\b|\b[Nn]o matter\.": "a sentence",
    rf"\b(?:{NOUN}) an? (?:{ONE})\b(?! (?:\w+s|has|can|may|must)\b)": "per",
    r"^\s*\w+(?:, \w+)*: an? (?:lane|wave|warp|thread|SM)\.$": "per lane, per wave, ...",
}


def home_made(text):
    """What a text says in words of its own, each with the words that stand there instead."""
    found = []
    for pattern, instead in HOME_MADE.items():
        for match in re.finditer(pattern, text, re.M):
            around = text[max(0, match.start() - 30) : match.end() + 30]
            found.append(f"{around!r}: {instead}")
    return found


def said_in_source(path):
    """The docstrings and comments of a module; of the figures all text."""
    source = path.read_text("utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    drawn = "figures" in path.relative_to(SRC).parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            yield ast.get_docstring(node) or ""
        elif drawn and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def said_on_page(path):
    """The text, the code, the alt texts and the printed lines of a page."""
    if path.suffix == ".md":
        yield path.read_text("utf-8")
        return
    for cell in load(path).cells:
        yield cell.source
        yield cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        for output in cell.get("outputs", ()):
            yield output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_speaks_in_the_terms_of_the_field(path):
    assert not [found for text in said_on_page(path) for found in home_made(text)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SRC)))
def test_source_speaks_in_the_terms_of_the_field(path):
    assert not [found for text in said_in_source(path) for found in home_made(text)]


@pytest.mark.parametrize(
    "text",
    [
        "Bytes on their way are bandwidth times latency.",
        "so many must be asked for at any time",
        "the bytes that the loads asked for",
        "Registers come in pieces of 256.",
        "It knows no pieces, nothing for the system, no places.",
        "An SM has places for 64 warps.",
        "The maker calls it a compute unit.",
        "what the compiler is told",
        "By the short formula 30 fit.",
        "# By hand",
        "A lane that is off moves no bytes.",
        "the dead lanes of a block",
        "A quarter holds 7 warps.",
        "Of more vector registers than a wave can name, it holds 0.",
        "So many must come from L2.",
        "34 registers a thread",
        "It moves 16 bytes a lane.",
        "An SM answers 16 results a clock.",
        "sgprs: a wave.",
    ],
)
def test_home_made_sees(text):
    assert home_made(text)


@pytest.mark.parametrize(
    "text",
    [
        "It is a copy with a little arithmetic on the way.",
        "Which sectors of 32 bytes a row touches.",
        "No number is typed by hand.",
        "Every private piece of Triton that we touch is in one file.",
        "The notebook is executed in place.",
        "The last place of a number.",
        "A block, whose elements past the row are masked.",
        "Lane 3 of the warp reads element 3.",
        "The reader is asked for a number.",
        "A program loads a block, and stores a row.",
        "It holds at most 32 elements per thread.",
        "So there are 132 programs.",
        "A quarter of the warps wait.",
        "Of the 98 widths, 57 are faster.",
    ],
)
def test_home_made_accepts(text):
    assert not home_made(text)
