import pytest
import torch

from memtraffic import device
from memtraffic_book.many_gpus import sharded_times


@pytest.mark.slow
def test_sharded_times_of_two_ranks():
    found = sharded_times(2, (40,), ("bfloat16",), repeats=2)
    on_gpus = not device.INTERPRETED and torch.cuda.device_count() >= 2  # else by gloo
    linked = ["one kernel"] * on_gpus
    assert list(found["impl"]) == ["copy", "own part", *linked, "two kernels", "DTensor"]
    assert set(zip(found["m"], found["n"], found["dtype"], strict=True)) == {(2, 40, "bfloat16")}
    assert (found["us_p20"] > 0).all()
    assert ((found["us_p20"] <= found["us"]) & (found["us"] <= found["us_p80"])).all()
