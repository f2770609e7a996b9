"""Weights in huge pages: only the pages change, not what they hold."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

from minipaged import LLM
from minipaged.execution.accel import huge_pages, optimize
from minipaged.execution.accel.huge_pages import HUGE_PAGE, move_into_huge_pages
from minipaged.kernels.dispatch import why_not_cpp


def num_huge_bytes(address):
    """Bytes of huge pages in the area of memory that holds the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            first, last = (int(bound, 16) for bound in name.split("-"))
            inside = first <= address < last
        elif inside and name == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no huge pages to ask for")
def test_small_pages_become_huge_and_keep_their_bytes():
    """Catches advice that Linux ignores, bytes at either end left out, and pages that are lost."""
    memory = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = content = bytes(range(251)) * (len(memory) // 251) + bytes(len(memory) % 251)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    assert num_huge_bytes(start) == 0
    if move_into_huge_pages(start + 5 * HUGE_PAGE, 1) == 0:
        pytest.skip("this kernel cannot collapse pages (before Linux 6.1), or has no huge page left")
    assert move_into_huge_pages(start + HUGE_PAGE + 5, 2 * HUGE_PAGE) == 3
    assert num_huge_bytes(start + HUGE_PAGE) >= 3 * HUGE_PAGE
    assert memory[:] == content


def test_memory_that_cannot_be_moved_stays(monkeypatch):
    """Catches an error where a kernel, or whoever started the process, wants no huge pages."""
    tensor = torch.arange(HUGE_PAGE)
    monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 99)  # unknown, as to older kernels
    assert move_into_huge_pages(tensor.data_ptr(), tensor.nbytes) == 0
    monkeypatch.undo()
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert move_into_huge_pages(tensor.data_ptr(), tensor.nbytes) == 0
    assert tensor.equal(torch.arange(HUGE_PAGE))


@pytest.mark.skipif(
    why_not_cpp(torch.device("cpu")) is not None, reason="the panels are those of the C++ kernels"
)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_all_panels_of_a_model_are_moved(quantization, monkeypatch):
    """Catches layers that are forgotten, or moved before they are packed."""
    moved = []
    monkeypatch.setattr(optimize, "move_into_huge_pages", lambda *area: moved.append(area))
    model = LLM(quantization=quantization).engine.executor.model
    from minipaged.execution.accel.panel_linear import panels_of

    panels = [panels for panels in map(panels_of, model.modules()) if panels]
    assert moved == [(own.address, own.num_bytes) for own in panels]
    assert len(moved) >= 4 * model.config.num_hidden_layers + 1
