"""`make demo`: trains, runs chapter 1 from top to bottom, and grades, in one table."""

import json
import re
import subprocess

import pytest
from readme import ROOT, environment


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(660)
def test_demo_trains_runs_the_chapter_and_grades():
    command = ["vlmcourse", "demo", "--json", "--steps", "40"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    parts = {part["name"]: part for part in json.loads(done.stdout.splitlines()[-1])["parts"]}
    assert all(part["good"] for part in parts.values()), parts
    assert {"loss before -> after", "held-out exact match", "speed", "ch01_parallelism"} <= set(parts)
    earned, most = re.findall(r"\d+", parts["reference answers"]["seen"])
    assert earned == most and int(most) > 0
    # nbgrader gives an unchanged written answer its zero without asking a person, so a blank counts out of more points.
    earned, most_of_blank = re.findall(r"\d+", parts["blank submission"]["seen"])
    assert earned == "0" and int(most_of_blank) >= int(most)
