import pytest
from drawings import boxes, texts, title

from memtraffic.gpus import find_gpu
from memtraffic.meters.count import OpTraffic
from memtraffic_book import figures
from memtraffic_book.figures.hardware import SEGMENTS

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests

H200 = find_gpu("H200")
SIZES = {"dram": "141 GB", "l2": "60 MiB"}


def arrows(ax):
    """The arrows of a drawing, as (tail, head, colour)."""
    found = [text for text in ax.texts if getattr(text, "arrow_patch", None)]
    return [
        (it.xyann, it.xy, it.arrow_patch.get_edgecolor(), it.arrow_patch.get_linewidth())
        for it in found
    ]


def test_machine_draws_what_the_table_says():
    ax = figures.machine(H200, speeds={"dram": "4273 GB/s"}, sizes=SIZES)
    assert len(boxes(ax, "processor")) == H200.num_sms == 132
    assert len(boxes(ax, "part")) == len(boxes(ax, "registers")) == 4
    assert len(boxes(ax, "lane")) == 4 * 32
    assert texts(ax).count("scheduler") == texts(ax).count("32 lanes") == 4
    assert texts(ax).count("registers\n64 KiB") == 4
    assert {"one SM, opened", "132 SMs", "with 256 KiB of registers", "4273 GB/s"} <= {*texts(ax)}
    assert {"shared memory\nup to 228 KiB", "L2 cache, 60 MiB", "memory (DRAM), 141 GB"} <= {
        *texts(ax)
    }
    assert title(ax).endswith(".") and "H200" in title(ax)
    beside = {text.get_text(): text.get_window_extent() for text in ax.texts}
    size = beside["with 256 KiB of registers"]
    assert beside["one SM, opened"].x1 < size.x0 < beside["one SM, opened"].x1 + 20


def test_machine_leads_to_all_schedulers():
    ax = figures.machine(H200)
    [rail] = [line for line in ax.lines if line.get_gid() == "rail"]
    (left, right), (y, _) = rail.get_data()
    parts = boxes(ax, "part")
    assert all(left <= x and x + w <= right + 1e-9 and part + h < y for x, part, w, h in parts)
    touching = [it for it in arrows(ax) if 0 < min(it[0][1], it[1][1]) - y < 0.05]
    assert len(touching) == 3


def test_machine_has_memory_at_the_bottom():
    ax = figures.machine(H200)
    heights = [boxes(ax, name)[0][1] for name in ("registers", "l1", "l2", "dram")]
    assert heights == sorted(heights)


def test_machine_lights_the_path_and_writes_its_bytes():
    lit = {"dram_to_l2": "268 MB", "l2_to_l1": "805 MB", "l2_to_dram": "269 MB", "shared": "16 kB"}
    ax = figures.machine(H200, lit=lit, title="Three reads reach L2, and one reaches memory.")
    assert title(ax) == "Three reads reach L2, and one reaches memory."
    assert all(text in texts(ax) for text in lit.values())
    strong = [arrow for arrow in arrows(ax) if arrow[3] > 2]
    assert (len(arrows(ax)), len(strong)) == (len(SEGMENTS) - 1, len(lit))
    by_text = {text.get_text(): text for text in ax.texts}
    near = {
        name: min(strong, key=lambda it: abs(it[0][0] - x) + abs((it[0][1] + it[1][1]) / 2 - y))
        for name, (x, y) in ((name, by_text[text].get_position()) for name, text in lit.items())
    }
    assert len({arrow[:2] for arrow in near.values()}) == len(lit)
    edges = {box.get_gid(): box.get_linewidth() for box in ax.patches}
    assert edges["dram"] == edges["l2"] == edges["l1"] == edges["registers"] == edges["shared"] == 2
    read_only = figures.machine(H200, lit={"dram_to_l2": "1 MB"})
    edges = {box.get_gid(): box.get_linewidth() for box in read_only.patches}
    assert edges["dram"] == edges["l2"] == 2 > edges["l1"]


def test_machine_shows_what_waits_in_shared_memory():
    lit = {"l2_to_l1": "row 1", "shared_to_registers": "row 0"}
    ax = figures.machine(H200, lit=lit, sizes={"shared": "row 1 waits here"})
    assert {*lit.values(), "shared memory\nrow 1 waits here"} <= {*texts(ax)}
    strong = [arrow for arrow in arrows(ax) if arrow[3] > 2]
    assert (len(arrows(ax)), len(strong)) == (len(SEGMENTS) - 1, 2)


def test_machine_refuses_an_unknown_segment():
    with pytest.raises(ValueError, match=r"dram_to_l1.*known are dram_to_l2"):
        figures.machine(H200, lit={"dram_to_l1": ""})


def test_machine_of_amd_has_its_words_and_its_caches():
    gpu = find_gpu("MI300X")
    ax = figures.machine(gpu, dies=8, sizes={"l2": "8 × 4 MiB", "mall": "256 MiB"})
    assert len(boxes(ax, "processor")) == 304 and len(boxes(ax, "lane")) == 4 * 64
    assert texts(ax).count("SIMD") == texts(ax).count("registers\n128 KiB") == 4
    assert {"LDS\n64 KiB", "304 CUs", "Infinity Cache, 256 MiB", "one compute unit, opened"} <= {
        *texts(ax)
    }
    assert sum(line.get_gid() == "die" for line in ax.lines) == 7
    assert not any("SM" in text or "shared" in text or "scheduler" in text for text in texts(ax))


@pytest.mark.parametrize("name", ["T4", "B200", "MI100", "MI355X", "RX 7900 XTX"])
def test_machine_of_other_gpus(name):
    gpu = find_gpu(name)
    ax = figures.machine(gpu)
    assert len(boxes(ax, "processor")) == gpu.num_sms
    assert len(boxes(ax, "lane")) == 4 * gpu.warp_size


MN, M = 67108864, 4096
OPS = [
    OpTraffic(name, read, write, 4 * read, 4 * write)
    for name, read, write in (("amax", MN, M), ("sub", MN + M, MN), ("exp", MN, MN))
]


def test_five_trips_shows_the_bytes_of_each_arrow():
    ax = figures.five_trips(OPS, OpTraffic("fused", MN, MN, 4 * MN, 4 * MN))
    assert len(boxes(ax, "op")) == 3
    labels = [text for text in texts(ax) if text.endswith(("MB", "kB"))]
    assert labels == ["268.4 MB", "16.4 kB", "268.5 MB", *["268.4 MB"] * 5]
    assert len(arrows(ax)) == 8
    assert {"amax", "sub", "exp", "fused", "3 kernels", "1 kernel"} <= {*texts(ax)}
    assert {"1,342.2 MB in all", "536.9 MB in all"} <= {*texts(ax)}
    assert title(ax).startswith("3 kernels move 1,342.2 MB") and "536.9 MB" in title(ax)
    for (x, _), (there, _), *_ in arrows(ax)[:6:2]:
        assert x > there, "a read comes from memory, which is to the right of the operations"
