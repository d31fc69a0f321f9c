"""Requests and sectors predicted without a GPU: by hand, lane by lane, and as an H200 counted."""

import numpy as np
import pytest

from memtraffic import sectors
from memtraffic.errors import CountError, NoKernelError, UnknownGpuError
from memtraffic.kernels.softmax import masked, persistent
from memtraffic.meters.sectors import count_sectors

# ---- the hardware


def slow_count(addresses, active, unit):
    """Requests and sectors, one lane after the other."""
    requests = sectors = 0
    for lanes, alive in zip(addresses.tolist(), active.tolist(), strict=True):
        touched = {at // unit for at, is_on in zip(lanes, alive, strict=True) if is_on}
        requests += bool(touched)
        sectors += len(touched)
    return requests, sectors


@pytest.mark.parametrize("seed", range(20))
def test_count_sectors_lane_by_lane(seed):
    rng = np.random.default_rng(seed)
    addresses = rng.integers(0, rng.choice([64, 4096, 2**40]), (50, 32))
    addresses[::3].sort(axis=1)
    active = rng.random((50, 32)) < rng.choice([0.03, 0.5, 1.0])
    unit = int(rng.choice([32, 64, 128]))
    assert count_sectors(addresses, active, unit) == slow_count(addresses, active, unit)


def test_count_sectors_of_an_instruction_without_an_active_lane():
    assert count_sectors(np.zeros((3, 32), dtype=np.int64), np.zeros(32, dtype=bool)) == (0, 0)


# ---- kernels


def test_sectors_by_hand():
    """Rows of 781: 24 instructions of 32 lanes and one of 13, by 4 bytes a lane."""
    found = sectors(masked.softmax, shape=(8, 781))
    assert found.load_requests == found.store_requests == 8 * 25
    starts = [row * 781 + 32 * i for row in range(8) for i in range(25)]
    ends = [min(start + 32, (start // 781 + 1) * 781) for start in starts]
    touched = sum(
        (4 * end - 1) // 32 - 4 * start // 32 + 1 for start, end in zip(starts, ends, strict=True)
    )
    assert found.load_sectors == found.store_sectors == touched == 956
    load, store = found.accesses
    assert (load.kind, load.bits, load.wanted_bytes) == ("load", 32, 8 * 781 * 4)
    assert load.source.startswith("x = tl.load(") and store.source.startswith("tl.store(")
    assert found.totals == dict(
        load_requests=200, load_sectors=956, store_requests=200, store_sectors=956
    )


@pytest.mark.parametrize(
    ("call", "target", "error", "match"),
    [
        (masked.softmax, "gfx942", CountError, "gfx942 is amd's"),
        (masked.softmax, "sm_1", UnknownGpuError, "sm_1"),
        (persistent.softmax, "sm_90", CountError, "copies asynchronously"),
        (lambda x: x + 1, "sm_90", NoKernelError, "launched no Triton kernel"),
    ],
)
def test_sectors_refuses(call, target, error, match):
    with pytest.raises(error, match=match):
        sectors(call, shape=(8, 1024), target=target)
