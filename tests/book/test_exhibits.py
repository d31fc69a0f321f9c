import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from memtraffic import gpus, runtime
from memtraffic.book import exhibits
from memtraffic.ladder import masked, persistent, tiled
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, is_softmax
from memtraffic.traffic.count import count

STAGES = (exhibits.softmax_1_stage, exhibits.softmax_2_stages, exhibits.softmax_3_stages)


@pytest.mark.parametrize("n", [1, 512, 781, 8320])
@pytest.mark.parametrize("fn", [exhibits.softmax_few_warps, exhibits.softmax_uncached, *STAGES])
def test_softmax_is_right(fn, n):
    assert_softmax(fn, matrix(5, n))


def launches(fn, x):
    """The kernels that `fn` launches, with their options."""
    from memtraffic.compile import capture_launches

    return capture_launches(fn, x, gpu=gpus.find_gpu("H200"))


def test_softmax_few_warps_has_those_of_8192_columns():
    [few] = launches(exhibits.softmax_few_warps, matrix(2, 8320))
    [most] = launches(masked.softmax, matrix(2, 8320))
    [fewer] = launches(masked.softmax, matrix(2, 8192))
    assert few.options["num_warps"] == fewer.options["num_warps"] < most.options["num_warps"]
    assert few.constants == most.constants


def test_softmax_stages_are_those_of_the_loop():
    stages = [launches(fn, matrix(8, 4096))[0].constants["STAGES"] for fn in STAGES]
    assert stages == [1, 2, 3]


def test_softmax_no_other_is_wrong_where_elements_are_masked():
    below_zero = matrix(3, 512).abs() * -1 - 1
    assert is_softmax(exhibits.softmax_no_other, below_zero)
    assert not is_softmax(exhibits.softmax_no_other, below_zero[:, :400].contiguous())


def test_softmax_block_of_512_leaves_the_rest():
    x = matrix(3, 781)
    assert not is_softmax(exhibits.softmax_block_of_512, x)
    assert count(exhibits.softmax_block_of_512, x).read_elements == 3 * 512


# ---- autotuned


@pytest.mark.parametrize("n", [32, 781])
def test_softmax_autotuned_moves_the_least_in_each_configuration(n):
    traffic = count(exhibits.softmax_autotuned, matrix(3, n))
    assert (traffic.read_elements, traffic.written_elements) == (3 * n, 3 * n)
    assert [op.name for op in traffic.ops] == ["_softmax_tiled_kernel"]


def test_autotuned_kernel_is_made_once_and_tuned_for_each_width():
    tuner = exhibits.autotuned_kernel()
    assert exhibits.autotuned_kernel() is tuner
    assert {"n_cols", "ALIGN"} <= set(tuner.keys)


def test_softmax_autotuned_refuses_narrow_rows():
    with pytest.raises(ValueError, match="31 columns"):
        exhibits.softmax_autotuned(matrix(4, 31))
    with pytest.raises(TypeError):
        exhibits.softmax_autotuned(matrix(4, 64).int())
    assert exhibits.softmax_autotuned(torch.empty(0, 64, device=runtime.device())).shape == (0, 64)


@pytest.mark.parametrize(("target", "lanes", "most"), [("sm_90", 32, 32), ("gfx942", 64, 16)])
@pytest.mark.parametrize("block", [32, 1024, 32768])
def test_autotuned_kernel_tries_what_fits(target, lanes, most, block):
    tuner = exhibits.autotuned_kernel()
    tuner.nargs = {"x_ptr": matrix(1, 1)}
    with runtime.capturing_launches(gpus.find_gpu(target)):
        configs = tuner.prune_configs({"BLOCK": block, "ALIGN": 4})
    assert {(it.kwargs["ROWS"], it.num_warps) for it in configs} == {
        (rows, num_warps)
        for rows in (1, 2, 4, 8)
        for num_warps in (1, 2, 4, 8, 16, 32)
        if num_warps <= most and num_warps * lanes <= rows * block <= 64 * num_warps * lanes
    }


def test_softmax_autotuned_launches_a_program_for_each_tile(monkeypatch):
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid({"ROWS": 8}))
            return lambda *args, **kwargs: None

    monkeypatch.setattr(exhibits, "autotuned_kernel", Kernel)
    for m in (3, 64, 65):
        exhibits.softmax_autotuned(matrix(m, 32))
    assert grids == [(1,), (8,), (9,)]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32, 781, 4100])
def test_softmax_autotuned_is_right(n):
    for _ in range(2):  # the call that tunes, and one after it
        assert_softmax(exhibits.softmax_autotuned, matrix(67, n))


# ---- uncached


def test_softmax_uncached_plans_at_each_call(monkeypatch):
    plans, plan = [], persistent.plan
    monkeypatch.setattr(persistent, "plan", lambda *a, **k: plans.append(1) or plan(*a, **k))
    for _ in range(2):
        exhibits.softmax_uncached(matrix(5, 9))
    assert len(plans) == 2
    assert exhibits.softmax_uncached(torch.empty(0, 9, device=runtime.device())).shape == (0, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 781, 4096, 32768])
def test_softmax_uncached_equals_cached(n):
    x = matrix(1000, n, "bfloat16")
    assert torch.equal(persistent.softmax(x), exhibits.softmax_uncached(x))
    assert torch.equal(persistent.softmax(x), exhibits.softmax_uncached(x))


# ---- kernels that are measured


@pytest.mark.parametrize("long", [True, False])
def test_first_of_row_kernel_reads_the_row(long):
    x, y = matrix(5, 7), torch.zeros(1, device=runtime.device())
    exhibits._first_of_row_kernel[(1,)](y, x, 3, x.stride(0), LONG=long)
    assert y.item() == x[3, 0].item()


def test_pointer_chase_kernel_follows_the_chain():
    x = torch.tensor([3, -1, 7, 2, -1], device=runtime.device())  # 0 -> 3 -> 2 -> 7
    y = torch.zeros(1, dtype=torch.int64, device=runtime.device())
    for hops, at in ((0, 3), (1, 2), (2, 7)):
        exhibits._pointer_chase_kernel[(1,)](y, x, hops)
        assert y.item() == at


def test_autotuned_kernel_is_the_tiled_one():
    assert exhibits.autotuned_kernel().fn is tiled._softmax_tiled_kernel
