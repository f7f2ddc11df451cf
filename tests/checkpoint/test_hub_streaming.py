"""Conversions of a Hub model that is never downloaded: the same output, each byte once, each fault told."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.checkpoint import network
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import open_checkpoint
from qconvert.errors import NotDownloaded
from qconvert.formats.huggingface.folder import open_hf_folder
from tests.support.commands import Ran, files_of, made, qconvert, without_source
from tests.support.crashes import asked, groups_of
from tests.support.fake_hub import COMMIT, GATED, Answer, FakeHub, known, running
from tests.support.models import tiny, tiny_arrays, tiny_config, write_shards

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000, "num_hidden_layers": 4}
QUANTIZE = ("quantize", "--bits", 4, "--group-size", 32, "--min-max", "-j", 2)
GGUF = ("to-gguf", "--type", "q8_0", "-j", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four shards, 9 MB."""
    return tiny(tmp_path_factory.mktemp("hub") / "m", "qwen3", shards=4, **SIZES)


@pytest.fixture
def hub(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
    with running() as fake, known(fake, here / "cache"):
        fake.add("org/m", folder)
        fake.repos[GATED] = fake.repos["org/m"]
        yield fake


def environment(hub: FakeHub, here: Path) -> dict[str, str]:
    """What a process of its own is told of the Hub by."""
    told = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(here / "cache")}
    return {**os.environ, **told, "PYTHONPATH": str(Path(__file__).parents[2])}


def weights(files: dict[str, bytes]) -> dict[str, int]:
    return {name: len(blob) for name, blob in files.items() if name.endswith(".safetensors")}


def weights_of(folder: Path) -> dict[str, bytes]:
    return {name: blob for name, blob in files_of(folder).items() if name.endswith(".safetensors")}


def kept_on_disk(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and not path.is_symlink())


def without_names(files: dict[str, bytes]) -> dict[str, Any]:
    """The files of an output, without what says where its source was found."""
    return without_source(files, "name", "repo_id", "commit")


def test_the_output_is_that_of_a_folder_and_each_byte_comes_once(
    hub: FakeHub, folder: Path, here: Path
) -> None:
    local = made(QUANTIZE[0], folder, *QUANTIZE[1:], "-o", "local")
    ran = qconvert(QUANTIZE[0], "org/m", *QUANTIZE[1:], "-o", "streamed", "--json")
    assert ran.code == 0, ran.err
    assert without_names(files_of(here / "streamed")) == without_names(files_of(local))
    sizes = weights(hub.repos["org/m"])
    total = sum(sizes.values())
    assert total <= hub.sent() <= 1.02 * total
    assert sorted(hub.heads()) == sorted(sizes), "one address a file"
    assert kept_on_disk(here / "cache") < 1e6
    assert ran.json["fetched"]["bytes"] == hub.sent()
    record = json.loads((here / "streamed/qconvert.json").read_text())["source"]
    assert (record["repo_id"], record["commit"]) == ("org/m", COMMIT)


@pytest.mark.parametrize("memory", ["2MB", "16MB", "1GB"])
def test_a_gguf_of_any_memory_is_the_same(hub: FakeHub, folder: Path, here: Path, memory: str) -> None:
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "kept.gguf", "--keep-source")
    total = sum(weights(hub.repos["org/m"]).values())
    assert len([asked for asked in hub.log if asked.server == "cdn"]) == 4, "whole files, as before"
    shutil.rmtree(here / "cache")
    hub.log.clear()
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "streamed.gguf", "--max-memory", memory)
    assert (here / "streamed.gguf").read_bytes() == (here / "kept.gguf").read_bytes()
    assert hub.sent() <= 1.02 * total


def test_what_is_in_the_cache_is_read_there(hub: FakeHub, here: Path) -> None:
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "kept.gguf", "--keep-source")
    hub.log.clear()
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "again.gguf")
    assert hub.sent() == 0
    removed = next((here / "cache").rglob("model-00002-*.safetensors"))
    removed.unlink()
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "partly.gguf")
    assert 0 < hub.sent() <= 1.02 * weights(hub.repos["org/m"])[removed.name]
    assert (here / "partly.gguf").read_bytes() == (here / "kept.gguf").read_bytes()


