import sys

import pytest
import torch

from memtraffic import device
from memtraffic.names import import_function, import_path


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A current folder in which a test puts a module of its own."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mine", "broken"):
        sys.modules.pop(name, None)


def test_import_function_moves_an_nn_module(folder, monkeypatch):
    (folder / "mine.py").write_text("import torch\nlayer = torch.nn.Linear(3, 2)\n", "utf-8")
    monkeypatch.setattr(device, "default", lambda: torch.device("meta"))
    layer = import_function("mine:layer")
    assert layer is sys.modules["mine"].layer
    assert [x.device.type for x in layer.parameters()] == ["meta", "meta"]


def test_import_function_in_the_current_folder(folder):
    """It reads the current folder, and does not leave it where other modules are looked for."""
    (folder / "mine.py").write_text(
        "class A:\n    def double(x):\n        return 2 * x\n", encoding="utf-8"
    )
    before = list(sys.path)
    assert import_function("mine:A.double")(3) == 6
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("fusd", "did you mean 'fused'", id="misspelt"),
        pytest.param("no_such_module:f", "No module named 'no_such_module'", id="no-module"),
        pytest.param("kernels:softmux", "softmux", id="no-attribute"),
        pytest.param("kernels:not_callable", "int", id="not-a-function"),
        pytest.param("./kernels.py:double", "cannot be imported", id="path"),
    ],
)
def test_import_function_of_a_wrong_name(name, message):
    with pytest.raises(LookupError, match=message):
        import_function(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("raise OSError('no data')", "broken:f.* no data", id="raises"),
        pytest.param("def f(x)", r"broken.py, line 1", id="syntax"),
        pytest.param("import sys; sys.exit(4)", "broken:f.*SystemExit: 4", id="exits"),
    ],
)
def test_import_function_of_a_broken_module(source, message, folder):
    (folder / "broken.py").write_text(source, encoding="utf-8")
    with pytest.raises(LookupError, match=message):
        import_function("broken:f")


class Function(torch.autograd.Function):
    pass


def test_import_path_of_an_inherited_method_names_its_class():
    assert import_path(Function.apply) == f"{__name__}:Function.apply"


def test_import_path_of_what_another_process_cannot_import():
    def inner(x):
        return x

    with pytest.raises(LookupError, match="file"):
        import_path(inner)
    inner.__module__, inner.__qualname__ = "__main__", "inner"
    with pytest.raises(LookupError, match="__main__"):
        import_path(inner)
