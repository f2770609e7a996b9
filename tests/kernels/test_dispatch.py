"""The backend table: which is chosen where, and the error when it cannot be."""

import importlib.util
import logging
import sys

import pytest
import torch

from minipaged.kernels.dispatch import BACKENDS, Backend, select_backend, why_not_triton
from tests.machine import skip_without_compiler


@pytest.mark.parametrize(
    ("platform", "device", "level"),
    [
        ("linux", "cpu", "WARNING"),
        ("darwin", "cpu", "WARNING"),
        ("win32", "cpu", "INFO"),
        ("darwin", "mps", "INFO"),
    ],
)
def test_auto_picks_torch_where_no_compiler_is_found_and_says_so(
    platform, device, level, caplog, monkeypatch
):
    """Catches an automatic choice the user cannot see, and a warning of what the user cannot mend."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("minipaged.kernels.dispatch.why_not_cpp", lambda device: "no C++ compiler found")
    with caplog.at_level(logging.INFO, logger="minipaged.kernels.dispatch"):
        assert select_backend("auto", device).name == "torch"
    [record] = caplog.records
    assert record.getMessage().startswith("attention backend: torch")
    assert record.levelname == level


@pytest.mark.parametrize("interpreter", ["", "0"])
def test_triton_without_a_gpu_says_what_is_missing_and_what_to_use(interpreter, monkeypatch):
    """Catches an import error or a launch failure deep in a kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    with pytest.raises(ValueError, match=r"'triton' cannot be used: .*; use 'torch' or 'auto'"):
        select_backend("triton", "cpu")


def test_triton_not_installed_is_named(monkeypatch):
    """Catches a ModuleNotFoundError shown to someone who only set a flag."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"the package triton is not installed \(pip install triton\)"):
        select_backend("triton", "cuda")


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "torch"), ((8, 0), "triton")])
def test_a_chip_below_sm_80_falls_back_to_torch_and_says_so(capability, chosen, caplog, monkeypatch):
    """Catches a compiler's error in the middle of the first step on a GPU that the kernels do not support."""
    pytest.importorskip("triton", reason="needs the package triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert select_backend("auto", "cuda").name == chosen
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "attention backend: torch (chosen for device cuda; triton cannot be used: "
        "Triton kernels need a chip of sm_80 or newer (Ampere), this one is sm_75)"
    ] * (chosen == "torch")


def test_triton_runs_on_a_cpu_in_its_interpreter(monkeypatch):
    """Catches kernels that cannot be tested without a GPU."""
    pytest.importorskip("triton", reason="needs the package triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not_triton(torch.device("cpu")) is None


def test_only_nvidias_chips_are_judged_by_their_compute_capability(monkeypatch):
    """Catches AMD's chips compared with NVIDIA's numbers, and a driver asked that is not there."""
    pytest.importorskip("triton", reason="needs the package triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not_triton(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert why_not_triton(torch.device("cuda")) is None


def test_unknown_backend_lists_the_choices():
    """Catches a KeyError for a typo."""
    with pytest.raises(ValueError, match="unknown attention backend 'flash': choose auto, torch, triton"):
        select_backend("flash", "cpu")


@pytest.mark.parametrize(("name", "left"), [("triton", set()), ("cpp", {"copy_blocks", "swap_blocks"})])
def test_a_backend_has_its_own_operations(name, left):
    """Catches an operation that was forgotten in the table: the reference's is right, but slow."""
    pytest.importorskip("triton", reason="needs the package triton")
    skip_without_compiler(name)
    own, reference = BACKENDS[name](), Backend()
    assert {field for field in Backend._fields if getattr(own, field) is getattr(reference, field)} == left
