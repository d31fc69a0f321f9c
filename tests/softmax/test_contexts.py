"""`memtraffic.softmax` works wherever `torch.softmax` does: a table of contexts."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import DEVICE, INF, NAN, cases
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hvp, jacobian
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtraffic import softmax
from memtraffic.meters.count import count
from memtraffic.tensors import matrix

OPERATOR, BACKWARD = (
    getattr(torch.ops.memtraffic, name).default for name in ("softmax", "softmax_backward")
)
pytestmark = [  # PyTorch's own: of forward mode, an import of torch.compile, `linearize`, `jacrev`
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.usefixtures("no_plans", "one_sm"),
]


def loss(fn):
    return lambda x: fn(x).square().sum()


def leaf(x):
    return x.detach().requires_grad_()


def gradient(fn, x, dy=None):
    y = fn(x := leaf(x))
    return torch.autograd.grad(y, x, x.detach().cos() if dy is None else dy)[0]


def forward_over_reverse(fn, x):
    """The graph of the gradient is made before there is a forward mode."""
    y = fn(x := leaf(x))
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.ones_like(y), y.detach())
        return tuple(forward_ad.unpack_dual(torch.autograd.grad(y, x, dy)[0]))


def without_gradient_inside(fn):
    """What is computed without a gradient is a constant to the transform around it."""

    def product(x):
        with torch.no_grad():
            y = fn(x)
        return (y * fn(x) * x).sum()

    return product


def tangent(fn):
    return lambda x: jvp(fn, (x,), (x.cos(),))


def dual(fn, x):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x.cos()))))


def within(mode, dtype=torch.float32):
    """The softmax in a context, and the gradient if it has one."""

    def context(fn, x):
        with mode():
            y = fn(x := leaf(x.to(dtype)))
        return (y, *torch.autograd.grad(y.square().sum(), x)) if y.requires_grad else y

    return context


inferred = torch.inference_mode()


def left(transform, x):
    """A tensor that was kept when its transform ended."""
    kept = []
    transform(lambda x: kept.append(x) or x.sum())(x)
    return kept[0]


def hooked(x):
    x.register_hook(torch.sin)
    return x


def module(fn, x):
    layer = torch.nn.LayerNorm(2, device=DEVICE)
    layer.register_forward_hook(lambda layer, given, y: fn(x * y))
    run = partial(torch.func.functional_call, deepcopy(layer), args=(x,))
    return grad(lambda weights: run(weights).square().sum())(dict(layer.named_parameters()))


EAGER = {  # what PyTorch does not compile, or changes where it does
    "inference": within(torch.inference_mode),
    "leaf-of-inference-mode": lambda fn, x: fn(inferred(lambda x: leaf(fn(x)))(x)),
    "gradients-in-inference": lambda fn, x: inferred(torch.enable_grad()(fn))(leaf(x)),
    "threads": lambda fn, x: list(ThreadPoolExecutor(2).map(fn, [x, x.cos(), -x, 2 * x] * 3)),
    "traced-by-fx": lambda fn, x: torch.fx.symbolic_trace(lambda x: fn(x.sin()) * 2)(x),
    "left-its-grad": lambda fn, x: fn(left(grad, x)),
    "functionalize-grad": lambda fn, x: functionalize(grad(loss(fn)))(x),
    "double-backward": lambda fn, x: hvp(loss(fn), x, x.cos()),
}
CONTEXTS = {
    "plain": within(torch.enable_grad),
    "no-grad": within(torch.no_grad),
    "autocast": within(lambda: torch.autocast(DEVICE.type, torch.bfloat16)),
    "autocast-of-bfloat16": within(lambda: torch.autocast(DEVICE.type), torch.bfloat16),
    "autocast-of-float64": within(lambda: torch.autocast(DEVICE.type), torch.float64),
    "no-autocast": within(lambda: torch.autocast(DEVICE.type, enabled=False), torch.float16),
    "default-device": within(lambda: torch.device("meta")),
    "saved-on-the-cpu": within(torch.autograd.graph.save_on_cpu),
    "hooks": lambda fn, x: gradient(lambda x: hooked(fn(hooked(x.sin()))), x),
    "module": module,
    "negated": lambda fn, x: gradient(lambda x: fn(torch._neg_view(x)), x),
    "dual": dual,
    "dual-without-gradients": torch.no_grad()(dual),
    "jacobian": partial(jacobian, vectorize=True),
    "jacobian-in-forward-mode": partial(jacobian, vectorize=True, strategy="forward-mode"),
    "vjp": lambda fn, x: torch.func.vjp(fn, x)[1](fn(x)),
    "jvp": lambda fn, x: tangent(fn)(x),
    "jacrev": lambda fn, x: jacrev(fn)(x),
    "jacfwd": lambda fn, x: jacfwd(fn)(x),
    "vmap": lambda fn, x: torch.vmap(fn)(x),
    "vmap-of-another-dimension": lambda fn, x: torch.vmap(fn, in_dims=1, out_dims=1)(x),
    "vmap-of-vmap": lambda fn, x: torch.vmap(torch.vmap(fn), in_dims=1)(x),
    "vmap-of-scalars": lambda fn, x: torch.vmap(fn)(x.flatten()),
    "vmap-of-grad-of-scalars": lambda fn, x: torch.vmap(grad(fn))(x.flatten()),
    "vmap-of-jacfwd-of-scalars": lambda fn, x: torch.vmap(jacfwd(fn))(x.flatten()),
    "grad-of-grad": lambda fn, x: grad(loss(grad(loss(fn))))(x),
    "vmap-of-grad": lambda fn, x: torch.vmap(grad(loss(fn)))(x),
    "grad-of-jvp": lambda fn, x: grad(lambda x: loss(fn)(x) + tangent(fn)(x)[1].square().sum())(x),
    "jvp-of-vmap": lambda fn, x: tangent(torch.vmap(fn))(x),
    "hessian": lambda fn, x: hessian(loss(fn))(x),
    "forward-over-forward": lambda fn, x: jacfwd(jacfwd(loss(fn)))(x),
    "reverse-over-forward": lambda fn, x: jacrev(jacfwd(loss(fn)))(x),
    "gradient": gradient,
    "forward-over-reverse": forward_over_reverse,
    "no-gradient-inside": lambda fn, x: grad(without_gradient_inside(fn))(x),
    "no-gradient-inside-twice": lambda fn, x: hessian(without_gradient_inside(fn))(x),
    "linearize": lambda fn, x: linearize(fn, x)[1](x.cos()),
    "checkpoint": lambda fn, x: gradient(
        lambda x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False), x
    ),
}
if torch.cuda.device_count() > 1:
    CONTEXTS["another-gpu"] = lambda fn, x: gradient(fn, x.to("cuda:1"))


def assert_same(found, expected):
    torch.testing.assert_close(found, expected)
    for it, right in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert (it.requires_grad, it.is_inference()) == (right.requires_grad, right.is_inference())


@cases("context", EAGER | CONTEXTS)
@pytest.mark.parametrize(("dim", "dtype"), [(-1, None), (0, torch.float64)])
def test_softmax_works_where_that_of_pytorch_does(context, dim, dtype):
    x = matrix(6, 2).view(2, 3, 2)
    assert_same(*(context(partial(fn, dim=dim, dtype=dtype), x) for fn in (softmax, torch.softmax)))


@pytest.mark.slow
@cases("context", CONTEXTS)
def test_softmax_works_in_compiled_contexts(context):
    torch._dynamo.reset()
    x = matrix(6, 2).view(2, 3, 2)
    found = torch.compile(lambda x: context(partial(softmax, dim=-1), x), backend="aot_eager")
    assert_same(found(x), context(partial(torch.softmax, dim=-1), x))


nested = partial(torch.nested.nested_tensor, [torch.ones(2, 3), torch.ones(4, 3)], device=DEVICE)
REFUSED = {
    "nested": (nested, r"nested, of layout torch.strided: pass each tensor of x.unbind\(\)"),
    "jagged": (partial(nested, layout=torch.jagged), "nested, of layout torch.jagged: pass each"),
    "nested-leaf": (partial(nested, requires_grad=True), "nested, of layout torch.strided"),
    "sparse": (matrix(2, 3).to_sparse, r"sparse_coo: pass x.to_dense\(\)"),
    "left-its-vmap": (partial(left, torch.vmap, matrix(2, 3)), "has left its torch.vmap"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@cases(("make", "told"), REFUSED)
def test_softmax_refuses_what_has_no_strides(make, told):
    with pytest.raises(RuntimeError, match=f"^softmax: the tensor .*{told}"):
        softmax(make())


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 2), (0, None), (None, 1)], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_vmap_of_the_backward(in_dims, dim):
    """Each of the two may have the dimension of the batch, in any place."""
    given = [
        x[0] if batch is None else x.movedim(0, batch)
        for x, batch in zip(matrix(24, 5).view(2, 4, 3, 5), in_dims, strict=True)
    ]
    found = torch.vmap(lambda dy, y: BACKWARD(dy, y, dim, torch.float32), in_dims)(*given)
    reference = torch.vmap(lambda dy, y: y * (dy - (y * dy).sum(dim, keepdim=True)), in_dims)
    torch.testing.assert_close(found, reference(*given))


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_under_vmap_is_one_that_a_sample_has(dim):
    x = matrix(6, 4).view(2, 3, 4)
    for fn in (lambda x: softmax(x, dim), lambda x: BACKWARD(x, x, dim, torch.float32)):
        with pytest.raises(IndexError, match=rf"dim {dim} is out .* 2 dimensions \(3, 4\)"):
            torch.vmap(fn)(x)


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_are_those_of_finite_differences(dim):
    """Those of the backward in each of the two; those of softmax are PyTorch's, see above."""
    y, dy = (leaf(matrix(2, 3, "float64", seed=seed)) for seed in (0, 1))
    operator = partial(BACKWARD, dim=dim, dtype=torch.float64)
    ways = {"check_batched_grad": True, "check_forward_ad": True}
    assert gradcheck(operator, (dy, y), fast_mode=True, **ways)
    assert gradgradcheck(operator, (dy, y), fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("value", [NAN, -INF])
def test_gradient_is_nan_where_that_of_pytorch_is(value):
    x = matrix(3, 8)
    x[1, 3], x[2] = value, -INF
    for dy in (matrix(3, 8, seed=1), torch.full((3, 8), INF, device=DEVICE)):
        found, expected = (gradient(fn, x, dy) for fn in (softmax, partial(torch.softmax, dim=1)))
        assert torch.equal(found.isnan(), expected.isnan())


def test_gradient_notices_that_the_result_was_changed():
    y = softmax(leaf(matrix(3, 4)))
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- torch.library, torch.compile, torch.export


SAMPLES = {
    "columns": lambda: (OPERATOR, leaf(matrix(5, 3, "bfloat16").t()), 0, torch.float32),
    "scalar": lambda: (OPERATOR, torch.tensor(1.0, device=DEVICE), 0, torch.float32),
    "one-row-far-from-the-next": lambda: (OPERATOR, matrix(5, 7)[:1], 1, torch.float32),
    "backward": lambda: (
        BACKWARD, leaf(matrix(3, 5, seed=1)), leaf(matrix(3, 5)), 1, torch.bfloat16,
    ),
}  # fmt: skip


@cases("sample", SAMPLES)
def test_opcheck(sample):
    operator, *arguments = sample()
    torch.library.opcheck(operator, tuple(arguments))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.gpu, pytest.mark.slow])]
)
@pytest.mark.parametrize(("dim", "dtype"), [(0, None), (-1, torch.float16)])
def test_compiled_softmax_of_any_shape_and_strides(backend, dim, dtype):
    torch._dynamo.reset()

    def block(x):
        return softmax(x.sin(), dim, dtype=dtype) * 2

    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for x in (matrix(3, 40), matrix(5, 40), matrix(5, 40).t()):
        torch.testing.assert_close(compiled(x), block(x))
    dy = x.cos().to(dtype)
    torch.testing.assert_close(gradient(compiled, x, dy), gradient(block, x, dy))


