"""What the folded cells of `book/many-gpus.ipynb` do, on data where a claim is false, too."""

import pandas as pd
import pytest
import torch

from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.chapters import many_gpus

LABELS = ("copy", "own part", "one kernel", "two kernels", "DTensor")


def times(*us):
    """Times of two widths, of which a program holds only the first."""
    rows = [(impl, 8192, 16384, "float32", t, t, t) for impl, t in zip(LABELS, us, strict=True)]
    rows += [(impl, 8192, 65536, "float32", 9, 9, 9) for impl in LABELS if impl != "one kernel"]
    return pd.DataFrame(rows, columns=list(EXPERIMENTS["many_gpus"].schema))


def test_show_times_has_no_time_where_no_program_holds_the_columns(capsys):
    many_gpus.show_times(times(250, 260, 300, 420, 2000))
    shown = capsys.readouterr().out
    assert "one kernel is 1.40x as fast as two" in shown and "6.67x its time" in shown


@pytest.mark.parametrize("us", [(250, 260, 300, 310, 2000), (250, 260, 300, 420, 500)])
def test_show_times_refuses_what_the_page_says(us):
    with pytest.raises(AssertionError, match=r"float32|There"):
        many_gpus.show_times(times(*us))


def test_check_parts_refuses_another_softmax():
    y = torch.softmax(torch.tensor([1.0, 3, 2, 5]), 0)
    with pytest.raises(AssertionError, match="all 4 numbers"):
        many_gpus.check_parts(y.split(2), [1, 3, 2, 5])


@pytest.mark.slow
def test_check_dtensor_sees_the_matrix_sent(capsys):
    many_gpus.check_dtensor()
    assert "a rank sends MN elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    "orders", [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [2, 1, 0]], [[*range(6)], [*range(6)]]]
)
def test_examine_orders_refuses(orders):
    with pytest.raises(AssertionError):
        many_gpus.examine_orders(lambda orders, room: orders[0] == orders[-1], orders)


def test_examine_sums_and_examine_normalised_refuse_what_is_wrong():
    def one_number(x):
        return many_gpus.sums_of_rows(x)[:, :1]

    for judge, wrong in (
        (many_gpus.examine_sums, one_number),
        (many_gpus.examine_normalised, lambda x, all_sums: torch.softmax(x, 1)),
    ):
        with pytest.raises(AssertionError):
            judge(wrong)
