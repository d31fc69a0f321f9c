"""What holds for `memtraffic.rms_norm` beside the contract of all kernels."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from memtraffic import runtime
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.gpus import find_gpu
from memtraffic.kernels.rms_norm.op import WIDEST, backward, backward_tile, forward, rms_norm
from memtraffic.kernels.softmax.op import softmax
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close

DEVICE = runtime.device()
torch_rms_norm = torch.nn.functional.rms_norm


@pytest.fixture(scope="module", autouse=True)
def _bounds_checked(bounds_checked):
    """A kernel that leaves its tensors fails its test and does not end the process."""


def gradients(fn, dy, *tensors):
    tensors = [x.detach().requires_grad_() for x in tensors]
    y = fn(*tensors)
    return y, *torch.autograd.grad(y, tensors, dy)


def assert_as_in_float64(x, weight, dy, eps=1e-6):
    """The result, and both gradients, to a few roundings of their rows."""
    found = gradients(lambda x, w: rms_norm(x, w, eps), dy, x, weight)
    exact = gradients(
        lambda x, w: torch_rms_norm(x, w.shape, w, eps), dy.double(), x.double(), weight.double()
    )
    for got, expected, like in zip(found, exact, (x, x, weight), strict=True):
        assert_close(got.detach(), expected.detach(), like.dtype, roundings=16)


@pytest.mark.parametrize(
    "shape", [(9, 7), (9, 1025), pytest.param((3, 32769), marks=pytest.mark.slow)], ids=str
)
def test_rms_norm_and_its_gradients(shape, dtype):
    """And so that of the weight, which the contract does not ask for."""
    x, dy = matrix(*shape, dtype), matrix(*shape, dtype, seed=1)
    assert_as_in_float64(x, matrix(1, shape[1], dtype, seed=2)[0], dy)


def test_rms_norm_of_another_dtype_than_its_weight():
    x, dy = matrix(9, 40, "bfloat16"), matrix(9, 40, "bfloat16", seed=1)
    assert_as_in_float64(x, matrix(1, 40, seed=2)[0], dy)
    assert_as_in_float64(x.double(), matrix(1, 40, seed=2)[0], dy.double())


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_each_result_of_16_bits_is_rounded_once(name):
    """Rounded before the weight as well, it would be up to twice as far off."""
    x, weight = matrix(9, 300, name), matrix(1, 300, name, seed=2)[0]
    exact = torch_rms_norm(x.double(), (300,), weight.double(), 1e-6)
    finfo = torch.finfo(x.dtype)
    error = (rms_norm(x, weight, 1e-6).double() - exact).abs()
    assert (error <= 0.51 * finfo.eps * exact.abs() + finfo.smallest_normal * finfo.eps).all()


def test_rms_norm_without_a_weight():
    x, dy = matrix(9, 40), matrix(9, 40, seed=1)
    found = gradients(rms_norm, dy, x)
    for got, expected in zip(
        found, gradients(lambda x: torch_rms_norm(x, (40,)), dy, x), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
def test_eps_is_by_default_that_of_pytorch(name):
    """Of numbers so small that it decides."""
    x = (matrix(3, 40) * 3e-4).to(getattr(torch, name)) * (1e-5 if name == "float64" else 1)
    torch.testing.assert_close(rms_norm(x), torch_rms_norm(x, (40,)))
    zeros = torch.zeros_like(x)
    assert torch.equal(rms_norm(zeros), zeros)


@pytest.mark.parametrize("eps", [np.float32(0.5), torch.tensor(0.5), 1, True], ids=repr)
def test_eps_is_any_number(eps):
    x = matrix(3, 8)
    assert torch.equal(rms_norm(x, eps=eps), rms_norm(x, eps=float(eps)))


def test_eps_is_added_to_the_mean():
    x = torch.full((2, 8), 3.0, device=DEVICE)
    assert torch.equal(rms_norm(x, eps=16.0), x / 5)
    _, rstd = forward(x, None, 16.0)
    assert (rstd - 0.2).abs().max() < 1e-7 and rstd.shape == (2,)


def test_rms_norm_of_any_leading_dimensions():
    x, weight = matrix(12, 40), matrix(1, 40, seed=2)[0]
    expected = rms_norm(x, weight)
    for view in (x.view(3, 4, 40), x.view(3, 4, 40).transpose(0, 1), x.view(2, 3, 2, 40)):
        y = rms_norm(view, weight)
        assert torch.equal(y, torch_rms_norm(view, (40,), weight, torch.finfo(x.dtype).eps)) or (
            torch.allclose(y, torch_rms_norm(view, (40,), weight))
        )
        assert y.is_contiguous()
    assert torch.equal(rms_norm(x[0], weight), expected[0])


def test_dweight_is_of_all_rows_and_of_every_program():
    """Each of the interpreter's 4 programs has several rows, and the last tile is not full."""
    x = torch.ones(11, 40, device=DEVICE)
    dy = torch.arange(11.0, device=DEVICE)[:, None].expand(11, 40)
    for columns in (40, 1040):
        x, dy = x[:, :1].expand(11, columns), dy[:, :1].expand(11, columns)
        weight = torch.ones(columns, device=DEVICE)
        _, _, dweight = gradients(lambda x, w: rms_norm(x, w, 0.0), dy, x, weight)
        assert (dweight == 55).all()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=["no-rows", "no-columns"])
