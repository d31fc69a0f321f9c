"""Code that a page prints is that of the package."""

from notebooks import BOOK, PYTHON, code_cells, load, markdown

from memtraffic.kernels.softmax import tiled
from memtraffic_book import exhibits, text


def test_kernel_of_the_page_is_the_one_that_was_timed():
    printed = [cell.source for cell in code_cells(load(BOOK / "memory-wall.ipynb"))]
    assert text.source(exhibits.copy_rows) in printed


def test_lines_that_the_page_prints_are_those_of_the_tile():
    printed = PYTHON.findall(markdown(load(BOOK / "tiled.ipynb")))[0].splitlines()
    code = [line.split("  #")[0].strip() for line in text.source(tiled._softmax_tile).splitlines()]
    assert len(printed) == 4 and {*printed} <= {*code}
