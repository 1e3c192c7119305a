"""Tab completion of the magics' lines, as a real kernel answers it."""

from collections.abc import Iterator

import pytest
from notebook_kernel import Kernel, loaded_kernel

from vlmcourse.notebook.completion import list_completions
from vlmcourse.notebook.options import FLAGS
from vlmcourse.notebook.subcommands import Subcommand

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        assert kernel.run("%reload_ext vlmcourse\nlearning_rate, list_of_steps, _hidden = 1, 2, 3").error == ""
        yield kernel


def complete(kernel: Kernel, text: str) -> list[str]:
    """Return what each answer would make of the whole text; `|` is the cursor."""
    before, _, after = text.partition("|")
    reply = kernel.client.complete(before + after, len(before), reply=True, timeout=60)["content"]  # type: ignore[call-arg]
    return [before[: reply["cursor_start"]] + match for match in reply["matches"]]


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("%%torchrun --la|\nprint(1)", ["%%torchrun --launcher"]),
        ("%%torchrun -n 2 --max|", ["%%torchrun -n 2 --max-restarts"]),
        ("%%torchrun --launcher |", [f"%%torchrun --launcher {how}" for how in ("fork", "direct", "elastic")]),
        ("%%torchrun --launcher e|\nx = 1", ["%%torchrun --launcher elastic"]),
        ("%%torchrun --in l|", ["%%torchrun --in learning_rate", "%%torchrun --in list_of_steps"]),
        ("%%torchrun --in list_of_steps,l|", ["%%torchrun --in list_of_steps,learning_rate"]),
        ("%%torchrun --out l|\nloss, lr = f()\nfor x in y:\n    last: int = 2", None),
        ("%torchrun --s|", ["%torchrun --show"]),
    ],
)
def test_a_kernel_completes_flags_values_and_names(kernel: Kernel, typed: str, expected: list[str] | None) -> None:
    found = complete(kernel, typed)
    if expected is None:
        assert sorted(found) == [f"%%torchrun --out {name}" for name in ("last", "loss", "lr")]
    else:
        assert found == expected


@pytest.mark.notebook
def test_all_flags_are_offered_and_other_lines_are_left_alone(kernel: Kernel) -> None:
    assert complete(kernel, "%%torchrun |") == [f"%%torchrun {flag}" for flag in FLAGS]
    assert "%%torchrun\nlearning_rate" in complete(kernel, "%%torchrun\nlearning_r|")
    assert any(text.endswith("%%torchrun") for text in complete(kernel, "%%torchr|"))
    assert not any("--launcher" in text for text in complete(kernel, "x = 1\n%%torchrun --la|"))


def test_subcommands_come_from_the_table_with_their_flags() -> None:
    table = {name: Subcommand(lambda rest: None, "", flags=("-n",)) for name in ("start", "status", "stop")}

    def offered(before: str) -> list[str]:
        return list_completions(before, 0, before, [], table)[1]

    assert offered("%torchrun ") == ["start", "status", "stop"]
    assert offered("%torchrun sta") == ["start", "status"]
    assert offered("%torchrun start -") == ["-n"]
    assert offered("%torchrun nonsense -") == offered("%torchru") == offered("torchrun s") == []
