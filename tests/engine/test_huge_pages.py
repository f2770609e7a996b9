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


@pytest.fixture
def small_pages(monkeypatch):
    """16 MB in small pages, all in use, and the first address that a huge page can have."""
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if sys.platform != "linux":
        pytest.skip("other systems have no huge pages to ask for")
    memory = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    memory[:] = bytes(range(251)) * (len(memory) // 251) + bytes(len(memory) % 251)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    assert num_huge_bytes(start) == 0
    madvise = ctypes.CDLL(None).madvise
    last = ctypes.c_void_p(start + 6 * HUGE_PAGE), ctypes.c_size_t(HUGE_PAGE)
    if madvise(*last, 14) or madvise(*last, 25):
        pytest.skip("this kernel cannot move memory into huge pages (before Linux 6.1), or has none left")
    if "[never]" in huge_pages.SETTINGS.joinpath("enabled").read_text():
        pytest.skip("huge pages are off on this machine")
    return memory, start


def test_small_pages_become_huge_and_keep_their_bytes(small_pages):
    """Catches advice that Linux ignores, bytes at either end left out, and pages that are lost."""
    memory, start = small_pages
    content = memory[:]
    assert move_into_huge_pages(start + HUGE_PAGE + 5, 2 * HUGE_PAGE) == 3
    assert num_huge_bytes(start + HUGE_PAGE) >= 3 * HUGE_PAGE
    assert memory[:] == content


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_an_administrator_has_the_last_word(setting, small_pages, monkeypatch, tmp_path):
    """Catches huge pages where they were turned off, for some programs need all small ones."""
    tmp_path.joinpath("hpage_pmd_size").write_text(str(HUGE_PAGE))
    if setting:
        tmp_path.joinpath("enabled").write_text(setting)
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    _, start = small_pages
    assert move_into_huge_pages(start, HUGE_PAGE) == 0
    assert num_huge_bytes(start) == 0


def test_where_memory_is_too_fragmented_it_gives_up(monkeypatch):
    """Catches a start that takes minutes, and an error where a kernel does not know the request."""
    tensor = torch.arange(4 * HUGE_PAGE)  # 32 huge pages
    requests = []

    class Library:
        @staticmethod
        def madvise(address, num_bytes, advice):
            requests.append(advice)
            return -1

    monkeypatch.setattr(huge_pages, "_are_wanted", lambda: True)
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: Library)
    assert move_into_huge_pages(tensor.data_ptr(), tensor.nbytes) == 0
    assert len(requests) == 1 + huge_pages.MOST_FAILURES


def test_who_starts_the_process_can_turn_it_off(small_pages, monkeypatch):
    """Catches a variable that PyTorch honours and we do not."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert move_into_huge_pages(small_pages[1], HUGE_PAGE) == 0


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
