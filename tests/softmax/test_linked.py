from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from memtraffic import device, resources
from memtraffic.kernels.softmax import linked
from memtraffic.kernels.softmax.linked import linked_kernel, linked_softmax
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close

M, CAPACITY, BLOCK, LOOKS = 3, 4, 32, 50
INTERPRETED_ONLY = pytest.mark.skipif(
    not device.INTERPRETED, reason="only in the interpreter, ranks take turns on one device"
)


@triton.jit
def in_turn_kernel(
    ys, xs, boxes_ptr, states_ptr, failed_ptr, widths, n_rows, capacity, looks,
    RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """All ranks in one cooperative launch: a program (row, rank) is one of the rank's kernel."""
    boxes = ()
    for i in tl.static_range(RANKS):
        boxes = boxes + (boxes_ptr + i * 4 * RANKS * capacity,)  # noqa: RUF005
    for i in tl.static_range(RANKS):
        if tl.program_id(1) == i:
            linked_kernel(
                ys[i], xs[i], widths[i], 1, boxes, boxes[i], states_ptr + 4 * i, failed_ptr,
                n_rows, widths[i], capacity, i, looks,
                RANKS, SLOTS, BLOCK, CHUNKS, 0, False,
            )  # fmt: skip


class Ranks:
    """Ranks that take turns on this device. missing: the last ones do not come."""

    def __init__(self, n_ranks):
        self.n_ranks = n_ranks
        self.boxes = torch.zeros(n_ranks, 2, n_ranks, CAPACITY, 2, dtype=torch.int64)
        self.states = torch.zeros(n_ranks, 4, dtype=torch.int32)
        self.failed = torch.zeros(1, dtype=torch.int32)

    def softmax(self, *xs, missing=0):
        xs = tuple(x.contiguous() for x in xs)
        ys = tuple(torch.full_like(x, float("nan")) for x in xs)
        chunks = max(1, triton.cdiv(max(x.shape[1] for x in xs), BLOCK))
        in_turn_kernel[(xs[0].shape[0], self.n_ranks - missing)](
            ys, xs, self.boxes, self.states, self.failed, tuple(x.shape[1] for x in xs),
            xs[0].shape[0], CAPACITY, LOOKS, RANKS=self.n_ranks, SLOTS=4, BLOCK=BLOCK,
            CHUNKS=chunks, launch_cooperative_grid=True,
        )  # fmt: skip
        return ys


@INTERPRETED_ONLY
@pytest.mark.parametrize(
    ("widths", "dtype", "before"),
    [
        ((70,), "float32", 0),
        ((64, 64), "float32", 2**31 - 2),  # the number of launches wraps
        ((0, 40, 9), "float32", 0),
        ((50, 1, 33), "bfloat16", 0),
    ],
    ids=str,
)
def test_linked_kernel_of_ranks_in_turn(widths, dtype, before):
    ranks = Ranks(len(widths))
    ranks.states[:, 2] = before
    for seed, n_rows in enumerate((M, CAPACITY, 2, M)):  # over words of earlier launches
        x = matrix(n_rows, sum(widths), dtype, seed=seed, device="cpu")
        x[0, : widths[0]] = -float("inf") if len(widths) > 1 else 0
        y = torch.cat(ranks.softmax(*x.split(widths, dim=1)), dim=1)
        assert_close(y, torch.softmax(x.double(), 1), x.dtype)
        launches = torch.tensor(before + seed + 1).to(torch.int32).item()
        assert ranks.states.tolist() == [[0, 0, launches, 0]] * len(widths)
    assert not ranks.failed.item()


@INTERPRETED_ONLY
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_linked_kernel_stores_two_words_a_row_at_each_other_rank(n_ranks):
    ranks, xs = Ranks(n_ranks), matrix(M, 20 * n_ranks, "float32", device="cpu").split(20, dim=1)
    traffic = count(lambda: ranks.softmax(*xs), (), trace=True)
    size, others, looked, read = ranks.boxes[0].numel(), 0, 0, 0
    for access in traffic.accesses:
        at = torch.tensor(access.offsets)
        elsewhere = int((at // size != access.program[1]).sum())
        if access.argument == "boxes_ptr" and access.kind == "written":
            others += elsewhere
        elif access.argument == "boxes_ptr":
            looked += elsewhere
        read += access.argument == "xs" and access.kind == "read" and at.numel()
    assert others == 2 * M * (n_ranks - 1) * n_ranks  # of all ranks
    assert looked == others  # an exchange reads the word that it replaces; the rest is at home
    assert read == M * 20 * n_ranks  # each element once


@INTERPRETED_ONLY
def test_linked_kernel_gives_nan_where_a_rank_does_not_come():
    ranks = Ranks(2)
    x = matrix(M, 16, "float32", device="cpu")
    y, _ = ranks.softmax(*x.split(8, dim=1), missing=1)
    assert y.isnan().all() and ranks.failed.item() == 1
    assert ranks.states.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]  # later programs look once


@pytest.fixture
def link(monkeypatch):
    """That of one of two ranks of 8192 rows, whose memory is here."""
    monkeypatch.setattr(linked.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(linked.dist, "get_world_size", lambda group: 2)
    boxes = [torch.zeros(4 * 2 * 8192, dtype=torch.int64, device=device.default()) for _ in "ab"]
    monkeypatch.setattr(linked, "symmetric_words", lambda n, device, group: (None, (*boxes,)))
    return linked.Link(8192, device.default())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linked_softmax_compiles_for_hopper_without_spills(dtype, link):
    fn, n_cols = partial(linked_softmax, link=link), 32768  # the widest
    [kernel] = resources(fn, "M,N", (8192, n_cols), dtype=dtype, target="sm_90")
    assert kernel.spill_bytes == 0
    n_loads = n_cols * getattr(torch, dtype).itemsize // 16 // (32 * kernel.num_warps)
    assert kernel.load_bits[128] == n_loads


def test_linked_softmax_refuses_what_it_cannot_hold_and_to_go_on_after_a_failure(link):
    for m, n, told in ((1, 32769, "32769 columns"), (8193, 1, "8193 rows, .* link is for 8192")):
        with pytest.raises(ValueError, match=told):
            linked_softmax(torch.ones(m, n, device=device.default()), link)
    link.failed.fill_(1)
    with pytest.raises(RuntimeError, match="a rank waited in vain"):
        linked_softmax(torch.ones(1, 8, device=device.default()), link)