def test_exported_softmax():
    class Softmax(torch.nn.Module):
        def forward(self, x):
            return softmax(x, 1)

    rows = {"x": {0: torch.export.Dim("rows", min=2)}}
    exported = torch.export.export(Softmax(), (matrix(3, 5),), dynamic_shapes=rows)
    assert OPERATOR in [node.target for node in exported.graph.nodes]
    for m in (3, 7):
        x = matrix(m, 5, seed=m)
        assert torch.equal(exported.module()(x), softmax(x, 1))


def test_softmax_of_meta_tensors():
    x = torch.empty(3, 2, device="meta", dtype=torch.float16, requires_grad=True)
    y = softmax(x.t(), 0, dtype=torch.float32)
    assert (y.shape, y.stride(), y.dtype, y.device.type) == ((2, 3), (3, 1), torch.float32, "meta")
    y.sum().backward()
    assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


# ---- modes, subclasses, meters


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators = [*getattr(self, "operators", []), func]
        return func(*args, **kwargs or {})


def test_a_mode_sees_the_operators():
    x, dy = matrix(3, 5), matrix(3, 5, seed=1)
    expected = gradient(softmax, x, dy)
    with Seen() as seen:
        found = gradient(softmax, x, dy)
    assert [it for it in seen.operators if it.namespace == "memtraffic"] == [OPERATOR, BACKWARD]
    assert torch.equal(found, expected)


def test_a_subclass_is_given_the_operators():
    """Such as one of two tensors, each of which is computed."""
    x, dy = matrix(3, 5), matrix(3, 5, seed=1)
    wrapped = TwoTensor(x, -x).requires_grad_()
    y = softmax(wrapped)
    assert torch.equal(y.a, softmax(x)) and torch.equal(y.b, softmax(-x))
    [dx] = torch.autograd.grad(y, wrapped, TwoTensor(dy, dy))
    assert torch.equal(dx.a, gradient(softmax, x, dy))


def test_a_subclass_of_its_own_memory_is_computed():
    class Named(torch.Tensor):
        pass

    x = matrix(3, 5)
    assert torch.equal(softmax(x.as_subclass(Named)).as_subclass(torch.Tensor), softmax(x))


def test_traffic_in_a_context():
    x = matrix(3, 40)
    for fn in (torch.vmap(lambda row: softmax(row, 0)), lambda x: OPERATOR(x, 1, x.dtype)):
        [kernel] = count(fn, x).ops
        assert kernel.name == "softmax_kernel"
        assert (kernel.read_elements, kernel.written_elements) == (x.numel(), x.numel())
