"""Files made to break a reader: each costs an error that names the place, and little time.

What no command may ever say is "unexpected ...": that is what it calls a bug of its own.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor
from qconvert.models.gguf.declaration import GGUFModel
from qconvert.models.gguf.families import MODELS
from tests.support.commands import qconvert
from tests.support.hostile_files import (
    GENERATE,
    HUGE,
    LAYOUTS,
    MODEL,
    OUT,
    TEMPLATE,
    TO_GGUF,
    Case,
    beside,
    config,
    counted,
    f64,
    gguf,
    imatrix_of,
    laughs,
    many_layers,
    one_list_many_keys,
    quantize,
    quantized,
    readme_of,
    sentencepiece,
    split_of_many,
    template,
    token_beyond,
    tokens,
)

CASES = {
    "SentencePiece of empty pieces": Case(
        sentencepiece(b"\x0a\0" * (3 << 20)), "piece 0 is empty", seconds=5
    ),
    "added token of 5000 digits": Case(
        beside(
            "tokenizer_config.json",
            json.dumps({"added_tokens_decoder": {"1" * 5000: {"content": "x"}}}),
            *TO_GGUF,
        ),
        "token 'x' has id None",
    ),
    "scheme of 5000 digits": Case(quantize("--scheme", "int4-g" + "1" * 5000), "not a scheme", code=2),
    "layers of 5000 digits": Case(
        quantize("--bits", 4, "--rule", f"layers.{'1' * 5000}.mlp.down=int8"), "matches no weight"
    ),
    "shards of 400 digits": Case(quantize("--bits", 4, "--shard-size", "9" * 400), "is not a size", code=2),
    "seed of 20 digits": Case(config(*GENERATE, "--seed", "9" * 20), "--seed", code=2),
    "token beyond the embedding": Case(token_beyond, "token 5000 is beyond the model's 320 rows"),
    "10^9 tokens": Case(
        config(*GENERATE[:-1], 10**9, max_position_embeddings=2**30),
        "1,000,000,001 tokens: their keys and values need",
    ),
    "template of 100 GB": Case(template("{{ 'a' * 10**11 }}"), "does not run: it takes more than 512 MiB"),
    "template of 100 MB": Case(template("{{ 'a' * 10**8 }}"), "it makes 100,000,000 characters"),
    "template without an end": Case(
        template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "does not run: it takes more than",
        seconds=60,
    ),
    **{f"{name}: {says}": Case(quantized(name, a, **said), says) for name, a, said, says in LAYOUTS},
    "GGUF of 2^40 parts": Case(split_of_many, "split.count is 1,099,511,627,776", seconds=2),
    "GGUF of 300,000 tensors": Case(counted(300_000, 0), "the tensor count is 300,000", seconds=2),
    "GGUF of 300,000 keys": Case(counted(0, 300_000), "the metadata count is 300,000", seconds=2),
    "GGUF token of 400 kB": Case(
        tokens("from-gguf", MODEL, "-o", OUT, last="a" * 400_000, model="llama"),
        "tokenizer.ggml.tokens: token 319 has a length of 400,000",
    ),
    "GGUF token that is not UTF-8, from-gguf": Case(
        tokens("from-gguf", MODEL, "-o", OUT, last="ab\udcff"),
        "tokenizer.ggml.tokens: entry 319 is not UTF-8",
    ),
    "GGUF token that is not UTF-8, generate": Case(
        tokens("generate", MODEL, "-p", "a", last="ab\udcff"), "tokenizer.ggml.tokens: entry 319 is not UTF-8"
    ),
    "GGUF chat template that is not UTF-8": Case(
        gguf("generate", MODEL, "-p", "a", kv={TEMPLATE: KV.text(TEMPLATE, "\udcff")}),
        "tokenizer.chat_template is not UTF-8",
    ),
    "factors of frequencies that are zero": Case(
        gguf("inspect", MODEL, tensors=[GGUFTensor("rope_freqs.weight", GGMLType.F32, (32,))]),
        "rope_freqs.weight holds a factor that is not a positive number",
    ),
    "imatrix of 3 counts and 256 sums": Case(imatrix_of(256, 3), "counts has 3 entries for 256 sums"),
    "rope_theta of 400 digits, to-gguf": Case(config(*TO_GGUF, rope_theta=HUGE), "config.json: rope_theta"),
    "rope_theta of 400 digits, generate": Case(config(*GENERATE, rope_theta=HUGE), "config.json: rope_theta"),
    "rms_norm_eps of 400 digits, generate": Case(
        config(*GENERATE, rms_norm_eps=HUGE), "config.json: rms_norm_eps"
    ),
    "rms_norm_eps beyond float32, to-gguf": Case(
        config(*TO_GGUF, rms_norm_eps=1e300), "config.json: rms_norm_eps is 1e+300, not a positive number"
    ),
    "rms_norm_eps beyond float32, generate": Case(
        config(*GENERATE, rms_norm_eps=1e300), "config.json: rms_norm_eps is 1e+300"
    ),
    "temperature of 400 digits": Case(
        beside("generation_config.json", json.dumps({"temperature": HUGE}), *TO_GGUF),
        "generation_config.json: temperature",
    ),
    "temperature beyond float32": Case(
        beside("generation_config.json", '{"temperature": 1e300}', *TO_GGUF), "general.sampling.temp"
    ),
    "GGUF base of frequencies beyond float32": Case(
        gguf("inspect", MODEL, kv=f64("qwen3.rope.freq_base", 1e300)), "qwen3.rope.freq_base is 1e+300"
    ),
    "GGUF epsilon beyond float32": Case(
        gguf("inspect", MODEL, kv=f64("qwen3.attention.layer_norm_rms_epsilon", 1e308)),
        "qwen3.attention.layer_norm_rms_epsilon is 1e+308",
    ),
    **{
        f"GGUF of 2^31 layers: {arch}": Case(many_layers(arch), f"m.gguf: {arch}.")
        for arch in sorted(
            {m.arch for m in MODELS.values() if isinstance(m, GGUFModel) and not m.products}  # those are read
        )
    },
}


HARMLESS = {
    "front matter of 9^8 aliases": readme_of(laughs()),
    "front matter of one list under many keys": readme_of(one_list_many_keys()),
    "front matter that holds itself": readme_of("a: &a [*a]"),
    "front matter nested deeply": readme_of("a: " + "[" * 20_000),
    "front matter of 2 MB": readme_of("tags:\n" + "- x\n" * 500_000),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_hostile_labels_cost_no_time(name: str, tmp_path: Path) -> None:
    words = HARMLESS[name](tmp_path)
    with limited(30):
        ran = qconvert(*words)
    assert ran.code == 0 and "unexpected" not in ran.err, ran.err


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stop what runs longer, with an error that no command words as its own."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_no_command_says_unexpected(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    words = case.make(tmp_path)
    with limited(case.seconds):
        ran = qconvert(*words)
    assert (ran.code, ran.out) == (case.code, ""), ran
    assert "Error: " in ran.err and "unexpected" not in ran.err and "Warning" not in ran.err, ran.err
    assert case.says in ran.err, ran.err
