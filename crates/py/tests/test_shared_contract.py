"""The contract of the loaders, which PyG's own pass: `shared/python/test_contract.py`, beside a checkout of the project."""

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).resolve().parents[4] / "shared/python/test_contract.py"

if _FILE.is_file():
    _spec = importlib.util.spec_from_file_location("contract", _FILE)
    _contract = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_contract)
    globals().update({name: value for name, value in vars(_contract).items() if name.startswith("test_")})
else:

    def test_contract():
        pytest.skip(f"{_FILE} is not there: the shared folder is not beside the checkout")
