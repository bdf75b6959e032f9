"""The package by itself: no torch, no torch_geometric."""

import esker


def test_the_version_is_that_of_the_wheel():
    from importlib.metadata import version

    assert esker.__version__ == version("esker")


def test_parameters_are_those_of_pyg_in_their_order():
    import inspect

    from torch_geometric.loader.link_neighbor_loader import LinkNeighborLoader
    from torch_geometric.loader.neighbor_loader import NeighborLoader

    for own, twin in ((esker.NeighborLoader, NeighborLoader), (esker.LinkNeighborLoader, LinkNeighborLoader)):
        assert issubclass(own, twin)
        parameters = [[(p.name, p.kind, p.default) for p in inspect.signature(c).parameters.values()] for c in (own, twin)]
        assert parameters[0] == parameters[1]


def test_native_names_have_stubs():
    from pathlib import Path

    import esker._esker

    stubs = Path(esker.__file__).with_name("_esker.pyi").read_text()
    for name in dir(esker._esker):
        assert name.startswith("__") and name != "__version__" or f" {name}" in stubs or f"{name}:" in stubs, name


def test_public_names_have_stubs():
    from pathlib import Path

    stubs = Path(esker.__file__).with_name("__init__.pyi").read_text()
    for name in esker.__all__:
        assert f" as {name}\n" in stubs or f"{name}: " in stubs, name
        assert getattr(esker, name) is not None
