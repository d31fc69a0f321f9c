"""The survey of kernels that others published, made of kernels of our own."""

import pytest
import torch

from memtraffic import runtime
from memtraffic.inputs import find_inputs
from memtraffic_book import survey
from memtraffic_book.recording import RecordingError, to_csv

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU answers itself")


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * x * weight * gradient, (x * x * gradient).sum(dim=0)


def refusing(x):
    raise TypeError("this GPU is too old\nfor it")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no backward yet")


def staircase(x):
    return torch.zeros(4 * (x.shape[0] // 4))


def rows_of(*kernels):
    path = survey.Path("nowhere")
    return [
        row
        for kernel in kernels
        for row in survey._count_kernel(
            survey.Published("ours", f"{__name__}:{kernel[0]}", *kernel[1:]), "1.0", path
        )
    ]


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """A path names an object of this file, which is no module to import."""
    monkeypatch.setattr(
        survey, "find_kernel", lambda path, tutorials: globals()[path.partition(":")[2]]
    )


def test_survey_of_both_passes():
    forward, backward = rows_of(("Squares", "M,N N,"))
    assert (forward.direction, forward.reads, forward.writes) == ("forward", "3MN + N", "2MN")
    assert (forward.least_reads, forward.least_writes, forward.at) == ("MN + N", "MN", "")
    assert (backward.direction, backward.least_reads) == ("backward", "2MN + N")
    assert backward.least_writes == "MN + N"
    assert (backward.reads, backward.writes) == ("9MN + N", "5MN + N")


def test_survey_gives_numbers_where_there_is_no_formula():
    [row] = rows_of(("staircase", "M,2"))
    size = survey.AT["M"]
    assert (row.reads, row.writes, row.at) == ("0", str(size // 4 * 4), f"M={size}")
    assert (row.least_reads, row.least_writes) == (str(2 * size), str(size // 4 * 4))


def test_survey_gives_numbers_of_more_than_two_sizes():
    class_name = "matmul"
    globals()[class_name] = torch.matmul
    forward, backward = rows_of((class_name, "M,K K,N"))
    m, k, n = (survey.AT[size] for size in "MKN")
    assert (forward.reads, forward.writes) == (str(m * k + k * n), str(m * n))
    assert forward.at == f"M={m}, K={k}, N={n}"
    assert backward.least_writes == str(m * k + k * n)


def test_survey_says_why_it_cannot_count():
    [row] = rows_of(("refusing", "M,N"))
    assert row.reason == "TypeError: this GPU is too old"
    forward, backward = rows_of(("Broken", "M,N"))
    assert (forward.reads, forward.reason) == ("MN", "")
    assert (backward.reads, backward.reason) == ("", "RuntimeError: no backward yet")


def test_survey_sets_arguments_by_name_and_by_position():
    def three(x, sizes, y, *, scale):
        assert (sizes, scale) == ([2], 3)
        return x + y

    globals()["three"] = three
    forward, *_ = rows_of(("three", "M,N M,N", {1: [2], "scale": 3}))
    assert (forward.reads, forward.writes) == ("2MN", "MN")


def test_survey_keeps_the_first_configuration():
    import kernels

    globals()["differing"] = kernels.differing
    globals()["tuned"] = kernels._differing_kernel
    configs = list(kernels._differing_kernel.configs)
    try:
        [row] = rows_of(("differing", "M,N", {}, ":tuned"))
    finally:
        kernels._differing_kernel.configs[:] = configs
    assert (row.reads, row.writes) == ("MN", "M")
    assert row.note == "_masked_kernel: STORED=1"


def test_kernels_of_the_survey():
    """Each is there once, is counted at sizes that are known, and there are enough of them."""
    seen = [(kernel.path, kernel.inputs) for kernel in survey.KERNELS]
    assert len(seen) == len(set(seen))
    for kernel in survey.KERNELS:
        letters = find_inputs(kernel.inputs).sizes
        assert set(letters) <= set(survey.AT)
        assert not (kernel.compiled and letters)
    assert len(seen) >= 40
    assert len({kernel.package for kernel in survey.KERNELS}) >= 4


def test_load_tutorial_leaves_out_what_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "01-made-up.py"
    file.write_text(
        "import torch\n"
        "def double(x):\n    return x + x\n"
        "y = double(torch.zeros(2, device='cuda'))\n"
        "def twice(x):\n    return double(double(x))\n"
        "open('results.html', 'w').close()\n"
    )
    module = survey._load_tutorial(file)
    assert module.twice(1) == 4 and not hasattr(module, "y")
    assert list(tmp_path.iterdir()) == [file]


def test_count_all_leaves_out_absent_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(
        survey, "KERNELS", (survey.Published("no-such-package", "nowhere:fn", "M,N"),)
    )
    frame, absent = survey.count_all(tmp_path)
    assert frame.empty and absent == ["no-such-package"]


def test_load_reads_what_was_written(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(tmp_path))
    with pytest.raises(RecordingError, match=r"missing; .*memtraffic_book survey"):
        survey.load()
    rows = rows_of(("Squares", "M,N N,"))
    frame = survey.pd.DataFrame(map(vars, rows))
    (tmp_path / survey.NAME).write_text(to_csv(frame))
    assert survey.load().to_dict("records") == frame.to_dict("records")
    (tmp_path / survey.NAME).write_text(to_csv(frame.drop(columns="reason")))
    with pytest.raises(RecordingError, match="has columns"):
        survey.load()


def test_recorded_survey():
    """Most kernels that were tried are counted, and nothing moves less than it must write."""
    frame = survey.load()
    tried = frame.groupby(["package", "kernel", "inputs"])
    counted = sum((group["reason"] == "").any() for _, group in tried)
    assert len(tried) >= 40 and frame["package"].nunique() >= 4
    assert counted >= 0.9 * len(tried)
    known = {(kernel.package, kernel.path) for kernel in survey.KERNELS}
    assert set(zip(frame["package"], frame["kernel"], strict=True)) <= known
    for row in frame[frame["at"] != ""].to_dict("records"):
        if row["direction"] == "forward":
            assert int(row["writes"]) >= int(row["least_writes"]) or row["note"], row["kernel"]


def test_recorded_survey_has_the_fused_attention_of_the_tutorials():
    """Its forward pass reads a block of queries once, and the keys and values up to it."""
    frame = survey.load()
    rows = frame[frame["kernel"] == "06-fused-attention:attention"]
    assert list(rows["direction"]) == ["forward", "backward"] and not rows["reason"].any()
    size, block, heads, features = survey.AT["S"], 64, 2, 64
    before = sum(range(block, size + 1, block))  # of each block, the keys up to its end
    reads = heads * features * (size + 2 * before)
    assert rows["reads"].iloc[0] == str(reads)
    assert rows["writes"].iloc[0] == str(heads * size * (features + 1))
