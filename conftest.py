"""On a GPU, `pytest --nbval` compares everything but numbers that carry a unit, and says what the recorded page says."""

import os


def pytest_configure(config):
    if not getattr(config.option, "nbval", False):
        return
    from memtraffic import machine

    if machine.HAS_GPU:
        os.environ.setdefault("MEMTRAFFIC_MODE", "verify")
        config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(config.rootpath / "tests/units.cfg")


def pytest_addoption(parser):
    parser.addoption("--site", help="the folder of a built site to check")
