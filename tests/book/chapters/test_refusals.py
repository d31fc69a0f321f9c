"""What the folded cells of each chapter refuse: data where a claim is false, a wrong answer.

That they accept what is right, nbval finds on the page and with its solutions.
"""

import pytest
import torch
import torch.nn.functional as F

from memtraffic.kernels.softmax import fused, masked, naive, persistent, tiled
from memtraffic_book import exhibits, experiment, yours

X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])
WRONG = "a judge says so"


def of_columns(x):
    """The softmax of columns, a program each, so that several programs touch a sector."""
    return tiled.softmax(x.t(), rows=1).t()


def two_reads(x, w):
    return F.layer_norm(x, x.shape[1:], eps=1e-6) * w


def padded(page):
    """A judge's own gradient, by a function that reads the rows that are not to be read."""

    def reads_all(x, target):
        loss = F.cross_entropy(x, target, reduction="none")
        return loss, page._gradient(x, target)

    return reads_all


SLOW = {
    "sectors-512 sectors are touched 2304 times": lambda it: it.examine(it.COLUMNS)(of_columns),
    f"sectors-{WRONG}": lambda it: it.loads_64_bits(1024),
}
QUICK = {
    "backward-mul is wrong": lambda it: it.judge(it.GRADIENT)(torch.mul),
    "chunks-is wrong": lambda it: it.examine(it.SINK)(fused.softmax),
    "fused-is wrong": lambda it: it.examine(it.HALF)(fused.softmax),
    "in_flight-is wrong": lambda it: it.doubles(fused.softmax),
    r"in_flight-not at \[3, 0\]": lambda it: it.follows_two_chains(lambda x, hops: x[:2]),
    "in_flight-95 % from 25 kB on": lambda it: it.draw_bend(experiment("bytes_in_flight"), 22_000),
    "long_rows-elements": lambda it: it.examine_minus_infinity(
        lambda x: (x - x.amax(1, keepdim=True)).exp()
    ),
    "long_rows-reads": lambda it: it.examine_logsumexp(lambda x: x.exp().sum(1).log()),
    "many_gpus-writes M, not 2M": lambda it: it.examine(it.SUMS)(lambda x: x.amax(dim=1)),
    r"many_gpus-reads MN, not MN \+ 4M": lambda it: it.examine_normalised(
        lambda x, all_sums: x.softmax(1)
    ),
    "masked-is wrong": lambda it: it.examine(it.SOFTMIN)(masked.softmax),
    "masked-At 64 columns": lambda it: it.check_narrow(64, at_least=0.9),
    "memory_wall-is wrong": lambda it: it.examine(it.REVERSED)(exhibits.first_copy),
    r"naive-reads 4MN \+ 2M, not 5MN": lambda it: it.predicts(("5MN + 2M", "2MN + 2M")),
    "naive-wrong at": lambda it: it.examine("5MN + 2M", "3MN + 2M", it.LOGS)(naive.softmax),
    "occupancy-allow 6 programs": lambda it: it.draw_packing(69, 32_784, 4, (6, 6, 16, 32)),
    "persistent-no neighbours": lambda it: it.takes_neighbours(
        lambda x: persistent.softmax(x, rows=1, programs=3)
    ),
    "persistent-not 3": lambda it: it.takes_neighbours(tiled.softmax),
    r"persistent-reads 2MN, not MN \+ 3N": lambda it: it.loads_weights_once(yours.rms_norm),
    f"sectors-{WRONG}": lambda it: it.sixteenth(16),
    "ship-width of the table": lambda it: it.right_by_the_table_alone(torch.zeros_like),
    "ship-right at 781": lambda it: it.right_by_the_table_alone(lambda x: x.softmax(dim=1)),
    "tiled-is wrong": lambda it: it.examine(it.SCALED)(masked.softmax),
    r"your_kernel-reads 2MN \+ N, not 2MN": lambda it: it.judge_layer_norm(two_reads),
    "your_kernel-reads 6MN, not 3MN": lambda it: it.judge_add_and_norm(
        lambda x, r, w: (x + r, yours.rms_norm(x + r, w))
    ),
    "your_kernel-rows to read": lambda it: it.judge_padding(padded(it)),
}


@pytest.mark.parametrize(
    ("chapter", "attempt", "reason"),
    [
        pytest.param(chapter, attempt, reason, id=f"{chapter}-{reason}", marks=marks)
        for table, marks in ((QUICK, []), (SLOW, [pytest.mark.slow]))
        for name, attempt in table.items()
        for chapter, _, reason in [name.partition("-")]
    ],
    indirect=["chapter"],
)
def test_chapter_refuses(chapter, attempt, reason):
    with pytest.raises(AssertionError, match=reason):
        assert attempt(chapter), WRONG


# ---- other kernels in place of those that a chapter is about


SAME = dict.fromkeys(("one block", "your chunks", "chunks, forget"), masked.softmax)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chapter", "name", "other", "attempt", "reason"),
    [
        ("chunks", "WAYS", SAME, "compare_ways", "programs in chunks"),
        ("fused", "fused.softmax", tiled.softmax, "count_exchanges", "18 exchanges"),
        ("masked", "exhibits.softmax_block_of_512", masked.softmax, "try_softmaxes", "passes 2"),
        ("memory_wall", "LADDER", ("masked", "naive"), "keep_ladder", "fall from MN"),
        ("occupancy", "waves_of", lambda *_: 0, "compare_rules", "0 of 36"),
    ],
    indirect=["chapter"],
)
def test_chapter_refuses_another_kernel(chapter, name, other, attempt, reason, monkeypatch):
    monkeypatch.setattr(f"{chapter.__name__}.{name}", other)
    with pytest.raises(AssertionError, match=reason):
        getattr(chapter, attempt)(*[masked.softmax] * (attempt == "compare_ways"))
