import math

import pytest
import torch

from memtraffic import runtime
from memtraffic.benchmark import comparing, peers
from memtraffic.benchmark.comparing import compare, judge
from memtraffic.kernels.softmax.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.tensors import matrix

COLUMNS = "impl m n dtype us us_p20 us_p80 us_reversed gb_per_s version note".split()


def softmax(x):
    return torch.softmax(x, dim=1)


def imprecise(x):
    return softmax(x) * (1 + 8 * torch.finfo(x.dtype).eps)


def refusing(x):
    if x.shape[1] > 8:
        raise RuntimeError("at most 8\ncolumns")
    return softmax(x)


@pytest.fixture
def gpu(timed, monkeypatch):
    """The fake timer, and a GPU that answers; no peer is here."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(peers, "absent", lambda name: f"{name} is not installed")
    return timed


def test_compare_without_a_gpu(monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        compare(["copy"], [(8, 8)])


def test_compare_finds_mistakes_before_it_times(gpu):
    with pytest.raises(LookupError, match="tilde"):
        compare(["tilde"], [(8, 8)])
    with pytest.raises(ValueError, match=r"softmax: a shape is M, N, not \(8,\)"):
        compare(["copy"], [(8, 8), (8,)])
    assert gpu == []


def test_compare_has_a_row_for_each_shape_and_name(gpu):
    frame = compare(["copy", "torch.softmax", "naive"], [(4, 8), [2, 16]], dtype="bfloat16")
    assert list(frame.columns) == COLUMNS
    assert frame["impl"].tolist() == ["copy", "torch.softmax", "naive"] * 2
    assert frame[["m", "n"]].drop_duplicates().to_numpy().tolist() == [[4, 8], [2, 16]]
    assert frame["us"].tolist() == pytest.approx([1, 2, 3] * 2)
    assert frame["us_reversed"].tolist() == pytest.approx([1, 2, 3] * 2)
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 8 * 2 / 1e3)
    assert set(frame["note"]) == set(frame["version"]) == {""}
    assert [options for _, options in gpu if options["budget"]] == [
        {"budget": 0.1, "reverse": True}
    ] * 2


def test_compare_tells_the_rounds_in_reverse_order_apart(gpu, monkeypatch):
    samples = [1e-6, 3e-6] * 10
    monkeypatch.setattr(comparing, "time_interleaved", lambda fns, **options: [samples] * len(fns))
    frame = compare(["naive"], [(4, 8)])
    assert frame[["us", "us_reversed"]].to_numpy()[0] == pytest.approx([2, 3])


def test_compare_gives_reasons_in_place_of_times(gpu):
    impls = {
        "copy": "copy",
        "wrong": torch.zeros_like,
        "imprecise": imprecise,
        "refusing": refusing,
        "Liger": "Liger",
        "right": softmax,
    }
    frame = compare(impls, [(4, 8), (4, 16)])
    notes = frame[frame["n"] == 16].set_index("impl")["note"]
    assert notes["wrong"].startswith("wrong: ") and notes["imprecise"].startswith("imprecise: ")
    assert notes["refusing"] == "refused: RuntimeError: at most 8 columns"
    assert notes["Liger"] == "absent: Liger is not installed"
    assert notes["copy"] == notes["right"] == ""
    timed = frame.assign(timed=frame["us"].notna()).pivot(index="impl", columns="n", values="timed")
    assert timed[8].to_dict() == dict.fromkeys(impls, True) | {"wrong": False, "Liger": False}
    assert timed[16].to_dict() == timed[8].to_dict() | {"refusing": False}


def test_compare_of_slow_compilers_at_few_shapes(gpu):
    frame = compare(["copy", "naive"], [(4, 8), (4, 16)], only={"naive": [[4, 16]]})
    assert list(zip(frame["impl"], frame["n"], strict=True)) == [
        ("copy", 8),
        ("copy", 16),
        ("naive", 16),
    ]


def test_compare_of_the_backward(gpu):
    frame = compare(["copy", "torch.softmax backward"], [(4, 8)], op="softmax_backward")
    assert set(frame["note"]) == {""}
    assert frame["gb_per_s"].tolist() == pytest.approx([3 * 4 * 8 * 4 / 1e3, 3 * 4 * 8 * 4 / 2e3])


def test_compare_when_the_timer_fails(gpu, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("out of events")

    monkeypatch.setattr(comparing, "time_interleaved", fail)
    frame = compare(["torch.softmax"], [(4, 8)])
    assert frame["note"].tolist() == ["not timed: RuntimeError: out of events"]
    assert math.isnan(frame["us"][0])


def test_compare_keeps_what_was_measured_before_the_gpu_was_lost(gpu, monkeypatch):
    broken = []

    def breaks(x):
        if x.shape[1] == 16:
            broken.append(1)
        return softmax(x)

    def synchronize():
        if broken:
            raise RuntimeError("illegal access")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    impls = {"breaks": breaks, "torch.softmax": "torch.softmax", "Liger": "Liger"}
    frame = compare(impls, [(4, 8), (4, 16), (4, 32)]).set_index(["n", "impl"])
    timed = ["breaks", "torch.softmax"]
    assert frame.loc[8].loc[timed, "us"].notna().all()
    assert frame.loc[[16, 32], "us"].isna().all()
    assert frame.loc[(16, "breaks"), "note"] == "broken: RuntimeError: illegal access"
    lost = "not timed: after breaks at (4, 16) the GPU answered no more"
    assert {frame.loc[(n, "torch.softmax"), "note"] for n in (16, 32)} == {lost}
    assert frame.loc[(32, "Liger"), "note"].startswith("absent")


def test_compare_judges_what_torch_compile_made_by_one_result(gpu):
    calls = []

    def compiled(x):
        calls.append(torch.are_deterministic_algorithms_enabled())
        return softmax(x)

    compare({"compile(mine)": compiled, "mine": compiled}, [(4, 8)])
    assert calls == [False, True, False, False]  # of each its judge, then the timer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_judge(dtype):
    x = matrix(5, 781, dtype)
    assert judge(SOFTMAX, softmax, x) == ""
    assert judge(SOFTMAX, imprecise, x).startswith("imprecise: ")
    for wrong in (torch.zeros_like, lambda x: softmax(x) * (1 + 40 * torch.finfo(x.dtype).eps)):
        with pytest.raises(AssertionError):
            judge(SOFTMAX, wrong, x)
    with pytest.raises(AssertionError, match="NaN"):
        judge(SOFTMAX, torch.empty_like, x)
    assert (
        judge(SOFTMAX_BACKWARD, SOFTMAX_BACKWARD.reference, *SOFTMAX_BACKWARD.inputs((3, 5))) == ""
    )


@pytest.mark.gpu
def test_compare_on_a_gpu():
    frame = compare(["copy", "torch.softmax", "tiled", "Liger"], [(4096, 1024), (4096, 65536)])
    timed = frame.set_index(["n", "impl"])["us"]
    assert (timed[1024][["copy", "torch.softmax", "tiled"]] > 1).all()
    assert math.isnan(timed[65536]["tiled"])
    assert frame["note"].str.startswith("refused").sum() >= 1
