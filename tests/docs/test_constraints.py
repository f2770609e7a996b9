"""constraints.txt: what pip can install together, with any build of torch and on every Python."""

import importlib.metadata
import tomllib

import pytest
from packaging.specifiers import SpecifierSet

from tests.docs.site import ROOT

# The triton that the torch on PyPI, the build with CUDA, requires on Linux (`Requires-Dist` of its wheel).
# Builds for CPUs require none, so an environment with one of them shows nothing.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}

PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def test_torch_and_triton_are_a_pair():
    """Catches pins that pip cannot install together where it takes torch's build with CUDA, its default."""
    assert TRITON_OF_TORCH[PINS["torch"]] == PINS["triton"]


@pytest.mark.parametrize("name", PINS)
def test_every_pin_is_for_the_oldest_python(name):
    """Catches a release for 3.11.5, where Debian's Python is 3.11.2: `.[docs]` could not be installed."""
    try:
        wanted = importlib.metadata.metadata(name)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if importlib.metadata.version(name).partition("+")[0] != PINS[name]:
        pytest.skip(f"{name} is installed in another version than {PINS[name]}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    assert oldest in SpecifierSet(wanted)
