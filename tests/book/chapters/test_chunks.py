"""What the folded cells of `book/chunks.ipynb` do, on data where a claim is false, too."""

import pytest

from memtraffic.kernels.softmax import chunks as rung
from memtraffic.kernels.softmax import masked
from memtraffic_book.chapters import chunks


@pytest.mark.slow
def test_compiled_kernels_are_held_by_an_sm(monkeypatch):
    chunks.count_programs()
    chunks.compare_ways()
    monkeypatch.setattr(chunks, "WAYS", dict(zip(chunks.WAYS, [masked.softmax] * 3, strict=True)))
    with pytest.raises(AssertionError, match="in chunks that are kept"):
        chunks.compare_ways()


def test_check_wider_row_refuses_one_that_fills_an_sm():
    chunks.check_wider_row(32768)
    with pytest.raises(AssertionError, match="65,536 float32 numbers"):
        chunks.check_wider_row(65536)


@pytest.mark.slow
def test_judges_of_the_exercises():
    assert chunks.is_the_rule(lambda n: max(1, 1 << (-(-n // 2048) - 1).bit_length()))
    with pytest.raises(AssertionError, match="it gives"):
        chunks.is_the_rule(lambda n: 4)
    with pytest.raises(AssertionError, match="elements at 8320 columns"):
        chunks.in_two_blocks(masked.softmax)
    for op in (chunks.softened, chunks.centred):
        with pytest.raises(AssertionError):
            chunks.prove.exam(rung.softmax, op=op)
