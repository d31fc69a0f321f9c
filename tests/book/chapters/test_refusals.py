"""What the folded cells of each chapter refuse: data where a claim is false, a wrong answer.

That they accept what is right, nbval finds on the page and with its solutions.
"""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from memtraffic import count, resources, softmax
from memtraffic.kernels.softmax import fused, masked, naive, persistent, tiled
from memtraffic_book import exhibits, experiment, yours

X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])
SLOPES = torch.tensor([1.0, 2, 4], dtype=torch.float64)
FELL = torch.tensor([1.0, 0.32])  # a loss
SIX = [*range(6)]
WIDE = torch.empty(8, 16384)
WRONG = "a judge says so"


def mi300x(fn, x=WIDE, **options):
    [kernel] = resources(fn, x, target="gfx942", **options)
    return kernel


def squares(x):
    return x.square().sum()


def flight():
    return experiment("bytes_in_flight")


def ratios(*values):
    """What long rows read: a multiple of the matrix of each kernel, on each way."""
    columns = ["instruction_read_bytes", "l1_l2_read_bytes", "dram_read_bytes"]
    cases = pd.MultiIndex.from_product([["split", "online"], [4096, 128256]])
    return pd.DataFrame(dict.fromkeys(columns, values), cases)


def of_columns(x):
    """The softmax of columns, a program each, so that several programs touch a sector."""
    return tiled.softmax(x.t(), rows=1).t()


def two_reads(x, w):
    return F.layer_norm(x, x.shape[1:], eps=1e-6) * w


def padded(page):
    """A judge's own gradient, by a function that reads the rows that are not to be read."""

    def reads_all(x, target):
        loss = F.cross_entropy(x, target, reduction="none")
        return loss, page._padded_gradient(x, target)

    return reads_all


