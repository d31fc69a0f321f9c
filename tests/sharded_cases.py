"""What tests/softmax/test_sharded.py asks ranks to do; they import this module."""

import torch
import torch.distributed as dist

from memtraffic.kernels.softmax.sharded import sharded_softmax
from memtraffic.tensors import matrix

INF, NAN = float("inf"), float("nan")
# By name: the columns of each rank; the ranks that are left out are not in the group.
WIDTHS = {
    "one-rank": (781,),
    "halves": (64, 64),
    "odd-and-uneven": (129, 652),
    "three": (33, 33, 15),
    "first-has-none": (0, 17, 5),
    "four": (20, 20, 20, 20),
    "one-column-each": (1, 1, 1, 1),
    "middle-have-none": (300, 0, 0, 81),
    "several-tiles": (9000, 4500),
}
DTYPES = ("float32", "float16", "bfloat16")
ROWS = {"several-tiles": 2}
WORLD = 4


def whole(name, dtype="float32", seed=0):
    """The matrix that the ranks of a case share."""
    return matrix(ROWS.get(name, 5), sum(WIDTHS[name]), dtype, seed=seed, device="cpu")


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


def part(x, widths, dim=-1):
    """The columns of this rank."""
    rank = dist.get_rank()
    return x.narrow(dim, sum(widths[:rank]), widths[rank])


def answers():
    """What a rank finds: by case and dtype, its part of the softmax and of the gradient."""
    groups = [dist.new_group(range(size)) for size in range(1, WORLD + 1)]
    found = {}
    for name, widths in WIDTHS.items():
        if dist.get_rank() >= len(widths):
            continue
        group = groups[len(widths) - 1]
        for dtype in DTYPES:
            x = part(whole(name, dtype), widths).requires_grad_()
            y = sharded_softmax(x, group=group)
            [dx] = torch.autograd.grad(y, x, part(whole(name, dtype, seed=1), widths))
            found[name, dtype] = y.detach(), dx
    if dist.get_rank() < 3:
        found["extremes"] = sharded_softmax(part(extremes(), WIDTHS["three"]), group=groups[2])
    return found
