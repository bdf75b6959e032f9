"""The package by itself: no torch, no torch_geometric."""

import esker


def test_the_version_is_that_of_the_wheel():
    from importlib.metadata import version

    assert esker.__version__ == version("esker")
