"""What imports what: the memory manager and the scheduler are readable and usable without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["memory", "scheduling", "engine", "simulation", "config", "components"])
def test_module_loads_no_torch(module):
    """A top-level import that drags seconds of torch into a simulation."""
    code = (
        f"import minipaged.{module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or f"minipaged.{module} imports torch"
