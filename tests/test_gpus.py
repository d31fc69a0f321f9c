"""The table of GPUs."""

import re
from pathlib import Path

import pytest

import memtraffic
from memtraffic import gpus
from memtraffic.gpus import GPUS, TARGETS, find_gpu, find_gpus

# ---- the table


def test_gpus_have_one_name_each():
    assert len({gpu.product for gpu in GPUS} | set(TARGETS)) == len(GPUS) + len(TARGETS)
    assert len({gpu.driver_name for gpu in GPUS}) == len(GPUS)
    assert list(TARGETS) == list(dict.fromkeys(gpu.target for gpu in GPUS))
    assert TARGETS["sm_90"].product == gpus.DEFAULT_GPU.product == "H200"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.product)
def test_find_gpu_by_target_and_product(gpu):
    assert find_gpu(gpu.target.upper()) is TARGETS[gpu.target]
    assert find_gpu(gpu.product) is find_gpu(gpu.product.lower()) is gpu
    if gpu.vendor == "nvidia":
        assert (gpu.backend, gpu.target) == ("cuda", f"sm_{gpu.architecture}")
    else:
        assert (gpu.vendor, gpu.backend, gpu.architecture) == ("amd", "hip", gpu.target)
    assert gpu.prefetches_to_shared_memory == (gpu.vendor == "nvidia" and gpu.target != "sm_75")


UNKNOWN = {"sm_91": "mean 'sm_90'", "H20": "mean 'H200'", 90: "named 90:", None: "named None:"}


@pytest.mark.parametrize(("name", "said"), [*UNKNOWN.items(), ("", "MI300X")])
def test_find_gpu_unknown(name, said):
    with pytest.raises(LookupError, match=said) as error:
        find_gpu(name)
    assert all(gpu.target in str(error.value) and gpu.product in str(error.value) for gpu in GPUS)
    assert name or "did you mean" not in str(error.value)


# ---- nothing else decides


def test_no_vendor_is_decided_by_the_beginning_of_a_name():
    sources = Path(memtraffic.__file__).parent.rglob("*.py")
    pattern = re.compile(r"""\(\s*\(?["'](gfx|sm_)["']""")  # such as startswith("gfx")
    assert not [path for path in sources if pattern.search(path.read_text("utf-8"))]


def test_find_gpus():
    h200, a100 = find_gpu("H200"), find_gpu("A100")
    assert find_gpus("h200") == find_gpus(h200) == [h200]
    assert find_gpus(it for it in ("sm_90", a100)) == [h200, a100]
