"""Numbers of the host on the device, and back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values as a tensor on the device; to a GPU from pinned memory: nobody waits for the copy."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def start_reading(tensor: Tensor) -> Callable[[], Any]:
    """Copy a tensor to the host, ordered before later work of its device. The function that is returned waits
    for the copy, and for nothing later, and returns its `tolist`."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(tensor.device))

    def read() -> Any:
        done.synchronize()
        return on_host.tolist()

    return read
