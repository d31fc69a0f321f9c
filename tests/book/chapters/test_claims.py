"""What a chapter claims of the recordings, with one of their columns changed until it is false.

What it says of the recordings as they are, nbval compares on its page.
"""

import pytest

from memtraffic_book import recording, survey
from memtraffic_book.chapters import backward, many_gpus, ship, tiled, your_kernel


def times(columns, by, **where):
    """A change of a recording: columns times a number, in the rows where others have values."""
    names = columns.split()

    def change(frame):
        if not {*names, *where} <= {*frame}:
            return frame
        other = ~(frame[[*where]] == [*where.values()]).all(axis=1)
        return frame.assign(**{name: frame[name].where(other, frame[name] * by) for name in names})

    return change


def us(by, impl=None, **where):
    """A change of times, of one implementation or of all."""
    return times("us", by, **({"impl": impl} if impl else {}), **where)


OURS = "memtraffic.softmax"


LIES = {
    "backward-show_moves": (times("l1_l2_read_bytes", 0.3), "the least bytes"),
    "backward-draw_race": (us(1.4, backward.OURS), "speed of an addition"),
    "backward-draw_race, theirs": (us(0.3, backward.THEIRS), "that of PyTorch"),
    "backward-show_steps": (times("dram_read_bytes", 2, softmax=OURS), "a step moves"),
    "chunks-draw_cliff": (us(0.5, "tiled", n=8320), "one block is"),
    "chunks-draw_cliff, chunks": (us(9, "chunks"), "and chunks fall"),
    "fused-compare_with_bytes": (us(3, "fused"), "as fast as the five lines"),
    "fused-draw_widths": (times("instruction_read_bytes", 2), "the matrix of 4096 x 16384"),
    "in_flight-show_ways": (times("gb_per_s", 0.1, slots=4), "as fast as 64"),
    "long_rows-show_three_reads": (times("l1_l2_read_bytes", 0.6, impl=ship.TORCH), "reads 1.80x"),
    "long_rows-draw_second_read": (times("dram_read_bytes", 1.4, impl="online"), "at the largest"),
    "long_rows-draw_speeds": (us(2, "split"), "split reaches"),
    "long_rows-show_few_rows": (us(9, "split, 1024 columns"), "as fast as online"),
    "many_gpus-show_times": (us(0.5, many_gpus.TWO), "as fast as two"),
    "many_gpus-show_times, DTensor": (us(0.1, many_gpus.DTENSOR), "as fast as the DTensor"),
    "masked-time_the_cheat": (us(3, "block of 512"), "as fast as masked"),
    "memory_wall-draw_times": (us(2, "copy_rows"), "copy_rows reaches"),
    "memory_wall-check_floor": (times("gb_per_s", 2, impl="tiled"), "floor; the best"),
    "naive-draw_late": (us(0.5, "naive"), "as long as a copy"),
    "naive-draw_late, lines": (times("ns", 0.5, kernel="elementwise_kernel"), "the time of exp"),
    "naive-draw_maxima": (times("instruction_read_bytes", 3), "at the loads"),
    "occupancy-compare_warps": (us(2, num_warps=32), "with 32 warps"),
    "occupancy-compare_programs": (us(3, programs=264), "four more"),
    "persistent-take_apart": (us(1.06, "2 stages, program per tile"), "no loop is"),
    "persistent-take_apart, tiled": (us(1.2, "tiled"), "no loop is as fast"),
    "persistent-draw_wide": (us(0.5, "persistent"), "at none of these"),
    "sectors-compare": (
        times("store_sectors", 2, fn="online", shape="16x8320", dtype="float32"),
        "611 of 612",
    ),
    "sectors-compare, others": (times("load_requests", 2, shape="160x128"), "596 of 612"),
    "sectors-time_layouts": (times("l1_l2_read_bytes", 2, layout="transposed"), "the bytes of a"),
    "scoreboard-show_versions": (times("us_reversed", 2), "2 % allowed"),
    "ship-claim_sizes": (times("eager_us eager_us_p20 eager_us_p80", 9, impl=ship.TORCH), "4 MB"),
    "ship-claim_attention": (us(3, ship.FUSED), "attention takes at least"),
    "scoreboard-show_wrong": (lambda it: it.assign(note="wrong: 1 element"), "none of them by"),
    "ship-draw_map": (us(2, OURS), "reaches 95 %"),
    "survey-show_measured": (times("instruction_read_bytes", 2), "request what was counted"),
    "survey-show_measured, again": (times("dram_read_bytes", 3), "fetch from DRAM at most"),
    "tiled-time_starts": (us(3, "masked"), "that do nothing"),
    "tiled-draw_tiles": (us(1.5, rows=tiled.RULE // 256, n=64), "longer than the best tiles"),
    "tiled-draw_narrow": (us(2, "tiled", n=64), "of the speed of a copy or more"),
    "timing-show_clocks": (times("eager_us", 99, n=4096), "takes .* in a CUDA graph"),
    "timing-claim_floor": (us(9, programs=0), "with a kernel that does nothing"),
    "timing-show_cold": (us(9, cache="warm"), "more than 1.1x"),
    "timing-draw_spread": (times("us us_p20 us_p80", 1.2, repeat=3), "less than 10 %"),
    "your_kernel-show_levels": (times("dram_read_bytes", 1.2), "DRAM sends"),
    "your_kernel-show_clock": (times("us_p20", 0.5, impl=your_kernel.LOOP), "20th percentile"),
    "your_kernel-show_loss": (us(1.3, "cross-entropy"), "the time of a copy"),
}  # fmt: skip
GIVEN = {  # what makes the argument of a function
    "ship-claim_sizes": lambda: "",
    "in_flight-show_ways": lambda: 337.0,
    "survey-show_measured": survey.load,
}


@pytest.mark.parametrize(
    ("chapter", "name"), [it.split("-") for it in LIES], ids=LIES, indirect=["chapter"]
)
def test_chapter_refuses_a_recording_in_which_its_claim_is_false(chapter, name, monkeypatch):
    slug, read = chapter.__name__.rpartition(".")[2], recording.read
    (change, refused), function = LIES[f"{slug}-{name}"], name.partition(",")[0]
    monkeypatch.setattr(recording, "read", lambda *what: change(read(*what)))
    if function == "take_apart":  # what it compiles, its page shows
        monkeypatch.setattr(chapter, "resources", lambda *_, **by: [type("", (), {"num_warps": 8})])
        monkeypatch.setattr(chapter, "resident_programs", lambda kernel: 1)
    make = GIVEN.get(f"{slug}-{function}")
    given = [make()] if make else []
    with pytest.raises(AssertionError, match=f"does not hold: .*{refused}"):
        getattr(chapter, function)(*given)
