"""Esker in Python."""

from esker._esker import __version__

__all__ = ["__version__"]
