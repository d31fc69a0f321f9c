"""What tests ask ranks to do, which import this module."""

import torch
import torch.distributed as dist
from cases import INF, NAN

from memtraffic.kernels.softmax.linked import Link, linked_softmax
from memtraffic.kernels.softmax.sharded import sharded_softmax
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close

# ---- run_ranks


def tell(offset):
    return dist.get_rank() + offset, dist.get_world_size(), dist.get_backend()


def fail_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("the last one")
    dist.barrier()  # for which that one does not come


# ---- sharded_softmax

# By name: the columns of each rank; the ranks that are left out are not in the group.
WIDTHS = {
    "one-rank": (781,),
    "odd-and-uneven": (129, 652),
    "three": (33, 33, 15),
    "first-has-none": (0, 17, 5),
    "one-column-each": (1, 1, 1),
    "middle-has-none": (300, 0, 81),
    "several-tiles": (9000, 4500),
}
DTYPES = ("float32", "float16", "bfloat16")
UNEVEN = ("odd-and-uneven", "first-has-none")
CASES = [
    (name, dtype) for name in WIDTHS for dtype in DTYPES if dtype == "float32" or name in UNEVEN
]
ROWS = {"several-tiles": 2}
WORLD = 3


def whole(name, dtype="float32"):
    """The matrix that the ranks of a case share."""
    return matrix(ROWS.get(name, 5), sum(WIDTHS[name]), dtype, device="cpu")


def extremes():
    """Rows in which parts, or all, are -inf, or hold what is not finite; and large ones."""
    x = whole("three").repeat(2, 1)
    x[0, :33] = -INF
    x[1, 33:] = -INF
    x[2] = -INF
    x[3, 40] = NAN
    x[4, 70] = INF
    x[5] *= 1e4
    x[6] = -3.4e38
    x[7, 66:] += 100  # of the last rank, against which the others vanish
    return x


def part(x, widths):
    """The columns of this rank."""
    rank = dist.get_rank()
    return x.narrow(1, sum(widths[:rank]), widths[rank])


def answers():
    """What a rank finds: its part of the softmax, by case and dtype."""
    groups = [dist.new_group(range(size)) for size in range(1, WORLD + 1)]
    found = {
        (name, dtype): sharded_softmax(part(whole(name, dtype), widths), groups[len(widths) - 1])
        for name, dtype in CASES
        if dist.get_rank() < len(widths := WIDTHS[name])
    }
    found["extremes"] = sharded_softmax(part(extremes(), WIDTHS["three"]), groups[2])
    return found


# ---- on two GPUs

LAUNCHES = 100_000


def part_of(n_rows, n_cols, dtype="float32"):
    """The whole matrix, and the columns of it that this rank has."""
    x = matrix(n_rows, n_cols, dtype, device="cuda")
    return x, x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def answer(linked, dtype, n_rows, n_cols):
    """Raises where a result is wrong."""
    x, mine = part_of(n_rows, n_cols, dtype)
    y = linked_softmax(mine, Link(n_rows, x.device)) if linked else sharded_softmax(mine)
    begin = dist.get_rank() * n_cols // 2
    exact = torch.softmax(x.double(), dim=1)
    assert_close(y, exact[:, begin : begin + y.shape[1]], x.dtype)


def many_launches(busy):
    """The result of each launch, of which a wrong one would stay wrong, beside other work."""
    _, mine = part_of(256, 4096)
    link = Link(256, mine.device)
    first = linked_softmax(mine, link)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for i in range(LAUNCHES):
        if busy and i % 100 == 0:
            with torch.cuda.stream(other):
                a = (a @ a).clamp(-1, 1)
        wrong += (linked_softmax(mine, link) != first).any()
    torch.cuda.synchronize()
    return wrong.item(), link.failed.item(), link.state.tolist()


def replayed():
    _, mine = part_of(256, 4096)
    link = Link(256, mine.device)
    first, graph = linked_softmax(mine, link), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        again = linked_softmax(mine, link)
    for _ in range(1000):
        again.zero_()
        graph.replay()
    return torch.equal(first, again), link.failed.item()


def alone():
    """Rank 0 calls, and rank 1 does not."""
    _, mine = part_of(64, 4096)
    link, told = Link(64, mine.device), None
    if dist.get_rank() == 0:
        y = linked_softmax(mine, link, looks=2**16)
        torch.cuda.synchronize()
        try:
            linked_softmax(mine, link)
        except RuntimeError as error:
            told = y.isnan().all().item(), str(error)
    dist.barrier()  # rank 1 keeps the memory in which rank 0 writes
    return told
