"""What two ranks do for `test_dryrun.py`: real steps, watched as dry runs are. Usage: dryrun_worker.py FOLDER.

The first step makes the optimizer's state, in the second DDP orders its buckets anew; two more are watched.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import Batch
from vlmcourse.dryrun.ledger import PlaceLedger
from vlmcourse.monitor.ledger import StepLedger, measure_ledger
from vlmcourse.parallel.counting import count_calls
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train.trainer import Trainer

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "single", "tp": 2},
}


def config_of(name: str, folder: str = "runs") -> TrainConfig:
    table = {
        "run": {"output_dir": folder, "name": name},
        "data": {"num_train_samples": 64, "num_eval_samples": 8},
        "train": {"num_steps": 9, "micro_batch_size": 4, "log_every": 9},
        "parallel": CASES[name],
    }
    return parse_config(table)


def measure(name: str, folder: str, ranks: Ranks) -> dict[str, Any]:
    trainer = Trainer(config_of(name, folder), ranks, show_progress=False)
    trainer.train_step()
    trainer.train_step()
    state: list[Any] = []
    trainer.before_update.append(lambda t: state.append(dataclasses.asdict(measure_ledger(t.model, t.optimizer))))
    load, first = trainer.load_step, trainer.step
    batch = load(first)[0]

    def load_again(step: int) -> list[Batch]:
        return load(first)  # the same samples in both

    trainer.load_step = load_again
    ledger = PlaceLedger(trainer.model, trainer.optimizer, of_fakes=False)
    plain = StepLedger(trainer.model, trainer.optimizer)
    for watched in (ledger, plain):
        with watched:
            trainer.train_step()
    peak = ledger.record.peak()
    calls = count_calls(call for _, call in ledger.record.calls)
    return {
        "size": [*batch.input_ids_BS.shape, batch.pixel_values_ICHW.shape[0]],
        "state": state[0],
        "peak": {"phase": peak.phase, "live_bytes": dict(peak.live_bytes)},
        "plain_peak_bytes": plain.peak().total_bytes,
        "flops": sum(ledger.record.flops),
        "calls": {kind: [count.calls, count.payload_bytes] for kind, count in calls.items()},
    }


def main(folder: Path) -> None:
    ranks = init_ranks(60)
    found = {name: measure(name, str(folder / "runs"), ranks) for name in CASES}
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
