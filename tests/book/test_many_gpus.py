import pytest

from memtraffic import runtime
from memtraffic_book.many_gpus import sharded_times


@pytest.mark.slow
def test_sharded_times_of_two_ranks():
    found = sharded_times(2, (40,), ("bfloat16",), repeats=2)
    [row] = found.to_dict("records")
    assert (row["dtype"], row["columns"]) == ("bfloat16", 40)
    assert min(row[name] for name in ("alone", "collective", "dtensor")) > 0
    assert ("one_kernel" in row) == (runtime.HAS_GPU and not runtime.INTERPRETED)
