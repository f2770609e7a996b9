"""The backend table: who is chosen where, and what is said when it cannot be."""

import importlib.util
import logging
import os

import pytest

from minipaged.kernels.dispatch import select_backend

in_the_interpreter = os.environ.get("TRITON_INTERPRET") == "1"


def test_auto_picks_torch_where_no_compiler_is_found_and_says_so(caplog, monkeypatch):
    """Catches an automatic choice the user cannot see."""
    monkeypatch.setattr("minipaged.kernels.dispatch.why_not_cpp", lambda device: "no C++ compiler found")
    with caplog.at_level(logging.INFO, logger="minipaged.kernels.dispatch"):
        assert select_backend("auto", "cpu").name == "torch"
    assert "attention backend: torch" in caplog.text


@pytest.mark.skipif(in_the_interpreter, reason="TRITON_INTERPRET=1: Triton runs on a CPU here")
def test_triton_without_a_gpu_says_what_is_missing_and_what_to_use():
    """Catches an import error or a launch failure deep in a kernel."""
    with pytest.raises(ValueError, match=r"'triton' cannot be used: .*; use 'torch' or 'auto'"):
        select_backend("triton", "cpu")


def test_triton_not_installed_is_named(monkeypatch):
    """Catches a ModuleNotFoundError shown to someone who only set a flag."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        select_backend("triton", "cuda")


def test_unknown_backend_lists_the_choices():
    """Catches a KeyError for a typo."""
    with pytest.raises(ValueError, match="unknown attention backend 'flash': choose auto, torch, triton"):
        select_backend("flash", "cpu")
