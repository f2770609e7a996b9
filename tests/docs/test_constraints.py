"""constraints.txt: what pip can install together, with any build of torch."""

from tests.docs.site import ROOT

# The triton that the torch on PyPI, the build with CUDA, requires on Linux (`Requires-Dist` of its wheel).
# Builds for CPUs require none, so an environment with one of them shows nothing.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def test_torch_and_triton_are_a_pair():
    """Catches pins that pip cannot install together where it takes torch's build with CUDA, its default."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert TRITON_OF_TORCH[pins["torch"]] == pins["triton"]
