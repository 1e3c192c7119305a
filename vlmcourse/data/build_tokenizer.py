"""Builds the small tokenizer that ships in the package for the tiny model.

Run `python -m vlmcourse.data.build_tokenizer` to write `builtin_tokenizer/` again; a test holds the shipped files equal
to what this builds. Ids 0 to 5 are the control tokens. The 128 ASCII characters follow, so that every ASCII text can be
written and read back, and then words and phrases of the digit questions, each with and without the space before it, so
that sequences stay short. Digits stay one token each.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from vlmcourse.data.questions import PLURALS

FOLDER = Path(__file__).parent / "builtin_tokenizer"
CONTROL_TOKENS = ("<pad>", "<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>")
ROLES = ("user\n", "assistant\n")
WORDS = (
    *("read them", "what is their sum?", "how many", "which digit is", "on the", "at the"),
    *("which", "what", "how", "many", "read", "them", "digit", "is", "on", "at", "the", "their", "sum"),
    *("left", "right", "top", "bottom"),
    *PLURALS,
)
_WORD_SCORE, _CHARACTER_SCORE, _NEVER = -1.0, -10.0, -1e6


def build_builtin_tokenizer() -> Tokenizer:
    """Return the tokenizer; the same one on every call.

    It is a unigram model (Kudo 2018, arXiv 1804.10959) whose scores are chosen rather than trained: a text is cut into
    as few pieces as possible, since a word scores better than its characters.
    """
    scores = [(token, _NEVER) for token in CONTROL_TOKENS]  # text never turns into a control token
    scores += [(chr(code), _CHARACTER_SCORE) for code in range(128)]
    scores += [(word, _WORD_SCORE) for word in ROLES]
    scores += [(space + word, _WORD_SCORE) for word in WORDS for space in ("", " ")]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=None, byte_fallback=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


def build_hf_config() -> dict[str, object]:
    """Return what `tokenizer_config.json` holds, so that transformers can load the folder too."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "extra_special_tokens": [token for token in CONTROL_TOKENS if token not in ("<pad>", "<|im_end|>")],
        "clean_up_tokenization_spaces": False,
    }


def write_builtin_tokenizer(folder: Path = FOLDER) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build_builtin_tokenizer().save(str(folder / "tokenizer.json"))
    text = json.dumps(build_hf_config(), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_builtin_tokenizer()
