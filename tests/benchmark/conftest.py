"""A timer without a GPU: it calls what it times once, and the i-th function takes i + 1 µs."""

import pytest

import memtraffic.runtime as runtime  # isort: skip

from memtraffic.benchmark import copying, loop, roof, timing


@pytest.fixture
def timed(monkeypatch):
    """The calls that were timed, as (functions, options)."""
    calls = []

    def time_interleaved(fns, **options):
        calls.append((list(fns), options))
        for fn in fns:
            fn()
        return [[1e-6 * (i + 1)] * 20 for i in range(len(fns))]

    monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
    for module in (copying, loop, roof, timing):
        monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    return calls
