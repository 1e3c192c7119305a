"""`vlmcourse export RUN --out FOLDER`: a run's checkpoint, of whatever strategy, as a Hugging Face folder.

Enters: the folder of a run or of one of its checkpoints. Leaves: config.json, safetensors and the tokenizer in a new
folder that transformers and `model.hf_folder` read; with `--layout internvl_chat` one in the original layout. One
process on CPU does it, on however many ranks the run was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DTYPES = ("saved", "fp32", "bf16")
LAYOUTS = ("transformers", "internvl_chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument(
        "run_folder", metavar="RUN", type=Path, help="folder of a run (its latest checkpoint) or of one"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="saved", help="of the weights (default: as they were saved)")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="its tokenizer (default: the run's own)")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="transformers",
        help="transformers' InternVLForConditionalGeneration (default), or the original InternVLChatModel",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="with internvl_chat: keep this folder's config.json and code (default: the one the run began with)",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Export, and say what was written; 1 where a file of the checkpoint is damaged.

    Raises:
        ValueError: if the checkpoint or the new folder cannot be used; see `export_hf_folder`.
        FileNotFoundError: if there is no checkpoint, or not all of it.
    """
    from vlmcourse.train.export import as_data, describe, export_hf_folder  # with torch, which --help does without

    try:
        exported = export_hf_folder(
            args.run_folder,
            args.out,
            dtype=args.dtype,
            tokenizer=args.tokenizer,
            layout=args.layout,
            like=args.like,
        )
    except RuntimeError as error:
        print(f"vlmcourse export: {error}", file=sys.stderr)
        return 1
    print(as_data(exported) if args.json else describe(exported), flush=True)
    return 0
