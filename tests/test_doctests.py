"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import gda

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(gda.__path__, "gda.")
    if module.name != "gda.testing.strategies"  # in test_strategies.py, by searches that repeat
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_name_has_a_docstring_and_most_have_an_example() -> None:
    documented = [name for name in gda.__all__ if getattr(gda, name).__doc__]
    assert documented == gda.__all__
    with_example = {name for name in gda.__all__ if ">>>" in getattr(gda, name).__doc__}
    without = {name for name in gda.__all__ if name.endswith("Error")} | {"Shard", "Index"}
    assert set(gda.__all__) - with_example <= without
