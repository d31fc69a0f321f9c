"""Code that a page prints is that of the package."""

from notebooks import BOOK, code_cells, load

from memtraffic_book import exhibits, text


def test_kernel_of_the_page_is_the_one_that_was_timed():
    printed = [cell.source for cell in code_cells(load(BOOK / "memory-wall.ipynb"))]
    assert text.source(exhibits.copy_rows) in printed
