import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from memtraffic import count, device, gpus, resources
from memtraffic.compile import capture_launches
from memtraffic.op import tolerance
from memtraffic.tensors import matrix
from memtraffic.testing import (
    assert_close,
    assert_resources,
    assert_row_sums,
    bounds_checked,
    poisoned_memory,
)
from memtraffic_book import prove, yours
from memtraffic_book.chapters import your_kernel as page

PACKED = {"layouts": ("packed",), "widths": (1, 2, 127, 781, 1024)}
pytestmark = pytest.mark.slow  # together they take several seconds

NORMS = {
    "norm": yours.rms_norm,
    "loop": yours.rms_norm_loop,
    "loop-of-two": partial(yours.rms_norm_loop, programs=2),
}


def logits(m, n, dtype="float32"):
    """Logits, one of them minus infinity, and the columns that are right: in all chunks."""
    x, target = matrix(m, n, dtype), torch.arange(m, device=device.default()) * (n - 1) // (m - 1)
    x[-1, int(target[-1]) - 1] = -float("inf")
    return x, target


@pytest.mark.parametrize("name", [*NORMS, "torch"])
def test_rms_norm_is_right(name):
    fn = NORMS.get(name, yours.torch_rms_norm)
    with poisoned_memory():
        prove.correct(fn, op=page.RMS_NORM, **PACKED)


@pytest.mark.parametrize("name", NORMS)
def test_rms_norm_takes_another_epsilon(name):
    x, w = matrix(5, 127), matrix(1, 127, seed=1)[0]
    exact = x.double() * (x.double().square().mean(dim=1, keepdim=True) + 1).rsqrt() * w.double()
    assert_close(NORMS[name](x, w, eps=1.0), exact, x.dtype, roundings=8)


def test_rms_norm_reads_the_weights_once_per_program():
    """No more programs than rows; that each reads them once, the page counts."""
    assert len(count(yours.rms_norms, inputs="3,8 8,").ops) == 2
    moved = count(partial(yours.rms_norm_loop, programs=64), inputs="3,8 8,")
    assert moved.read_elements == 2 * 3 * 8


def programs(fn, *tensors):
    return len({access.program for access in count(fn, tensors, trace=True).accesses})


def test_rms_norm_loop_launches_four_programs_per_sm(monkeypatch):
    gpu = dataclasses.replace(gpus.find_gpu("H200"), num_sms=2)
    monkeypatch.setattr(yours, "planning_gpu", lambda x: gpu)
    w = matrix(1, 8)[0]
    assert programs(yours.rms_norm_loop, matrix(20, 8), w) == 4 * 2
    assert programs(yours.rms_norm_loop, matrix(5, 8), w) == 5
    assert programs(yours.rms_norm, matrix(20, 8), w) == 20


def test_cross_entropy_of_large_logits_and_that_of_pytorch():
    x = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]], device=device.default())
    target = torch.tensor([0, 1], device=device.default())
    loss, dx = yours.cross_entropy(x, target)
    assert loss.tolist() == [0, 2e4]
    assert dx.tolist() == [[0, 0, 0], [1, -1, 0]]
    total, gradient = yours.torch_cross_entropy(x, target)
    assert total == 2e4 and torch.equal(gradient, dx) and not x.requires_grad


def test_cross_entropy_is_right(dtype):
    """And leaves the logits as they were; at other widths the page judges it."""
    n = 781
    x, target = logits(5, n, str(dtype).removeprefix("torch."))
    before, exact = x.clone(), x.double().requires_grad_()
    with poisoned_memory(), bounds_checked():
        loss, dx = yours.cross_entropy(x, target)
    expected = F.cross_entropy(exact, target, reduction="none")
    expected.sum().backward()
    assert_close(loss, expected.detach(), torch.float32, roundings=8)
    if device.runs_on_gpu():
        # At the target, 1 is taken from a probability, which another exponential rounded.
        room = F.one_hot(target, n) * torch.finfo(torch.float32).eps
        error = (dx.double() - exact.grad).abs()
        assert dx.dtype == x.dtype
        assert (error <= tolerance(exact.grad, x.dtype) + room).all()
    else:
        assert_close(dx, exact.grad, x.dtype)
    one = F.one_hot(target[:1], n)
    assert_row_sums(dx[:1] + one, exact.grad[:1] + one)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("n", "warps", "chunks"), [(50, 1, 1), (781, 1, 7), (32768, 16, 16)])
def test_cross_entropy_takes_a_program_per_row(n, warps, chunks):
    x, target = logits(5, n)
    [launch] = capture_launches(yours.cross_entropy, x, target, gpu=gpus.find_gpu("H200"))
    assert launch.options["num_warps"] == warps
    assert launch.constants["CHUNKS"] == chunks
    assert launch.constants["BLOCK"] == 4 * 32 * warps
    assert programs(yours.cross_entropy, *logits(5, 8)) == 5


@pytest.mark.parametrize(("dtype", "target"), [("fp32", "sm_80"), ("bf16", "sm_90")])
def test_cross_entropy_does_not_spill(dtype, target):
    inputs = f"256,32768:{dtype} 256:int64<32768"
    [kernel] = resources(yours.cross_entropy, inputs, target=target)
    assert kernel.spill_bytes == 0 and not kernel.unlaunchable
    assert kernel.registers <= 128  # in bf16, two programs of 8 warps fit an SM


def test_rms_norm_is_vectorised():
    for fn in (yours.rms_norm, yours.rms_norm_loop):
        options = dict(target=["sm_80", "gfx942"], load_bits=128, store_bits=128)
        assert_resources(fn, "16,4096 4096,", **options)


@pytest.mark.parametrize("shape", [(2, 32769), (2, 0), (2, 8), (8,)], ids=str)
def test_yours_refuse_other_matrices(shape):
    x = torch.zeros(shape)
    x = x.T if shape == (2, 8) else x  # which is not packed
    with pytest.raises(ValueError, match=r"cross_entropy: .* 1 to 32768 columns, not \("):
        yours.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64))
    for fn in (yours.rms_norm, yours.rms_norm_loop):
        with pytest.raises(ValueError, match=rf"{fn.__name__}: "):
            fn(x, torch.ones(x.shape[-1]))


def test_yours_hold_32_elements_per_thread():
    many = (32768, 32, "H200"), (32768, 16, "gfx942")
    for n, warps, gpu in ((8, 4, "H200"), (4096, 4, "H200"), (8192, 8, "H200"), *many):
        x = torch.empty(2, n, device=device.default())
        [launch] = capture_launches(yours.rms_norm, x, x[0], gpu=gpus.find_gpu(gpu))
        assert launch.options["num_warps"] == warps
