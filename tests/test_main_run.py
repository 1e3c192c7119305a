"""The main run of the README: the tiny model learns on two ranks, from the command as written."""

import json
import subprocess

import pytest
from readme import ROOT, environment, shell_commands


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_the_main_run_answers_95_percent_of_heldout_questions(tmp_path):
    line = next(command for command in shell_commands() if command.startswith("vlmcourse train"))
    command = [*line.split(), "--json", "--set", f"run.output_dir={json.dumps(str(tmp_path))}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exact_match"] >= 0.95
    assert result["loss_last"] < 0.1 < 3 < result["loss_first"]
    assert (result["strategy"], result["world_size"]) == ("ddp", 2)
    assert result["tokens_per_s"] > 0 and result["peak_bytes"] > 0 and result["seconds"] > 0
    assert (tmp_path / "tiny" / "training.png").stat().st_size > 10_000
