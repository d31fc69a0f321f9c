import functools

import pytest
import torch

from memtraffic import device, gpus
from memtraffic.benchmark import copying as module
from memtraffic.benchmark.copying import copies, fastest_copy
from memtraffic.tensors import MEMORY_LAYOUTS, matrix

PYTORCH = ["clone", "copy_"]
FLAT = ["1024, 4 warps", "1024, 8 warps", "4096, 8 warps"]


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 8192), (67, 5), (1, 1), (5, 781)], ids=str)
def test_copies_are_copies(shape, layout, dtype):
    x = matrix(*shape, dtype, layout)
    for name, copy in copies(x).items():
        y = copy()
        assert torch.equal(y, x), name
        assert y.dtype == dtype and y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("layout", ["packed", "transposed", "odd"])
def test_copies_of_memory_as_it_lies_need_memory_without_gaps(layout):
    x, flat = matrix(4, 6, layout=layout), layout != "odd"
    found = copies(x)
    assert list(found) == [*PYTORCH, *(FLAT if flat else []), "tiles"]
    assert found["clone"]().stride() == (x if flat else x.contiguous()).stride()
    assert found["tiles"]().is_contiguous()


def test_copies_of_what_has_no_tiles():
    for x in (torch.zeros(100), torch.zeros(2, 40_000), torch.zeros(0, 8), torch.zeros(8, 0)):
        x = x.to(device.default())
        assert list(copies(x)) == [*PYTORCH, *FLAT]
        assert all(torch.equal(copy(), x) for copy in copies(x).values())


@pytest.mark.parametrize("layout", ["packed", "transposed", "every other"])
def test_copies_of_two_inputs_add_them(layout):
    x, other = (matrix(5, 781, layout=layout, seed=seed) for seed in (0, 1))
    found = copies(x, other)
    assert list(found) == ["add", "add into", *(FLAT if layout != "every other" else [])]
    assert all(torch.equal(call(), x + other) for call in found.values())
    if layout == "packed":
        assert list(copies(x, matrix(5, 781, layout="transposed"))) == ["add", "add into"]


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
    for name in (*FLAT, "tiles"):
        [kernel] = resources(lambda x, name=name: copies(x)[name](), x, target="sm_90")
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
