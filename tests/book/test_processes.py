import time

import pytest
import rank_functions
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from memtraffic_book.processes import run_ranks

pytestmark = pytest.mark.slow
TIMEOUT = 120


def test_run_ranks_returns_what_each_returns():
    found = run_ranks(rank_functions.tell, 2, (100,), backend="gloo", timeout=TIMEOUT)
    assert found == [(100, 2, "gloo"), (101, 2, "gloo")]


def test_run_ranks_raises_what_a_rank_raises():
    with pytest.raises(ProcessRaisedException, match=r"(?s)Process 1 .*fail_last.*the last one"):
        run_ranks(rank_functions.fail_last, 2, backend="gloo", timeout=TIMEOUT)


def test_run_ranks_names_the_rank_that_died():
    with pytest.raises(ProcessExitedException, match="process 0 terminated with signal SIGKILL"):
        run_ranks(rank_functions.die_first, 2, backend="gloo", timeout=TIMEOUT)


def test_run_ranks_ends_what_is_late():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 1 still ran after 1 s"):
        run_ranks(rank_functions.linger, 1, backend="gloo", timeout=1)
    assert time.monotonic() - start < 30
