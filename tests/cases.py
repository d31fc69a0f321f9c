"""A table of cases by their names, which become the ids of the tests."""

import pytest


def cases(names, table):
    """Parametrises a test: names of its parameters, and a dict from ids to their values."""
    return pytest.mark.parametrize(names, list(table.values()), ids=list(table))
