"""What holds for every rung of the ladder."""

import re
import sys

import pytest

from memtraffic.meters.formula import formula
from memtraffic.names import RUNGS, import_function, import_path


@pytest.fixture(params=RUNGS)
def softmax(request):
    """The softmax of each rung."""
    return import_function(request.param)


def test_rungs_are_in_the_order_of_the_book():
    first = "naive", "fused", "masked", "tiled", "chunks"
    assert list(RUNGS) == [*first, "persistent", "online", "split"]
    assert [import_path(import_function(name)) for name in RUNGS] == list(RUNGS)


# ---- what the rungs move


def test_formula_is_that_of_the_docstring(softmax):
    docstring = sys.modules[softmax.__module__].__doc__
    [traffic] = re.findall(r"Traffic: (reads .*?, writes .*?)\.\s", docstring)
    one_program = [(9, 8), (4, 2), (2, 700)]  # a row; of longer ones, split takes several
    assert str(formula(softmax, held_out=one_program)) == traffic
