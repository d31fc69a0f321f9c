from memtraffic_book import measurements, recording
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.cost import Cost, estimate

SLOWER = 15  # than an H200
FEWEST_ROUNDS = 36  # of the timer, with those that warm up


def test_estimate_is_more_than_what_was_recorded_would_take():
    """Every call, in as few rounds as the timer makes, by a fifteenth of the bandwidth."""
    compared = 0
    for subject in EXPERIMENTS.values():
        frame = recording.read(recording.root() / recording.PUBLISHED, subject)
        if "us" in frame and subject.needs.moves and subject.needs.gpus == 1:
            seconds = SLOWER * FEWEST_ROUNDS * frame["us"].sum() * 1e-6
            assert seconds <= estimate(subject.measure, subject.arguments).seconds, subject.id
            compared += 1
    assert compared > 25


def test_estimate_grows_with_what_is_timed():
    def of(**arguments):
        fn = measurements.compare if "judged" in arguments else measurements.bench_dtypes
        arguments.pop("judged", None)
        return estimate(fn, {"impls": ["copy", "tiled"], "shapes": [[4096, 4096]]} | arguments)

    one, gib = of(), 2.0**30
    assert one == Cost((5 * 2**26 + 2**28) / gib, one.moves, 1.0)
    # 8 calls of 8 passes over 64 MiB, and L2 overwritten: all of it in 36 rounds.
    assert one.moves > 36 * 8 * (8 * 2**26 + 2**28) / gib
    assert of(shapes=[[4096, 4096]] * 3).moves == 3 * one.moves
    assert of(dtypes=["float32", "float32"]).compiling == 2 * one.compiling
    assert of(repeats=2).moves == 2 * one.moves
    assert of(impls=["copy", "tiled", "compile(naive)"]).compiling == one.compiling + 10
    assert of(judged=True).gib == one.gib + 6 * 8 * 2**24 / gib
    assert of(inputs="M,N M,N").gib == one.gib + 5 * 2**26 / gib
