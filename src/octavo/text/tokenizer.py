"""The tokenizer of a model, whatever file it came in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, RequestError
from octavo.text.chat import ChatTemplate

# Tokens that end a model's turn.  Files name one EOS; chat models end on these too.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
)


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's file says, in one form for all kinds of files.

    ``encode``: text to ids, special tokens in the text recognised, nothing put around it.  ``raw``: the bytes of an id.
    ``prefix`` and ``suffix``: ids that go around a prompt.  ``strips_space``: the first space of decoded text belongs
    to the tokenizer (SentencePiece with a space prefix).
    """

    size: int
    encode: Callable[[str], list[int]]
    raw: Callable[[int], bytes]
    special: frozenset[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    strips_space: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()
    unk: int | None = None
    pad: int | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Owns the way between text and ids of one model.

    Promises: the ids that Hugging Face's tokenizer of that model gives, BOS included; ``decode`` of ids is the text of
    their bytes, and nothing but bytes that are no UTF-8 becomes a replacement mark, one for each broken character.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos
        self.eos_ids = tuple(dict.fromkeys(vocabulary.eos))
        self.unk_id = vocabulary.unk
        self.pad_id = vocabulary.pad
        self.special_ids = vocabulary.special
        self.strips_space = vocabulary.strips_space
        self.chat_templates = dict(vocabulary.templates)
        checked = [
            ("BOS", self.bos_id),
            ("UNK", self.unk_id),
            ("PAD", self.pad_id),
            *(("EOS", i) for i in self.eos_ids),
        ]
        for name, i in checked:
            if i is not None and not 0 <= i < self.vocab_size:
                raise ModelError(f"tokenizer: the {name} id {i} is outside the vocabulary of {self.vocab_size} tokens.")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file; raises ``ModelError`` naming the key that is missing or wrong."""
        from octavo.text.sources import from_gguf

        return cls(from_gguf(metadata))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face folder: ``tokenizer.json``, or else a SentencePiece ``tokenizer.model``."""
        from octavo.text.sources import from_folder

        return cls(from_folder(Path(path)))

    @property
    def add_bos(self) -> bool:
        return self.bos_id is not None and self.bos_id in self._vocabulary.prefix

    @property
    def add_eos(self) -> bool:
        return bool(self._vocabulary.suffix) and self._vocabulary.suffix[-1] in self.eos_ids

    @property
    def eos_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def chat(self) -> ChatTemplate:
        """The model's chat template with its special tokens; encode what it renders with ``add_special=False``."""
        return ChatTemplate(self.chat_templates, specials=self._vocabulary.named)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of ``text``; with ``add_special``, inside the BOS and EOS that the model's files ask for.

        May be empty (no text and no BOS).  Raises ``RequestError`` for text that is no valid Unicode.
        """
        ids = self._vocabulary.encode(_checked(text))
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special else ids

    def encode_batch(self, texts: Iterable[str], add_special: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special) for text in texts]

    def encode_inside(self, text: str) -> list[int]:
        """Ids of ``text`` as it reads in the middle of other text: without the space that SentencePiece puts first."""
        if not self.strips_space:
            return self.encode(text, add_special=False)
        # A newline takes the prefix; no piece joins it with what follows, unless the model has newline pieces, and
        # then a rarer character does it.
        for mark in ("\n", "\x02"):
            alone, both = self.encode(mark, add_special=False), self.encode(mark + text, add_special=False)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self.encode(text, add_special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``, all at once; equal to what ``Detokenizer`` gives bit by bit."""
        raw, special = self._vocabulary.raw, self.special_ids
        data = b"".join(raw(i) for i in ids if not (skip_special and i in special))
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strips_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the output, as bytes; b"" for an id that names no token."""
        return self._vocabulary.raw(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise RequestError(f"A prompt must be text, not {type(text).__name__}.", field="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds half a surrogate pair at character {error.start}, which is no Unicode.", field="prompt"
        ) from None
    return text
