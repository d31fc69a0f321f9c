import pytest
import torch

from memtraffic import machine, measure
from memtraffic.judge import assert_close
from memtraffic.measure import DATASHEET, PEERS, bench, roof, seconds, summary

needs_gpu = pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU")
ON_CPU = ("copy", "torch.softmax")


def test_summary_is_median_fifths_and_bandwidth():
    samples = [5e-6, 1e-6, 2e-6, 4e-6, 3e-6, 6e-6]
    found = summary(samples, 7000)
    assert found == pytest.approx(
        {"us": 3.5, "us_p20": 2.0, "us_p80": 5.0, "gb_per_s": 2.0}
    )
    assert list(found) == ["us", "us_p20", "us_p80", "gb_per_s"]


def test_summary_of_equal_samples():
    assert summary([1e-3] * 20, 10**9) == pytest.approx(
        {"us": 1e3, "us_p20": 1e3, "us_p80": 1e3, "gb_per_s": 1e3}
    )


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("seconds", lambda: seconds([lambda: None])),
        ("bench", lambda: bench(["copy"], [(8, 8)])),
        ("roof", roof),
    ],
)
def test_no_gpu(what, call, monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", False)
    with pytest.raises(
        RuntimeError,
        match=f"^{what} needs a GPU, and PyTorch finds none on this machine$",
    ):
        call()


def test_an_unknown_name_is_found_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(measure, "seconds", None)
    with pytest.raises(LookupError, match=r"no rung is named 'torch\.softmux'"):
        bench(["copy", "torch.softmux"], [(8, 8)])


def test_bench_gives_a_row_for_each_shape_and_name(monkeypatch):
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(
        measure,
        "seconds",
        lambda fns, cold: [[1e-6 * (i + 1)] * 20 for i, fn in enumerate(fns) if [fn()]],
    )
    frame = bench(["copy", "naive"], [(4, 8), (2, 16)], dtype="bfloat16")
    assert list(frame.columns) == list(bench.columns)
    assert [tuple(row)[:5] for row in frame.itertuples(index=False)] == [
        ("copy", 4, 8, "bfloat16", pytest.approx(1)),
        ("naive", 4, 8, "bfloat16", pytest.approx(2)),
        ("copy", 2, 16, "bfloat16", pytest.approx(1)),
        ("naive", 2, 16, "bfloat16", pytest.approx(2)),
    ]
    assert list(frame["gb_per_s"]) == pytest.approx([0.128, 0.064, 0.128, 0.064])


@pytest.mark.filterwarnings("ignore")  # compilers warn of what they do
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ON_CPU else needs_gpu) for name in PEERS],
)
def test_peers_compute_what_they_are_named_for(name):
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)).to(
        machine.device()
    )
    y = PEERS[name](x)
    assert_close(
        y, x.double() if name == "copy" else torch.softmax(x.double(), dim=1), x.dtype
    )
    assert y.data_ptr() != x.data_ptr()


@needs_gpu
def test_bench_on_a_gpu():
    frame = bench(
        ["copy", "torch.softmax", "naive", "fused"], [(4096, 1024), (4096, 4096)]
    )
    assert list(frame["impl"]) == ["copy", "torch.softmax", "naive", "fused"] * 2
    assert (frame["us"] > 1).all()
    assert (frame["us_p20"] <= frame["us"]).all()
    assert (frame["us"] <= frame["us_p80"]).all()
    assert frame["gb_per_s"].tolist() == pytest.approx(
        (2 * frame["m"] * frame["n"] * 4 / frame["us"] * 1e-3).tolist()
    )
    large = frame[frame["n"] == 4096].set_index("impl")["us"]
    assert large["fused"] < large["naive"]


@needs_gpu
def test_seconds_makes_twenty_rounds_and_more():
    a, b = seconds([lambda: None, lambda: None], budget=0)
    assert len(a) == len(b) == 20
    assert max(a) < 1


@needs_gpu
def test_roof_on_a_gpu():
    precision = torch.get_float32_matmul_precision()
    frame = roof()
    assert torch.get_float32_matmul_precision() == precision
    assert list(frame.columns) == list(roof.columns)
    [row] = frame.to_dict("records")
    assert row["gpu"] == machine.gpu_name()
    top = DATASHEET.get(row["gpu"], 0) * 1e-9
    assert row["datasheet_gb_per_s"] == top
    if not top:
        pytest.skip(f"no datasheet of {row['gpu']}")
    assert 0.6 * top < row["copy_gb_per_s"] < top
    assert 1 < row["fp32_tflop_per_s"] < 200


def test_datasheets_are_in_bytes_a_second():
    assert all(0.2e12 < value < 10e12 for value in measure.DATASHEET.values())
    assert measure.DATASHEET["NVIDIA H200"] == 4.8e12
