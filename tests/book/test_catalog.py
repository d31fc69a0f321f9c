import inspect
import json

import pytest

from memtraffic_book import catalog, published, recording
from memtraffic_book.catalog import EXPERIMENTS, Column, find_experiments
from memtraffic_book.measurements import implementation


def test_experiments_are_what_is_published():
    folder = recording.root() / recording.PUBLISHED
    assert recording.load_machine(folder)["experiments"].keys() == EXPERIMENTS.keys()
    files = {path.name for path in folder.glob("*.csv")} - {recording.DRIFT}
    assert files == {f"{id}.csv" for id in EXPERIMENTS}


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_arguments_are_json_that_the_function_takes(id):
    subject = EXPERIMENTS[id]
    assert subject.id == id
    assert json.loads(json.dumps(subject.arguments)) == subject.arguments
    inspect.signature(subject.measure).bind(**subject.arguments)


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_columns_are_named_once_and_say_how_they_are_compared(id):
    names = [column.name for column in EXPERIMENTS[id].columns]
    assert len(names) == len(set(names)) == len(EXPERIMENTS[id].schema)
    for column in EXPERIMENTS[id].columns:
        assert column.unit or not column.tolerance, f"{column} is a number without a unit"
        assert not column.noise or column.unit == "bytes"
    options = [EXPERIMENTS[id].arguments.get("option", names[0])]
    assert names[:1] == options


def test_columns_of_one_run_or_of_the_host_are_not_compared():
    loose = {c.name for e in EXPERIMENTS.values() for c in e.columns if c.tolerance is None}
    host = {"host_us", "host_wait_us", "host_first_ms"}
    names = {"us_p20", "us_p80", "us_reversed", "turn_us", "kernel", "version", "note"}
    assert loose == names | host


def test_rule_of_tiled_is_measured_at_other_widths_than_it_was_read_from():
    read = {n for _, n in EXPERIMENTS["tiled_map_float32"].arguments["shapes"]}
    for dtype in ("float32", "bfloat16"):
        shapes = EXPERIMENTS[f"tiled_rule_{dtype}"].arguments["shapes"]
        assert not read & {n for _, n in shapes}
        assert min(m * n for m, n in shapes) >= 2**24


def test_scoreboard_has_the_widths_of_the_published_tables():
    printed = set(published.load_bandwidth().query("source == 'triton-docs-2024'")["n_cols"])
    for dtype in ("float32", "bfloat16"):
        arguments = EXPERIMENTS[f"scoreboard_{dtype}"].arguments
        shapes = arguments["shapes"]
        assert len(printed) == 98 and printed <= {n for m, n in shapes if m == 4096}
        assert all(shape in shapes for shape in arguments["compiled_shapes"])
        assert len({n for _, n in shapes}) == len(shapes)


def labels(arguments):
    return [
        *arguments.get("impls", []),
        *arguments.get("compiled", []),
        *(arguments[k] for k in ("impl", "tuned") if k in arguments),
        *(case["impl"] for case in arguments.get("cases", []) if "impl" in case),
    ]


def test_labels_name_functions_and_no_paths():
    pytest.importorskip("triton", reason="Triton is not installed")
    used = {label for e in EXPERIMENTS.values() for label in labels(e.arguments)}
    assert {"copy", "naive", "tiled", "few warps"} <= used
    assert not [label for label in used if ":" in label]
    assert all(callable(implementation(label)) for label in used)


def test_long_rows_are_all_of_one_size_and_counted_where_they_are_timed():
    raced, counted = (EXPERIMENTS[f"long_{it}"].arguments for it in ("race", "counters"))
    shapes = [*raced["shapes"], *(case["shape"] for case in counted["cases"])]
    assert {m * n for m, n in shapes} == {2**27}
    found = {case["impl"] for case in counted["cases"] if case["shape"] == [1024, 131072]}
    assert found == {"torch.softmax", "online", "split"} <= set(raced["impls"])
    assert [1024, 131072] in raced["shapes"]


def test_find_experiments():
    assert find_experiments() == list(EXPERIMENTS.values())
    assert [it.id for it in find_experiments(["roof", "copy"])] == ["roof", "copy"]
    with pytest.raises(LookupError, match="'rof'"):
        find_experiments(["roof", "rof"])


def test_run_refuses_other_columns(book):
    assert len(catalog.EXPERIMENTS["speed"].run()) == 2
    subject = book.changes(columns=(Column("impl"), Column("n", "columns")))
    with pytest.raises(ValueError, match="speed"):
        subject.run()
