"""Weights by name in safetensors files, one or several with an index, in and out.

Enters: a folder, or weights one by one. Leaves: the weights, or the files that transformers would write. What weights
are called is said in `weight_names.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlmcourse.config_files import HF_INDEX_FILE as INDEX_FILE
from vlmcourse.config_files import HF_WEIGHTS_FILE as WEIGHTS_FILE

UNUSED = ("mask_token", "rotary_emb.inv_freq")
"""How names end of weights that no layout computes with."""


def read_weights(
    folder: Path, device: str | torch.device, dtype: torch.dtype, read_name: Callable[[str], str]
) -> dict[str, Tensor]:
    """Return every weight in a folder.

    Args:
        folder: with one file of weights, or shards and their index.
        device: where the weights go.
        dtype: what they are turned into.
        read_name: called with the name of each in the file; returns the name that it gets.

    Raises:
        FileNotFoundError: if there are no files of weights, or not all.
    """
    if (folder / WEIGHTS_FILE).is_file():
        files = [WEIGHTS_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
    else:
        raise FileNotFoundError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: save the model as safetensors, as transformers does"
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / INDEX_FILE} names {file}, which is not there: download all the shards")
        with safe_open(folder / file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (the handle is not a mapping)
                if not name.endswith(UNUSED):
                    weights[read_name(name)] = tensors.get_tensor(name).to(dtype)
    return weights


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Write one file, or shards with an index; nothing of an older save is left.

    Args:
        folder: where the files go.
        weights: names on disk and weights, on the CPU and contiguous.
        max_shard_bytes: size from which a new file is begun.

    Returns:
        The first weight's type.
    """
    # A loaded model may still be reading the old file, so that file must not be written to: replace it whole.
    stale = {*folder.glob("model*.safetensors"), *folder.glob(INDEX_FILE)}
    dtypes: list[torch.dtype] = []
    names_of: list[list[str]] = []
    num_bytes = 0
    for number, shard in enumerate(_fill_shards(weights, max_shard_bytes)):
        save_file(shard, folder / f"{number}.partial", metadata={"format": "pt"})
        dtypes += [weight.dtype for weight in shard.values()]
        num_bytes += sum(weight.nbytes for weight in shard.values())
        names_of.append(list(shard))
    for file in stale:
        file.unlink()
    count = len(names_of)
    files = [WEIGHTS_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for number, file in enumerate(files):
        (folder / f"{number}.partial").replace(folder / file)
    if count > 1:
        index = {
            "metadata": {"total_size": num_bytes},
            "weight_map": {name: file for file, names in zip(files, names_of, strict=True) for name in names},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtypes[0]


def _fill_shards(weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield weights by name, as many at a time as have room in one file; one that has none is alone."""
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, weight in weights:
        if shard and shard_bytes + weight.nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = weight
        shard_bytes += weight.nbytes
    yield shard
