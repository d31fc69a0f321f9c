"""The calls that peers get, of modules that stand for their packages; no package is needed here."""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from memtraffic.benchmark import packages
from memtraffic.benchmark.baselines import PACKAGES, find_implementation
from memtraffic.benchmark.decision import WITH_GRADIENT, with_gradient
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct
from memtraffic_book.measurements import peer_version


@pytest.fixture(autouse=True)
def fresh():
    """Nothing is remembered of the packages that another test has made."""
    caches = packages.quack_kernel, packages._tune_quickly
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def package(monkeypatch):
    """Makes a module that can be imported."""

    def make(name, **content):
        parent = ""
        for part in name.split("."):
            path = f"{parent}.{part}".lstrip(".")
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
            parent = path
        vars(module).update(content)
        return module

    find_spec = importlib.util.find_spec  # which PyTorch asks, too, when it imports the rest of it

    def find(name, *package):
        return sys.modules.get(name) if name == "quack" else find_spec(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return make


def softmax(x):
    return torch.softmax(x, dim=1)


@pytest.fixture
def fakes(package):
    """Liger and FlagGems; returns the settings that Liger's backward is called with."""
    seen = []

    def backward(dy, y, block, num_warps, multi_block):
        seen.append((block, num_warps, multi_block))
        return SOFTMAX_BACKWARD.reference(y, dy)

    package(
        "liger_kernel.ops.softmax",
        LigerSoftmaxFunction=SimpleNamespace(apply=softmax),
        calculate_settings=lambda n: (1024, 4),
        _softmax_backward=backward,
    )
    package(
        "flag_gems.ops",
        softmax=torch.softmax,
        softmax_backward=lambda dy, y, dim, dtype: SOFTMAX_BACKWARD.reference(y, dy).to(dtype),
    )
    return seen


@pytest.mark.parametrize(("name", "dtype"), [("Liger", "float32"), ("FlagGems", "bfloat16")])
def test_kernels_of_a_package(name, dtype, fakes):
    x = matrix(3, 781, dtype)
    assert torch.equal(find_implementation(name)(x), softmax(x))
    y, dy = SOFTMAX_BACKWARD.arguments((3, 781), dtype).positional
    dx = find_implementation(f"{name} backward")(y, dy)
    assert dx.dtype == y.dtype and torch.equal(dx, SOFTMAX_BACKWARD.reference(y, dy))
    assert fakes == ([(1024, 4, False)] if name == "Liger" else [])


def test_flag_gems_tunes_its_backward_quickly(package, monkeypatch):
    """The kernel is wrapped in two others, of which the inner one is the autotuner."""
    triton = pytest.importorskip("triton")
    configs = [triton.Config({}), triton.Config({}, num_warps=8)]
    tuned = triton.autotune(configs, key=[])(triton.jit(softmax))
    timed = []
    monkeypatch.setattr("triton.testing.do_bench", lambda fn, **options: timed.append(options))
    content = {"softmax_backward_kernel_inner": type("Entry", (), {"fn": tuned})(), "tuned": tuned}
    body = "    tuned.do_bench(None, quantiles=(0.5,))\n    return dy"
    exec(f"def backward(dy, y, dim, dtype):\n{body}", content)
    package("flag_gems.ops", softmax_backward=content["backward"])
    packages.flag_gems_backward(*SOFTMAX_BACKWARD.arguments((3, 8)).positional)
    assert timed == [{"warmup": 2.5, "rep": 10, "quantiles": (0.5,)}]


def test_quack(package):
    compiled = []

    def compiler(run):
        return SimpleNamespace(compile=lambda *key: compiled.append(key) or run)

    def backward(dy, y, dx):
        dx.copy_(SOFTMAX_BACKWARD.reference(y, dy))

    package("quack").softmax = softmax  # a function hides the module, as in the package
    package(
        "quack.softmax",
        torch2cute_dtype_map={torch.float32: "f32"},
        Softmax=compiler(lambda x, y: y.copy_(softmax(x))),
        SoftmaxBackward=compiler(backward),
    )
    x = matrix(3, 8)
    for _ in range(2):
        assert torch.equal(find_implementation("QuACK")(x), softmax(x))
    y, dy = SOFTMAX_BACKWARD.arguments((3, 8)).positional
    dx = find_implementation("QuACK backward")(y, dy)
    assert torch.equal(dx, SOFTMAX_BACKWARD.reference(y, dy))
    assert compiled == [("f32", "f32", 8), ("f32", "f32", "f32", 8)]


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        pytest.param(matrix(2, 6), "multiple of 4 columns of this type, not 6", id="float32"),
        pytest.param(matrix(2, 12, "bfloat16"), "multiple of 8 columns", id="bfloat16"),
        pytest.param(matrix(2, 8, layout="transposed"), "packed", id="transposed"),
        pytest.param(torch.empty(1, 2**20), "at most .* columns of this type here, not", id="long"),
    ],
)
def test_quack_refuses_before_it_compiles(x, reason):
    for call in (lambda: packages.quack(x), lambda: packages.quack_backward(x, x)):
        with pytest.raises(ValueError, match=reason):
            call()


@pytest.mark.parametrize(
    ("rows", "itemsize", "most"),
    [(1, 2, 2**20), (1, 4, 2**19), (2, 2, 2**19), (2, 4, 2**18)],
)
def test_quack_takes_rows_that_fit_and_whole_vectors(rows, itemsize, most):
    takes = packages.quack_takes
    assert takes(most, itemsize, rows) == takes(8, itemsize, rows) == ""
    assert "at most" in takes(2 * most, itemsize, rows)
    assert (takes(12, itemsize, rows) == "") == (itemsize == 4)


def test_what_is_not_here_is_an_import_error(package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])  # whatever is installed
    with pytest.raises(ImportError, match="No module named 'liger_kernel'"):
        packages.liger(matrix(3, 8))
    assert peer_version("Liger") == peer_version("naive") == ""
    monkeypatch.setattr(importlib.metadata, "version", {"flag-gems": "5.0.2"}.__getitem__)
    assert peer_version("FlagGems") == peer_version("FlagGems backward") == "5.0.2"

    def broken(name):
        raise OSError("no such\nlibrary")

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"quack cannot be imported \(OSError: no such library\)"):
        packages.quack(matrix(3, 8))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # packages warn of what they like
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*PACKAGES])
def test_peers_that_are_here_compute_a_softmax(name, dtype):
    from memtraffic.benchmark.loop import judge_result
    from memtraffic.kernels.softmax.definitions import SOFTMAX

    if not peer_version(name):
        pytest.skip(f"{name} is not installed")
    op = SOFTMAX_BACKWARD if name.endswith("backward") else SOFTMAX
    judge_result(op, find_implementation(name), *op.arguments((64, 1024), dtype).positional)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["torch.softmax", "Liger", "FlagGems", "memtraffic.softmax"])
def test_gradient_of_each_that_can_be_called(name, dtype, fakes):
    """Of a package by the two kernels that it has, whichever these are."""
    assert_correct(WITH_GRADIENT, with_gradient(name), matrix(5, 781, dtype))
