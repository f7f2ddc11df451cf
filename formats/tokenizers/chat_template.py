"""Renders a chat template in a process of its own.

A template is a program that came with a checkpoint. jinja's sandbox gives it no access to Python, but one
line of it (`'a' * 10**11`) takes all the memory of the process. So this file is run as a script, which
imports nothing of the package: stdin holds {"template", "chats": [the variables of each]}, stdout
{"answers"}, for each chat one of {"text"} and {"error"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache

MAX_BYTES = 512 << 20
MAX_SECONDS = 5
MAX_CHARACTERS = 16 << 20


@cache
def compiled(template: str) -> Callable[..., str]:
    """Returns what renders a template from variables; whatever it raises is raised."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template).render


def limit() -> None:
    """Limits this process's memory and time, where the system can (Windows cannot: its caller waits)."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    except (ImportError, ValueError, OSError):
        return


def answer(template: str, chat: dict[str, object]) -> dict[str, str]:
    """Returns the text of one chat, or what its template did wrong."""
    try:
        text = compiled(template)(**chat)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it makes {len(text):,} characters, over {MAX_CHARACTERS:,}")
        return {"text": text}
    except MemoryError:
        return {"error": f"it takes more than {MAX_BYTES >> 20} MiB of memory"}
    except Exception as error:  # whatever the program does wrong becomes its error text
        return {"error": str(error)[:500] or type(error).__name__}


def main() -> None:
    """Answers the one request on stdin."""
    request = json.load(sys.stdin)
    limit()
    json.dump({"answers": [answer(request["template"], chat) for chat in request["chats"]]}, sys.stdout)


if __name__ == "__main__":
    main()
