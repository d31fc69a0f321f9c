import matplotlib
import pytest
from drawings import boxes, texts, title

from memtraffic.meters.count import Access, count
from memtraffic.tensors import matrix
from memtraffic_book import figures

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests


def test_plot_access_map_shows_who_touched_what():
    accesses = [
        Access((0, 0, 0), "read", "x_ptr", (0, 1, 2)),
        Access((1, 0, 0), "read", "x_ptr", (3, 4, 4)),
        Access((0, 0, 0), "written", "y_ptr", (8,)),
    ]
    ax = figures.plot_access_map(accesses, (3, 3), "x_ptr", "Each program reads a row.")
    assert texts(ax)[:9] == ["0", "1", "2", "3", "4 (2×)", "5", "6", "7", "8"]
    assert texts(ax)[9:] == ["program 0", "program 1", "no program"]
    assert title(ax) == "Each program reads a row."
    colors = [patch.get_facecolor() for patch in ax.patches]
    white = matplotlib.colors.to_rgba("white")
    assert [color == white for color in colors] == [False] * 5 + [True] * 4
    assert colors[0] == colors[2] != colors[3]


@pytest.mark.parametrize("argument", ["x_ptr", "y_ptr"])
def test_plot_access_map_of_a_kernel(argument):
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.kernels.softmax import fused

    accesses = count(fused.softmax, matrix(3, 4), trace=True).accesses
    ax = figures.plot_access_map(accesses, (3, 4), argument)
    assert texts(ax) == [*map(str, range(12)), "program 0", "program 1", "program 2"]


def test_mask_shows_the_dead_elements():
    ax = figures.mask(5, 8)
    assert (len(boxes(ax, "live")), len(boxes(ax, "dead"))) == (5, 3)
    dead = [box for box in ax.patches if box.get_gid() == "dead"]
    live = [box for box in ax.patches if box.get_gid() == "live"]
    assert all(box.get_hatch() for box in dead) and not any(box.get_hatch() for box in live)
    assert texts(ax).count("-inf") == 3
    assert "3 dead elements: not loaded, -inf" in texts(ax)
    assert title(ax) == "A row of 5 fills 5 of 8 elements, and the mask switches 3 off."


@pytest.mark.parametrize(
    ("row", "itemsize", "sectors", "before"),
    [(0, 4, [0], 0), (1, 4, [0, 1], 5), (3, 4, [1, 2], 7), (1, 2, [0], 5)],
)
def test_mask_shows_the_row_in_its_sectors(row, itemsize, sectors, before):
    ax = figures.mask(5, 8, row=row, itemsize=itemsize)
    assert [text for text in texts(ax) if text.startswith("sector")] == [
        f"sector {it}: 32 bytes" for it in sectors
    ]
    assert len(boxes(ax, "sector")) == len(sectors)
    in_memory = boxes(ax, "row") + boxes(ax, "others")
    assert len(boxes(ax, "row")) == 5
    assert len(in_memory) == len(sectors) * 32 // itemsize
    first = min(boxes(ax, "row"))[0]
    assert sum(it[0] < first - 1e-9 for it in boxes(ax, "others")) == before


def test_mask_writes_offsets_and_where_the_matrix_ends():
    ax = figures.mask(5, 8, row=1, rows=3)
    numbers = [int(text) for text in texts(ax) if text.isdigit()]
    assert numbers == [*range(5, 10), *range(15)]
    assert (len(boxes(ax, "others")), len(boxes(ax, "after"))) == (10, 1)
    assert "after the matrix" in texts(ax)
    assert "after the matrix" not in texts(figures.mask(5, 8, row=0, rows=3))


def test_mask_refuses_a_row_that_the_matrix_does_not_have():
    with pytest.raises(ValueError, match="row 3 of a matrix of 3 rows"):
        figures.mask(5, 8, row=3, rows=3)


def test_mask_that_is_full_names_no_dead_elements():
    ax = figures.mask(8, 8, row=0)
    assert not boxes(ax, "dead") and not any("dead" in text for text in texts(ax))


def test_mask_of_other_values_and_one_dead_element():
    ax = figures.mask(15, 16, other="0.0")
    assert texts(ax).count("0.0") == 1 and "1 dead element: not loaded, 0.0" in texts(ax)


@pytest.mark.parametrize(("n", "block"), [(9, 8), (0, 8), (20, 32)])
def test_mask_refuses_what_it_cannot_draw(n, block):
    with pytest.raises(ValueError, match=f"a row of {n} in a block of {block}"):
        figures.mask(n, block)


STRIPS = {
    "packed": range(16),
    "odd": range(5, 21),
    "every other": range(0, 32, 2),
    "transposed": range(0, 16 * 4096, 4096),
}


def test_sectors_counts_what_is_wanted():
    ax = figures.sectors(STRIPS)
    counts = [text for text in texts(ax) if text.endswith("bytes wanted")]
    assert counts == [f"64 of {fetched} bytes wanted" for fetched in (64, 96, 128, 512)]
    assert len(boxes(ax, "sector")) == 2 + 3 + 4 + 4  # of the 8 of the transposed row, 4 are drawn
    assert len(boxes(ax, "wanted")) == 16 + 16 + 16 + 4
    assert len(boxes(ax, "wanted")) + len(boxes(ax, "unwanted")) == 8 * (2 + 3 + 4 + 4)
    assert (texts(ax).count("…"), texts(ax).count("⋮")) == (1, 3)
    assert "of what the transposed row fetches, it wants 12.5 %." in title(ax)
    unwanted = [box for box in ax.patches if box.get_gid() == "unwanted"]
    assert all(box.get_hatch() for box in unwanted)


def test_sectors_of_smaller_elements_hold_more_of_them():
    ax = figures.sectors({"packed": range(32)}, itemsize=2)
    assert len(boxes(ax, "sector")) == 2 and "64 of 64 bytes wanted" in texts(ax)
