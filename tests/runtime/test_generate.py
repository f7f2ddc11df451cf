"""Generated text against transformers, the sampler against its definition, and the command."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qconvert.cli.printing import escaped
from qconvert.errors import BadRecipe, QConvertError, UnsupportedModel
from qconvert.formats.tokenizers.prompts import Detokenizer, open_dialogue
from qconvert.formats.tokenizers.stop_texts import StopTexts
from qconvert.runtime.device_layout import find_device
from qconvert.runtime.generate import Sampler, generate
from tests.support.commands import failed, qconvert
from tests.support.decoder_models import decoder_of, tiny

NO_STOPS: frozenset[int] = frozenset()
TEXT = "one two, three"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with a byte-level tokenizer of 256 bytes and two special tokens."""
    path = tmp_path_factory.mktemp("model")
    model = tiny("qwen2", vocab_size=260, tie_word_embeddings=True)
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    safetensors.torch.save_file(state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(model.config.to_dict() | {"eos_token_id": 256}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<user>", "<system>", "<assistant>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_greedy_tokens_are_those_of_transformers() -> None:
    model = tiny("qwen3", seed=3, head_dim=16)
    prompt = torch.arange(1, 12)[None]
    want = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = list(generate(decoder_of(model), prompt[0].tolist(), 20, Sampler(), NO_STOPS))
    assert got == want[0, 11:].tolist()


def test_a_device_that_is_not_here_is_refused_by_name(folder: Path) -> None:
    ran = qconvert("generate", folder, "-p", "x", "--device", "cuda:99")
    assert ran.code == 1 and ran.err.startswith("Error: device 'cuda:99': ") and "Hint: " in ran.err


@pytest.mark.parametrize("device", ["tpu", "meta"])
def test_the_decoder_runs_on_cpu_and_cuda(device: str) -> None:
    with pytest.raises(BadRecipe, match=f"device '{device}'"):
        find_device(device)


def test_generation_ends_before_a_stop_and_at_the_last_position() -> None:
    decoder = decoder_of(tiny("qwen2"))
    free = list(generate(decoder, [1, 2, 3], 10, Sampler(), NO_STOPS))
    stop = free[4]
    assert list(generate(decoder, [1, 2, 3], 10, Sampler(), frozenset({stop}))) == free[: free.index(stop)]
    assert len(list(generate(decoder, [5] * 60, 10, Sampler(), NO_STOPS))) == 4
    with pytest.raises(QConvertError, match="64 tokens"):
        next(generate(decoder, [5] * 64, 1, Sampler(), NO_STOPS))
    with pytest.raises(QConvertError, match="0 tokens"):
        next(generate(decoder, [], 1, Sampler(), NO_STOPS))


def test_samples_follow_the_softmax() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(temperature=2.0, seed=1)
    counts = torch.bincount(torch.tensor([sampler.choose(2 * p.log()) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, p, atol=0.03)


def test_top_p_keeps_the_likeliest_that_reach_it() -> None:
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    for top_p, kept in ((0.4, {1}), (0.7, {1, 3}), (0.9, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        sampler = Sampler(1.0, top_p, seed=2)
        assert {sampler.choose(logits) for _ in range(300)} == kept


def test_a_seed_repeats_a_text() -> None:
    decoder = decoder_of(tiny("qwen2"))
    texts = [tuple(generate(decoder, [1, 2], 20, Sampler(5.0, seed=seed), NO_STOPS)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_text_comes_in_whole_characters(folder: Path) -> None:
    dialogue = open_dialogue(folder, {})
    text = "naïve 日本語 🙂 end"
    detokenizer = Detokenizer(dialogue.tokenizer)
    pieces = [detokenizer.push(token) for token in dialogue.encode(text)]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if len(piece) > 1] == []
    assert detokenizer.rest() == ""


def test_broken_utf8_is_shown_and_does_not_hold_up_the_rest(folder: Path) -> None:
    dialogue = open_dialogue(folder, {})
    face = dialogue.encode("🙂")
    detokenizer = Detokenizer(dialogue.tokenizer)
    pieces = [detokenizer.push(token) for token in [face[0]] * 20 + dialogue.encode("ok")]
    assert any(pieces[:19]) and "".join(pieces).endswith("ok")
    detokenizer.push(face[0])
    assert detokenizer.rest() == "\ufffd"


def test_a_chat_is_rendered_as_transformers_renders_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Why?"}]
    dialogue = open_dialogue(folder, {})
    assert dialogue.render(messages) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert dialogue.stops == {256, 258} and 259 in dialogue.encode_chat(messages)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not run"),
        ("{% for", "does not run"),
        ("{{ messages[0].content / 0 }}", "does not run"),
    ],
)
def test_templates_that_do_not_run(folder: Path, tmp_path: Path, template: str | None, said: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UnsupportedModel, match=said):
        open_dialogue(tmp_path, {}).render([{"role": "user", "content": "x"}])


def test_the_command(folder: Path) -> None:
    ran = qconvert("generate", folder, "-p", "abc", "-n", 12, "--json", "--backend", "reference")
    assert ran.code == 0 and ran.json["prompt_tokens"] == 3 and ran.json["tokens"] <= 12
    plain = qconvert("generate", folder, "-p", "abc", "-n", 12, "--backend", "reference")
    assert plain.out == escaped(ran.json["text"]) + "\n" and "3 tokens of prompt at" in plain.err
    chat = qconvert(
        "generate", folder, "-p", "abc", "--chat", "--system", "s", "-n", 2, "--json", "--head", "int8"
    )
    assert chat.code == 0 and chat.json["prompt_tokens"] == 3 + len("s\n") + len("abc\n")
    assert qconvert("generate", folder, "-p", "x", "--system", "s").code == 2
    record = chat.json
    assert record["model"]["files"][0]["name"] == "model.safetensors" and record["model"]["commit"] is None
    assert record["asked"]["seed"] == 0 and record["asked"]["system"] == "s"
    assert (record["computed"]["head"], ran.json["computed"]["head"]) == ("int8", "f32")
    assert "float32" in ran.json["computed"]["arithmetic"]
    assert record["versions"]["torch"] and record["loading_seconds"] > 0


def test_a_prompt_that_is_no_text_is_told() -> None:
    ran = qconvert("generate", "embedded", "-p", "caf\udce9", "-n", 1)
    assert ran.code == 2 and ran.err == "Error: prompt: not UTF-8 text\nHint: give the prompt in UTF-8\n"


@pytest.mark.parametrize(
    ("stops", "wanted"),
    [((), TEXT), (("two",), "one "), (("three", "two"), "one "), (("four", "threes"), TEXT), (("e",), "on")],
)
def test_a_text_ends_before_the_first_stop_however_it_comes(stops: tuple[str, ...], wanted: str) -> None:
    for cuts in itertools.combinations(range(1, len(TEXT)), 3):
        ends = StopTexts(stops)
        pieces = [TEXT[a:b] for a, b in itertools.pairwise((0, *cuts, len(TEXT)))]
        shown = "".join(ends.push(piece) for piece in pieces) + ends.rest()
        assert shown == wanted and ends.found == (wanted != TEXT)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    ends = StopTexts(("\n\n",))
    assert [ends.push(piece) for piece in ("a\n", "b", "c\n")] == ["a", "\nb", "c"]
    assert ends.rest() == "\n"


def test_generating_stops_before_a_text(folder: Path) -> None:
    call = ("generate", folder, "-p", "abc", "-n", 12, "--json")
    whole = qconvert(*call).json
    stop = whole["text"][4:6]
    found = qconvert(*call, "--stop", "no such text", "--stop", stop).json
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["tokens"] < whole["tokens"] == 12
    assert qconvert(*call[:-1], "--stop", stop, "-q").out.startswith(found["text"])
    assert qconvert(*call, "--stop", "").code == 2


def test_a_talk_answers_every_line_with_all_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer is that of one prompt that holds the first message and its answer."""
    call = ("generate", folder, "--chat", "--system", "s", "-n", 5)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    ran = qconvert(*call, "-q")
    assert ran.code == 0, ran.err
    first = qconvert(*call, "-p", "hello", "-q").out
    assert ran.out.startswith(first)
    told = f"<system>s\n<user>hello\n<assistant>{first.strip()}\n<user>again\n<assistant>"
    second = qconvert("generate", folder, "-p", told, "-n", 5, "-q").out
    assert ran.out == first + second


def test_without_a_prompt_there_is_nothing_to_continue() -> None:
    ran = qconvert("generate", "embedded", "-n", 1)
    failed(ran, "generate: there is no prompt", "add -p TEXT, or --chat for a conversation", code=2)
    assert qconvert("generate", "embedded", "--chat", "--json").code == 2
