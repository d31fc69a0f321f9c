"""What only two GPUs show of the sharded softmax: links, waiting programs, a rank that is gone."""

import pytest
import rank_functions
import torch

from memtraffic_book.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_cols", [2 * 4096, 2 * 16384, 2 * 32768, 2 * 12345])
@pytest.mark.parametrize("linked", [False, True])
def test_sharded_softmax_of_two_gpus(linked, n_cols, dtype):
    run_ranks(rank_functions.answer, 2, (linked, dtype, 300, n_cols), timeout=300)


def test_sharded_softmax_of_rows_that_no_program_holds():
    run_ranks(rank_functions.answer, 2, (False, "float32", 30, 2 * 40000), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside-products"])
def test_linked_kernel_launched_many_times(busy):
    found = run_ranks(rank_functions.many_launches, 2, (busy,), timeout=600)
    assert found == [(0, 0, [0, 0, rank_functions.LAUNCHES + 1, 0])] * 2


def test_linked_kernel_in_a_graph():
    assert run_ranks(rank_functions.replayed, 2, timeout=300) == [(True, 0)] * 2


def test_linked_kernel_of_a_rank_whose_peer_is_gone():
    [(is_nan, told), _] = run_ranks(rank_functions.alone, 2, timeout=300)
    assert is_nan and "a rank waited in vain" in told
