import dataclasses

import pytest
import torch

from memtraffic import device, gpus
from memtraffic.benchmark import roof as module
from memtraffic.benchmark.roof import copy_bandwidth, matmul_rate, roof


def test_copy_bandwidth_is_timed_as_kernels_are(timed):
    """Reads plus writes over the median of `time_interleaved`, which takes 1 µs here."""
    assert copy_bandwidth(1000) == pytest.approx(2 * 1000 / 1e-6)
    [(tried, _), ([call], options)] = timed
    assert options.get("cold", True)
    assert call is tried[0] and call().nbytes == 1000


def test_matmul_rate_is_of_float32_without_tf32(timed, monkeypatch):
    asked, inside = torch.get_float32_matmul_precision, []
    monkeypatch.setattr(torch, "matmul", lambda a, b: inside.append(asked()))
    before = asked()
    torch.set_float32_matmul_precision("high")
    try:
        assert matmul_rate(8) == pytest.approx(2 * 8**3 / 1e-6)
        inside.append(asked())
    finally:
        torch.set_float32_matmul_precision(before)
    assert inside == ["highest", "high"]


def test_roof_has_one_row(timed, monkeypatch):
    h200 = dataclasses.replace(gpus.find_gpu("H200"), l2_bytes=60 * 2**20)
    monkeypatch.setattr(device, "this_gpu", lambda: h200)
    monkeypatch.setattr(device, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(module, "copy_bandwidth", lambda n_bytes: 2e12 if n_bytes == 2**31 else 0)
    monkeypatch.setattr(module, "matmul_rate", lambda: 5e13)
    assert roof().to_dict("records") == [
        {
            "gpu": "NVIDIA H200",
            "copy_gb_per_s": pytest.approx(2000),
            "datasheet_gb_per_s": 4800,
            "fp32_tflop_per_s": 50,
            "l2_mib": 60,
        }
    ]


@pytest.mark.gpu
def test_roof_on_a_gpu():
    [row] = roof().to_dict("records")
    assert row["gpu"] == device.gpu_name()
    assert 1 < row["fp32_tflop_per_s"] < 200
    if not row["datasheet_gb_per_s"]:
        pytest.skip(f"no datasheet of {row['gpu']}")
    assert 0.6 * row["datasheet_gb_per_s"] < row["copy_gb_per_s"] < row["datasheet_gb_per_s"]
