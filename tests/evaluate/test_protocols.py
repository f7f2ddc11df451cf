"""Windows: counted by hand, and held to their laws for any length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.errors import BadRecipe
from qconvert.evaluate.protocols import PROTOCOLS, Window, protocol_named


def test_gptq_windows_by_hand() -> None:
    windows = protocol_named("gptq2048", 4).windows(11)
    assert windows == [Window(0, 4, 1), Window(4, 8, 5)]


def test_llamacpp_scores_255_tokens_of_512() -> None:
    first, second = protocol_named("llamacpp512").windows(1024)
    assert (first, second) == (Window(0, 512, 257), Window(512, 1024, 769))
    assert first.stop - first.scored == 255


def test_hf_stride_by_hand() -> None:
    windows = protocol_named("hf-stride", 4).windows(9)
    assert windows == [Window(0, 4, 1), Window(2, 6, 4), Window(4, 8, 6), Window(6, 9, 8)]


def test_wikitext_in_qwen_tokens() -> None:
    windows = protocol_named("gptq2048").windows(299_078)
    assert len(windows) == 146
    assert sum(w.stop - w.scored for w in windows) == 298_862


@given(name=st.sampled_from(sorted(PROTOCOLS)), context=st.integers(4, 40), tokens=st.integers(0, 200))
def test_laws(name: str, context: int, tokens: int) -> None:
    protocol = protocol_named(name, context)
    try:
        windows = protocol.windows(tokens)
    except BadRecipe:
        assert tokens < (2 if name == "hf-stride" else context)
        return
    scored = [token for w in windows for token in range(w.scored, w.stop)]
    assert len(set(scored)) == len(scored)
    assert all(w.start < w.scored < w.stop <= tokens and w.stop - w.start <= context for w in windows)
    if name == "hf-stride":
        assert scored == list(range(1, tokens))


def test_labels_name_a_context_that_is_not_the_protocols_own() -> None:
    assert protocol_named("gptq2048").label == "gptq2048"
    assert protocol_named("gptq2048", 2048).label == "gptq2048"
    assert protocol_named("gptq2048", 512).label == "gptq2048@512"


@pytest.mark.parametrize(
    ("name", "context", "tokens", "says"),
    [
        ("gptq2048", None, 2047, "2047 tokens are fewer than one window of 2048"),
        ("gptq", None, 9999, "gptq2048, hf-stride, llamacpp512"),
        ("gptq2048", 1, 9999, "too short"),
    ],
)
def test_refusals_say_what_to_do(name: str, context: int | None, tokens: int, says: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        protocol_named(name, context).windows(tokens)
    assert says in f"{caught.value.fact} {caught.value.hint}"
    assert caught.value.hint
