"""Ends a text that comes in pieces before the first of some texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StopTexts:
    """Passes text on up to the first of `stops`; what may be the beginning of one is held back until it is
    known not to be.
    """

    stops: Sequence[str]
    found: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        """Returns what of the text so far can be shown, and was not; nothing once a stop is `found`."""
        self._held += text
        begins = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if begins:
            self.found = True
            return self._give(min(begins))
        return self._give(len(self._held) - max((self._begun(stop) for stop in self.stops), default=0))

    def rest(self) -> str:
        """Returns what was held back, at the end of the text."""
        return "" if self.found else self._give(len(self._held))

    def _begun(self, stop: str) -> int:
        """How many characters at the end of what is held begin this stop."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:])), 0)

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given
