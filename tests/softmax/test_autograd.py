"""What `operator` and `operation` promise to any kernel, by one with all that they offer."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from memtraffic import device
from memtraffic.kernels import autograd
from memtraffic.kernels.autograd import operation, operator
from memtraffic.kernels.softmax import op
from memtraffic.tensors import matrix

DEVICE = device.default()
PLANNED = []


# y = eps * x * weight, and the mean of x, which is saved; weight may be absent


def plan_forward(results, tensors, eps):
    PLANNED.append((tuple(it if it is None else it.shape for it in tensors), eps))

    def run(y, mean, x, weight):
        y.copy_(eps * x if weight is None else eps * x * weight)
        mean.copy_(x.detach().mean(-1))

    return run


def plan_backward(results, tensors, eps):
    def run(dx, dweight, dy, x, weight, mean):
        assert torch.equal(mean, x.detach().mean(-1))
        dx.copy_(eps * dy if weight is None else eps * dy * weight)
        dweight.copy_((eps * dy * x).sum(0))

    return run


def reference(dy, x, weight, mean, eps):
    return eps * dy if weight is None else eps * dy * weight, (eps * dy * x).sum(0)


def in_pytorch(x, weight, eps):
    return eps * x if weight is None else eps * x * weight, None


def refuse(x, weight, eps):
    if eps < 0:
        raise ValueError(f"weighted: eps is {eps}")


FORWARD = operator(
    "test_weighted",
    "(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    plan_forward,
    lambda x, weight, eps: [(x.shape, x.dtype), (x.shape[:-1], x.dtype)],
    refuse,
)
BACKWARD = operator(
    "test_weighted_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor mean, float eps) -> (Tensor, Tensor)",
    plan_backward,
    lambda dy, x, weight, mean, eps: [(x.shape, x.dtype), (x.shape[-1:], x.dtype)],
)
WEIGHTED = operation(
    FORWARD,
    BACKWARD,
    save=lambda arguments, results: ((*arguments[:2], results[1]), arguments[2:]),
    reference=reference,
    in_pytorch=in_pytorch,
)


@pytest.fixture(autouse=True)
def _no_plans():
    for it in (FORWARD, BACKWARD):
        it.plans.forget()
    PLANNED.clear()


def inputs(**options):
    x, weight = matrix(3, 4, **options), matrix(1, 4, seed=1, **options)[0]
    return x.requires_grad_(), weight.requires_grad_()


def test_apply_returns_the_first_result():
    x, weight = matrix(3, 4), matrix(1, 4)[0]
    for it in (weight, None):
        y = WEIGHTED.apply(x, (it, 2.0))
        assert torch.equal(y, 2 * x if it is None else 2 * x * it)
        assert torch.equal(y, FORWARD.registered(x, it, 2.0)[0])


def test_gradients_of_every_tensor_once_and_twice():
    x, weight = inputs(dtype="float64")
    fn = lambda x, weight: WEIGHTED.apply(x, (weight, 0.5))  # noqa: E731
    assert gradcheck(fn, (x, weight)) and gradgradcheck(fn, (x, weight))
    assert gradcheck(lambda x: WEIGHTED.apply(x, (None, 0.5)), (x,))
    assert gradgradcheck(lambda x: WEIGHTED.apply(x, (None, 0.5)), (x,))
    assert gradcheck(lambda weight: WEIGHTED.apply(x.detach(), (weight, 0.5)), (weight,))


def test_gradients_of_the_registered_operator_are_those_of_eager_mode():
    x, weight = inputs()
    for of in (weight, None):
        given = [it for it in (x, of) if it is not None]
        eager = torch.autograd.grad(WEIGHTED.apply(x, (of, 2.0)).square().sum(), given)
        y, mean = FORWARD.registered(x, of, 2.0)
        assert not mean.requires_grad  # what is saved is no result of the operation
        assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), given), eager))


def test_opcheck():
    x, weight = inputs()
    for of in (weight, None):
        torch.library.opcheck(FORWARD.registered.default, (x, of, 2.0))
        mean = x.detach().mean(-1)
        torch.library.opcheck(BACKWARD.registered.default, (x.detach(), x, of, mean, 2.0))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, at an import
def test_compiled():
    torch._dynamo.reset()
    fn = lambda x, weight: WEIGHTED.apply(x.sin(), (weight, 2.0))  # noqa: E731
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    x, weight = inputs()
    found, expected = (
        torch.autograd.grad(it(x, weight).square().sum(), (x, weight)) for it in (compiled, fn)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_dims", [(0, None), (1, 0), (None, 1)])
def test_vmap_of_an_operator_without_a_rule(in_dims):
    x = matrix(3, 8).view(3, 2, 4) if in_dims[0] is not None else matrix(3, 4)
    weight = matrix(4, 4, seed=1)[0 if in_dims[1] is None else slice(None)]
    weight = weight[: x.shape[in_dims[0]]] if in_dims == (1, 0) else weight
    found, expected = (
        torch.vmap(fn, in_dims=in_dims)(x, weight)
        for fn in (lambda x, w: WEIGHTED.apply(x, (w, 2.0)), lambda x, w: 2 * x * w)
    )
    torch.testing.assert_close(found, expected)


def test_vmap_of_nothing():
    x, weight = matrix(3, 4), matrix(1, 4)[0]
    for in_dims, given in (((0, None), x[None][:0]), ((1, None), x[:, None][:, :0])):
        y = torch.vmap(lambda x, w: WEIGHTED.apply(x, (w, 2.0)), in_dims=in_dims)(given, weight)
        assert y.shape == (0, 3, 4)


def test_gradients_by_the_batch():
    x, weight = inputs()
    dys = matrix(10, 6, seed=2).view(5, 3, 4)
    found, expected = (
        torch.autograd.grad(fn(x, weight), (x, weight), dys, is_grads_batched=True)
        for fn in (lambda x, w: WEIGHTED.apply(x, (w, 2.0)), lambda x, w: 2 * x * w)
    )
    torch.testing.assert_close(found, expected)


def test_a_plan_is_made_once_per_kind_of_call():
    """What a compiled kernel depends on: dtypes, shapes, strides and alignments of each tensor."""
    memory, vector = matrix(1, 64).view(-1), matrix(1, 16).view(-1)
    x, weight, out = memory[:24].view(3, 8), vector[:8], matrix(3, 8)
    wide = matrix(3, 16)
    like_x = {
        "dtype": lambda x: x.double(),
        "shape": lambda x: x[:2],
        "strides": lambda x: wide[:, :8],
        "transposed": lambda x: x.t().contiguous().t(),
        "alignment": lambda x: memory[1:25].view(3, 8),
        "alignment-to-8": lambda x: memory[2:26].view(3, 8),
    }
    calls = {
        "first": lambda: WEIGHTED.apply(x, (weight, 2.0)),
        "option": lambda: WEIGHTED.apply(x, (weight, 3.0)),
        "no-weight": lambda: WEIGHTED.apply(x, (None, 2.0)),
        "alignment-of-weight": lambda: WEIGHTED.apply(x, (vector[1:9], 2.0)),
        "dtype-of-weight": lambda: WEIGHTED.apply(x, (weight.double(), 2.0)),
        "strides-of-weight": lambda: WEIGHTED.apply(x, (vector[::2], 2.0)),
        "out": lambda: WEIGHTED.into(out, x, weight, 2.0),
        "strides-of-out": lambda: WEIGHTED.into(wide[:, 8:], x, weight, 2.0),
        "alignment-of-out": lambda: WEIGHTED.into(memory[33:57].view(3, 8), x, weight, 2.0),
    }
    for name, change in like_x.items():
        calls[f"{name}-of-x"] = lambda change=change: WEIGHTED.apply(change(x), (weight, 2.0))
    for name, call in calls.items():
        before = len(PLANNED)
        call()
        call()
        assert len(PLANNED) == before + 1, name


def test_gradient_notices_that_what_is_saved_was_changed():
    x, weight = inputs()
    y = WEIGHTED.apply(x, (weight, 2.0))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_wrong_is_remembered():
    x, weight = matrix(3, 4), matrix(1, 4)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match="eps is -1"):
            WEIGHTED.apply(x, (weight, -1.0))
        with pytest.raises(ValueError, match="eps is -1"):
            FORWARD.registered(x, weight, -1.0)
        with pytest.raises(ValueError, match="eps is -1"):
            WEIGHTED.apply(x.to("meta"), (weight.to("meta"), -1.0))
    assert not PLANNED and not FORWARD.plans.latest


def test_tensors_that_are_negated_when_they_are_read():
    x, weight = matrix(3, 4), matrix(1, 4)[0]
    for given in ((torch._neg_view(x), weight), (x, torch._neg_view(weight))):
        assert torch.equal(WEIGHTED.apply(given[0], (given[1], 2.0)), -2 * x * weight)


# ---- torch.func, forward mode, torch.jit


def weighted(x, weight):
    return WEIGHTED.apply(x, (weight, 2.0)).square()


def weighted_of_pytorch(x, weight):
    return (2 * x * weight).square()


def grad(fn):
    return torch.func.grad(lambda *tensors: fn(*tensors).sum(), (0, 1))


def of_rows(fn):
    return torch.vmap(lambda row, weight: fn(row[None], weight), in_dims=(0, None))


def tangent(fn):
    return lambda *tensors: torch.func.jvp(fn, tensors, tuple(x + 1 for x in tensors))[1]


def forward_over_reverse(fn):
    """The graph of the gradient is made before there is a forward mode."""

    def tangents(*tensors):
        tensors = [x.clone().requires_grad_() for x in tensors]
        y = fn(*tensors)
        with forward_ad.dual_level():
            dy = forward_ad.make_dual(torch.ones_like(y), y.detach())
            found = torch.autograd.grad(y, tensors, dy)
            return [forward_ad.unpack_dual(it).tangent for it in found]

    return tangents


TRANSFORMS = {
    "grad": grad,
    "jacrev": lambda fn: torch.func.jacrev(fn, (0, 1)),
    "per-sample": lambda fn: of_rows(grad(fn)),
    "grad-of-vmap": lambda fn: grad(of_rows(fn)),
    "jvp": tangent,
    "forward-over-reverse": forward_over_reverse,
    "hessian": lambda fn: torch.func.hessian(lambda *tensors: fn(*tensors).sum(), (0, 1)),
    "reverse-over-reverse": lambda fn: torch.func.jacrev(grad(fn), (0, 1)),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own forward mode
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform):
    tensors = matrix(3, 4, "float64"), matrix(1, 4, "float64", seed=1)[0]
    found, expected = (transform(fn)(*tensors) for fn in (weighted, weighted_of_pytorch))
    torch.testing.assert_close(found, expected)


def left(transform, *tensors):
    """What is inside of a transform, and is used once it has returned."""
    found = []
    transform(lambda *it: (found.extend(x * 1 for x in it), it[0] * 1)[1])(*tensors)
    return found


LEFT = {
    "grad": lambda fn: torch.func.grad(lambda *it: fn(*it).sum(), (0, 1)),
    "jvp": lambda fn: lambda *tensors: torch.func.jvp(fn, tensors, tensors),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own forward mode
@pytest.mark.parametrize("transform", LEFT.values(), ids=LEFT)
def test_tensors_that_left_a_transform(transform):
    """They are still wrapped, and have no memory of their own."""
    x, weight = matrix(3, 4), matrix(1, 4)[0]
    expected = weighted(x, weight)
    wrapped = left(transform, x, weight)
    for given in (wrapped, (wrapped[0], weight), (x, wrapped[1])):
        torch.testing.assert_close(weighted(*given).detach() + 0, expected)
    if transform is not LEFT["functionalize"]:  # which PyTorch lets nobody write elsewhere
        with torch.no_grad():
            found = WEIGHTED.into(torch.empty_like(x), *wrapped, 2.0)
        torch.testing.assert_close(found.square(), expected)
    x.requires_grad_()
    [found] = torch.autograd.grad(WEIGHTED.apply(x, (weight, 2.0)), x, wrapped[0].detach())
    torch.testing.assert_close(found + 0, 2 * x.detach() * weight)


def test_a_tensor_that_left_vmap_is_refused():
    x = matrix(6, 4).view(2, 3, 4)
    [wrapped] = left(torch.vmap, x)
    with pytest.raises(RuntimeError, match=r"^test_weighted: a tensor has left"):
        WEIGHTED.apply(wrapped, (None, 2.0))


def test_zeros_without_memory():
    """As autograd makes them for a tangent that is not there."""
    zeros, x = torch._efficientzerotensor((3, 4), device=DEVICE), matrix(3, 4)
    for given in ((zeros, x[0]), (x, zeros[0])):
        assert not WEIGHTED.apply(given[0], (given[1], 2.0)).any()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_has_the_operator_and_its_gradients():
    x, weight = inputs()
    for tensors in ((x, weight), (x.detach(), weight.detach())):
        traced = torch.jit.trace(weighted, tensors)
        assert "memtraffic::test_weighted" in str(traced.graph)
        other = matrix(5, 4, seed=2)
        assert torch.equal(traced(other, weight), weighted(other, weight))
    traced = torch.jit.trace(weighted, (x, weight))
    found, expected = (
        torch.autograd.grad(fn(x, weight).sum(), (x, weight)) for fn in (traced, weighted)
    )
    torch.testing.assert_close(found, expected)
    with pytest.warns(torch.jit.TracerWarning, match="Python boolean"):  # the shape of out is fixed
        into = torch.jit.trace(lambda x, w: WEIGHTED.into(torch.zeros_like(x), x, w, 2.0), tensors)
    x, weight = -x.detach(), weight.detach()
    assert torch.equal(into(x, weight), WEIGHTED.apply(x, (weight, 2.0)))


# ---- what is no tensor with memory


@pytest.mark.parametrize("of", ["x", "weight"])
def test_tensors_of_two_devices_are_refused(of):
    x, weight = matrix(3, 4), matrix(1, 4)[0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^test_weighted: tensors on [\w:]+ and on [\w:]+"):
            if of == "x":
                WEIGHTED.apply(x.to("meta"), (weight, 2.0))
            else:
                WEIGHTED.apply(x, (weight.to("meta"), 2.0))
    with pytest.raises(RuntimeError, match=r"^test_weighted: out is .* on meta, and the result is"):
        WEIGHTED.into(x.to("meta"), x, weight, 2.0)


def freed(x):
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        pytest.param(lambda x: None, TypeError, "x is a NoneType, not a tensor", id="none"),
        pytest.param(
            lambda x: x.to_sparse(), NotImplementedError, "x is torch.sparse_coo: a dense", id="coo"
        ),
        pytest.param(
            lambda x: x.to_sparse_csr(), NotImplementedError, "x is torch.sparse_csr", id="csr"
        ),
        pytest.param(freed, RuntimeError, "the memory of a tensor was freed", id="freed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_has_no_memory_is_refused(make, error, says):
    weight = matrix(1, 4)[0]
    WEIGHTED.apply(matrix(3, 4), (weight, 2.0))  # planned
    for _ in range(2):
        with pytest.raises(error, match=f"^test_weighted: {says}"):
            WEIGHTED.apply(make(matrix(3, 4)), (weight, 2.0))
        if error is not RuntimeError:
            with pytest.raises(error, match=says):
                WEIGHTED.into(torch.empty(3, 4, device=DEVICE), make(matrix(3, 4)), weight, 2.0)
            with pytest.raises(error, match=f"^test_weighted: {says.replace('x', 'out', 1)}"):
                WEIGHTED.into(make(matrix(3, 4)), matrix(3, 4), weight, 2.0)


def test_out_whose_memory_was_freed_is_refused():
    x, weight, out = matrix(3, 4), matrix(1, 4)[0], matrix(3, 4)
    WEIGHTED.into(out, x, weight, 2.0)  # planned
    with pytest.raises(RuntimeError, match=r"^test_weighted: the memory of out was freed"):
        WEIGHTED.into(freed(out), x, weight, 2.0)


# ---- on a GPU that need not be here


def test_results_are_apart_from_one_another_and_packed():
    for x in (matrix(6, 8), matrix(8, 6).t(), matrix(6, 16)[:, ::2]):
        for dtype in (None, torch.float16, torch.float64):
            first, second = (op.forward(x, -1, dtype) for _ in range(2))
            assert first.dtype == second.dtype == (dtype or x.dtype)
            assert first.stride() == second.stride() == (8, 1)
            assert first.data_ptr() != second.data_ptr()


def test_results_are_allocated_on_the_current_gpu_where_kernels_run(monkeypatch):
    given = []
    empty = lambda *like: given.append(like) or "new"  # noqa: E731
    monkeypatch.setattr(autograd.torch_adapter, "empty_on_current_gpu", empty)
    like = (2, 3), torch.float16
    for runs, kind, expected in ((True, "cuda", "new"), (True, "cpu", None)):
        monkeypatch.setattr(device, "runs_on_gpu", lambda runs=runs: runs)
        made = autograd._allocator(*like, torch.device(kind))()
        assert made == expected or made.shape == (2, 3)
    assert given == [((2, 3), (3, 1), torch.float16)]


class FarTensor:
    """A tensor on a GPU, as far as a launch looks before that is the current one."""

    def __init__(self, index=1):
        self.index = index

    def get_device(self):
        return self.index

    @property
    def dtype(self):
        raise LookupError(f"GPU {autograd.current_gpu()}")


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_start_on_the_gpu_of_the_tensors(monkeypatch, current):
    used = [current]

    @contextmanager
    def device(index):
        used.append(index)
        yield
        used.pop()

    monkeypatch.setattr(autograd, "current_gpu", lambda: used[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    with pytest.raises(LookupError, match="GPU 1"):
        op.forward(FarTensor(), -1, None)


def test_every_argument_reaches_the_other_gpu(monkeypatch):
    current, seen = [0], []
    monkeypatch.setattr(autograd, "current_gpu", lambda: current[0])
    monkeypatch.setattr(
        torch.cuda, "device", lambda index: current.__setitem__(0, index) or nullcontext()
    )
    monkeypatch.setattr(autograd, "facts", lambda x: x.dtype)

    def find(key, make):
        seen.append(key)
        return lambda *tensors: seen.extend(tensors), None

    monkeypatch.setattr(op._BACKWARD.plans, "find", find)
    monkeypatch.setattr(autograd, "is_indirect", lambda x: False)
    like = {"stride": lambda: (1,), "data_ptr": lambda: 16, "get_device": lambda: 1}
    dy, y, out = (SimpleNamespace(dtype=name, shape=(1,), **like) for name in ("dy", "y", "out"))
    op.backward(dy, y, 0, torch.half, out=out)
    key, *tensors = seen
    assert {"dy", "y", "out", (0, torch.half)} < {*key} and tensors == [out, dy, y]


def test_a_tensor_on_the_cpu_asks_for_no_gpu(monkeypatch):
    monkeypatch.setattr(autograd, "current_gpu", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: pytest.fail("switched"))
    with pytest.raises(LookupError):
        op.forward(FarTensor(-1), -1, None)
