"""What the folded cells of `book/fused.ipynb` do, on data where a claim is false, too."""

import matplotlib.pyplot as plt
import pytest
import torch

from memtraffic import resources, runtime
from memtraffic.kernels.softmax import fused as kernel
from memtraffic_book import experiment
from memtraffic_book.chapters import fused

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")
X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])


def test_compare_rows_refuses_one_wrong_element(glued):
    y = torch.softmax(X[:, :4], dim=1)
    fused.compare_rows(y, X)
    assert "wrong" in glued["tried"]
    y[2, 3] += 1e-3
    with pytest.raises(AssertionError, match="less than 1e-6"):
        fused.compare_rows(y, X)


@pytest.mark.slow
def test_compiled_kernel_is_held_and_counted(glued, capsys):
    compiled = fused.show_who_holds_what(1024)
    assert glued == {"row_kib": "64 KiB"}
    fused.count_exchanges(compiled, 1024)
    assert "20 shuffles: 10 for each" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="shuffles"):
        fused.count_exchanges(compiled, 512)
    [narrow] = resources(kernel.softmax, torch.empty(1, 1024), target="sm_90")
    with pytest.raises(AssertionError):
        fused.count_exchanges(narrow, 1024)


def test_draw_single_trip_draws_one_figure():
    fused.draw_single_trip()
    assert len(plt.get_fignums()) == 1


def test_compare_with_bytes_takes_the_gain_apart(glued, capsys, changed):
    fused.compare_with_bytes()
    assert "4.00x from fewer bytes" in capsys.readouterr().out
    speedup, faster = float(glued["speedup"].split()[0]), float(glued["faster"][:-1])
    assert speedup == pytest.approx(4 * faster, rel=0.02)
    changed("us", 3, impl="fused")
    with pytest.raises(AssertionError, match=r"2\.40x needed"):
        fused.compare_with_bytes()


def test_compare_requests_refuses_a_kernel_that_reads_otherwise(capsys, monkeypatch):
    fused.compare_requests()
    assert "1.00x, 2.00x, 1.00x, 3.00x" in capsys.readouterr().out
    frames = [experiment(f"{id}_counters") for id in ("fused", "torch_softmax")]
    monkeypatch.setattr(fused, "experiments", lambda *ids: frames * 2)
    with pytest.raises(AssertionError, match="in the order of the table"):
        fused.compare_requests()


def test_draw_widths_refuses_a_compiler_that_is_slower(glued, changed):
    fused.draw_widths()
    assert len(plt.get_fignums()) == 1
    assert glued["dropped"] < glued["ours_32768"] and glued["ours_256"] < glued["others_256"]
    changed("us", 2, impl=f"compile({fused.KEPT})")
    with pytest.raises(AssertionError, match=r"1\.10x needed"):
        fused.draw_widths()


def test_examine_and_reads_row_0_judge_answers():
    assert fused.examine(lambda x: torch.softmax(x, dim=1))(kernel.softmax)
    for op in (fused.half, fused.center):
        with pytest.raises(AssertionError):
            fused.examine(op)(kernel.softmax)
    assert not fused.reads_row_0(lambda x: x + 1)
