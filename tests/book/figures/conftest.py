import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from drawings import assert_legible


@pytest.fixture(autouse=True)
def legible():
    """Every figure that a test draws is legible, and Matplotlib's settings stay as they were."""
    before = dict(plt.rcParams)
    yield
    try:
        for number in plt.get_fignums():
            assert_legible(plt.figure(number))
    finally:
        plt.close("all")
    assert dict(plt.rcParams) == before