def test_headers_alone_are_fetched_to_look_or_to_plan(hub: FakeHub, folder: Path) -> None:
    headers = sum(
        8 + int.from_bytes(blob[:8], "little")
        for name, blob in hub.repos["org/m"].items()
        if name.endswith(".safetensors")
    )
    looks = (
        ("inspect", "org/m"),
        ("quantize", "org/m", "--bits", 4, "--dry-run", "-o", "out"),
        ("to-gguf", "org/m", "--type", "q4_k_m", "--dry-run", "-o", "out.gguf"),
        (
            "quantize",
            "org/m",
            "--bits",
            4,
            "--method",
            "feedback",
            "--tokens",
            4096,
            "--dry-run",
            "-o",
            "out",
        ),
    )
    for look in looks:
        hub.log.clear()
        ran, local = qconvert(*look), qconvert(look[0], folder, *look[2:])
        assert (ran.code, local.code) == (0, 0), ran.err
        assert headers <= hub.sent() <= headers + 4 * 4096, look
        assert len([asked for asked in hub.log if asked.server == "cdn"]) == 4
        assert ran.out.splitlines()[1:] == local.out.splitlines()[1:], "all but the name of the model"


def test_what_reads_weights_several_times_says_that_they_are_downloaded(hub: FakeHub, here: Path) -> None:
    """The model has no tokenizer, which is known when it is here."""
    command = (*QUANTIZE[:1], "org/m", "--bits", 4, "--method", "feedback", "--tokens", 256, "-o", "out")
    ran = qconvert(*command)
    line = "org/m: --method feedback reads weights several times: what the cache lacks is downloaded\n"
    assert ran.err.startswith(line), ran.err
    assert hub.sent() == sum(weights(hub.repos["org/m"]).values())
    assert line not in qconvert(*command, "-q").err


def test_quantized_sources_stream_as_well(hub: FakeHub, folder: Path, here: Path) -> None:
    for layout in ("gptq", "compressed-tensors", "mlx"):
        source = made("quantize", folder, "--bits", 4, "--group-size", 32, "--layout", layout, "-o", layout)
        hub.add(f"org/{layout}", source)
        local = made("dequantize", source, "-o", f"{layout}-local")
        hub.log.clear()
        streamed = made("dequantize", f"org/{layout}", "-o", f"{layout}-streamed", "--max-memory", "64MB")
        total = sum(weights(hub.repos[f"org/{layout}"]).values())
        assert hub.sent() <= 1.02 * total, layout
        same = [files_of(each)["model.safetensors"] for each in (local, streamed)]
        assert same[0] == same[1], layout


def test_a_scheme_that_reads_twice_has_the_same_bytes(hub: FakeHub, folder: Path, here: Path) -> None:
    how = ("--to", "compressed-tensors", "--scheme", "nvfp4")
    local, streamed = (
        made("convert", model, *how, "-o", out) for model, out in ((folder, "local"), ("org/m", "streamed"))
    )
    assert without_names(files_of(local)) == without_names(files_of(streamed))
    assert hub.sent() <= 2.04 * sum(weights(hub.repos["org/m"]).values())


def test_faults_and_expiring_addresses_change_no_byte(hub: FakeHub, here: Path) -> None:
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "kept.gguf", "--keep-source")
    shutil.rmtree(here / "cache")
    odd = (Answer(503), Answer(408), Answer(keep=70_000, reset=True), Answer(keep=10))
    hub.ranges, hub.uses = 0, 3
    hub.fault = lambda number: odd[number % 4] if number % 3 == 2 else None
    made(GGUF[0], "org/m", *GGUF[1:], "-o", "hard.gguf", "--max-memory", "8MB", "--connections", 2)
    assert (here / "hard.gguf").read_bytes() == (here / "kept.gguf").read_bytes()
    assert len([asked for asked in hub.log if asked.status == 403]) > 3
    assert all(asked.authorization is None for asked in hub.log if asked.server == "cdn")


def stop_after(hub: FakeHub, requests: int, answer: Answer) -> Ran:
    """A conversion whose content network gives that answer after so many requests."""
    hub.ranges = 0
    hub.fault = lambda number: answer if number >= requests else None
    with groups_of(1):
        ran = qconvert(*CONVERT, "--patience", 1)
    hub.fault = lambda number: None
    return ran


CONVERT = (QUANTIZE[0], "org/m", *QUANTIZE[1:], "-o", "out", "--max-memory", "8MB")
ODD = (
    Answer(503), Answer(408), Answer(500), Answer(403), Answer(200, whole=True), Answer(416), Answer(keep=1),
    Answer(keep=70_000, reset=True), Answer(content_range="bytes 1-2/3"), Answer(headers={"ETag": '"other"'}),
    Answer(429, {"Retry-After": "0"}), Answer(headers={"Content-Encoding": "gzip"}), Answer(302),
)  # fmt: skip
# `make crash` tries 2,000 sequences.
SEQUENCES = asked(range(2000), range(8))


