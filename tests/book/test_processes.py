"""Ranks in processes; one that ends or is late, test_marked_counters sees."""

import pytest
import rank_functions
from torch.multiprocessing import ProcessRaisedException

from memtraffic_book.processes import run_ranks

pytestmark = pytest.mark.slow
TIMEOUT = 120


def test_run_ranks_returns_what_each_returns():
    found = run_ranks(rank_functions.tell, 2, (100,), backend="gloo", timeout=TIMEOUT)
    assert found == [(100, 2, "gloo"), (101, 2, "gloo")]


def test_run_ranks_raises_what_a_rank_raises():
    with pytest.raises(ProcessRaisedException, match=r"(?s)Process 1 .*fail_last.*the last one"):
        run_ranks(rank_functions.fail_last, 2, backend="gloo", timeout=TIMEOUT)