SLOW = {
    "backward-8704 elements with y": lambda it: it.check_kept(it.FromX.apply),
    "cdna-5 waves on an MI300X": lambda it: it.check_by_hand(3, 5, 5),
    "cdna-more than 160": lambda it: it.check_units(replace(mi300x(tiled.softmax), vgprs=160), {}),
    "cdna-0 of 1 kernels": lambda it: it.check_units(
        three := mi300x(tiled.softmax, num_warps=2, waves_per_eu=3),
        {("gfx942",): replace(three, llvm_waves=9)},
    ),
    "cdna-LDS leaves room": lambda it: it.draw_packing(
        replace(mi300x(exhibits.transpose, WIDE[:, :8]), shared_bytes=4096)
    ),
    "cdna-LDS more": lambda it: it.compare_stages(*[mi300x(persistent.softmax, num_stages=1)] * 2),
    "chunks-it gives": lambda it: it.is_the_rule(lambda n: 4),
    "chunks-elements at 8320 columns": lambda it: it.in_two_blocks(masked.softmax),
    "fused-20 shuffles": lambda it: it.count_exchanges(it.show_who_holds_what(1024), 512),
    f"fused-{WRONG}": lambda it: it.reads_row_0(lambda x: x + 1),
    "long_rows-2.00x the bytes": lambda it: it.check_split(ratios(1, 2, 2, 2)),
    "long_rows-far larger": lambda it: it.draw_second_read(ratios(1, 1, 2, 2)),
    "sectors-512 sectors are touched 2304 times": lambda it: it.examine(it.COLUMNS)(of_columns),
    f"sectors-{WRONG}": lambda it: it.loads_64_bits(1024),
    r"your_kernel-3\.00 times": lambda it: it.keep_reads(lambda x, w: yours.rms_norm(x.clone(), w)),
    "your_kernel-_rms_norm_kernel": lambda it: it.judge_spills(yours.rms_norm),
}
QUICK = {
    "backward-finite differences": lambda it: it.check_differences(squares, SLOPES, SLOPES),
    "backward-add up to 0": lambda it: it.check_differences(squares, SLOPES, 2 * SLOPES),
    "backward-5 x 781": lambda it: it.check_gradient(lambda x: x.log_softmax(1)),
    "backward-1 in 10,000": lambda it: it.check_losses(FELL, 2 * FELL, FELL),
    "backward-wrong gradient": lambda it: it.check_losses(FELL, FELL, torch.tensor([1.0, 0.9])),
    "backward-registered operation 2": lambda it: it.check_graphs(
        torch.compiler.disable(masked.softmax), softmax
    ),
    "backward-mul is wrong": lambda it: it.judge()(torch.mul),
    "chunks-65,537 float32 numbers": lambda it: it.check_wider_row(65537),
    "fused-less than 1e-6": lambda it: it.compare_rows(torch.softmax(X[:, :4], dim=1) + 1e-3, X),
    "fused-is wrong": lambda it: it.examine(it.half)(fused.softmax),
    "in_flight-the law predicts": lambda it: it.check_law(flight(), 1000.0, 11_300),
    r"in_flight-1\.2x of that": lambda it: it.draw_bend(flight(), 22_000),
    r"in_flight-over 1\.5x": lambda it: it.show_load(
        flight().assign(latency_ns=400.0), it.draw_bend(flight(), 11_300)
    ),
    f"long_rows-{WRONG}": lambda it: it.are_parts((4, 16)),
    "long_rows-1.2x as fast": lambda it: it.draw_speeds(
        pd.DataFrame({"split": 0.9, "online": 0.8, "torch.softmax": 0.5}, [4096, it.LLAMA])
    ),
    "long_rows-elements": lambda it: it.examine_minus_infinity(
        lambda x: (x - x.amax(1, keepdim=True)).exp()
    ),
    "long_rows-reads": lambda it: it.examine_logsumexp(lambda x: x.exp().sum(1).log()),
    "many_gpus-all 5 numbers": lambda it: it.check_parts(X[:1].softmax(1), [*X[1]]),
    "many_gpus-writes M, not 2M": lambda it: it.examine_sums(lambda x: x.amax(dim=1)),
    r"many_gpus-reads MN, not MN \+ 4M": lambda it: it.examine_normalised(
        lambda x, all_sums: x.softmax(1)
    ),
    "many_gpus-1 orders": lambda it: it.examine_orders(pytest.fail, [SIX]),
    "many_gpus-is no order": lambda it: it.examine_orders(pytest.fail, [SIX, SIX[:3]]),
    "many_gpus-end": lambda it: it.examine_orders(lambda orders, room: room == 3, [SIX] * 2),
    "masked-On 3 rows of 5 numbers": lambda it: it.try_rows(exhibits._no_other_kernel),
    "masked-At 64 columns": lambda it: it.check_narrow(64, at_least=0.9),
    "memory_wall-still NaN": lambda it: it.trace_rows(exhibits.copy_rows, X, X),
    "memory_wall-reads MN, not 3MN": lambda it: it.examine(torch.clone, "3MN")(exhibits.first_copy),
    "naive-81 elements": lambda it: it.show_ops(count(naive.softmax, torch.ones(3, 6))),
    "naive-more than": lambda it: it.draw_late([line | {"ns": 99} for line in it.show_counters()]),
    r"naive-reads 5MN \+ 2M, not 4MN": lambda it: it.predicts(naive.softmax)(
        ("4MN + 2M", "3MN + 2M")
    ),
    "naive-wrong at": lambda it: it.examine("5MN + 2M", "3MN + 2M", it.logs)(naive.softmax),
    "occupancy-allow 6 programs": lambda it: it.draw_packing(69, 32_784, 4, (6, 6, 16, 32)),
    "persistent-no neighbours": lambda it: it.takes_neighbours(
        lambda x: persistent.softmax(x, rows=1, programs=3)
    ),
    "persistent-not 3": lambda it: it.takes_neighbours(tiled.softmax),
    "persistent-read the weights 50 times": lambda it: it.loads_weights_once(yours.rms_norm),
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


SAME = dict.fromkeys(("one block", "converted once", "kept"), masked.softmax)
NO_LOOP = "check_schedules", "^none"


def never_ahead(n_cols, stages):
    """A kernel that asks for nothing ahead, however many stages it has."""
    return SimpleNamespace(schedule=("for", "load") if stages == 1 else ("copy", "for", "wait 0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chapter", "name", "other", "attempt", "reason"),
    [
        ("chunks", "WAYS", SAME, "compare_ways", "in chunks that are kept"),
        ("masked", "exhibits.softmax_block_of_512", masked.softmax, "try_softmaxes", "passes 2"),
        ("memory_wall", "LADDER", ("masked", "naive"), "keep_ladder", "fall from MN"),
        ("persistent", "compiled", never_ahead, "check_schedules", "3 stages has 1"),
        ("persistent", "compiled", lambda *_: SimpleNamespace(schedule="none"), *NO_LOOP),
    ],
    indirect=["chapter"],
)
def test_chapter_refuses_another_kernel(chapter, name, other, attempt, reason, monkeypatch):
    monkeypatch.setattr(f"{chapter.__name__}.{name}", other)
    with pytest.raises(AssertionError, match=reason):
        getattr(chapter, attempt)()


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["masked"], indirect=True)
def test_full_blocks_first_gives_a_hint(chapter, monkeypatch):
    monkeypatch.setattr(chapter, "softmin", lambda x: torch.softmax(x, dim=1))
    with pytest.raises(AssertionError, match="where no element is dead"):
        chapter.full_blocks_first(exhibits.softmax_no_other)
