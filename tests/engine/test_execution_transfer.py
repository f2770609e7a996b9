"""What a step needs travels to a GPU in one copy: packed here, unpacked there."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged.execution.batch import BatchBuilder
from minipaged.execution.transfer import pack, to_device, unpack
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import build

ARRAYS = [
    np.arange(5, dtype=np.int64) << 40,
    np.arange(3, dtype=np.int32),
    np.zeros(0, dtype=np.int64),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
    np.array([7], dtype=np.int64),
]


def test_arrays_come_out_as_they_went_in():
    """Catches an array read from another's place, a type that changed, a view taken for the whole."""
    for tensor, array in zip(unpack(pack(ARRAYS, pinned=False), ARRAYS), ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.is_contiguous()


def test_every_array_begins_where_16_divides():
    """Catches kernels compiled anew for a step of an odd number of tokens, with loads of 4 bytes."""
    tensors = unpack(pack(ARRAYS, pinned=False), ARRAYS)
    starts = [tensor.storage_offset() * tensor.itemsize for tensor in tensors]
    assert starts == [0, 48, 64, 64, 112]


def test_on_a_cpu_nothing_is_copied():
    """Catches a step on a CPU that copies what it has."""
    [tensor] = to_device(ARRAYS[:1], torch.device("cpu"))
    assert tensor.data_ptr() == ARRAYS[0].ctypes.data


class Copies(TorchDispatchMode):
    """Counts copies to a device that is no CPU."""

    count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **keywords or {})
        given = [argument.device.type for argument in arguments if isinstance(argument, torch.Tensor)]
        self.count += "cpu" in given and result.device.type != "cpu"
        return result


def test_a_step_is_one_copy():
    """Catches an array that travels on its own: each is a launch, and pinned memory of its own."""
    driver = Driver(build("llama"))
    chunks = driver.scheduled([(driver.add(random_tokens(9, 101, seed=1)), 5)])
    with Copies() as copies:
        batch = BatchBuilder("meta").build(chunks)
    assert batch.input_ids.device.type == batch.metadata.block_tables.device.type == "meta"
    assert copies.count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_on_a_gpu_they_arrive_as_they_were():
    """Catches pinned memory that is filled again before its copy is done."""
    device = torch.device("cuda")
    torch.cuda._sleep(50_000_000)
    sent = [[array + step for array in ARRAYS] for step in range(100)]
    arrived = [to_device(arrays, device) for arrays in sent]
    for tensors, arrays in zip(arrived, sent):
        for tensor, array in zip(tensors, arrays):
            assert torch.equal(tensor.cpu(), torch.from_numpy(array))