def test_gradients_of_nothing(shape):
    x, weight = torch.empty(shape, device=DEVICE), torch.empty(shape[1], device=DEVICE)
    y, dx, dweight = gradients(rms_norm, torch.empty(shape, device=DEVICE), x, weight)
    assert y.shape == dx.shape == shape and not dweight.any()


@pytest.mark.slow
def test_gradcheck():
    x, weight = (
        it.requires_grad_() for it in (matrix(2, 5, "float64"), matrix(1, 5, "float64")[0])
    )
    for tensors in ((x, weight), (x,)):
        assert gradcheck(lambda *it: rms_norm(*it, eps=1e-3), tensors)
        assert gradgradcheck(lambda *it: rms_norm(*it, eps=1e-3), tensors, fast_mode=True)
    assert gradgradcheck(lambda *it: rms_norm(*it, eps=1e-3), (x[0], weight))


@pytest.mark.parametrize("weighted", [pytest.param(True, marks=pytest.mark.slow), False])
def test_opcheck(weighted):
    x, dy = matrix(3, 5).requires_grad_(), matrix(3, 5, seed=1).requires_grad_()
    weight = matrix(1, 5, seed=2)[0].requires_grad_() if weighted else None
    torch.library.opcheck(torch.ops.memtraffic.rms_norm.default, (x, weight, 1e-6))
    rstd = torch.ones(3, device=DEVICE)
    arguments = (dy.detach(), x.detach(), weight, rstd, 1e-6)
    torch.library.opcheck(torch.ops.memtraffic.rms_norm_backward.default, arguments)


# ---- out


def test_rms_norm_into_out_beside_its_weight():
    """A weight may lie shortly before the result; what they overlap is refused by its name."""
    memory = torch.ones(8 + 9 * 8, device=DEVICE)
    weight, out = memory[:8], memory[8:].view(9, 8)
    x = matrix(9, 8)
    assert rms_norm(x, weight, out=out) is out
    assert torch.equal(out, rms_norm(x))
    with pytest.raises(RuntimeError, match="-16 bytes after weight"):
        rms_norm(x, memory[4:12], out=memory[:72].view(9, 8))


def test_rms_norm_into_an_out_that_repeats_its_elements():
    """Not by a stride of 0: a window starts where the one before it has its second element."""
    for fn in (rms_norm, softmax):
        with pytest.raises(RuntimeError, match=r"repeats its elements: .* \(1, 1\)"):
            fn(matrix(3, 5), out=torch.empty(7, device=DEVICE).unfold(0, 5, 1))


# ---- torch.compile, torch.func


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, at an import
def test_compiled_with_an_eps_that_changes():
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    x, weight = matrix(3, 5), matrix(1, 5, seed=1)[0]
    for eps in (1e-3, 0.5, 0.25, None, 1):
        assert torch.equal(compiled(x, weight, eps), rms_norm(x, weight, eps))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own forward mode
def test_rms_norm_under_transforms():
    x, weight = matrix(6, 5).view(2, 3, 5), matrix(1, 5, seed=1)[0]
    found, expected = (
        (
            torch.func.jvp(of, (x, weight), (x.cos(), weight.cos())),
            torch.vmap(torch.func.jacrev(of, (0, 1)), in_dims=(0, None))(x, weight),
            torch.func.hessian(lambda *it, of=of: of(*it).square().sum(), (0, 1))(x, weight),
        )
        for of in (
            lambda x, weight: rms_norm(x, weight, 1e-3),
            lambda x, weight: torch_rms_norm(x, (5,), weight, 1e-3),
        )
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


NAN = float("nan")


def zeros(*shape, **options):
    return torch.zeros(shape, device=DEVICE, **options)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        pytest.param(lambda: rms_norm([1.0]), TypeError, "x is a list", id="a-list"),
        pytest.param(lambda: rms_norm(zeros(3), 2.0), TypeError, "weight is a float", id="weight"),
        pytest.param(lambda: rms_norm(zeros(3), eps="a"), TypeError, "eps is a str", id="eps"),
        pytest.param(lambda: rms_norm(zeros()), RuntimeError, "scalar", id="scalar"),
        pytest.param(
            lambda: rms_norm(zeros(2, 3), zeros(4)), RuntimeError, r"\(4,\), not \(3,\)", id="shape"
        ),
        pytest.param(
            lambda: rms_norm(zeros(2, 3), zeros(3).int()), NotImplementedError, "int32", id="dtype"
        ),
        pytest.param(
            lambda: rms_norm(zeros(2, 3), zeros(3, requires_grad=True), out=zeros(2, 3)),
            RuntimeError, "weight requires", id="gradient-into-out",
        ),
    ],
)  # fmt: skip
def test_rms_norm_refuses(call, error, says):
    with pytest.raises(error, match=f"^rms_norm: .*{says}"):
        call()


