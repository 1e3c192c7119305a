"""JupyterLab in a browser: open a notebook, run its cells, read what a person sees, take a picture of it.

As a script it takes the pictures of the README anew:

    python tests/lab_browser.py docs            # every picture of PICTURES, into this folder
    python tests/lab_browser.py docs two_ranks  # one of them
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import nbformat
from lab_server import LAB_FLAGS, fetch, served
from nbformat import v4
from playwright.sync_api import Locator, Page, ViewportSize, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WINDOW: ViewportSize = {"width": 1060, "height": 760}
SHARPNESS = 1.5
"""Pixels of a picture for each of the window, in both directions."""
HIGH = 3000
"""Higher than any of these notebooks."""
OPEN_S = 90.0
CELL_S = 120.0

PICTURES: dict[str, list[str]] = {
    "two_ranks": [
        "%load_ext vlmcourse",
        "# **Two ranks, one model.** Each rank trains on its own half of the batch; losses are those of one process.",
        """%%torchrun -n 2 --out loss
from vlmcourse.config import parse_config
from vlmcourse.plots import plot_training
from vlmcourse.train.trainer import Trainer

settings = {"train": {"num_steps": 60, "micro_batch_size": 16, "log_every": 2},
            "optimizer": {"lr_vision": 2e-3, "lr_projector": 2e-3, "lr_language": 2e-3},
            "run": {"output_dir": "runs"}, "parallel": {"strategy": "fsdp"}}
trainer = Trainer(parse_config(settings))
weights = list(trainer.model.parameters())
num_local, num_all = sum(w.to_local().numel() for w in weights), sum(w.numel() for w in weights)
print(f"rank {rank} of {world_size} on {device} holds {num_local:,} of {num_all:,} weights")
result = trainer.fit()
loss = result.loss_last
plot_training(result.history)""",
        """print(f"the notebook has rank 0's loss: {loss:.3f} nats")""",
    ],
    "hang": [
        "%load_ext vlmcourse",
        "# **A rank that never comes.** Rank 0 waits in a collective; a person interrupts the cell.",
        """%%torchrun -n 2
import time, torch, torch.distributed as dist

losses = torch.zeros(3)
for step in range(3):
    losses[step] = 1.0 / (step + 1) + rank
    if step == 2 and rank == 1:
        print("rank 1 looks for its next file ...")
        time.sleep(600)
    dist.all_reduce(losses)
    print(f"step {step}: mean loss {losses[step] / 2:.2f}")""",
    ],
}
"""Name of the picture: the cells of its notebook; text that begins with `# **` is Markdown."""
HANGS = {"hang": "rank 1 looks for its next file"}
"""The last cell of these prints this, then hangs, and is interrupted."""


def is_text(cell: str) -> bool:
    """Whether a cell of `PICTURES` is Markdown."""
    return cell.startswith("# **")


def find_browser() -> str | None:
    """Return the program of an installed Chromium; None where there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class LabNotebook:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @property
    def cells(self) -> Locator:
        """All cells, in order."""
        return self.page.locator(".jp-Notebook .jp-Cell")

    def run(self, number: int) -> None:
        """Run a cell, counted from 0; does not wait for its end."""
        self.cells.nth(number).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Control+Enter")

    def output(self, number: int) -> str:
        """Return the text that is shown below a cell."""
        return "\n".join(self.cells.nth(number).locator(".jp-OutputArea-output").all_inner_texts())

    def pictures(self, number: int) -> int:
        """Return how many pictures are shown below a cell."""
        return self.cells.nth(number).locator(".jp-OutputArea-output img").count()

    def wait_for_text(self, number: int, text: str) -> None:
        """Wait until a text is shown below a cell."""
        found = self.cells.nth(number).locator(".jp-OutputArea-output").filter(has_text=text)
        found.first.wait_for(timeout=CELL_S * 1000)

    def wait_for_end(self, number: int) -> None:
        """Wait until a cell that was run has its number in the brackets before it."""
        prompt = self.cells.nth(number).locator(".jp-InputPrompt")
        end_s = time.monotonic() + CELL_S
        while not prompt.inner_text().strip("[]: ").isdigit():
            if time.monotonic() > end_s:
                raise TimeoutError(f"cell {number} has not ended after {CELL_S:g} s; it shows {self.output(number)!r}")
            self.page.wait_for_timeout(50)

    def interrupt(self) -> None:
        """Interrupt the kernel through its menu."""
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.locator('.lm-Menu-item[data-command="kernelmenu:interrupt"]').click()

    def take_picture(self, path: Path) -> None:
        """Save what the window shows, made as high as the notebook is."""
        self.page.keyboard.press("Escape")
        self.page.mouse.move(5, 5)
        # First in a window that holds everything: JupyterLab takes cells that cannot be seen off the page.
        for height in (HIGH, None):
            bottom = self.cells.last.bounding_box() or {}
            self.page.set_viewport_size(
                {"width": WINDOW["width"], "height": height or int(bottom["y"] + bottom["height"]) + 60}
            )
            self.page.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0; }")
            self.page.wait_for_timeout(1000)
        self.page.screenshot(path=path)


@contextmanager
def open_notebook(
    folder: Path, name: str, cells: list[str], env: Mapping[str, str] | None = None
) -> Iterator[LabNotebook]:
    """Serve a new notebook with JupyterLab and open it in a browser; on leaving the server is asked to end."""
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = v4.new_notebook(metadata={"kernelspec": kernel})
    for cell in cells:
        make_cell = v4.new_markdown_cell if is_text(cell) else v4.new_code_cell
        notebook.cells.append(make_cell(cell.removeprefix("# ") if is_text(cell) else cell))
    nbformat.write(notebook, folder / f"{name}.ipynb")
    # Nothing of the person who runs this: neither settings nor the tabs that were open.
    own = {f"JUPYTER_{kind}_DIR": str(folder / f".{kind.lower()}") for kind in ("CONFIG", "RUNTIME")}
    own |= {f"JUPYTERLAB_{kind}_DIR": str(folder / f".{kind.lower()}") for kind in ("SETTINGS", "WORKSPACES")}
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", *LAB_FLAGS, "--port={port}"]
    with served(command, folder, own | dict(env or {})) as (server, url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=BROWSER_FLAGS)
        try:
            fetch(server, f"{url}/api/status?token=test")
            page = browser.new_page(viewport=WINDOW, device_scale_factor=SHARPNESS)
            page.goto(f"{url}/lab/tree/{name}.ipynb?token=test", timeout=OPEN_S * 1000)
            page.locator(".jp-NotebookPanel-toolbar").wait_for(timeout=OPEN_S * 1000)
            page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=OPEN_S * 1000)
            page.keyboard.press("Control+b")  # the file browser takes a quarter of the window
            yield LabNotebook(page)
        finally:
            browser.close()
            server.terminate()
            server.wait(timeout=60)


def take_picture(name: str, path: Path) -> None:
    """Run the notebook of a picture and save what it looks like."""
    cells = PICTURES[name]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        open_notebook(Path(folder), name, cells) as notebook,
    ):
        for number in [number for number, cell in enumerate(cells) if not is_text(cell)]:
            notebook.run(number)
            if name in HANGS and number == len(cells) - 1:
                notebook.wait_for_text(number, HANGS[name])
                notebook.page.wait_for_timeout(1000)
                notebook.interrupt()
            notebook.wait_for_end(number)
        notebook.take_picture(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Take the pictures of the README anew.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(PICTURES))
    options = parser.parse_args()
    for picture in options.names:
        take_picture(picture, options.folder / f"{picture}.png")
