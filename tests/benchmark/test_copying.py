import functools

import pytest
import torch

from memtraffic import device, gpus
from memtraffic.benchmark import copying as module
from memtraffic.benchmark.copying import copies, fastest_copy
from memtraffic.tensors import matrix

PYTORCH, ADD = ["clone", "copy_"], ["add", "add into"]
FLAT = ["1024, 4 warps", "1024, 8 warps", "4096, 8 warps"]


NO_TILES = [torch.zeros(shape) for shape in (100, (2, 40_000), (0, 8), (8, 0))]
FOUND = [  # inputs, and what is found for them: memory is copied as it lies where it has no gaps
    *(
        ([matrix(67, 5, dtype, it)], [*PYTORCH, *FLAT, "tiles"])
        for dtype, it in (("float32", "packed"), ("bfloat16", "transposed"))
    ),
    ([matrix(3, 8190, "float16", "odd")], [*PYTORCH, "tiles"]),
    *(([x.to(device.default())], [*PYTORCH, *FLAT]) for x in NO_TILES),
    *(
        ([matrix(5, 781, layout=it, seed=seed) for seed in (0, 1)], [*ADD, *FLAT])
        for it in ("packed", "transposed")
    ),
    ([matrix(5, 781, layout="every other")] * 2, ADD),
    ([matrix(5, 781), matrix(5, 781, layout="transposed")], ADD),
]


@pytest.mark.parametrize(("inputs", "names"), FOUND)
def test_copies_of_inputs(inputs, names):
    """Two are added."""
    found, expected = copies(*inputs), sum(inputs)
    assert list(found) == names
    for y in (call() for call in found.values()):
        assert torch.equal(y, expected) and y.dtype == expected.dtype
        assert not y.numel() or y.data_ptr() not in [x.data_ptr() for x in inputs]
    assert "tiles" not in found or found["tiles"]().is_contiguous()


@pytest.mark.parametrize("n", [64, 781, 4096, 16384])
def test_copies_have_the_launch_of_tiled(n):
    from memtraffic.compile import capture_launches
    from memtraffic.kernels.softmax import tiled

    x = matrix(2, n)
    h200 = gpus.find_gpu("H200")
    [ours] = capture_launches(lambda x: copies(x)["tiles"](), x, gpu=h200)
    [theirs] = capture_launches(tiled.softmax, x, gpu=h200)
    assert (ours.constants, ours.options) == (theirs.constants, theirs.options)
    assert ours.signature == theirs.signature


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_move_16_bytes_per_access(dtype):
    from memtraffic.compile import resources

    x = matrix(64, 4096, dtype)
    names = (*FLAT, "tiles")
    kernels = resources(lambda x: [copies(x)[name]() for name in names], x, target="sm_90")
    for name, kernel in zip(names, kernels, strict=True):
        widest = 64 if (name, dtype) == ("1024, 8 warps", "bfloat16") else 128
        assert set(kernel.load_bits) == set(kernel.store_bits) == {widest}, name
        assert kernel.spill_bytes == 0


def test_fastest_copy_has_the_least_median(monkeypatch):
    slow, fast, uneven = 20 * [3e-6], 20 * [2e-6], [1e-9, 4e-6, 4e-6]

    def time_interleaved(fns, budget):
        assert [fn() for fn in fns] == ["slow", "fast", "uneven", "as fast"] and budget == 0
        return [slow, fast, uneven, fast]

    names = ("slow", "fast", "uneven", "as fast")
    found = {name: functools.partial(str, name) for name in names}
    monkeypatch.setattr(module, "copies", lambda x, other: found)
    monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    assert fastest_copy("x")() == fastest_copy("x", "y")() == "fast"
