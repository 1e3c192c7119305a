"""A book of all memory that tensors hold: who owns each storage, from the operation that made it until it is freed.

Enters: every operation that runs inside `with StorageBook()`, and names of owners. Leaves: live bytes by owner, at any
moment. A storage is what tensors view: however many views there are, its bytes count once, and they count until the
last of them is gone, wherever it is kept. Works the same on CPU and GPU. Left out: what a kernel allocates and frees
within one operation, and memory that no tensor holds. Chapter 4.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Owner = tuple[str, str]
"""What the bytes are, such as activations, and the layer they belong to, or ""."""
TEMPORARY: Owner = ("temporary", "")
OTHER: Owner = ("other", "")
"""What was there before: the batch, buckets of gradients."""
GATHERED: Owner = ("gathered", "")
"""Whole weights of FSDP."""
RESIZED = (GATHERED, OTHER)
"""Whose storages may grow and shrink in place."""


@dataclass
class Entry:
    """One live storage."""

    key: int
    """Of its storage in the book."""
    size_bytes: int
    owner: Owner
    storage: weakref.ref[torch.UntypedStorage]
    num_keepers: int = 0
    """Operations for whose backward autograd keeps it."""


class StorageBook(TorchDispatchMode):
    """Live storages and their owners."""

    def __init__(
        self, device_type: str, after_operation: Callable[[list[Entry]], None], *, of_fakes: bool = False
    ) -> None:
        """Begin with an empty book.

        Args:
            device_type: cpu or cuda; storages elsewhere are left out.
            after_operation: called after each operation with the entries that it added.
            of_fakes: count fake tensors, as the memory that they would have. In a real step they are none: DTensor
                asks with them what an operation would return.
        """
        super().__init__()
        self.device_type, self.after_operation, self.of_fakes = device_type, after_operation, of_fakes
        self.live_bytes: Counter[Owner] = Counter()
        """Bytes by owner, now."""
        self.on_change: Callable[[str, Entry], None] | None = None
        """Called with alloc, free or give after a storage came, before it goes, and after its owner changed."""
        self.on_operation: Callable[[Any, Any, Any, Any], None] | None = None
        """Called with operation, arguments, keyword arguments and result, before `after_operation`."""
        self.may_resize = True
        """Whether to look after an operation for storages that grew or shrank; who knows when that is may switch it."""
        self._entries: dict[int, Entry] = {}
        self._resizable: dict[int, Entry] = {}
        """Of these the ones of owners in RESIZED: few, and looked at after every operation."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.after_operation = lambda _: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These turn into plain operations first, which come here again.
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        for tensor in _tensors((args, kwargs)):
            self.enter(tensor, GATHERED if isinstance(tensor, nn.Parameter) else OTHER)
        result = func(*args, **(kwargs or {}))
        added = [entry for tensor in _tensors(result) if (entry := self.enter(tensor, TEMPORARY)) is not None]
        if self.on_operation is not None:
            self.on_operation(func, args, kwargs or {}, result)
        if self.may_resize:
            self._measure_again()
        self.after_operation(added)
        return result

    def enter(self, tensor: Tensor, owner: Owner) -> Entry | None:
        """Add a tensor's storage if it is not in the book; return its entry only if it was added."""
        storage = storage_of(tensor, of_fakes=self.of_fakes)
        if storage is None or storage._cdata in self._entries or _device_type(tensor) != self.device_type:
            return None
        return self._add(storage, owner)

    def find(self, tensor: Tensor) -> Entry | None:
        """Return the entry of a tensor's storage, or None if it is not in the book."""
        storage = storage_of(tensor, of_fakes=self.of_fakes)
        return None if storage is None else self._entries.get(storage._cdata)

    def give(self, tensor: Tensor, owner: Owner) -> Entry | None:
        """Let a tensor's storage belong to an owner; it is added where it is not in the book."""
        storage = storage_of(tensor, of_fakes=self.of_fakes)
        if storage is None:
            return None
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self.pass_on(entry, owner)
        elif _device_type(tensor) == self.device_type:
            entry = self._add(storage, owner)
        return entry

    def pass_on(self, entry: Entry, owner: Owner) -> None:
        """Give a live storage to another owner."""
        if owner == entry.owner:
            return
        self.live_bytes[entry.owner] -= entry.size_bytes
        self.live_bytes[owner] += entry.size_bytes
        entry.owner = owner
        self._keep_resizable(entry)
        self._tell("give", entry)

    def entries(self) -> Iterator[Entry]:
        """Yield all live entries."""
        yield from list(self._entries.values())

    def _add(self, storage: torch.UntypedStorage, owner: Owner) -> Entry:
        key, size = storage._cdata, storage.nbytes()
        entry = Entry(key, size, owner, weakref.ref(storage, partial(self._forget, key)))
        self._entries[key] = entry
        self._keep_resizable(entry)
        self.live_bytes[owner] += size
        self._tell("alloc", entry)
        return entry

    def _keep_resizable(self, entry: Entry) -> None:
        if entry.owner in RESIZED:
            self._resizable[entry.key] = entry
        else:
            self._resizable.pop(entry.key, None)

    def _forget(self, key: int, _: Any) -> None:
        entry = self._entries.pop(key)
        self._resizable.pop(key, None)
        self.live_bytes[entry.owner] -= entry.size_bytes
        self._tell("free", entry)

    def _tell(self, change: str, entry: Entry) -> None:
        if self.on_change is not None:
            self.on_change(change, entry)

    def _measure_again(self) -> None:
        """Read the sizes of storages that may be resized in place: FSDP frees and fills them so."""
        for entry in list(self._resizable.values()):  # another thread, or the next line, may let a storage go meanwhile
            if (storage := entry.storage()) is not None:
                size = storage.nbytes()
                if size == entry.size_bytes:
                    continue
                self.live_bytes[entry.owner] += size - entry.size_bytes
                self._tell("free", entry)
                entry.size_bytes = size
                self._tell("alloc", entry)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def storage_of(tensor: Tensor, *, of_fakes: bool = False) -> torch.UntypedStorage | None:
    """Return the memory behind a tensor on this rank; None for what has none (meta, sparse, other subclasses).

    Args:
        tensor: plain or a `DTensor`.
        of_fakes: return the storage of a fake tensor too: its size is right, and nothing is there.
    """
    local = _inner(tensor)
    if type(local) is FakeTensor:  # before anything else is asked of it: each question is an operation
        return local.untyped_storage() if of_fakes else None
    if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided or local.is_meta:
        return None
    return local.untyped_storage()


def _device_type(tensor: Tensor) -> str:
    """Return where a tensor's memory is; the storage of a fake one would say meta."""
    local = _inner(tensor)
    return local.fake_device.type if type(local) is FakeTensor else local.device.type


def _inner(tensor: Tensor) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # `to_local` would be an operation
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local
