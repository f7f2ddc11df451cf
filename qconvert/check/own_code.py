"""Determines which loaders need the Python code that a model brings."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.check.subject import NEEDS, NOTE, WARNING, Problem, Subject

# Declared families of which transformers 5.23 has no class.
NO_CLASS = frozenset({
    "baichuan", "chatglm", "deepseek", "grok-1", "internlm", "internlm2", "openelm", "qwen", "rwkv5",
    "skywork", "Yi", "yuan",
})  # fmt: skip
_FLAGS = {
    "transformers": "trust_remote_code=True",
    "vllm": "--trust-remote-code",
    "sglang": "--trust-remote-code",
}


def own_code(s: Subject) -> Iterator[Problem]:
    """Python files beside the weights, and those that a config names but the folder lacks."""
    flag = _FLAGS.get(s.loader)
    for name in s.missing_code:
        fact = "auto_map names it as the model's code, and it is not in the folder"
        yield Problem(WARNING, name, fact, "copy it from the model's source: some loaders run it")
    if not s.code:
        return
    known = s.architecture.family.model_types
    named = ", ".join(s.code)
    if flag and s.loader == "transformers" and (not known or NO_CLASS.intersection(known)):
        fact = f"the model's class is in {named}, which {s.loader} runs only when told to"
        yield Problem(NEEDS, s.code[0], fact, f"read the code, then load with {flag}", flag)
    elif flag:
        fact = f"the model has code of its own ({named}); {s.loader} runs it only with {flag}"
        yield Problem(NOTE, s.code[0], fact)
    else:
        yield Problem(NOTE, s.code[0], f"{s.loader} does not run the model's own code ({named})")
