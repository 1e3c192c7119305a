"""A checkpoint of any strategy as a Hugging Face folder, made by one process without a GPU.

Enters: a checkpoint that ranks have written, each its shards. Leaves: config.json, safetensors and the tokenizer, as
transformers' `InternVLForConditionalGeneration` (or the original `InternVLChatModel`) and `load_hf_folder` read them.
Weights pass one by one, so that memory holds one file of weights and not the model. The folder gets its name when it is
complete. Chapter 5.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vlmcourse.data.tokenizer import BUILTIN_FOLDER
from vlmcourse.models.hf import save_hf_folder
from vlmcourse.models.vlm import build_model
from vlmcourse.planner.hf_chat_config import CHAT_MODEL_TYPE
from vlmcourse.planner.hf_folder import read_hf_config
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.presets import LanguageShape, VisionShape, VLMShape
from vlmcourse.train.folder import META_NAME, find_checkpoint, read_meta
from vlmcourse.train.new_folder import check_new_folder, check_room, write_whole
from vlmcourse.train.plain_checkpoint import quiet_alone, readable_errors

DTYPES = {"saved": None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""What weights may be written as; saved is what the checkpoint holds."""
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export came to."""

    checkpoint: str
    """The folder that was read."""
    strategy: str
    """Of the run that wrote it."""
    step: int
    folder: str
    """The folder that was written."""
    num_params: int
    weight_bytes: int
    dtype: str
    """Of the written weights, as torch names it."""
    layout: str
    """One of `LAYOUTS`."""
    like: str
    """The folder in the original layout whose config.json and code went along; empty where there was none."""


class CheckpointWeights(Mapping[str, Tensor]):
    """The whole weights of a checkpoint by their names in the plain model; each is read when it is asked for."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Read what the checkpoint holds, and check that its files do.

        Args:
            checkpoint: its folder.
            dtype: what weights are given as; by default what is saved. Where there are fp32 master copies beside bf16
                weights, float32 means those.

        Raises:
            FileNotFoundError: if a file of it is missing or shorter than what was written.
        """
        self._folder, self._dtype = checkpoint, dtype
        self._metadata = read_dcp_metadata(checkpoint)
        check_whole(checkpoint, self._metadata)
        # Names are model.<name> and optimizer.<name>.<key>.
        tensors = self._metadata.state_dict_metadata
        found = {key.removeprefix("model."): key for key in tensors if key.startswith("model.")}
        if dtype == torch.float32:
            masters = {name: f"optimizer.{name}.master" for name in found}
            found |= {name: key for name, key in masters.items() if key in tensors}
        self._keys = found

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Return how many weights there are."""
        return len(self._keys)

    def __getitem__(self, name: str) -> Tensor:
        """Read a whole weight, onto the CPU.

        Raises:
            RuntimeError: if its file cannot be read.
        """
        saved = self._saved(name)
        weight = torch.empty(saved.size, dtype=saved.properties.dtype)
        what, remedy = f"{name} of the checkpoint {str(self._folder)!r} cannot be read", "take another checkpoint"
        with quiet_alone(), readable_errors(what, remedy):
            dcp.load({self._keys[name]: weight}, checkpoint_id=self._folder, no_dist=True)
        return weight.to(self._dtype) if self._dtype else weight

    def size(self, name: str) -> torch.Size:
        """Return the size of a weight without reading it."""
        return self._saved(name).size

    def dtype(self, name: str) -> torch.dtype:
        """Return the type in which a weight is given."""
        return self._dtype or self._saved(name).properties.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights, as they are given."""
        return sum(self.size(name).numel() * self.dtype(name).itemsize for name in self)

    def _saved(self, name: str) -> TensorStorageMetadata:
        saved = self._metadata.state_dict_metadata[self._keys[name]]
        assert isinstance(saved, TensorStorageMetadata)
        return saved


def export_hf_folder(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str = "saved",
    tokenizer: str | Path | None = None,
    layout: str = "transformers",
    like: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write the weights of a checkpoint as a Hugging Face folder; no process group and no GPU is needed.

    Args:
        run: the folder of a run (its latest checkpoint), or of one checkpoint, under any strategy.
        out: the new folder; it may exist if it is empty.
        dtype: one of `DTYPES`.
        tokenizer: a folder whose tokenizer files are copied along; by default the run's own.
        layout: one of `LAYOUTS`: transformers', or the original one, with the code's own names.
        like: with the original layout, the folder whose config.json and code are kept; by default the one that the run
            began with, if it is one and is still there.
        max_shard_bytes: size from which a new file of weights is begun.

    Raises:
        FileNotFoundError: if there is no checkpoint, a part of it is missing, or there is no tokenizer.
        ValueError: if `out` has something in it or cannot be written, its disk has no room, or the layout cannot hold
            the model.
        RuntimeError: if a file of the checkpoint is damaged.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: choose one of {', '.join(DTYPES)}")
    folder = Path(out)
    check_new_folder(folder)
    checkpoint = _find_whole(Path(run))
    meta = _read_meta(checkpoint)
    weights = CheckpointWeights(checkpoint, DTYPES[dtype])
    model = build_model(_read_shape(checkpoint, meta), device="meta")
    named = meta["config"]["data"]["tokenizer"]
    tokenizer_dir = Path(tokenizer or (BUILTIN_FOLDER if named == "builtin" else named))
    if not tokenizer_dir.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(tokenizer_dir)!r}, the run's tokenizer: give its present place with --tokenizer"
        )
    check_room(folder, weights.num_bytes)
    if like is None and layout == CHAT_MODEL_TYPE:
        like = _find_origin(meta["config"]["model"]["hf_folder"])
    options = {"layout": layout, "like": like, "state_dict": weights, "max_shard_bytes": max_shard_bytes}
    write_whole(folder, lambda partial: save_hf_folder(model, partial, tokenizer_dir, **options))
    return Exported(
        checkpoint=str(checkpoint),
        strategy=meta["config"]["parallel"]["strategy"],
        step=int(meta["step"]),
        folder=str(folder),
        num_params=sum(weights.size(name).numel() for name in weights),
        weight_bytes=weights.num_bytes,
        dtype=str(weights.dtype(next(iter(weights)))).removeprefix("torch."),
        layout=layout,
        like=str(like or ""),
    )


def read_dcp_metadata(checkpoint: Path) -> Metadata:
    """Return what PyTorch's distributed checkpoint knows of its files.

    It is a pickle: read checkpoints of your own, or of people you trust.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it cannot be read.
    """
    where, remedy = f"the checkpoint {str(checkpoint)!r}", "take another of the run's checkpoints"
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{where} has no list of its tensors, the file .metadata: it was not saved to its end or not copied whole; "
            f"{remedy}"
        ) from error
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{where}: its list of tensors, the file .metadata, cannot be read ({error}); {remedy}"
        ) from error


def check_whole(checkpoint: Path, metadata: Metadata) -> None:
    """Refuse a checkpoint whose files are not all there, in their whole length.

    Raises:
        FileNotFoundError: naming the first file that is missing or too short.
    """
    needed: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        end = stored.offset + stored.length
        needed[stored.relative_path] = max(end, needed.get(stored.relative_path, 0))
    for name, num_bytes in sorted(needed.items()):
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < num_bytes:
            what = "is not there" if found is None else f"has {found:,} of {num_bytes:,} bytes"
            raise FileNotFoundError(
                f"The checkpoint {str(checkpoint)!r} is incomplete: {name} {what} ({len(needed)} files are needed, "
                "one or more of each rank): copy all of it, from every machine, or take another checkpoint"
            )


def _find_whole(run: Path) -> Path:
    """Return the checkpoint that a person means, and say so where it is one that was never finished."""
    if not run.exists():
        raise FileNotFoundError(f"There is no folder {str(run)!r}: give that of a run, or of one of its checkpoints")
    if run.suffix == ".partial" or (run / ".metadata").is_file() and not (run / META_NAME).is_file():
        raise FileNotFoundError(
            f"The checkpoint {str(run)!r} was not saved to its end: a save was interrupted; take another of the run's "
            "checkpoints"
        )
    return find_checkpoint(run)


def _read_meta(checkpoint: Path) -> dict[str, Any]:
    """Return what was kept beside a checkpoint's tensors, and say so where that is no JSON."""
    try:
        return read_meta(checkpoint)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r}: its {META_NAME} cannot be read ({error}); take another of the run's "
            "checkpoints"
        ) from error


