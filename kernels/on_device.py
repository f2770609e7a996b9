"""Numbers of the host on the device."""

from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values as a tensor on the device; to a GPU from pinned memory: nobody waits for the copy."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
