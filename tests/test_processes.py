import importlib.util
import os
import signal
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from another_process import run_python

from memtraffic.errors import RanksError
from memtraffic.processes import run_ranks

TIMEOUT = 120
FACTOR = 3


def scaled(x):
    return FACTOR * x


def tell(offset):
    print("rank", dist.get_rank(), "of", dist.get_world_size(), dist.get_backend())
    return scaled(torch.tensor(dist.get_rank())) + offset


def fail_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("the last one")
    dist.barrier()  # for which that one does not come


def die_first():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def linger():
    time.sleep(1000)


@pytest.mark.slow
def test_run_ranks_returns_what_each_returns_and_prints_rank_0(capfd):
    found = run_ranks(tell, 2, (100,), backend="gloo", timeout=TIMEOUT)
    assert [each.item() for each in found] == [100, 103]
    assert capfd.readouterr().out == "rank 0 of 2 gloo\n"


@pytest.mark.slow
def test_run_ranks_raises_what_a_rank_raises():
    with pytest.raises(RanksError, match=r"(?s)rank 1 of 2 raised.*fail_last.*the last one"):
        run_ranks(fail_last, 2, backend="gloo", timeout=TIMEOUT)


@pytest.mark.slow
def test_run_ranks_names_the_rank_that_died():
    with pytest.raises(RanksError, match="rank 0 of 2 ended by SIGKILL"):
        run_ranks(die_first, 2, backend="gloo", timeout=TIMEOUT)


@pytest.mark.slow
def test_run_ranks_ends_what_is_late_and_says_where_it_was():
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"(?s)rank 0 of 1 still ran after 8 s.* linger"):
        run_ranks(linger, 1, backend="gloo", timeout=8)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_run_ranks_brings_a_script_and_its_kernel(tmp_path):
    """From a script without a guard, which a rank must not run again."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import memtraffic
        import torch
        import triton
        import triton.language as tl
        from memtraffic.processes import run_ranks

        @triton.jit
        def twice_kernel(x_ptr):
            tl.store(x_ptr, 2 * tl.load(x_ptr))

        class Number:
            value = 21.0

        def work():
            x = torch.tensor([Number.value])
            twice_kernel[(1,)](x)
            return x.item()

        print("once", run_ranks(work, 1, backend="gloo", timeout=120))
    """)
    )
    done = run_python("script.py", folder=tmp_path)
    assert done.stdout == "once [42.0]\n", done.stderr


def test_run_ranks_refuses_what_it_cannot_bring():
    def inner():
        return used

    used = 1
    for fn in (inner, lambda: 1):
        with pytest.raises(TypeError, match="variables of another function"):
            run_ranks(fn, 1)
    with pytest.raises(ValueError, match="0 ranks"):
        run_ranks(tell, 0)
    with pytest.raises(ValueError, match="1000 ranks of nccl"):
        run_ranks(tell, 1000, backend="nccl")


def test_run_ranks_names_the_value_that_it_cannot_bring(tmp_path):
    path = tmp_path / "absent.py"
    path.write_text("import sys\nLOCK = sys.stdout\ndef work():\n    return LOCK\n")
    spec = importlib.util.spec_from_file_location("absent", path)
    absent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(absent)  # nobody else can import it
    with pytest.raises(TypeError, match="LOCK cannot be brought to a rank"):
        run_ranks(absent.work, 1)
