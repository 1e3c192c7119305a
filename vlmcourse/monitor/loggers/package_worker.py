"""The process in which wandb or trackio runs: rows in on standard input, its state out on standard output.

    python -m vlmcourse.monitor.loggers.package_worker wandb

Enters: JSON lines, the first with the run and the options, then one a row, then `{"close": true}`. Leaves: lines with
`started`, `finished` or `failed` and the reason; nothing else, since what the package prints is thrown away. Input that
ends without a `close` means that the run was killed: the package gets its time limit to finish, then this process ends.

A resumed run goes on in the same run of the package, whose number is kept in the run's folder. Steps that were logged
before and are made again after a resume from a checkpoint are not logged again: the package keeps what it has.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vlmcourse.monitor.whole_file import replace_file


class Backend(Protocol):
    """What gives rows to a package."""

    def start(self, run: Mapping[str, Any], options: Mapping[str, Any], run_id: str) -> str:
        """Begin or go on with the run of this number; return where it is kept."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        ...

    def finish(self, exit_code: int) -> None:
        """Finish the run; the code is 0 where the training run closed it."""
        ...


class WandbBackend:
    """Weights & Biases, online or offline (`wandb sync runs/NAME/wandb/offline-run-*` sends that later)."""

    def start(self, run: Mapping[str, Any], options: Mapping[str, Any], run_id: str) -> str:
        """Begin or go on with the run of this number."""
        import wandb

        is_online = options["mode"] == "online"
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=options["timeout_s"],
            x_disable_stats=True,  # the run measures its hardware itself
        )
        self._run = wandb.init(
            project=options["project"],
            name=run["name"],
            id=run_id,
            dir=run["folder"],
            config={**run["config"], "hardware": run["hardware"]},
            mode=options["mode"],
            resume="allow" if is_online else None,
            settings=settings,
        )
        return self._run.url or run["folder"]

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        """Finish the run, which sends what is left."""
        self._run.finish(exit_code=exit_code)


class TrackioBackend:
    """Trackio, on this machine: `trackio show --project vlmcourse`."""

    def start(self, run: Mapping[str, Any], options: Mapping[str, Any], run_id: str) -> str:
        """Begin or go on with the run of this number, which is a part of its name."""
        import trackio  # pyright: ignore[reportMissingImports]  (not a dependency: it takes an older pillow)

        self._package = trackio
        config = {**run["config"], "hardware": run["hardware"]}
        name = f"{run['name']}-{run_id}"
        trackio.init(
            project=options["project"], name=name, config=config, resume="allow", embed=False, auto_log_gpu=False
        )
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        self._package.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        """Finish the run; trackio has no word for one that was killed."""
        self._package.finish()


BACKENDS: dict[str, type[Backend]] = {"wandb": WandbBackend, "trackio": TrackioBackend}


class KeptRun:
    """Number and last logged step of a package's run, in a file of the training run's folder."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        """Read the file where the run goes on, or choose a new number."""
        self._path = path
        kept = json.loads(path.read_text(encoding="utf-8")) if goes_on and path.is_file() else {}
        self.run_id: str = kept.get("run_id") or secrets.token_hex(4)
        self.last_step: int = kept.get("last_step", -1)

    def note(self, step: int) -> None:
        """Keep the number, and that rows up to this step are logged."""
        self.last_step = step
        replace_file(self._path, json.dumps({"run_id": self.run_id, "last_step": step}))


def serve(backend: Backend, name: str, messages: queue.Queue[dict[str, Any] | None], tell: Any) -> None:
    """Give rows to a package until there are no more.

    Args:
        backend: of the package.
        name: the package's.
        messages: the run, rows, `close`; None for input that ended without it.
        tell: called with each thing to say.
    """
    first = messages.get()
    if first is None:
        return
    run = first["run"]
    kept = KeptRun(Path(run["folder"]) / f"{name}_run.json", goes_on=run["keep_until_step"] is not None)
    where = backend.start(run, first["options"], kept.run_id)
    kept.note(kept.last_step)
    tell(started=where)
    while (message := messages.get()) is not None and "row" in message:
        row = message["row"]
        if row["step"] > kept.last_step:
            numbers = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
            backend.log(numbers, row["step"])
            kept.note(row["step"])
    backend.finish(exit_code=1 if message is None else 0)
    tell(finished=True)


def main(name: str) -> None:
    """Serve one package, then leave without waiting for its threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the training run, which then closes its loggers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ |= {"WANDB_SILENT": "true", "PYTHONWARNINGS": "ignore"}

    def tell(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=[messages], daemon=True).start()
    code = 0
    try:
        serve(BACKENDS[name](), name, messages, tell)
    except Exception as error:  # the boundary of this process: whatever the package raised goes to the parent
        code = 1
        try:
            tell(failed=" ".join(str(error).split()) or type(error).__name__)
        except OSError:
            code = 2  # nobody listens any more
    os._exit(code)  # a package's exit hooks may wait for a network


def _read(messages: queue.Queue[dict[str, Any] | None]) -> None:
    """Queue what comes in; when it ends, leave at the latest after the time limit."""
    limit_s, is_closed = 30.0, False
    for line in sys.stdin:
        message = json.loads(line)
        limit_s = message.get("options", {}).get("timeout_s", limit_s)
        is_closed = "close" in message
        messages.put(message)
    if not is_closed:
        messages.put(None)
    last_call = threading.Timer(limit_s, os._exit, args=[1])
    last_call.daemon = True
    last_call.start()


if __name__ == "__main__":
    main(sys.argv[1])
