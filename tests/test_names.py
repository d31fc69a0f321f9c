import sys

import pytest
import torch

from memtraffic import device
from memtraffic.names import import_function, import_path


def test_import_function_moves_an_nn_module(module, monkeypatch):
    module("import torch\nlayer = torch.nn.Linear(3, 2)\n")
    monkeypatch.setattr(device, "default", lambda: torch.device("meta"))
    layer = import_function("mine:layer")
    assert layer is sys.modules["mine"].layer
    assert [x.device.type for x in layer.parameters()] == ["meta", "meta"]


def test_import_function_in_the_current_folder(module):
    """It reads the current folder, and does not leave it where other modules are looked for."""
    module("class A:\n    def double(x):\n        return 2 * x\n")
    before = list(sys.path)
    assert import_function("mine:A.double")(3) == 6
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("fusd", "", "did you mean 'fused'"),
        ("no_such_module:f", "", "No module named 'no_such_module'"),
        ("mine:softmux", "", "softmux"),
        ("mine:f", "f = 3", "int"),
        ("./mine.py:f", "f = print", "cannot be imported"),
        ("mine:f", "raise OSError('no data')", "mine:f.* no data"),
        ("mine:f", "def f(x)", r"mine.py, line 1"),
        ("mine:f", "import sys; sys.exit(4)", "mine:f.*SystemExit: 4"),
    ],
)
def test_import_function_that_is_not_there(name, source, message, module):
    module(source)
    with pytest.raises(LookupError, match=message):
        import_function(name)


class Function(torch.autograd.Function):
    pass


def test_import_path_is_of_what_another_process_can_import():
    def inner(x):
        return x

    assert import_path(Function.apply) == f"{__name__}:Function.apply"  # which it inherits
    with pytest.raises(LookupError, match="file"):
        import_path(inner)
    inner.__module__, inner.__qualname__ = "__main__", "inner"
    with pytest.raises(LookupError, match="__main__"):
        import_path(inner)
