"""What the labs' helpers do with arguments that cannot be: each is refused by name, before anything runs."""

from __future__ import annotations

import pytest

from vlmcourse.labs import ch03, ch04
from vlmcourse.presets import get_model


@pytest.mark.parametrize("policy", ["sqrt", "every:2", "selective", "ful", None])
@pytest.mark.parametrize("tower", ["vision", "language"])
def test_bytes_of_towers_are_counted_for_the_policies_that_the_formula_knows(tower: str, policy: str) -> None:
    """Another one's answer would be that of none."""
    policies = {"vision": "full", "language": "none"} | {tower: policy}
    with pytest.raises(ValueError, match=rf"policies\['{tower}'\] = .*none and full"):
        ch04.tower_bytes(get_model("tiny"), 1, 5, policies)


def test_bytes_of_towers_without_a_policy_for_each_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policies\['language'\] = None"):
        ch04.tower_bytes(get_model("tiny"), 1, 5, {"vision": "full", "langauge": "full"})


@pytest.mark.parametrize("counts", [(0, -5), (-1, 5), (1.5, 5), (1, True)])
def test_bytes_of_fewer_than_no_tiles_or_tokens_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be a whole number, 0 or greater"):
        ch04.tower_bytes(get_model("tiny"), *counts, {"vision": "none", "language": "none"})
    alone = ch04.tower_bytes(get_model("tiny"), 0, 5, {"vision": "none", "language": "full"})
    assert alone["vision"] == 0 < alone["language"], "a sample without a picture is no mistake"


def test_log_of_zero_is_planted_in_the_formats_that_it_names() -> None:
    with pytest.raises(ValueError, match="precision = 'fp8': .* one of fp16, bf16, fp32"):
        ch03.plant_log_of_zero("fp8")
