"""Which parts of a model FSDP gathers and frees together."""

import pytest
from parity import small_shape
from torch import nn

from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.fsdp import find_units


@pytest.mark.parametrize("tied", [True, False])
def test_units_are_blocks_and_the_embedding_and_output_matrix_where_they_are_two(tied: bool) -> None:
    model = build_model(small_shape(tied), seed=0)
    names = {id(module): name for name, module in model.named_modules()}
    units = [names[id(unit)] for unit in find_units(model)]
    blocks = [f"{tower}.blocks.{i}" for tower in ("vision", "language") for i in range(2)]
    assert units == blocks + ([] if tied else ["language.embedding", "language.lm_head"])


def test_a_model_without_blocks_is_refused_and_told_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no blocks in this Sequential.*called `blocks`, or call fully_shard"):
        find_units(model)
