"""Large tensors on mappings of their own: zeros like any others, not shared, and given back whole."""

import gc
import os
import sys

import pytest
import torch

from minivllm.cpu import host_memory

CPU = torch.device("cpu")
LARGE = (host_memory.MIN_BYTES // 4 + 1,)


@pytest.mark.parametrize("shape", [(3,), (0, 5), LARGE, (2, 3, *LARGE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_zeros(shape, dtype):
    tensor = host_memory.zeros(shape, dtype, CPU)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert not tensor.any()
    tensor.fill_(2)
    assert (tensor == 2).all()
    assert tensor.data_ptr() % 64 == 0  # a row should not straddle one more cache line than it needs


def test_views_outlive_the_tensor():
    view = host_memory.zeros(LARGE, torch.float32, CPU)[-3:]
    gc.collect()
    view += 1
    assert view.tolist() == [1, 1, 1]


def test_no_room():
    with pytest.raises(MemoryError, match=r"no room for 4,194,304\.0 GiB"):
        host_memory.zeros((2**50,), torch.float32, CPU)
    with pytest.raises(MemoryError, match="no room"):
        host_memory.zeros((2**62,), torch.float64, CPU)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_has_a_copy():
    tensor = host_memory.zeros(LARGE, torch.float32, CPU)
    child = os.fork()
    if child == 0:
        tensor.numpy()[0] = 7  # NumPy: PyTorch's threads do not survive a fork
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_back():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    tensors = [host_memory.zeros((2**22,), torch.float32, CPU).fill_(1) for _ in range(8)]  # 16 MiB each
    assert resident() - before > 100 * 2**20
    del tensors[::2]
    assert resident() - before < 80 * 2**20  # nothing is kept for the holes
