import pytest
import torch
from drawings import boxes, texts, title

from memtraffic import resources, runtime
from memtraffic.compile import BlockedLayout, assembly
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import tiled
from memtraffic.residency import nvidia
from memtraffic_book import figures

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests


def test_plot_thread_layout_numbers_lanes_within_their_warp():
    ax = figures.plot_thread_layout(BlockedLayout((1, 2), (2, 3), (2, 1)), (4, 12))
    first, second = ["0", "1", "2"] * 2, ["3", "4", "5"] * 2
    names = [text for text in texts(ax) if text.startswith(("warp", "row"))]
    assert names == [it for row in range(4) for it in (f"row {row}", f"warp {row // 2}")]
    assert [text for text in texts(ax) if text.isdigit()] == [*(first + second) * 2, "3", "6", "9"]
    widths = {(round(width, 6), height) for _, _, width, height in boxes(ax)}
    assert len(boxes(ax)) == 24 and len(widths) == 1
    colors = [box.get_facecolor() for box in ax.patches]
    assert len(set(colors[:12])) == len(set(colors[12:])) == 1 and colors[0] != colors[12]


def test_plot_thread_layout_of_warps_side_by_side():
    ax = figures.plot_thread_layout(BlockedLayout((2, 1), (2, 1), (1, 2)), (8, 2))
    lanes = [text for text in texts(ax)[:-2] if text.isdigit()]
    assert lanes == ["0", "0", "1", "1"] * 2
    assert [text for text in texts(ax) if text.startswith("row")] == [
        f"row {row}" for row in (0, 2, 4, 6)
    ]


def test_plot_thread_layout_of_narrow_boxes_writes_some_lanes():
    ax = figures.plot_thread_layout(BlockedLayout((1, 4), (2, 16), (2, 1)), (4, 64))
    lanes = [int(text) for text in texts(ax) if text.isdigit()][:-3]
    assert len(boxes(ax)) == 64 and lanes == [*range(0, 32, 2)] * 2


def test_plot_thread_layout_hatches_dead_columns():
    ax = figures.plot_thread_layout(BlockedLayout((1, 1), (1, 32), (2, 1)), (4, 32), live=31)
    assert (len(boxes(ax, "dead")), len(boxes(ax))) == (4, 128)


def test_lanes_hatches_those_without_work():
    ax = figures.lanes(16, 4)
    assert (len(boxes(ax, "busy")), len(boxes(ax, "idle"))) == (16, 112)
    assert title(ax) == "16 threads load the row, and 112 are idle."
    assert [text for text in texts(ax) if text.startswith("warp")] == [
        f"warp {i}" for i in range(4)
    ]
    figures.lanes(1000, 2, warp_size=64)


@pytest.mark.parametrize(
    ("n_threads", "elements", "warp_size", "expected"),
    [
        (512, 32, 32, (31, 5, 16, 4, 2)),
        (128, 1, 32, (0, 5, 4, 2, 2)),
        (32, 8, 32, (7, 5, 0, 0, 0)),
        (256, 4, 64, (3, 6, 4, 2, 2)),
    ],
)
def test_reduction_steps(n_threads, elements, warp_size, expected):
    assert figures.reduction_steps(n_threads, elements, warp_size) == expected


def test_reduction_draws_what_it_counts():
    ax = figures.reduction(512, 32)
    counts = ["31 comparisons", "5 shuffles", "16 values", "4 shuffles", "1 value", "1 value each"]
    assert [text for text in texts(ax) if text in counts] == counts
    assert texts(ax).count("barrier: 16 warps wait") == 2
    assert sum(line.get_gid() == "barrier" for line in ax.lines) == 4  # two halves each
    assert len(boxes(ax, "shared")) == 17
    dots = [line for line in ax.lines if line.get_gid() == "lanes"]
    assert sum(len(line.get_xdata()) for line in dots) == 32 * 6 + 16 * 5
    assert title(ax) == "512 threads find one maximum in 9 shuffles and 2 barriers."


def test_reduction_of_another_program():
    ax = figures.reduction(256, 8, warp_size=64, what="sum", operations="additions")
    assert {"7 additions", "6 shuffles", "4 values", "2 shuffles"} <= {*texts(ax)}
    assert "find one sum in 8 shuffles" in title(ax)


def test_reduction_is_what_triton_compiles():
    """A softmax has two reductions, a maximum and a sum, and shuffles and barriers for each."""
    pytest.importorskip("triton", reason="Triton is not installed")
    x = torch.empty(8, 16384, device=runtime.device())
    [kernel] = resources(lambda x: tiled.softmax(x, rows=1, num_warps=16), "sm_90", x)
    steps = figures.reduction_steps(512, 16384 // 512)
    found = {name.split(".")[0]: count for name, count in kernel.instructions.items()}
    assert found["SHFL"] == 2 * (steps.shuffles + steps.last_shuffles)
    assert found["FMNMX"] == steps.comparisons + steps.shuffles + steps.last_shuffles
    assert found["BAR"] == 2 * steps.barriers + 1  # one between the two reductions


def test_sm_packing_fills_until_the_first_is_full():
    limits = nvidia.programs_by_limit(69, 12784, 4, find_gpu("H200"))
    assert limits == {"registers": 7, "shared": 16, "warps": 16, "blocks": 32}
    ax = figures.sm_packing(limits, {"registers": "9,216 of 65,536"})
    assert len(boxes(ax, "taken")) == 4 * 7
    assert len(boxes(ax, "free")) == 0 + 9 + 9 + 25
    assert {"room for only 7", "room for 16", "room for 32"} <= {*texts(ax)}
    assert "one program: 9,216 of 65,536" in texts(ax)
    assert title(ax) == "One SM holds 7 programs, and then its registers are full."
    widths = [bar.get_linewidth() for bar in ax.patches if bar.get_gid() == "bar"]
    assert widths[0] > widths[1] == widths[2] == widths[3]


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (
            {"registers": 2, "shared": 3, "warps": 2},
            "One SM holds 2 programs, and then its registers and warp slots are full.",
        ),
        ({"shared": 1, "warps": 2}, "One SM holds 1 program, and then its shared memory is full."),
        ({"shared": 0, "warps": 2}, "One SM holds no program: its shared memory is not enough."),
    ],
    ids=["two-limits", "one-program", "none"],
)
def test_sm_packing_says_what_is_full(limits, sentence):
    assert title(figures.sm_packing(limits)) == sentence