def test_any_sequence_of_faults_ends_equal_or_in_one_sentence_and_goes_on(hub: FakeHub, here: Path) -> None:
    whole = weights_of(made(*CONVERT[:-4], "-o", "whole", "--max-memory", "8MB"))
    ends = 0
    for seed in SEQUENCES:
        rng = random.Random(seed)
        share, hub.ranges, hub.resolved, hub.uses = (
            rng.choice((0.02, 0.1, 0.3)),
            0,
            0,
            rng.choice((3, 10, 10**9)),
        )
        faults = {number: rng.choice(ODD) for number in range(400) if rng.random() < share}
        resolves = {number: (503, {}) for number in range(1, 60) if rng.random() < share / 2}
        hub.fault, hub.resolve_fault = faults.get, resolves.get
        with groups_of(1):
            ran = qconvert(*CONVERT)
        assert ran.code in (0, 1) and ran.err.count("Error: ") == ran.code, (seed, ran.err)
        assert "Traceback" not in ran.err and "ignature" not in ran.err, (seed, ran.err)
        hub.fault, hub.resolve_fault, hub.uses = (lambda number: None), (lambda number: None), 10**9
        if ran.code:
            ends += 1
            assert not (here / "out").exists(), seed
            ran = qconvert(*CONVERT)
            assert ran.code == 0, (seed, ran.err)
        assert weights_of(here / "out") == whole, seed
        shutil.rmtree(here / "out")
        hub.log.clear()
    assert 0 < ends < len(SEQUENCES)


ENDS = {
    "lost": (Answer(503), r"answers HTTP 503; no byte has come for 1 s"),
    "refused": (Answer(403, body=b"not any more"), r"refuses a new address too \(HTTP 403: not any more\)"),
    "whole": (Answer(200, whole=True), r"answers a request for a part with all of it"),
    "replaced": (Answer(headers={"ETag": '"new"'}), r"has changed while it was read: its ETag was"),
}


@pytest.mark.parametrize(("answer", "told"), ENDS.values(), ids=ENDS)
def test_a_run_that_the_network_ends_goes_on(hub: FakeHub, here: Path, answer: Answer, told: str) -> None:
    ran = stop_after(hub, 14, answer)
    assert ran.code == 1 and "Traceback" not in ran.err
    assert re.search(r"Error: 127\.0\.0\.1:\d+: org/m/model-0000\d-of-00004\.safetensors: ", ran.err), ran.err
    assert re.search(told, ran.err), ran.err
    assert "ignature" not in ran.err and "secret" not in ran.err
    assert "run the same command to continue" in ran.err
    assert not (here / "out").exists()
    hub.log.clear()
    done = qconvert(*CONVERT)
    assert done.code == 0, done.err
    assert "resuming out.partial" in done.err
    total = sum(weights(hub.repos["org/m"]).values())
    assert hub.sent() < 0.9 * total, "what was done is not fetched again"
    whole = made(*CONVERT[:-4], "-o", "whole", "--max-memory", "8MB")
    assert files_of(here / "out").keys() == files_of(whole).keys()
    same = [{**files_of(each), "README.md": b""} for each in (here / "out", whole)]
    assert same[0] == same[1]


def test_a_run_goes_on_with_the_files_that_were_downloaded_since(hub: FakeHub, here: Path) -> None:
    stop_after(hub, 14, Answer(503))
    done = qconvert(*CONVERT, "--keep-source")
    assert done.code == 0 and "resuming" in done.err, done.err


def test_another_file_under_the_same_name_is_another_job(hub: FakeHub, here: Path) -> None:
    stop_after(hub, 14, Answer(503))
    name = "model-00004-of-00004.safetensors"
    blob = hub.repos["org/m"][name]
    hub.repos["org/m"][name] = blob[:-1] + bytes([blob[-1] ^ 1])
    refused = qconvert(*CONVERT)
    assert refused.code == 1
    assert f"source files {name} was" in refused.err
    assert (here / "out.partial").exists()


