"""The devices that torch finds on this machine, and transfers of numpy arrays to and from them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.errors import UserError
from training.engine_resources import AUTO
from training.engines.processor import MB, describe_processor
from training.worker_protocol import DeviceInfo

CPU = torch.device("cpu")
# Environment variable and value that give cuBLAS a separate buffer, so that it gives the same bits each time. cuBLAS reads it at
# its start.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
# Elements of a vector that are transferred at once: 64 MiB, enough for the full rate of a bus, and little memory.
PIECE_ELEMENTS = 1 << 24
COPIERS_MAX = 8  # threads that copy one piece of a vector: more threads do not increase the memory's throughput


def cuda_devices() -> list[torch.device]:
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def select_device(name: str) -> torch.device:
    """Return the device that a setting names. Raises `UserError` for a device that this machine lacks."""
    here = cuda_devices()
    if name == "cpu" or (name == AUTO and not here):
        return CPU
    for device in here:
        if name in (AUTO, "cuda", str(device)):
            return device
    there_are = ", ".join(["cpu", *(f"{device} ({torch.cuda.get_device_name(device)})" for device in here)])
    why = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
    raise UserError(f"this machine has no device {name!r}, only {there_are}{why}")


def describe_devices(used: Sequence[torch.device]) -> Iterator[DeviceInfo]:
    """Yield descriptions of all devices, with their memory. The memory of the device CPU is the machine's."""
    yield describe_processor(CPU in used)
    for here in cuda_devices():
        about, is_used = torch.cuda.get_device_properties(here), here in used
        free_mb = torch.cuda.mem_get_info(here)[0] // MB if is_used else None
        held = torch.cuda.memory_reserved(here) // MB if is_used else 0
        yield DeviceInfo(str(here), about.name, about.total_memory // MB, free_mb, held, is_used)


def configure_device(device: torch.device) -> None:
    """Prepare a device before its first use: float32 as on CPUs, and the same bits each time where torch can."""
    if device.type != "cuda":
        return
    os.environ.setdefault(*WORKSPACE)
    torch.set_float32_matmul_precision("highest")  # TF32 is off: with its 10 bits, replays differ by more than audits tolerate.
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling uninitialized memory would only cost time: it is never read.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.set_device(device)


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Let torch raise if it has no deterministic algorithm on a GPU.

    In the mode that only warns, the gradient of attention is not deterministic.
    """
    if device.type != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor: a view on the CPU, else a copy whose transfer continues after the call."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class _PinnedBuffers:
    """Two buffers of pinned memory for concurrent copies of CUDA: one buffer is in transfer while the CPU uses the other."""

    def __init__(self, device: torch.device, elements: int) -> None:
        is_cuda = device.type == "cuda"
        self._pieces = [torch.empty(elements, pin_memory=is_cuda) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in self._pieces] if is_cuda else []

    def travels(self, number: int) -> None:
        if self._arrived:
            self._arrived[number % 2].record()

    def at_rest(self, number: int, elements: int) -> Tensor:
        """Return the buffer for piece `number` of a vector, after the previous transfer of this buffer has ended."""
        if self._arrived:
            self._arrived[number % 2].synchronize()
        return self._pieces[number % 2][:elements]


@contextmanager
def _copiers(elements: int) -> Iterator[Callable[..., None]]:
    """Provide a function that applies a numpy operation to vectors of at most `elements` elements, in several threads."""
    threads = min(COPIERS_MAX, torch.get_num_threads())
    share = -(-elements // threads)
    shares = [slice(start, start + share) for start in range(0, elements, share)]
    with ThreadPoolExecutor(threads) as pool:

        def share_out(operation: Callable[..., object], *pieces: npt.NDArray[np.float32]) -> None:
            deque(pool.map(lambda of: operation(*(piece[of] for piece in pieces)), shares), maxlen=0)

        yield share_out


def upload_vector(array: npt.NDArray[np.float32], target: Tensor, elements: int = PIECE_ELEMENTS) -> None:
    """Copy a flat vector, which may be a read-only memory map, into the vector `target` on a device."""
    elements = min(elements, len(array))
    pieces = _PinnedBuffers(target.device, elements)
    with _copiers(elements) as share_out:
        for number, start in enumerate(range(0, len(array), elements)):
            part = array[start : start + elements]
            piece = pieces.at_rest(number, len(part))
            share_out(np.copyto, piece.numpy(), part)
            target[start : start + elements].copy_(piece, non_blocking=True)
            pieces.travels(number)


@torch.no_grad()
def subtract_device_vector(array: npt.NDArray[np.float32], of: Tensor, elements: int = PIECE_ELEMENTS) -> npt.NDArray[np.float32]:
    """Return `array` − `of` for flat vectors. `of` is on a device."""
    elements = min(elements, len(array))
    found, pieces, starts = np.empty_like(array), _PinnedBuffers(of.device, elements), range(0, len(array), elements)

    def send(number: int) -> None:
        part = of[starts[number] : starts[number] + elements]
        pieces.at_rest(number, len(part)).copy_(part, non_blocking=True)
        pieces.travels(number)

    send(0)
    with _copiers(elements) as share_out:
        for number, start in enumerate(starts):
            if number + 1 < len(starts):
                send(number + 1)
            part, into = (vector[start : start + elements] for vector in (array, found))
            share_out(np.subtract, part, pieces.at_rest(number, len(part)).numpy(), into)
    return found


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array. The array is a view if the tensor is on the CPU."""
    return np.asarray(tensor.detach().cpu().numpy())
