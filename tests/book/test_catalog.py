import inspect
import json
import re

import pytest
import torch

from memtraffic import device, gpus
from memtraffic_book import catalog, measurements, recording
from memtraffic_book.catalog import EXPERIMENTS, Column, Needs, find_experiments


def test_experiments_are_what_is_published():
    """And nothing else: that the files are those of the machine, `test_pages` sees."""
    folder = recording.root() / recording.PUBLISHED
    assert recording.load_machine(folder)["experiments"].keys() == EXPERIMENTS.keys()


def test_arguments_are_json_that_the_function_takes():
    for id, subject in EXPERIMENTS.items():
        assert subject.id == id
        assert json.loads(json.dumps(subject.arguments)) == subject.arguments
        found = measurements.resolve(subject.arguments)
        inspect.signature(subject.measure).bind(**found)
        assert all(map(callable, found.get("impls", {}).values())), id
        assert "fn" not in found or callable(found["fn"]), id


def test_columns_are_named_once_and_say_how_they_are_compared():
    for subject in EXPERIMENTS.values():
        names = [column.name for column in subject.columns]
        assert len(names) == len(subject.schema)
        for column in subject.columns:
            assert column.unit or not column.tolerance, f"{column} is a number without a unit"
        assert names[0] == subject.arguments.get("option", names[0])


def test_needs_are_those_of_the_functions_that_measure():
    """What reads counters needs ncu; a vendor's own calculator needs that vendor's GPU."""
    counting = {id for id in EXPERIMENTS if re.search("counters|sectors", id)}
    assert counting == {id for id, it in EXPERIMENTS.items() if it.needs.commands == ("ncu",)}
    vendors = {id for id, it in EXPERIMENTS.items() if it.needs.vendor == "nvidia"}
    assert vendors == counting | {"occupancy_driver", "many_gpus"}


@pytest.mark.parametrize(
    ("needs", "lacking"),
    [
        (Needs(("sh",), "amd", 100, 2, 2048), ""),
        (Needs(gib=200), "200 GiB of GPU memory, not 192.0"),
        (Needs(gpus=3), "3 GPUs, not 2"),
        (Needs(gb_per_s=5299), ""),
        (Needs(gb_per_s=5301), "a memory of 5301 GB/s, not 5300, or patience"),
        (Needs(("no-such-command",), "nvidia"), "the command `no-such-command`, a GPU of nvidia"),
    ],
)
def test_lacking_names_what_the_machine_does_not_have(needs, lacking, monkeypatch):
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpus.find_gpu("MI300X"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 192 * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = needs.lacking(reader=True)
    assert found.startswith(lacking) and bool(found) == bool(lacking)
    assert not (needs.gb_per_s and needs.lacking())  # who records has time


def test_what_an_sm_cannot_hold_or_a_reader_not_await_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 140 * 2**30))
    for name, lacks in ("H200", ""), ("T4", "SMs of 2048 threads, not 1024"), ("MI300X", ""):
        monkeypatch.setattr(device, "this_gpu", lambda *index, name=name: gpus.find_gpu(name))
        assert EXPERIMENTS["bytes_in_flight"].needs.lacking() == lacks
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpus.find_gpu("H200"))
    long = {id for id, it in EXPERIMENTS.items() if "patience" in it.needs.lacking(reader=True)}
    types = ("float32", "bfloat16")
    assert long == {
        f"{it}_{dtype}" for it in ("map", "decision", "decision_gradient") for dtype in types
    }


def test_find_experiments_and_run_them(book, monkeypatch):
    assert find_experiments() == [catalog.EXPERIMENTS["speed"]]
    with pytest.raises(LookupError, match="'sped': give one of speed"):
        find_experiments(["speed", "sped"])
    assert len(catalog.EXPERIMENTS["speed"].run()) == 2
    subject = book.changes(columns=(Column("impl"), Column("n", "columns")))
    with pytest.raises(ValueError, match=r"speed.*'m'.*not \['impl', 'n'\]"):
        subject.run()
    monkeypatch.undo()
    monkeypatch.setattr(device, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="ladder needs a GPU"):
        EXPERIMENTS["ladder"].run()
