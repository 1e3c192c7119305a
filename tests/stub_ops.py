"""Stand-ins in Python for what DeepSpeed compiles: its Adam for main memory, and its reading and writing of files.

They do the same arithmetic and the same files, so that all of DeepSpeed around them runs without a compiler or libaio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlmcourse.parallel import engine_offload


class StubAdam:
    """Stands for `cpu_adam`; counts its calls."""

    def __init__(self) -> None:
        self.num_updates = 0

    def create_adam(self, *settings: object) -> None:
        pass

    def destroy_adam(self, number: int) -> None:
        pass

    def adam_update(self, number: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        eps, decay, _, weights, gradients, first, second = rest
        self.num_updates += 1
        first.lerp_(gradients, 1 - beta1)
        second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        weights.mul_(1 - lr * decay)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(eps)
        weights.addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


class StubHandle:
    """Stands for `aio_handle` of `async_io`: each request is carried out at once."""

    locked: ClassVar[list[tuple[int, int]]] = []
    """Addresses of all buffers whose pages would be locked; DeepSpeed treats others in another way."""

    def __init__(self, **settings: object) -> None:
        self.num_pending = 0

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        Path(path).write_bytes(tensor.detach().contiguous().numpy().tobytes())
        self.num_pending += 1
        return 0

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        size = tensor.numel() * tensor.element_size()
        read = torch.frombuffer(bytearray(Path(path).read_bytes()[:size]), dtype=tensor.dtype)
        tensor.detach().view(-1)[: read.numel()].copy_(read)
        self.num_pending += 1
        return 0

    def wait(self) -> int:
        done, self.num_pending = self.num_pending, 0
        return done

    def new_cpu_locked_tensor(self, num_elements: int, like: Tensor) -> Tensor:
        buffer = torch.empty(num_elements, dtype=like.dtype)
        self.locked.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        self.locked.remove((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.locked)


class StubAIO:
    """Stands for `async_io`."""

    aio_handle = StubHandle


class StubBuilder:
    """Stands for one of DeepSpeed's builders: builds for a moment, and can be told to fail."""

    name = "stub"

    def __init__(
        self, folder: Path, build_s: float = 0.0, error: Exception | None = None, on_load: Callable[[], object] = bool
    ) -> None:
        self.on_load = on_load
        self.folder, self.build_s, self.error, self.num_loads = folder, build_s, error, 0

    def sources(self) -> list[str]:
        return ["one.cpp", "two.cpp"]

    def load(self, verbose: bool) -> str:
        self.num_loads += 1
        if not (self.folder / "stub.so").exists():
            (self.folder / "one.o").touch()
            self.on_load()
            time.sleep(self.build_s)
            if self.error is not None:
                raise self.error
            (self.folder / "stub.so").touch()
        return "the operation"


@contextmanager
def stub_ops() -> Iterator[StubAdam]:
    """Let DeepSpeed find stand-ins where it would compile, and this machine one that could."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    loaded: Any = OpBuilder._loaded_ops
    adam, before = StubAdam(), dict(loaded)
    real = engine_offload.load_op, engine_offload.find_nvme_problem
    engine_offload.load_op = lambda builder, ranks: loaded[builder.name]
    engine_offload.find_nvme_problem = lambda path, builder: ""
    loaded |= {"cpu_adam": adam, "async_io": StubAIO(), "pin_memory": object()}
    try:
        yield adam
    finally:
        engine_offload.load_op, engine_offload.find_nvme_problem = real
        loaded.clear()
        loaded.update(before)
