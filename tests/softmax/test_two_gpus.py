"""What only two GPUs show of the sharded softmax: links, waiting programs, a rank that is gone."""

import pytest
import torch
import torch.distributed as dist

from memtraffic.errors import RanksError
from memtraffic.kernels.softmax.linked import _links, link_of, linked_softmax
from memtraffic.kernels.softmax.sharded import RUNGS, sharded_softmax
from memtraffic.processes import run_ranks
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAUNCHES = 100_000


def part_of(n_rows, n_cols, dtype="float32"):
    """The whole matrix, and the columns of it that this rank has."""
    x = matrix(n_rows, n_cols, dtype, device="cuda")
    return x, x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def answer(rung, dtype, n_rows, n_cols):
    """Raises where a result is wrong; whether there is a link, which the one kernel uses."""
    x, mine = part_of(n_rows, n_cols, dtype)
    y = sharded_softmax(mine.requires_grad_(), rung=rung)
    [dx] = torch.autograd.grad(y, mine, mine.detach())
    exact_x = x.double().requires_grad_()
    every = torch.softmax(exact_x, dim=1)
    [every_dx] = torch.autograd.grad(every, exact_x, exact_x.detach())
    begin = dist.get_rank() * x.shape[1] // 2
    for found, exact in ((y, every), (dx, every_dx)):
        assert_close(found.detach(), exact.detach()[:, begin : begin + y.shape[1]], x.dtype)
    return any(_links.values())


def many_launches(busy):
    """The result of each launch, of which a wrong one would stay wrong, beside other work."""
    _, mine = part_of(256, 4096)
    link, rank = link_of(None, mine.device, 256), dist.get_rank()
    first = linked_softmax(mine, link, rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for i in range(LAUNCHES):
        if busy and i % 100 == 0:
            with torch.cuda.stream(other):
                a = (a @ a).clamp(-1, 1)
        wrong += (linked_softmax(mine, link, rank) != first).any()
    torch.cuda.synchronize()
    return wrong.item(), link.failed.item(), link.state.tolist()


def on_two_streams():
    _, mine = part_of(2048, 16384)
    link, rank = link_of(None, mine.device, 2048), dist.get_rank()
    first, streams = linked_softmax(mine, link, rank), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            found.append(linked_softmax(mine, link, rank))
    torch.cuda.synchronize()
    return sum(not torch.equal(first, y) for y in found), link.failed.item()


def replayed():
    _, mine = part_of(256, 4096)
    link, rank = link_of(None, mine.device, 256), dist.get_rank()
    first, graph = linked_softmax(mine, link, rank), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        again = linked_softmax(mine, link, rank)
    for _ in range(1000):
        again.zero_()
        graph.replay()
    return torch.equal(first, again), link.failed.item()


def alone():
    """Rank 0 calls, and rank 1 does not."""
    _, mine = part_of(64, 4096)
    link = link_of(None, mine.device, 64)
    told = None
    if dist.get_rank() == 0:
        y = linked_softmax(mine, link, 0, looks=2**16)
        torch.cuda.synchronize()
        try:
            sharded_softmax(mine, run_check=False, rung="one kernel")
        except RanksError as error:
            told = y.isnan().all().item(), str(error)
    dist.barrier()  # rank 1 keeps the memory in which rank 0 writes
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_cols", [2 * 4096, 2 * 16384, 2 * 32768, 2 * 12345])
@pytest.mark.parametrize("rung", [None, *RUNGS])
def test_sharded_softmax_of_two_gpus(rung, n_cols, dtype):
    found = run_ranks(answer, 2, (rung, dtype, 300, n_cols), timeout=300)
    assert found == [rung != "collective"] * 2


def test_sharded_softmax_of_rows_that_no_program_holds_takes_the_collective():
    assert run_ranks(answer, 2, (None, "float32", 30, 2 * 40000), timeout=300) == [False] * 2


def test_linked_softmax_on_two_streams():
    assert run_ranks(on_two_streams, 2, timeout=300) == [(0, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside-products"])
def test_linked_kernel_launched_many_times(busy):
    for wrong, failed, state in run_ranks(many_launches, 2, (busy,), timeout=600):
        assert (wrong, failed, state) == (0, 0, [0, 0, LAUNCHES + 1, 0])


def test_linked_kernel_in_a_graph():
    assert run_ranks(replayed, 2, timeout=300) == [(True, 0)] * 2


def test_linked_kernel_of_a_rank_whose_peer_is_gone():
    [(is_nan, told), _] = run_ranks(alone, 2, timeout=300)
    assert is_nan and "waited for another in vain" in told
