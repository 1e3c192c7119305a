r"""Text to token ids and back, and conversations to ids with labels.

Enters: `Message`s and how many tokens each picture takes. Leaves: token ids in ChatML turns
(`<|im_start|>user\n ... <|im_end|>\n`), each `<image>` marker replaced by `<img>`, one `<IMG_CONTEXT>` for every
visual token and `</img>`, and labels, shifted by one, that supervise the assistant's text and the end of its turn
alone. The tokenizer is the small one in the package or that of any Hugging Face folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vlmcourse.data.samples import IGNORE_LABEL, IMAGE_MARKER, Message
from vlmcourse.planner.hf_chat_config import CHAT_MODEL_TYPE
from vlmcourse.planner.hf_folder import read_hf_config

BUILTIN_FOLDER = Path(__file__).parent / "builtin_tokenizer"
IMAGE_TOKENS = ("<IMG_CONTEXT>", "<image>", "<|image_pad|>")
"""Image tokens looked for in a Hugging Face folder that does not name its own, in this order."""
_CACHED_TEXTS, _CACHED_CHARACTERS = 20_000, 200


class CourseTokenizer:
    """A tokenizer that knows ChatML turns and image tokens; build one with `load_tokenizer`."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        image_token: str,
        end_of_turn: str,
        pad_token: str,
        image_brackets: tuple[str, str] = ("<img>", "</img>"),
        prefix_ids: Sequence[int] = (),
        ascii_only: bool = False,
    ) -> None:
        """Wrap `backend`.

        Args:
            backend: the tokenizer; its truncation and padding are switched off.
            image_token: the token whose embedding an image feature replaces.
            end_of_turn: the token that ends a turn, and generation.
            pad_token: the token that fills short rows.
            image_brackets: what stands before and after the image tokens of one picture.
            prefix_ids: ids that begin every conversation (a beginning-of-text token, where the model has one).
            ascii_only: refuse other text with a message, since `backend` cannot write it.
        """
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # "<|im_end|>" in a user's text is text, not the end of the turn
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.image_token_id: int = vocabulary[image_token]
        self.eos_token_id: int = vocabulary[end_of_turn]
        self.pad_token_id: int = vocabulary[pad_token]
        self._ascii_only = ascii_only
        self._cache: dict[str, tuple[int, ...]] = {}
        names = (image_token, end_of_turn, "<|im_start|>")
        self._control_ids = frozenset(vocabulary[name] for name in names if name in vocabulary)
        self._start = self._control("<|im_start|>", vocabulary)
        self._before_image, self._after_image = (self._control(token, vocabulary) for token in image_brackets)
        self._prefix = list(prefix_ids)
        self._newline = self.encode("\n")

    def _control(self, token: str, vocabulary: dict[str, int]) -> list[int]:
        """Return the id of `token`, or of its pieces where the vocabulary does not have it."""
        return [vocabulary[token]] if token in vocabulary else self.encode(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; control tokens written in it are taken as text.

        Raises:
            ValueError: if the tokenizer cannot write the text, or can only write it with a control token.
        """
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encode(text)
            if len(text) <= _CACHED_CHARACTERS and len(self._cache) < _CACHED_TEXTS:
                self._cache[text] = ids
        return list(ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._ascii_only and not text.isascii():
            bad = next(character for character in text if not character.isascii())
            raise ValueError(
                f"The builtin tokenizer cannot write {bad!r} in {_short(text)}: it knows ASCII characters only; "
                "set data.tokenizer to a Hugging Face tokenizer folder"
            )
        ids = tuple(self._backend.encode(text, add_special_tokens=False).ids)
        if not self._control_ids.isdisjoint(ids):
            found = self._backend.id_to_token(next(i for i in ids if i in self._control_ids))
            raise ValueError(f"The text {_short(text)} contains the control token {found!r}: take it out of the data")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, without control tokens unless `skip_special_tokens` is False."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Return the text that a model generated: everything before the first end of turn."""
        ids = [int(i) for i in ids]
        if self.eos_token_id in ids:
            ids = ids[: ids.index(self.eos_token_id)]
        return self.decode(ids, skip_special_tokens=False)

    def encode_conversation(
        self, messages: Sequence[Message], tokens_per_image: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a whole conversation and its shifted labels.

        Args:
            messages: turns, the last one the assistant's.
            tokens_per_image: visual tokens of each picture, in the order of the `<image>` markers.

        Returns:
            Two lists of equal length. `labels[s]` is `ids[s + 1]` where that is part of an assistant's text or the end
            of its turn, and `IGNORE_LABEL` everywhere else.

        Raises:
            ValueError: if the markers and the pictures differ in number, or no assistant's turn comes last.
        """
        if not messages or messages[-1].role != "assistant":
            raise ValueError("A conversation to train on must end with the assistant's turn: there is nothing to learn")
        ids, supervised = self._turns(messages, tokens_per_image)
        targets = [i if learned else IGNORE_LABEL for i, learned in zip(ids, supervised, strict=True)]
        return ids, [*targets[1:], IGNORE_LABEL]

    def encode_prompt(self, messages: Sequence[Message], tokens_per_image: Sequence[int]) -> list[int]:
        """Return the ids up to the opened assistant's turn, for generation.

        Args:
            messages: turns; an assistant's turn at the end is the answer to be generated and is left out.
            tokens_per_image: visual tokens of each picture, in the order of the `<image>` markers.

        Raises:
            ValueError: if the markers and the pictures differ in number, or no user's turn comes last.
        """
        asked = messages[:-1] if messages and messages[-1].role == "assistant" else messages
        if not asked or asked[-1].role != "user":
            raise ValueError("A prompt must end with the user's turn, or with the one answer to it")
        ids, _ = self._turns(asked, tokens_per_image)
        return ids + self._newline + self._start + self.encode("assistant\n")

    def _turns(self, messages: Sequence[Message], tokens_per_image: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return the ids of the turns, and for each whether it is learned."""
        markers = sum(message.text.count(IMAGE_MARKER) for message in messages if message.role == "user")
        if markers != len(tokens_per_image):
            raise ValueError(
                f"The conversation has {markers} {IMAGE_MARKER} markers in its user's turns and "
                f"{len(tokens_per_image)} pictures: write one marker for each picture"
            )
        images = iter(tokens_per_image)
        ids, supervised = list(self._prefix), [False] * len(self._prefix)

        def add(new_ids: list[int], learned: bool = False) -> None:
            ids.extend(new_ids)
            supervised.extend([learned] * len(new_ids))

        for i, message in enumerate(messages):
            add((self._newline if i else []) + self._start)
            if message.role == "user":
                first, *rest = f"user\n{message.text}".split(IMAGE_MARKER)
                add(self.encode(first))
                for part in rest:
                    add(self._before_image + [self.image_token_id] * next(images) + self._after_image)
                    add(self.encode(part))
                add([self.eos_token_id])
            elif message.role == "assistant":
                add(self.encode("assistant\n"))
                add([*self.encode(message.text), self.eos_token_id], learned=True)
            else:
                raise ValueError(f"A message has the role {message.role!r}: it must be 'user' or 'assistant'")
        return ids, supervised


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def load_tokenizer(name_or_folder: str, *, image_token: str | None = None) -> CourseTokenizer:
    """Return the tokenizer of the package or of a Hugging Face folder; nothing is downloaded.

    Args:
        name_or_folder: `builtin`, or a folder with `tokenizer.json` (or what transformers can turn into one).
        image_token: the token that stands for one visual token. By default the one that the folder names, or the first
            of `IMAGE_TOKENS` in its vocabulary.

    Raises:
        ValueError: if there is no such folder, transformers cannot read it, or it has no image token or end of turn.
    """
    if name_or_folder == "builtin":
        backend = Tokenizer.from_file(str(BUILTIN_FOLDER / "tokenizer.json"))
        return CourseTokenizer(
            backend, image_token="<IMG_CONTEXT>", end_of_turn="<|im_end|>", pad_token="<pad>", ascii_only=True
        )
    return _load_hf(name_or_folder, image_token)


def _load_hf(folder: str, image_token: str | None) -> CourseTokenizer:
    if not Path(folder).is_dir():
        raise ValueError(
            f"data.tokenizer = {folder!r}: there is no such folder; write 'builtin', or the folder of a Hugging Face "
            "tokenizer (names on the hub are not downloaded)"
        )
    try:
        hf = _read_hf(Path(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"data.tokenizer = {folder!r}: transformers cannot read a tokenizer there: {error}") from error
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"data.tokenizer = {folder!r} is a slow tokenizer: save it with its tokenizer.json")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    named = [getattr(hf, name, None) for name in ("context_image_token", "image_token")]
    candidates = [image_token] if image_token else [*(name for name in named if name), *IMAGE_TOKENS]
    found = next((token for token in candidates if token in vocabulary), None)
    if found is None:
        raise ValueError(
            f"data.tokenizer = {folder!r} has no image token (looked for {', '.join(map(repr, candidates))}): name the "
            "one it has with image_token=, or add one with transformers: tokenizer.add_special_tokens("
            "{'additional_special_tokens': ['<IMG_CONTEXT>']}), save the folder, and give the model an embedding for it"
        )
    end_of_turn = "<|im_end|>" if "<|im_end|>" in vocabulary else hf.eos_token
    if not isinstance(end_of_turn, str) or end_of_turn not in vocabulary:
        raise ValueError(
            f"data.tokenizer = {folder!r} has neither '<|im_end|>' nor an eos_token: nothing could end an answer; set "
            "eos_token in its tokenizer_config.json"
        )
    brackets = [getattr(hf, name, None) for name in ("start_image_token", "end_image_token")]
    bos = hf.bos_token if isinstance(hf.bos_token, str) else None
    prefix_ids = [vocabulary[bos]] if bos in vocabulary and vocabulary[bos] in backend.encode("").ids else []
    return CourseTokenizer(
        backend,
        image_token=found,
        end_of_turn=end_of_turn,
        pad_token=hf.pad_token if isinstance(hf.pad_token, str) else end_of_turn,
        image_brackets=(brackets[0] or "<img>", brackets[1] or "</img>"),
        prefix_ids=prefix_ids,
    )


def _read_hf(folder: Path) -> Any:
    """Let transformers read a tokenizer; code in the folder never runs, and nobody is asked whether it may."""
    # These take seconds to import, and the builtin tokenizer does without.
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

    if "AutoTokenizer" in _auto_map(folder / "tokenizer_config.json"):
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                "its class is code in the folder, which is not run, and there is no tokenizer.json: where you trust "
                "that code, make one once with AutoTokenizer.from_pretrained(folder, trust_remote_code=True)."
                "save_pretrained(new_folder), and set data.tokenizer to the new folder"
            )
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    # A model that transformers does not know, with its code in the folder or without, says nothing of its tokenizer.
    is_foreign = (read_hf_config(folder) or {}).get("model_type") == CHAT_MODEL_TYPE
    own = {"config": PreTrainedConfig()} if is_foreign or _auto_map(folder / "config.json") else {}
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **own)


def _auto_map(file: Path) -> Any:
    """Return the classes that a JSON file says are code beside it."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8")).get("auto_map") or {}
    return found if isinstance(found, dict) else {"AutoTokenizer": found}