def test_sm_packing_draws_programs_of_one_width_on_bars_of_two_lengths():
    ax = figures.sm_packing({"usable": 2, "counted": 4}, lengths={"usable": 0.5})
    widths = {round(program[2], 9) for program in boxes(ax, "taken") + boxes(ax, "free")}
    assert len(widths) == 1


def test_sm_packing_draws_the_rest_to_scale():
    limits, takes = {"shared": 6, "warps": 16}, {"shared": (33920, 233472), "warps": (4, 64)}
    ax = figures.sm_packing(limits, takes)
    [rest], places = boxes(ax, "rest"), boxes(ax, "taken") + boxes(ax, "free")
    assert rest[2] / places[0][2] == pytest.approx(29952 / 33920)
    assert rest[0] == pytest.approx(places[5][0] + places[5][2])
    found = {"one program: 33,920 of 233,472 bytes", "rest: 29,952", "one program: 4 of 64"}
    assert found | {"rest: too small"} <= {*texts(ax)}
    assert not boxes(figures.sm_packing(limits, {"shared": "33,920 bytes"}), "rest")


def test_sm_packing_of_amd_has_its_words():
    limits = {"vgprs": 4, "waves": 8, "sgprs": 8, "lds": 3, "groups": 16}
    ax = figures.sm_packing(limits, processor="CU")
    assert {"vector registers", "wave slots", "LDS", "workgroup slots"} <= {*texts(ax)}
    assert title(ax) == "One CU holds 3 programs, and then its LDS is full."


def test_registers_of_row_shows_what_holds_no_number():
    rows = {
        "in one block of 8192": (8192, [8192]),
        "in one block of 16384": (8320, [16384]),
        "in blocks of 8192 and 128": (8320, [8192, 128]),
    }
    ax = figures.registers_of_row(rows, 512)
    registers = [text for text in texts(ax) if text.endswith("registers")]
    assert registers == ["16 registers", "32 registers", "17 registers"]
    live, dead = boxes(ax, "live"), boxes(ax, "dead")
    shares = [one[2] / (one[2] + other[2]) for one, other in zip(live, dead, strict=True)]
    assert shares == pytest.approx([1, 8320 / 16384, 1])
    [copies] = boxes(ax, "copies")  # 128 elements, each in 4 of the 512 threads
    assert copies[2] / live[2][2] == pytest.approx((512 - 128) / 8320)
    assert "49 % hold -inf" in texts(ax) and "copies" in texts(ax)
    assert title(ax) == (
        "8320 numbers in one block of 16384 take 32 registers of each thread, "
        "and 49 % of them hold minus infinity."
    )


def test_wave_reduction_ends_in_lane_63():
    ax = figures.wave_reduction()
    needed = [line for line in ax.lines if line.get_gid() == "needed"]
    assert [len(line.get_xdata()) for line in needed] == [64, 32, 16, 8, 4, 2, 1]
    others = [line for line in ax.lines if line.get_gid() == "other"]
    assert [len(line.get_xdata()) for line in others] == [0, 32, 48, 56, 60, 62, 63]
    steps = ["row_shr:8", "row_shr:4", "row_shr:2", "row_shr:1", "row_bcast:15", "row_bcast:31"]
    assert [text for text in texts(ax) if text.startswith("row_")] == steps
    assert title(ax) == "64 lanes find one maximum in 6 steps, and lane 63 has it."


def test_wave_reduction_is_what_triton_compiles():
    """The maximum and the sum of a softmax take these steps, and no lane but 63 is read."""
    pytest.importorskip("triton", reason="Triton is not installed")
    steps = [text for text in texts(figures.wave_reduction()) if text.startswith("row_")]
    x = torch.empty(8, 256, device=runtime.device())
    [code] = assembly(lambda x: tiled.softmax(x, rows=1, num_warps=1), "gfx942", x)
    found = [word for word in code.split() if word.startswith(("row_shr", "row_bcast"))]
    assert found == 2 * steps
    assert {line.split()[-1] for line in code.splitlines() if "v_readlane" in line} == {"63"}


def test_register_file_rounds_up():
    kernels = {"64": (64, 8), "67": (67, 8), "165": (165, 8), "165, by 16": (165, 16)}
    ax = figures.register_file(kernels, registers=512, max_waves=8)
    waves = [text for text in texts(ax) if text.endswith(" waves")]
    assert waves == ["8 waves", "7 waves", "3 waves", "2 waves"]
    assert len(boxes(ax, "wave")) == 8 + 7 + 3 + 2
    assert len(boxes(ax, "rounded")) == 0 + 7 + 3 + 2
    assert "160 free" in texts(ax)
    assert title(ax) == "165, by 16: each wave takes 176, and 2 waves fit."


def test_register_file_has_only_so_many_slots():
    ax = figures.register_file({"16 registers": (16, 8)}, registers=512, max_waves=8)
    assert len(boxes(ax, "wave")) == 8 and "384 free" in texts(ax)
