import functools
import re

import pytest
import torch

from memtraffic import tensors
from memtraffic.benchmark import bench, loop
from memtraffic.benchmark.baselines import copy
from memtraffic.benchmark.baselines import torch_softmax as softmax
from memtraffic.kernels.softmax import naive
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.op import Op
from memtraffic.tensors import matrix

TIMES = ["us", "us_p20", "us_p80", "gb_per_s"]
COLUMNS = "impl m n dtype us us_p20 us_p80 us_reversed gb_per_s note".split()


compare = functools.partial(bench, judge=True, budget=0.1)


def keys(frame):
    """The rows without their times."""
    return [tuple(row) for row in frame.drop(columns=TIMES).itertuples(index=False)]


def off(ulps):
    return lambda x: softmax(x) * (1 + ulps * torch.finfo(x.dtype).eps)


def refusing(x):
    if x.shape[1] > 8:
        raise RuntimeError("at most 8\ncolumns")
    return softmax(x)


def not_here(x):
    import nowhere

    return nowhere.softmax(x)


def test_bench_finds_mistakes_before_it_times(timed):
    with pytest.raises(LookupError, match=r"torch\.softmux"):
        bench(["copy", "torch.softmux"], shapes=[(8, 8)])
    with pytest.raises(ValueError, match=r"softmax: a shape is M, N, not \(8,\)"):
        bench(["copy"], shapes=[(8, 8), (8,)])
    with pytest.raises(ValueError, match="an Op"):
        bench(["naive"], "M,N", [(4, 8)], judge=True)
    half = Op("half", "M,N value=0.5", lambda x, value=2: x * value)
    with pytest.raises(ValueError, match="half: inputs of a judged function"):
        bench({"half": half.reference}, half, [(4, 8)], judge=True)
    for inputs in ("M,N N", "M,N M,N M,N", "3 M,N", "x=M,N"):
        with pytest.raises(ValueError, match="copy takes"):
            bench(["copy"], shapes=[(4, 8)], inputs=inputs)
    assert timed == []


@pytest.mark.parametrize("judge", [False, True])
def test_bench_has_a_row_for_each_shape_and_name(judge, timed):
    names, shapes, reverse = ["copy", "naive"], [(4, 8), [2, 16]], {"reverse": True}
    frame = bench(names, shapes=shapes, dtype="bfloat16", judge=judge)
    further = ["us_reversed", "note"]
    assert [it for it in COLUMNS if judge or it not in further] == list(frame.columns)
    rows = [(name, m, n, "bfloat16") for m, n in shapes for name in names]
    assert keys(frame.drop(columns=further, errors="ignore")) == rows
    assert frame["us"].tolist() == pytest.approx([1, 2, 1, 2])
    assert frame["gb_per_s"].tolist() == pytest.approx([0.128, 0.064, 0.128, 0.064])
    trial = {"budget": 0}  # of copies
    expected = [trial, {"budget": 0.3} | (reverse if judge else {})]
    assert [options for _, options in timed] == expected * 2
    assert not judge or set(frame["note"]) == {""}


def test_bench_of_functions_by_name(timed, monkeypatch):
    """Beside the fastest copy, on the same inputs."""
    tried = []
    monkeypatch.setattr(loop, "fastest_copy", lambda x: tried.append(x) or x.clone)
    impls = {"half": lambda x: x / 2, "naive": naive.softmax, "rung": "naive", "roof": copy}
    frame = bench(impls, shapes=[(4, 8)], budget=0.1)
    assert frame["impl"].tolist() == list(impls)
    [([*calls, copied], options)] = timed
    assert options == {"budget": 0.1} and copied == tried[0].clone
    assert calls[1].func is calls[2].func is naive.softmax
    assert all(call.args[0] is tried[0] for call in calls)


def test_bench_of_an_op_with_two_inputs(timed):
    """Bandwidth comes from the op's least traffic: 3MN elements for the backward."""
    shapes = []

    def backward(y, dy):
        shapes.extend((y.shape, dy.shape))
        return SOFTMAX_BACKWARD.reference(y, dy)

    frame = bench({"ours": backward, "copy": "copy"}, shapes=[(4, 8)], inputs=SOFTMAX_BACKWARD)
    assert keys(frame) == [("ours", 4, 8, "float32"), ("copy", 4, 8, "float32")]
    assert shapes == [(4, 8)] * 2
    assert [len(fns) for fns, _ in timed] == [5, 2]  # what adds two inputs, and the fastest of it
    assert frame["gb_per_s"][0] == pytest.approx(3 * 4 * 8 * 4 / 1e3)


