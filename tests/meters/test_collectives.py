"""What collectives move, by each rank of a group whose others are not there: shapes are enough."""

from contextlib import contextmanager
from fractions import Fraction

import memtraffic  # first: without a GPU, it makes Triton interpret kernels

import pytest  # isort: skip
import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import torch.distributed._functional_collectives as functional  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # isort: skip

from memtraffic.cli import count_table
from memtraffic.errors import CountError
from memtraffic.kernels.softmax.sharded import sharded_softmax
from memtraffic.meters.count import count

N = 24  # elements of what each rank gives; each number of ranks divides it


@contextmanager
def rank_of(rank, size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def like(x, ranks=1):
    return [torch.empty_like(x) for _ in range(ranks)]


def exchange(x):
    splits = [N - dist.get_world_size() + 1, *[1] * (dist.get_world_size() - 1)]
    dist.all_to_all_single(torch.empty_like(x), x, splits, splits)


def at_root(make):
    return make() if dist.get_rank() == 0 else None


# By name: the call, and what all ranks of a group of G send together, in N.
CALLS = {
    "all_gather": (lambda x, g: dist.all_gather(like(x, g), x), lambda g: g * (g - 1)),
    "all_gather_base": (
        lambda x, g: functional.all_gather_tensor(x, 0, dist.group.WORLD).add_(1),
        lambda g: g * (g - 1),
    ),
    "all_reduce": (lambda x, g: dist.all_reduce(x), lambda g: 2 * (g - 1)),
    "functional_all_reduce": (
        lambda x, g: functional.all_reduce(x, "sum", dist.group.WORLD).add_(1),
        lambda g: 2 * (g - 1),
    ),
    "reduce_scatter": (
        lambda x, g: dist.reduce_scatter(like(x.chunk(g)[0])[0], list(x.chunk(g))), lambda g: g - 1
    ),
    "broadcast": (lambda x, g: dist.broadcast(x, g - 1), lambda g: g - 1),
    "reduce": (lambda x, g: dist.reduce(x, g - 1), lambda g: g - 1),
    "gather": (lambda x, g: dist.gather(x, at_root(lambda: like(x, g))), lambda g: g - 1),
    "scatter": (lambda x, g: dist.scatter(x, at_root(lambda: like(x, g))), lambda g: g - 1),
    "all_to_all": (
        lambda x, g: dist.all_to_all_single(torch.empty_like(x), x), lambda g: g - 1
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_count_of_a_collective(name, ranks):
    call, total = CALLS[name]
    sent, received = [], []
    for rank in range(ranks):
        with rank_of(rank, ranks):
            [op, *_] = count(call, (torch.ones(N, dtype=torch.bfloat16), ranks)).ops
        assert op.name in name
        assert op.sent_bytes == 2 * op.sent_elements
        assert op.received_bytes == 2 * op.received_elements
        sent.append(op.sent_elements)
        received.append(op.received_elements)
    assert sum(sent) == sum(received) == total(ranks) * N
    rooted = name in {"broadcast", "reduce", "gather", "scatter"}
    assert rooted or sent == received == [Fraction(total(ranks) * N, ranks)] * ranks


def test_count_of_a_collective_with_a_root():
    """A chain to the root, or from it; a root sends to each, or receives from each."""
    expected = {
        "broadcast": [(N, N), (0, N), (N, 0)],  # the last is the root
        "reduce": [(N, N), (N, 0), (0, N)],
        "gather": [(0, 2 * N), (N, 0), (N, 0)],
        "scatter": [(2 * N, 0), (0, N), (0, N)],
    }
    for name, ranks in expected.items():
        for rank, moved in enumerate(ranks):
            with rank_of(rank, 3):
                traffic = count(CALLS[name][0], (torch.ones(N), 3))
            assert (traffic.sent_elements, traffic.received_elements) == moved, (name, rank)
            assert (traffic.sent_bytes, traffic.received_bytes) == tuple(4 * n for n in moved)


def test_count_of_an_exchange_whose_parts_differ():
    for rank, others in enumerate([2, N - 1, N - 1]):
        with rank_of(rank, 3):
            traffic = count(exchange, torch.ones(N))
        assert (traffic.sent_elements, traffic.received_elements) == (others, others)


def test_count_says_what_is_sent():
    with rank_of(1, 4):
        traffic = count(lambda x: (dist.send(x, 0), dist.recv(x, 0), dist.barrier()), torch.ones(6))
        third = count(dist.all_reduce, torch.ones(6))
        part = count(dist.all_reduce, torch.ones(5))
    assert str(traffic) == (
        "reads 6 elements, writes 6 elements, sends 6, receives 6, in 2 operations"
    )
    assert [op.name for op in traffic.ops] == ["send", "recv"]
    assert third.sent_elements == 9 and "sends 9" in str(third)
    table, document = (count_table(traffic, as_json) for as_json in (False, True))
    assert "15/2" in count_table(part, as_json=False)  # the mean over the ranks
    assert "sent bytes" in table and '"received_bytes": 24' in document
    assert "sent" not in count_table(count(torch.exp, torch.ones(6)), as_json=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_formula_of_sharded_softmax_sends_two_numbers_a_row_to_each_other_rank(ranks):
    with rank_of(ranks - 1, ranks):
        found = memtraffic.formula(
            lambda x: sharded_softmax(x, run_check=False),
            fit=[(2, 8), (3, 16), (5, 12), (7, 4), (4, 9)],
            held_out=[(6, 40), (9, 21)],
        )
    link = "2M" if ranks == 2 else "4M"
    reads, writes = {2: ("6M", "6M"), 3: ("8M", "8M")}[ranks]
    assert str(found) == f"reads 2MN + {reads}, writes MN + {writes}, sends {link}, receives {link}"


def test_count_refuses_a_collective_without_values():
    with rank_of(0, 2), pytest.raises(CountError, match="all_reduce sends values"):
        count(dist.all_reduce, torch.ones(4, device="meta"))
