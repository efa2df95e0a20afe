"""Pytest plugin for nbval runs: writes into the JUnit report which notebook and which cell id each result is about.

nbval names cells by number, and numbers shift; ids do not.
"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note the notebook and the cell id on every cell that nbval collected."""
    for item in items:
        item.user_properties += [("notebook", str(item.path)), ("cell", item.cell["id"])]
