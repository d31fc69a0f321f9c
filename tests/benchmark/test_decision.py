"""What is timed to say which softmax to call; the doctest of `choose` tells how it is chosen."""

import pytest

from memtraffic.benchmark.decision import CANDIDATES, WAYS, choose, decide


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # compilers and packages warn of what they like
@pytest.mark.parametrize("gradient", [False, True])
def test_decide_times_what_is_here_in_each_way(gradient):
    frame = decide((64, 781), gradient=gradient).set_index("impl")
    assert list(frame.index) == ["copy", *CANDIDATES]
    for name in ("torch.softmax", "memtraffic.softmax"):
        assert (frame.loc[name, list(WAYS)] > 0).all(), frame.loc[name, "note"]
        assert frame.at[name, "graph_us"] < frame.at[name, "eager_us"]
    assert {choose(frame.reset_index(), way) for way in WAYS} <= set(CANDIDATES)
