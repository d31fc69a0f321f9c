"""The plain file of each kernel: it runs where the package is not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import plain_files
import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "naive": ("naive.py", "return numerator / denominator"),
    "fused": ("fused.py", "def _softmax_fused_kernel("),
    "masked": ("masked.py", "def _softmax_masked_kernel("),
    "tiled": ("tiled.py", "def _softmax_tile("),
    "chunks": ("rows.py", "def softmax_kernel("),
    "persistent": ("persistent.py", "def _softmax_persistent_kernel("),
}
# In a process where `memtraffic` cannot be imported: the largest error of each softmax, as a
# multiple of the rounding of its type, at each shape, beside NaN for what is no softmax at all.
RUN = """
import json, runpy, sys
from pathlib import Path
sys.modules["memtraffic"] = None
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
errors = {}
for path in map(Path, sys.argv[1:]):
    softmax = runpy.run_path(str(path), run_name="__main__")["softmax"]
    torch.manual_seed(0)
    for m, n in ((1, 1), (5, 64), (3, 2048), (2, 32768), (5, 33), (3, 781), (1, 20000)):
        if n & (n - 1) and path.stem == "softmax_fused":
            continue
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(m, n, device=device).to(dtype)
            y = softmax(x).double()
            expected = torch.softmax(x.double(), dim=1)
            error = (y - expected).abs() / expected.amax(dim=1, keepdim=True)
            errors[f"{path.stem} {m} {n} {dtype}"] = (error.amax() / torch.finfo(dtype).eps).item()
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return plain_files.write_plain_files(tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
def test_plain_files_run_without_the_package(files, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert {path.stem for path in files} == {f"softmax_{name}" for name in KERNELS}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *files], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    *said, errors = done.stdout.splitlines()
    assert said == ["equal to torch.softmax"] * len(files)
    errors = json.loads(errors)
    assert len(errors) == (7 * 6 - 3) * 2
    assert not {case: error for case, error in errors.items() if not error < 8}


@pytest.mark.parametrize("name", KERNELS)
def test_plain_file_holds_the_kernel_of_the_package(files, name):
    """To the letter, and nothing that imports the package."""
    [text] = [path.read_text("utf-8") for path in files if path.stem == f"softmax_{name}"]
    module, line = KERNELS[name]
    source = (ROOT / "src/memtraffic/kernels/softmax" / module).read_text("utf-8")
    [kernel] = [part for part in source.split("\n\n\n") if line in part]
    assert (kernel if name != "naive" else kernel[kernel.index("    row_max") :]).rstrip() in text
    assert not re.search(r"^\s*(from|import) memtraffic|>>>", text, re.M)


def linked(tmp_path, name, **modules):
    """What a linker gathers for a name of the module `memtraffic.a`."""
    (tmp_path / "book/_ext").mkdir(parents=True)
    (tmp_path / "src/memtraffic").mkdir(parents=True)
    (tmp_path / "book/_ext/plain_launch.py").write_text("def own():\n    return 0\n", "utf-8")
    for module, text in modules.items():
        (tmp_path / f"src/memtraffic/{module}.py").write_text(text, "utf-8")
    linker = plain_files.Linker(plain_files.Sources(tmp_path))
    linker.gather("memtraffic.a", name)
    return linker


@pytest.mark.parametrize(
    "modules",
    [
        {"a": "from memtraffic import b\n\ndef f(): return b.K\n", "__init__": ""},
        {
            "a": "from memtraffic.b import g\nK = 1\n\ndef f(): return g() + K\n",
            "b": "K = 2\n\ndef g(): return K\n",
        },
    ],
    ids=["a-module", "one-name-twice"],
)
def test_linker_refuses_what_one_file_cannot_hold(modules, tmp_path):
    with pytest.raises(LookupError, match=r"K is defined in|import b: only"):
        linked(tmp_path, "f", **modules)
