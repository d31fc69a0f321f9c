import pytest
import torch

from memtraffic import runtime
from memtraffic.benchmark import sweeps
from memtraffic.benchmark.baselines import copy
from memtraffic.benchmark.sweeps import bench, bench_layouts, bench_option
from memtraffic.kernels.softmax import naive
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.tensors import MEMORY_LAYOUTS

TIMES = ["us", "us_p20", "us_p80", "gb_per_s"]


def keys(frame):
    """The rows without their times."""
    return [tuple(row) for row in frame.drop(columns=TIMES).itertuples(index=False)]


@pytest.mark.parametrize(
    "call",
    [
        lambda: bench(["copy"], [(8, 8)]),
        lambda: bench_option("naive", [(8, 8)], "rows", [1]),
        lambda: bench_layouts("naive", (8, 8)),
    ],
    ids=["bench", "bench_option", "bench_layouts"],
)
def test_sweeps_without_a_gpu(call, monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        call()


def test_bench_finds_an_unknown_name_before_it_times(timed):
    with pytest.raises(LookupError, match=r"torch\.softmux"):
        bench(["copy", "torch.softmux"], [(8, 8)])
    assert timed == []


def test_bench_has_a_row_for_each_shape_and_name(timed):
    frame = bench(["copy", "naive"], [(4, 8), [2, 16]], dtype="bfloat16", cold=False)
    assert list(frame.columns) == ["impl", "m", "n", "dtype", *TIMES]
    assert keys(frame) == [
        ("copy", 4, 8, "bfloat16"),
        ("naive", 4, 8, "bfloat16"),
        ("copy", 2, 16, "bfloat16"),
        ("naive", 2, 16, "bfloat16"),
    ]
    assert frame["us"].tolist() == pytest.approx([1, 2, 1, 2])
    assert frame["gb_per_s"].tolist() == pytest.approx([0.128, 0.064, 0.128, 0.064])
    assert [options for _, options in timed] == [
        {"cold": False, "budget": 0},  # the trial of copies
        {"cold": False, "budget": 0.3},
    ] * 2


def test_bench_times_the_fastest_copy_beside_the_rest(timed, monkeypatch):
    tried = []
    fastest = lambda x, cold: tried.append((x, cold)) or x.clone  # noqa: E731
    monkeypatch.setattr(sweeps, "fastest_copy", fastest)
    bench({"naive": "naive", "roof": copy}, [(4, 8)], budget=0.1)
    [([rung, copied], options)] = timed
    assert options == {"cold": True, "budget": 0.1}
    assert rung.args[0] is tried[0][0] and tried[0][1]
    assert copied == tried[0][0].clone


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
def test_bench_of_a_layout(layout, timed):
    frame = bench(["naive"], [(4, 6)], layout=layout)
    [([call], _)] = timed
    assert call.args[0].stride() == MEMORY_LAYOUTS[layout](4, 6)
    assert keys(frame) == [("naive", 4, 6, "float32")]


def test_bench_of_functions_by_name(timed):
    frame = bench({"half": lambda x: x / 2, "naive": naive.softmax, "rung": "naive"}, [(4, 8)])
    assert frame["impl"].tolist() == ["half", "naive", "rung"]
    [(calls, options)] = timed
    assert calls[1].func is calls[2].func is naive.softmax
    assert all(call.args[0] is calls[0].args[0] for call in calls)
    assert options == {"cold": True, "budget": 0.3}


def test_bench_of_an_op_with_two_inputs(timed):
    """Bandwidth comes from the op's least traffic: 3MN elements for the backward."""
    inputs = []

    def backward(y, dy):
        inputs.append((y, dy))
        return SOFTMAX_BACKWARD.reference(y, dy)

    frame = bench({"ours": backward, "copy": "copy"}, [(4, 8)], op="softmax_backward")
    assert keys(frame) == [("ours", 4, 8, "float32"), ("copy", 4, 8, "float32")]
    assert [x.shape for x in inputs[0]] == [(4, 8), (4, 8)]
    assert [len(fns) for fns, _ in timed] == [5, 2]  # what adds two inputs, and the fastest of it
    assert frame["gb_per_s"][0] == pytest.approx(3 * 4 * 8 * 4 / 1e3)
    assert keys(bench({"ours": backward}, [(4, 8)], op=SOFTMAX_BACKWARD)) == keys(frame[:1])
    with pytest.raises(ValueError):
        bench({"ours": backward}, [(4, 8, 2)], op="softmax_backward")


def test_bench_of_inputs(timed):
    """Bandwidth is of the tensors and of the new ones that the first implementation returns."""
    impls = {"add": lambda x, w, eps: x + w + eps, "in place": lambda x, w, eps: x.add_(w)}
    frame = bench(impls, [(4, 8)], inputs="M,N N:float64 eps=1e-6")
    assert keys(frame) == [("add", 4, 8, "float32"), ("in place", 4, 8, "float32")]
    n_bytes = 4 * 8 * 4 + 8 * 8 + 4 * 8 * 8  # x, w, and a sum in float64
    assert frame["gb_per_s"][0] == pytest.approx(n_bytes / 1e3)
    frame = bench({"in place": impls["in place"]}, [(4, 8)], inputs="M,N N eps=1e-6")
    assert frame["gb_per_s"][0] == pytest.approx((4 * 8 * 4 + 8 * 4) / 1e3)


@pytest.mark.parametrize("inputs", ["M,N N", "M,N M,N M,N", "3 M,N", "x=M,N"])
def test_bench_of_a_copy_of_what_it_does_not_take(inputs, timed):
    with pytest.raises(ValueError, match="copy takes"):
        bench(["copy"], [(4, 8)], inputs=inputs)
    assert timed == []


def test_bench_option_has_a_row_for_each_value_that_is_not_refused(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    shapes = [(4, 64), (2, 4096)]
    frame = bench_option("tiled", shapes, "num_warps", [1, 3, 4], dtype="bfloat16")
    assert list(frame.columns) == ["num_warps", "m", "n", "dtype", *TIMES, "copy_us"]
    assert keys(frame) == [
        (1, 4, 64, "bfloat16", pytest.approx(1)),
        (4, 4, 64, "bfloat16", pytest.approx(1)),
        (4, 2, 4096, "bfloat16", pytest.approx(1)),
    ]
    assert frame["us"].tolist() == pytest.approx([2, 3, 2])
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 64 * 2 / 2e3)
    [(tried, _), (first, _), *_] = timed
    assert first[0] is tried[0]
    assert [call.keywords for call in first[1:]] == [{"num_warps": 1}, {"num_warps": 4}]


def test_bench_option_of_what_is_no_option(timed):
    with pytest.raises(TypeError, match="rows"):
        bench_option("naive", [(4, 64)], "rows", [1])


def test_bench_layouts_has_a_row_for_each_layout(timed):
    frame = bench_layouts("naive", [4, 6], dtype="float16")
    assert list(frame.columns) == ["layout", "m", "n", "dtype", *TIMES]
    assert keys(frame) == [(layout, 4, 6, "float16") for layout in MEMORY_LAYOUTS]
    assert frame["us"].tolist() == pytest.approx([1, 2, 3, 4])
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 6 * 2 / 1e3)
    [(calls, _)] = timed
    strides = [MEMORY_LAYOUTS[layout](4, 6) for layout in frame["layout"]]
    assert [call.args[0].stride() for call in calls] == strides
    assert {call.args[0].dtype for call in calls} == {torch.float16}


@pytest.mark.gpu
def test_bench_on_a_gpu():
    frame = bench(["copy", "torch.softmax", "naive", "fused"], [(4096, 1024), (4096, 4096)])
    assert list(frame["impl"]) == ["copy", "torch.softmax", "naive", "fused"] * 2
    assert (frame["us"] > 1).all()
    assert (frame["us_p20"] <= frame["us"]).all() and (frame["us"] <= frame["us_p80"]).all()
    bandwidth = 2 * frame["m"] * frame["n"] * 4 / frame["us"] * 1e-3
    assert frame["gb_per_s"].tolist() == pytest.approx(bandwidth.tolist())


@pytest.mark.gpu
def test_bench_option_and_layouts_on_a_gpu():
    frame = bench_option("tiled", [(4096, 4096)], "num_warps", [1, 4, 8])
    assert frame["num_warps"].tolist() == [4, 8]
    assert (frame["copy_us"] > 1).all()
    assert len(bench_layouts("tiled", (4096, 4096))) == len(MEMORY_LAYOUTS)
