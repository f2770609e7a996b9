"""The benchmarks of a GPU machine, run dry where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dry_run_takes_every_step_and_writes_its_results(tmp_path):
    """Catches a script that rots unseen until a GPU is paid for."""
    pytest.importorskip("triton", reason="needs the package triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(ROOT / "tests/gpu/benchmarks"), "--dry-run", "--out", str(tmp_path)]
    subprocess.run(script, env=environment, check=True, capture_output=True, timeout=280)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    measured = {result["benchmark"] for result in results if "value" in result}
    assert measured >= {"read ceiling", "decode", "paging overhead", "prefill", "copy", "swap in", "engine"}
    missing = [result["parameters"] for result in results if "not_measured" in result]
    assert all("varlen_attn" in name or "generate_batch" in name for name in missing), missing
