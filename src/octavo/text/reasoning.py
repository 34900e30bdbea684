"""What a model thinks aloud, apart from what it answers."""

from __future__ import annotations

from octavo.errors import RequestError


class ReasoningStream:
    """Owns the end of an output that may yet turn out to be a mark.

    Promises: what :meth:`feed` and :meth:`finish` gave, joined, depends on the text alone, not on how it was cut.
    Reasoning is what stands between ``start``, if that is the first thing in the output, and ``end``; all else is
    content.  White space next to the marks goes with them; nothing else is lost.

    ``inside``: the prompt has opened the reasoning already, as some chat templates do.  Reasoning that is never closed
    stays reasoning.
    """

    def __init__(self, start: str = "<think>", end: str = "</think>", inside: bool = False) -> None:
        if not start or not end:
            raise RequestError("reasoning: both marks must be texts that are not empty", "reasoning")
        self._start, self._end = start, end
        self._inside = inside
        self._begun = False  # whether anything but white space has come
        self._ended = False  # whether all that comes is content
        self._trim = False  # whether white space that comes now stands next to a mark
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._inside and not self._ended

    def feed(self, text: str) -> tuple[str, str]:
        """New (reasoning, content)."""
        self._held += text
        reasoning = ""
        if not self._ended:
            if not self._begun and not self._open():
                return "", ""
            if self._inside:
                reasoning = self._reasoning()
        return reasoning, self._content() if self._ended else ""

    def finish(self) -> tuple[str, str]:
        """The rest, once no text follows."""
        held, self._held = self._held, ""
        return (held, "") if self._inside and not self._ended else ("", held)

    def _open(self) -> bool:
        """Look for the start mark; False while it may still be coming."""
        head = self._held.lstrip()
        if len(head) < len(self._start) and self._start.startswith(head):
            return False
        self._begun = True
        if head.startswith(self._start):
            self._held = head[len(self._start) :]
            self._inside = True
        elif not self._inside:
            self._ended = True
        self._trim = self._inside
        return True

    def _reasoning(self) -> str:
        """Reasoning up to the end mark, or up to what may begin it."""
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        at = self._held.find(self._end)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(self._end) :]
            self._ended = self._trim = True
            return text
        text = self._held[: len(self._held) - _overlap(self._held, self._end)].rstrip()
        self._held = self._held[len(text) :]
        return text

    def _content(self) -> str:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        text, self._held = self._held, ""
        return text


def _overlap(text: str, mark: str) -> int:
    """How long the longest end of ``text`` is that begins ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
