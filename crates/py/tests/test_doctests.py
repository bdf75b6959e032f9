"""The examples in docstrings, of the package as it is installed."""

import doctest
import importlib
import pkgutil

import pytest

import esker

_MODULES = sorted(module.name for module in pkgutil.iter_modules(esker.__path__, "esker.") if module.name != "esker._esker")


@pytest.mark.parametrize("name", _MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_loaders_have_examples():
    finder = doctest.DocTestFinder()
    for name in ("NeighborLoader", "LinkNeighborLoader", "NeighborSampler"):
        assert any(found.examples for found in finder.find(getattr(esker, name), name)), name
