"""Writes a chat template as Ollama's: its own are programs for Go, and it knows jinja's by heart only.

Pieces between the messages of rendered chats are the template, if other chats put together of them equal what
the template makes. Templates with tools are left to Ollama, which has its own for the usual ones.
Format: https://docs.ollama.com/modelfile (TEMPLATE with .System, .Prompt and .Response).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qconvert.checkpoint.dialogue import dialogue_of
from qconvert.checkpoint.open import Checkpoint
from qconvert.errors import QConvertError
from qconvert.formats.tokenizers.prompts import Dialogue

_ROLES = {"s": "system", "u": "user", "a": "assistant"}
_CHATS = ("su", "u", "uau", "suau")  # up to the assistant's turn


@dataclass(frozen=True, slots=True)
class Turns:
    """What is written before and after the texts of system and user, and after those of the assistant."""

    system: tuple[str, str]
    user: tuple[str, str]
    end: str

    def modelfile(self) -> str:
        """The lines TEMPLATE and PARAMETER of a Modelfile."""
        system = "{{ if .System }}" + "{{ .System }}".join(self.system) + "{{ end }}"
        prompt = "{{ if .Prompt }}" + "{{ .Prompt }}".join(self.user) + "{{ end }}"
        stop = self.end.strip()
        plain = stop and "\n" not in stop and "\\" not in stop
        lines = f'TEMPLATE """{system}{prompt}{{{{ .Response }}}}{self.end}"""\n'
        return lines + (f'PARAMETER stop "{stop}"\n' if plain else "")


def turns_of(checkpoint: Checkpoint) -> Turns | None:
    """The turns of a checkpoint's chat template; None without one, with tools, or of another structure."""
    try:
        dialogue = dialogue_of(checkpoint)
        return _turns(dialogue) if dialogue.has_template and not dialogue.has_tools else None
    except QConvertError:
        return None


def _turns(dialogue: Dialogue) -> Turns | None:
    texts = _rendered(dialogue, _CHATS)
    start = dialogue.special_text("bos")  # llama.cpp puts it before every prompt
    made = {chat: (text or "").removeprefix(start) for chat, text in zip(_CHATS, texts, strict=True)}
    cut, begun = _pieces(made["uau"], "uau"), _pieces(made["su"], "su")
    if cut is None or begun is None:
        return None
    first, prompted, ended, _ = cut
    if not ended.endswith(first) or not begun[1].endswith(first):
        return None
    system = begun[0], begun[1].removesuffix(first)
    turns = Turns(system, (first, prompted), ended.removesuffix(first))
    if any(odd in piece for piece in (*system, *turns.user, turns.end) for odd in ("{{", '"')):
        return None
    return turns if all(_joined(turns, chat) == made[chat] for chat in _CHATS) else None


def _text(chat: str, at: int) -> str:
    return f"text{chat[at]}{at}end"


def _rendered(dialogue: Dialogue, chats: Sequence[str]) -> list[str | None]:
    messages = [
        [{"role": _ROLES[role], "content": _text(chat, at)} for at, role in enumerate(chat)] for chat in chats
    ]
    return dialogue.render_finished([{"messages": each, "add_generation_prompt": True} for each in messages])


def _pieces(text: str | None, chat: str) -> list[str] | None:
    """What is around the texts of a chat; None where one is not there once, in its turn."""
    found: list[str] = []
    for at in range(len(chat)):
        before, middle, text = (text or "").partition(_text(chat, at))
        if not middle or _text(chat, at) in text:
            return None
        found.append(before)
    return [*found, text or ""]


def _joined(turns: Turns, chat: str) -> str:
    around = {"s": turns.system, "u": turns.user, "a": ("", turns.end)}
    return "".join(_text(chat, at).join(around[role]) for at, role in enumerate(chat))
