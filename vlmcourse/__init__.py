"""Distributed training of vision-language models: the package under the course notebooks.

Importing it does no work; `%load_ext vlmcourse` in a notebook registers the `%%torchrun` magic.
"""

__version__ = "0.1.0"


def load_ipython_extension(ipython: object) -> None:
    """Register the course's magics (called by `%load_ext vlmcourse`)."""
    from vlmcourse.notebook.magic import register

    register(ipython)
