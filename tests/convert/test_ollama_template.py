"""A plain chat template is written as Ollama's; of another, nothing is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.convert.ollama_template import turns_of
from tests.support.models import tiny

_EACH = "{% for m in messages %}"
_SYSTEM = "{% if m.role == 'system' %}"
PLAIN = {
    "chatml": (
        _EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}'
        "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n{{ end }}"
        '{{ .Response }}<|im_end|>\n"""\nPARAMETER stop "<|im_end|>"\n',
    ),
    "with a token at the start": (
        "{{ bos_token }}" + _EACH + "[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        'TEMPLATE """{{ if .System }}[system]{{ .System }}</s>{{ end }}'
        "{{ if .Prompt }}[user]{{ .Prompt }}</s>[assistant]{{ end }}"
        '{{ .Response }}</s>"""\nPARAMETER stop "</s>"\n',
    ),
    "Alpaca": (
        _EACH
        + _SYSTEM
        + "{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
        "### Response:\n{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        'TEMPLATE """{{ if .System }}{{ .System }}\n\n{{ end }}'
        "{{ if .Prompt }}### Instruction:\n{{ .Prompt }}\n\n### Response:\n{{ end }}"
        '{{ .Response }}</s>"""\nPARAMETER stop "</s>"\n',
    ),
}
OTHER = {
    "tools": PLAIN["chatml"][0] + "{% if tools %}{% endif %}",
    "a system of its own": "<|s|>Be good.\n" + PLAIN["chatml"][0],
    "no system": _EACH
    + _SYSTEM
    + "{{ raise_exception('no') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "the system in the user's turn": "{% set first = messages[0] %}"
    "{% set system = first.content if first.role == 'system' else '' %}"
    + _EACH
    + "{% if m.role == 'user' %}[I]{{ system }}{{ m.content }}[/I]{% elif m.role == 'assistant' %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}",
    "thoughts before an answer": PLAIN["chatml"][0].replace("{% endif %}", "<think>\n{% endif %}"),
    "braces": PLAIN["chatml"][0].replace("<|im_end|>", "{{ '{{' }}"),
    "a text that is changed": PLAIN["chatml"][0].replace("m.content", "m.content | upper"),
    "no template": None,
    "an error": "{% for %}",
}


def model(folder: Path, template: str | None) -> Path:
    """A model with this chat template."""
    tiny(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= {"bos_token": "<s>", "chat_template": template}
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return folder


@pytest.mark.parametrize("case", PLAIN)
def test_turns_one_after_another(tmp_path: Path, case: str) -> None:
    template, wanted = PLAIN[case]
    turns = turns_of(open_checkpoint(model(tmp_path / "m", template)))
    assert turns is not None and turns.modelfile() == wanted


@pytest.mark.parametrize("case", OTHER)
def test_others_are_left_to_ollama(tmp_path: Path, case: str) -> None:
    assert turns_of(open_checkpoint(model(tmp_path / "m", OTHER[case]))) is None