def _read_shape(checkpoint: Path, meta: Mapping[str, Any]) -> VLMShape:
    """Return the shape of the model that a checkpoint is of."""
    saved = meta.get("shape")
    if saved is None:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} does not say the shape of its model: an earlier version saved it; "
            "resume the run with this one and save again"
        )
    parts = {"vision": VisionShape(**saved["vision"]), "language": LanguageShape(**saved["language"])}
    return VLMShape(**{**saved, **parts})


def _find_origin(hf_folder: str) -> Path | None:
    """Return the folder that a run began with, where it is in the original layout and is still there."""
    config = read_hf_config(hf_folder) if hf_folder else None
    return Path(hf_folder) if config is not None and config.get("model_type") == CHAT_MODEL_TYPE else None


def describe(exported: Exported) -> str:
    """Return one line for a person."""
    code = f"config.json and code of {exported.like}" if exported.like else "a config.json without the original's code"
    layout = f" ({exported.layout}: {code})" if exported.layout == CHAT_MODEL_TYPE else ""
    return (
        f"{exported.checkpoint}: step {exported.step} of {exported.strategy}, {exported.num_params:,} weights in "
        f"{exported.dtype}, {show_bytes(exported.weight_bytes)} -> {exported.folder}{layout}"
    )


def as_data(exported: Exported) -> str:
    """Return the same as JSON."""
    return json.dumps(dataclasses.asdict(exported))