def test_refusals_are_one_sentence(hub: FakeHub, here: Path) -> None:
    ran = qconvert(*QUANTIZE[:1], GATED, *QUANTIZE[1:], "-o", "out")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: org/gated: is gated, and not open to you\nHint: accept its terms")
    hub.repos["org/half"] = {**hub.repos["org/m"]}
    del hub.repos["org/half"]["model-00003-of-00004.safetensors"]
    ran = qconvert(*QUANTIZE[:1], "org/half", *QUANTIZE[1:], "-o", "out")
    assert "org/half: model-00003-of-00004.safetensors, which model.safetensors.index.json names" in ran.err
    hub.repos["org/bad"] = {**hub.repos["org/m"], "model-00001-of-00004.safetensors": b"\xff" * 5000}
    ran = qconvert(*QUANTIZE[:1], "org/bad", *QUANTIZE[1:], "-o", "out")
    assert re.search("model-00001-of-00004.safetensors: claims a header of [0-9,]+ bytes", ran.err)
    assert not list(here.glob("out*"))


def test_a_stop_ends_within_seconds_while_the_network_is_silent(hub: FakeHub, here: Path) -> None:
    """In a process of its own, which is sent SIGTERM while every transfer hangs."""
    hub.fault = lambda number: time.sleep(20) if number >= 14 else None  # type: ignore[func-returns-value]
    script = "from tests.support.commands import main, of_any_size; of_any_size().start(); main()"
    command = [sys.executable, "-c", script, *map(str, CONVERT)]
    with subprocess.Popen(command, env=environment(hub, here), stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while process.poll() is None and hub.ranges < 16 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.5)
        began = time.monotonic()
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode == 143, err
    assert "Traceback" not in err


def test_offline_no_server_is_asked(hub: FakeHub, here: Path) -> None:
    qconvert("inspect", "org/m")
    hub.log.clear()
    command = [sys.executable, "-m", "qconvert", *map(str, CONVERT)]
    env = {**environment(hub, here), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE forbids downloading it" in done.stderr
    assert not hub.log


def mixture(folder: Path) -> Path:
    """A model of 32 experts a layer, each of which lies in the file as w1, w2 and w3 side by side."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = tiny_config("qwen3", tied=False)
    arrays = {name: array for name, array in tiny_arrays(config).items() if ".mlp." not in name}
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes}
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    tiny(folder, "qwen3", tied=False)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp"
        arrays[f"{at}.gate.weight"] = rng.standard_normal((32, 256)).astype("f4")
        for expert in range(32):
            for name, shape in (("gate", (256, 256)), ("up", (256, 256)), ("down", (256, 256))):
                arrays[f"{at}.experts.{expert}.{name}_proj.weight"] = rng.standard_normal(shape).astype("f4")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    write_shards(folder, arrays, "bf16", 2)
    return folder


@pytest.mark.parametrize("memory", ["4MB", "1GB"])
def test_stacked_experts_are_fetched_once(hub: FakeHub, here: Path, memory: str) -> None:
    source = mixture(here / "moe")
    hub.add("org/moe", source)
    made(GGUF[0], source, *GGUF[1:], "-o", "local.gguf")
    made(GGUF[0], "org/moe", *GGUF[1:], "-o", "streamed.gguf", "--max-memory", memory)
    total = sum(weights(hub.repos["org/moe"]).values())
    assert hub.sent() <= 1.02 * total
    arrays = [gguf_arrays(here / name) for name in ("local.gguf", "streamed.gguf")]
    assert arrays[0] == arrays[1]


def gguf_arrays(path: Path) -> dict[str, bytes]:
    """The arrays of a GGUF file, whose keys name the repository of a Hub model."""
    from gguf import GGUFReader

    return {tensor.name: bytes(tensor.data) for tensor in GGUFReader(path).tensors}


def test_a_model_whose_headers_alone_are_here_has_no_rows(hub: FakeHub, here: Path) -> None:
    found = resolve("org/m", weights=False)
    checkpoint = open_checkpoint(found.path, found.remote)
    assert not checkpoint.files.has_weights
    with pytest.raises(NotDownloaded, match="its bytes are not here"):
        checkpoint.files.read("model.norm.weight", 0, 1)
    found = resolve("org/m", network=network.Network())
    with open_hf_folder(found.path, found.remote) as files:
        assert files.has_weights
        assert (files.read("model.norm.weight", 0, 1) != 0).any()


def test_what_the_hubs_own_client_logs_has_no_signature(
    hub: FakeHub, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fault = lambda number: Answer(keep=10)
    hub.uses = 0
    ran = qconvert(*CONVERT, "--keep-source")
    assert ran.code == 1
    assert "ignature" not in ran.err + caplog.text