def test_bench_of_inputs(timed):
    """Bandwidth is of the tensors and of the new ones that the first implementation returns."""
    impls = {"add": lambda x, w, eps: x + w + eps, "in place": lambda x, w, eps: x.add_(w)}
    frame = bench(impls, shapes=[(4, 8)], inputs="M,N N:float64 eps=1e-6")
    assert keys(frame) == [("add", 4, 8, "float32"), ("in place", 4, 8, "float32")]
    n_bytes = 4 * 8 * 4 + 8 * 8 + 4 * 8 * 8  # x, w, and a sum in float64
    assert frame["gb_per_s"][0] == pytest.approx(n_bytes / 1e3)
    frame = bench({"in place": impls["in place"]}, shapes=[(4, 8)], inputs="M,N N eps=1e-6")
    assert frame["gb_per_s"][0] == pytest.approx((4 * 8 * 4 + 8 * 4) / 1e3)


def test_bench_beside_a_copy(timed):
    """The copy of the first tensor stands first; all bandwidths are of what it moves."""
    frame = bench({"add": lambda x, w: x + w}, "M,N N", [(4, 8), (2, 16)], beside_copy=True)
    assert frame["impl"].tolist() == ["copy", "add"] * 2
    assert frame["gb_per_s"].tolist() == pytest.approx([0.256, 0.128] * 2)
    with pytest.raises(ValueError, match="no tensor"):
        bench({"f": abs}, "3", [()], beside_copy=True)


def test_bench_judged_has_the_median_of_the_rounds_in_reverse_order(monkeypatch, timed):
    """Which are every second one."""
    monkeypatch.setattr(loop, "time_interleaved", lambda fns, **options: [[1e-6, 3e-6] * 10])
    frame = compare(["naive"], shapes=[(4, 8)])
    assert frame[["us", "us_reversed"]].to_numpy()[0] == pytest.approx([2, 3])


def test_bench_judged_gives_reasons_in_place_of_times(timed):
    notes = {
        "copy": ("copy", ""),
        "wrong": (torch.zeros_like, "wrong: .*"),
        "imprecise": (off(8), "imprecise: .*"),
        "too imprecise": (off(40), "wrong: .*"),
        "refusing": (refusing, "refused: RuntimeError: at most 8 columns"),
        "not here": (not_here, "absent: No module named 'nowhere'"),
        "right": (softmax, ""),
    }
    impls = {name: fn for name, (fn, _) in notes.items()}
    frame = compare(impls, shapes=[(4, 8), (4, 16)], dtype="bfloat16").set_index(["n", "impl"])
    assert all(re.fullmatch(note, frame["note"][16, name]) for name, (_, note) in notes.items())
    untimed = ("wrong", "too imprecise", "not here")
    assert frame["us"].isna()[8].to_dict() == {it: it in untimed for it in impls}
    untimed = (*untimed, "refusing")
    assert frame["us"].isna()[16].to_dict() == {it: it in untimed for it in impls}
    frame = compare({"ours": SOFTMAX_BACKWARD.reference}, SOFTMAX_BACKWARD, [(4, 8)])
    assert frame["note"].tolist() == [""]


def test_bench_judged_when_the_timer_fails(timed, monkeypatch):
    monkeypatch.setattr(loop, "time_interleaved", lambda *args, **options: 1 / 0)
    frame = compare({"naive": "naive", "wrong": torch.zeros_like}, shapes=[(4, 8)])
    assert frame["note"][0] == "not timed: ZeroDivisionError: division by zero"
    assert frame["note"][1].startswith("wrong: ") and frame["us"].isna().all()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_bench_judged_where_inputs_cannot_be_made(error, timed, monkeypatch):
    """They are too large, or an earlier kernel broke the GPU: what was measured is kept."""

    def make(m, n, *args, **options):
        if n == 16:
            raise error("illegal access")
        return matrix(m, n, *args, **options)

    monkeypatch.setattr(tensors, "matrix", make)
    frame = compare(["naive"], shapes=[(4, 8), (4, 16), (4, 32)])
    assert frame["us"].notna().tolist() == [True, False, True]
    assert "not timed: " in frame["note"][1] and "illegal access" in frame["note"][1]


def test_bench_judged_judges_what_torch_compile_made_by_one_result(timed):
    calls = []

    def compiled(x):
        calls.append(torch.are_deterministic_algorithms_enabled())
        return softmax(x)

    compare({"compile(mine)": compiled, "mine": compiled}, shapes=[(4, 8)])
    assert calls == [False, True, False, False]  # of each its judge, then the timer


@pytest.mark.gpu
def test_bench_judged_on_a_gpu():
    frame = compare(["copy", "torch.softmax", "tiled"], shapes=[(4096, 1024), (4096, 65536)])
    assert frame["note"].str.startswith("refused").tolist() == [*[False] * 5, True]
    frame = frame[frame["us"].notna()]
    assert len(frame) == 5 and (frame["us"] > 1).all()
    assert (frame["us_p20"] <= frame["us"]).all() and (frame["us"] <= frame["us_p80"]).all()
    bandwidth = 2 * frame["m"] * frame["n"] * 4 / frame["us"] * 1e-3
    assert frame["gb_per_s"].tolist() == pytest.approx(bandwidth.tolist())
