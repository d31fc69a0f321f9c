"""What the folded cells of `book/long-rows.ipynb` do, on data where a claim is false, too."""

import pandas as pd
import pytest
import torch

from memtraffic.kernels.softmax import split
from memtraffic_book.chapters import long_rows

KERNELS = ("split", "online", "torch.softmax")
LLAMA = long_rows.LLAMA


def counted(times, n=LLAMA, m=10):
    """Counters of each kernel, which reads its matrix so many times on each way."""
    rows = [{"impl": impl, "m": m, "n": n} for impl in KERNELS]
    for row, reads in zip(rows, times, strict=True):
        row |= dict.fromkeys(long_rows.READS, 4 * m * n * reads)
    return pd.DataFrame(rows)


def test_reads_are_multiples_of_the_matrix():
    found = long_rows.reads(pd.concat([counted((1, 2, 3)), counted((1, 2, 3), n=4096, m=7)]))
    assert found.loc["online"].to_numpy().tolist() == [[2] * 3] * 2


@pytest.mark.slow
def test_draw_second_read_refuses_a_second_read_that_dram_does_not_send(monkeypatch):
    roof = pd.DataFrame({"l2_mib": [60]})
    monkeypatch.setattr(long_rows, "experiments", lambda *ids: (None, roof))
    moved = long_rows.reads(pd.concat([counted((1, 2, 3), n=4096), counted((1, 2, 3))]))
    moved.loc["online", "dram_read_bytes"] = [1.0, 1.9]
    long_rows.draw_second_read(moved)
    moved.loc["online", "dram_read_bytes"] = [1.0, 1.0]
    with pytest.raises(AssertionError, match="far larger"):
        long_rows.draw_second_read(moved)


@pytest.mark.slow
def test_check_split_and_check_impatience():
    moved = long_rows.reads(counted((1, 2, 3)))
    long_rows.check_split(moved)
    long_rows.check_impatience(lambda x, **how: split.softmax(x, block=1024, chunks=1, **how))
    with pytest.raises(AssertionError, match=r"2.00x the bytes"):
        long_rows.check_split(long_rows.reads(counted((2, 2, 3))))


def test_draw_speeds_refuses_an_online_softmax_that_is_as_fast():
    share = pd.DataFrame(dict(zip(KERNELS, (0.9, 0.8, 0.5), strict=True)), [4096, LLAMA])
    with pytest.raises(AssertionError, match=r"1.2x as fast"):
        long_rows.draw_speeds(share)


def test_judges_of_the_exercises():
    assert long_rows.forgetful_sum() == 3.875
    assert long_rows.are_parts((5, 13)) and not long_rows.are_parts((4, 16))
    with pytest.raises(AssertionError):
        long_rows.examine_minus_infinity(lambda x: (x - x.amax(1, keepdim=True)).exp())
    with pytest.raises(AssertionError):
        long_rows.examine_logsumexp(lambda x: torch.exp(x).sum(1).log())
