"""What tests/softmax/test_sharded.py asks ranks to do; they import this module."""

from datetime import timedelta

import torch
import torch.distributed as dist

from memtraffic.errors import RanksError
from memtraffic.kernels.softmax.sharded import sharded_cross_entropy, sharded_softmax
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
UNEVEN = ("odd-and-uneven", "first-has-none")
CASES = [
    (name, dtype) for name in WIDTHS for dtype in DTYPES if dtype == "float32" or name in UNEVEN
]
MESH = 2  # ranks of a mesh, and what it shards
PLACEMENTS = {"columns": 1, "rows": 0, "replicated": None}
ROWS = {"several-tiles": 2}
DTYPE, INT = (torch.float32, torch.float16), (torch.float32, torch.int64)
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


def targets(n_cols):
    """The target of each of five rows; the last but one has none."""
    return torch.tensor([0, n_cols - 1, n_cols // 2, -100, 1])


def answers():
    """What a rank finds: by case and dtype, its part of the softmax and of the gradient."""
    groups = [dist.new_group(range(size)) for size in range(1, WORLD + 1)]
    found = {}
    for name, dtype in CASES:
        widths = WIDTHS[name]
        if dist.get_rank() >= len(widths):
            continue
        group = groups[len(widths) - 1]
        x = part(whole(name, dtype), widths).requires_grad_()
        y = sharded_softmax(x, group=group)
        [dx] = torch.autograd.grad(y, x, part(whole(name, dtype, seed=1), widths))
        found[name, dtype] = y.detach(), dx
        if name in UNEVEN:
            loss = sharded_cross_entropy(x, targets(sum(widths)), group=group)
            [dx] = torch.autograd.grad(loss, x, torch.arange(5.0) - 1)
            found["loss", name, dtype] = loss.detach(), dx
    if dist.get_rank() < 3:
        found["extremes"] = sharded_softmax(part(extremes(), WIDTHS["three"]), group=groups[2])
    late = dist.new_group(range(2), timeout=timedelta(seconds=2))
    if dist.get_rank() < MESH:
        found |= {"meshes": meshes(), "errors": errors(groups[MESH - 1], late)}
    return found


def meshes():
    """The softmax and the gradient of a DTensor, as wholes, with the placements of the first."""
    from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor

    mesh, found = DeviceMesh("cpu", list(range(MESH))), {}
    for name, dim in PLACEMENTS.items():
        place = [Replicate() if dim is None else Shard(dim)]
        x, dy = (distribute_tensor(whole("halves", seed=i)[:, :9], mesh, place) for i in range(2))
        y = sharded_softmax(x.requires_grad_(), 1)
        [dx] = torch.autograd.grad(y, x, dy)
        found[name] = y.placements == x.placements, y.detach().full_tensor(), dx.full_tensor()
    x = distribute_tensor(whole("halves"), mesh, [Shard(1)])
    found["loss"] = sharded_cross_entropy(x, targets(128))
    try:
        sharded_softmax(type(x).from_local(torch.ones(2, 2), mesh, [Partial()]), 1)
    except ValueError as error:
        found["partial"] = str(error)
    return found


def errors(group, late):
    """What each of two ranks is told where one of them does what does not fit."""
    first, found = dist.get_rank() == 0, {}
    wrong = {
        "rows": lambda: sharded_softmax(torch.ones(2 + first, 3), group=group),
        "dtype": lambda: sharded_softmax(torch.ones(2, 3, dtype=DTYPE[first]), group=group),
        "integers": lambda: sharded_softmax(torch.ones(2, 3, dtype=INT[first]), group=group),
        "targets": lambda: sharded_cross_entropy(
            torch.ones(2, 3), torch.arange(2 + first), group=group
        ),
        "link": lambda: sharded_softmax(torch.ones(2, 3), group=group, rung="one kernel"),
        "wide": lambda: sharded_softmax(torch.ones(1, 40000), group=group, rung="one kernel"),
        "absent": lambda: first and sharded_softmax(torch.ones(2, 3), group=late),
    }
    for name, call in wrong.items():
        try:
            call()
        except (RanksError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