# ---- what it moves


def test_traffic_of_rms_norm():
    """A program has a row, so it reads the weight anew; 4 programs have parts of dweight."""
    m, n = 9, 2048
    x, weight = matrix(m, n), matrix(1, n)[0]
    traffic = count(lambda x: rms_norm(x, weight), x)
    assert (traffic.read_elements, traffic.written_elements) == (2 * m * n, m * n + m)
    rstd = torch.ones(m, device=DEVICE)
    [kernel, added, stored] = count(lambda x: backward(x, x, weight, rstd, 1e-6), x.clone()).ops
    assert kernel.read_elements == 2 * m * n + 2 * m * n + m  # x, dy; the weight twice; rstd
    assert kernel.written_elements == m * n + 4 * n
    assert (added.read_elements, stored.written_elements) == (4 * n, n)


@pytest.mark.parametrize(("n", "parts"), [(32768, 6), (36865, 7)])
def test_a_row_of_the_gradient_is_split(n, parts):
    """Each program exchanges a word of its row with what is there, and reads those of all."""
    x, rstd = matrix(3, n), torch.ones(3, device=DEVICE)
    traffic = count(lambda x: backward(x, x.clone(), None, rstd, 1e-6), x)
    kernel = next(it for it in traffic.ops if "kernel" in it.name)
    assert kernel.read_elements == 3 * (2 * n + parts) + 3 * parts * (1 + parts)
    assert kernel.written_elements == 3 * (n + parts)


@pytest.mark.gpu
def test_a_split_gradient_in_a_cuda_graph_and_on_several_streams():
    """Its programs wait for one another, and their words are zeroed for each replay."""
    n = 40_000
    x, dy, weight = matrix(300, n), matrix(300, n, seed=1), matrix(1, n, seed=2)[0]
    rstd = torch.rand(300, device=DEVICE)
    expected = backward(dy, x, weight, rstd, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(dy, x, weight, rstd, 1e-6)
    for _ in range(3):
        for it in captured:
            it.fill_(NAN)
        graph.replay()
        assert all(map(torch.equal, captured, expected))
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            found.append(backward(dy, x, weight, rstd, 1e-6))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, expected, strict=True))


# ---- compiled


def test_backward_tile_covers_the_row():
    gpu = find_gpu("H200")
    for itemsize, warps in WIDEST.items():
        for n in (1, 7, 300, 2049, max(warps.values()), max(warps.values()) + 1, 2**18, 800_000):
            found = backward_tile(n, itemsize, gpu)
            assert (found is None) == (itemsize == 8 and n > 8192)
            if found:
                tile, parts = found
                width = tile.block * tile.chunks
                assert (parts - 1) * width < n <= parts * width and tile.num_warps <= 16
                assert parts == 1 or n > max(warps.values())
    assert backward_tile(2**24, 4, gpu) is None  # its programs would not run at once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [2048, 12672, 32768])
def test_rms_norm_keeps_memory_busy_on_sm_90(n, name):
    """No spills, 128 bits an access, and more bytes in flight than the 25 kB that an SM needs."""
    x, weight = torch.empty(64, n, dtype=getattr(torch, name), device=DEVICE), matrix(1, n, name)[0]
    rstd = torch.empty(64, device=DEVICE)
    for matrices, fn in (
        (1, lambda x: forward(x, weight, 1e-6)),
        (2, lambda x: backward(x, x.clone(), weight, rstd, 1e-6)),
    ):
        [launch] = capture_launches(fn, x, gpu=find_gpu("H200"))
        [kernel] = compile_launches([(launch, "sm_90")])
        assert not kernel.spill_bytes
        assert set(kernel.load_bits) - {32, 64} == set(kernel.store_bits) - {32} == {128}
        programs = 65536 // (kernel.registers * kernel.num_warps * 32) or 1
        assert programs * matrices * n * x.element_size() >= 25_000
