"""The pure rooms import without torch, so that a plan can be made where no torch is installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["job", "cost", "control", "transition", "simulate"])
def test_rooms_of_plain_data_import_without_torch(room):
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module("lightning_nereus.{room}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
heavy = sorted(m for m in ("torch", "lightning", "transformers") if m in sys.modules)
sys.exit(f"{room} imports {{heavy}}" if heavy else 0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
