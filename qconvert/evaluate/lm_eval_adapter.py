"""Runs tasks of EleutherAI's lm-evaluation-harness on qconvert's decoder.

`python -m qconvert.evaluate.lm_eval_adapter` is `lm_eval` with one more model, `qconvert`:

    python -m qconvert.evaluate.lm_eval_adapter run --model qconvert --model_args path=m-int4 --tasks arc_easy

Any layout that the decoder runs can be measured so, GGUF and MLX included. The harness is installed with
`pip install lm-eval`; this module alone imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # the harness's own models, which it leaves out where one is there
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from qconvert.checkpoint.dialogue import dialogue_of
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.resolved import open_found
from qconvert.evaluate.measure import load_runtime
from qconvert.formats.tokenizers.prompts import Detokenizer
from qconvert.runtime.generate import Sampler, generate
from qconvert.runtime.model import Decoder

GENERATED = 256
"""Tokens that are generated at most where a task names no number (as the harness's own models)."""


def continuation_score(
    decoder: Decoder, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """The log-probability of a continuation in nats, and whether greedy decoding would have chosen it.

    What exceeds the model's positions is cut off at the beginning of the context.
    """
    read = [*context, *continuation][-decoder.config.max_positions - 1 : -1]
    scored = continuation[-len(read) :]
    hidden_1TD = decoder.hidden(torch.tensor([read], device=decoder.device))
    logits_CV: Tensor = decoder.logits(hidden_1TD[0, -len(scored) :]).float()
    wanted_C = torch.tensor(scored, device=decoder.device)
    losses_C = torch.nn.functional.cross_entropy(logits_CV, wanted_C, reduction="none")
    return -float(losses_C.double().sum()), bool((logits_CV.argmax(-1) == wanted_C).all())


@register_model("qconvert")
class QConvertLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint behind the harness's interface; `path` is a folder, a GGUF file or a Hub name."""

    def __init__(self, path: str, device: str = "cpu", revision: str | None = None, **_: Any) -> None:
        super().__init__()
        checkpoint = open_found(resolve(path, revision=revision))
        # The harness names cuda:0 where the user named nothing.
        self.decoder = load_runtime(checkpoint, device=device if torch.cuda.is_available() else "cpu")
        self.dialogue = dialogue_of(checkpoint)

    @property
    def eot_token_id(self) -> int:
        eos = self.dialogue.eos
        return 0 if eos is None else eos

    @property
    def tokenizer_name(self) -> str:
        return str(self.dialogue.folder.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, without special tokens unless they are asked for."""
        return self.dialogue.encode(string, special=bool(add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The chat in the model's own template."""
        if add_generation_prompt:
            return self.dialogue.render(chat_history)
        (text,) = self.dialogue.render_finished([{"messages": chat_history}])
        return text or ""

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows of the model's positions."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.decoder.config.max_positions - 1,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            found.append(sum(continuation_score(self.decoder, *pair)[0] for pair in pairs))
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuations of prompts, up to a stop text or the number of tokens that the task names."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, prompt: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(options.get("max_gen_toks", GENERATED))
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        ids = self.tok_encode(prompt)[-(self.decoder.config.max_positions - most) :]
        detokenizer, text = Detokenizer(self.dialogue.tokenizer), ""
        for token in generate(self.decoder, ids, most, Sampler(temperature), self.dialogue.stops):
            text += detokenizer.push(token)
            if any(stop in text for stop in stops):
                break
        else:
            text += detokenizer.rest()
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [continuation_score(self.decoder, context, wanted) for _, context, wanted in requests]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
