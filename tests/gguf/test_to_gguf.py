"""`to-gguf`: llama.cpp, its converter's recorded files and transformers say whether a GGUF is right."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.cli import options
from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.io.local_file import octets
from qconvert.quant.ggml import encode_rows
from tests.support.commands import qconvert, refused, strict_json
from tests.support.gguf_models import (
    SIZES,
    TRANSFORMERS,
    imatrix_dat,
    llama_cpp_logits,
    log_probabilities,
    qwen2_tokenizer,
    transformers_logits,
    transformers_model,
)
from tests.support.models import tiny

IDS = [3, 17, 250, 9, 9, 101, 0, 44, 260, 271, 5, 120, 33, 2, 199, 299]


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("file_type", ["f32", "bf16"])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, name: str, file_type: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = transformers_model(tmp_path / name, name)
    out = tmp_path / "m.gguf"
    ran = qconvert("to-gguf", folder, "--type", file_type, "-o", out, "-q")
    assert (ran.code, ran.out) == (0, f"{out}\n"), ran.err
    expected = log_probabilities(transformers_logits(folder, IDS))
    found = log_probabilities(llama_cpp_logits(out, IDS, rows=320))
    # Measured: at most 0.008 and 0.056; llama.cpp rounds activations to bf16 where weights are.
    assert np.abs(found - expected).max() < {"f32": 0.02, "bf16": 0.1}[file_type]
    assert expected.std() > 1


# Files of llama.cpp's own tools


@pytest.fixture(scope="module")
def golden(assets: Path) -> dict[str, Any]:
    """What llama.cpp's converter and llama-quantize made of tiny-qwen3: every tensor's type and hash."""
    found = json.loads((assets / "fixtures" / "gguf" / "golden.json").read_text())
    found["files"] |= {"converter F16": found["converter_f16"]}
    return dict(found)


def to_gguf(assets: Path, out: Path, *flags: object) -> GGUFFile:
    """tiny-qwen3 as GGUF (its tokenizer is known by structure, the converter had to be told)."""
    ran = qconvert("to-gguf", assets / "models" / "tiny-qwen3", "-o", out, "-q", *flags)
    assert ran.code == 0, ran.err
    return GGUFFile(out)


def described(file: GGUFFile) -> dict[str, dict[str, object]]:
    """Every tensor of a file, in order, as golden.json has them."""
    return {
        name: {
            "type": tensor.type.name,
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "sha256": hashlib.sha256(octets(file.read(name, 0, file.specs[name].rows))).hexdigest(),
        }
        for name, tensor in file.tensors.items()
    }


def recorded(entry: dict[str, Any]) -> dict[str, dict[str, object]]:
    keys = ("type", "shape", "bytes", "sha256")
    return {name: {key: tensor[key] for key in keys} for name, tensor in entry["tensors"].items()}


@pytest.mark.parametrize(("key", "file_type"), [("BF16", "bf16"), ("converter F16", "f16")])
def test_sixteen_bit_files_are_the_converters(
    assets: Path, tmp_path: Path, golden: dict[str, Any], key: str, file_type: str
) -> None:
    expected = golden["files"][key]
    with to_gguf(assets, tmp_path / "m.gguf", "--type", file_type) as file:
        found = described(file)
        assert list(found) == list(expected["tensors"])
        assert found == recorded(expected)
        keys = {name: entry.value for name, entry in file.kv.items()}
    if key == "BF16":
        assert (tmp_path / "m.gguf").stat().st_size == expected["bytes"]
        assert list(keys) == list(golden["bf16_metadata"])
        scalars = {n: value for n, value in golden["bf16_metadata"].items() if not isinstance(value, dict)}
        assert {n: keys[n] for n in scalars} == scalars


# Everything in golden.json but 16-bit files.
QUANTIZED = """
    Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ4_NL IQ4_XS
    IQ3_S IQ3_M Q1_0 Q2_0 TQ1_0 TQ2_0 MXFP4_MOE MXFP4-by-tensor-type
    IQ1_M-imat IQ2_XXS-imat IQ2_XS-imat IQ3_XXS-imat IQ3_S-imat
    Q4_0-imat Q2_K_S-imat Q3_K_M-imat Q4_K_M-imat Q5_K_M-imat Q6_K-imat IQ4_XS-imat
""".split()  # noqa: SIM905  (a list of strings would take 30 lines)


@pytest.mark.parametrize("key", QUANTIZED)
def test_quantized_files_are_llama_quantizes(
    assets: Path, tmp_path: Path, golden: dict[str, Any], key: str
) -> None:
    expected = golden["files"][key]
    flags: list[object] = ["--type", key.removesuffix("-imat")]
    if key == "MXFP4-by-tensor-type":
        flags = ["--type", "q8_0", "--tensor-type", "attn_=mxfp4", "--tensor-type", "ffn_=mxfp4"]
    if key.endswith("-imat"):
        flags += ["--imatrix", assets / "fixtures" / "gguf" / "imatrix.gguf"]
    with to_gguf(assets, tmp_path / "m.gguf", *flags) as file:
        found = described(file)
    assert list(found) == list(expected["tensors"])
    assert found == recorded(expected)
    if not key.endswith("-imat"):  # which name the calibration file
        assert (tmp_path / "m.gguf").stat().st_size == expected["bytes"]


def test_a_whole_file_of_llama_quantize_byte_for_byte(assets: Path, tmp_path: Path) -> None:
    to_gguf(assets, tmp_path / "m.gguf", "--type", "q4_k_m").close()
    expected = assets / "fixtures" / "gguf" / "tiny-qwen3-Q4_K_M.gguf"
    assert (tmp_path / "m.gguf").read_bytes() == expected.read_bytes()


def test_every_expert_has_its_own_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.MEMORY, "least", "0B")  # so little memory cuts these small tensors up
    folder = transformers_model(tmp_path / "moe", "qwen3moe")
    columns, name = SIZES["hidden_size"], "blk.1.ffn_up_exps.weight"
    importance_EI = np.random.default_rng(0).random((4, columns), np.float32)
    (tmp_path / "i.dat").write_bytes(imatrix_dat({name: (1, importance_EI.ravel().tolist())}))
    flags = [
        "--type",
        "q4_0",
        "--pure",
        "--imatrix",
        tmp_path / "i.dat",
        "-j",
        2,
        "--max-memory",
        "20KB",
        "-q",
    ]
    for path, extra in (("f32", ["--type", "f32", "-q"]), ("q4_0", flags)):
        ran = qconvert("to-gguf", folder, "-o", tmp_path / f"{path}.gguf", *extra)
        assert ran.code == 0, ran.err
    with GGUFFile(tmp_path / "f32.gguf") as plain, GGUFFile(tmp_path / "q4_0.gguf") as file:
        rows_ERI = plain.read(name, 0, plain.specs[name].rows).reshape(4, -1, columns)
        found_ERB = file.read(name, 0, file.specs[name].rows).reshape(4, rows_ERI.shape[1], -1)
    for rows_RI, importance_I, found_RB in zip(rows_ERI, importance_EI, found_ERB, strict=True):
        expected = encode_rows(DenseRows(rows_RI, DType.F32), "Q4_0", importance_I=importance_I)
        assert np.array_equal(found_RB, expected)
    (tmp_path / "i.dat").write_bytes(imatrix_dat({name: (1, [1.0] * columns)}))
    assert f"{name}: the importance matrix has 64 columns" in refused(tmp_path, folder, *flags)


# What is refused, and what is left behind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with a tokenizer."""
    return transformers_model(tmp_path_factory.mktemp("model") / "small", "qwen2")


def test_an_existing_file_is_replaced_only_when_asked(model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"precious")
    assert "already exists" in refused(tmp_path, model, "--type", "f16")
    assert (tmp_path / "m.gguf").read_bytes() == b"precious"
    ran = qconvert("to-gguf", model, "--type", "f16", "-o", tmp_path / "m.gguf", "--overwrite", "-q")
    assert ran.code == 0 and (tmp_path / "m.gguf").read_bytes().startswith(b"GGUF")


def test_a_folder_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).symlink_to(model / name)
    assert "no tokenizer.json" in refused(tmp_path, tmp_path / "bare", "--type", "f16")


def test_an_unknown_pre_tokenizer_is_refused_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / "odd" / name).symlink_to(model / name)
    text = (model / "tokenizer.json").read_text()
    (tmp_path / "odd" / "tokenizer.json").write_text(text.replace("|[^", "|[x^", 1))
    with monkeypatch.context() as patch:
        patch.setattr("qconvert.convert.execute.run", None)
        said = refused(tmp_path, tmp_path / "odd", "--type", "f16")
    assert "no pre-tokenizer of this structure" in said and "--pre-tokenizer" in said
    flags = ["--type", "f16", "--pre-tokenizer", "qwen2", "-o", tmp_path / "m.gguf", "-q"]
    assert qconvert("to-gguf", tmp_path / "odd", *flags).code == 0


def test_rows_that_blocks_do_not_divide_can_be_refused(model: Path, tmp_path: Path) -> None:
    said = refused(tmp_path, model, "--type", "q4_k_m", "--no-fallback")
    assert "rows of 64 are not a multiple of q4_k's 256" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--type", "q4_k_n"], "did you mean 'q4_k_"),
        (["--type", "q4"], "did you mean 'q4_k_m'?"),
        (["--type", "q8"], "did you mean 'q8_0'?"),
        (["--type", "f16", "--tensor-type", "ffn_down"], "write PATTERN=TYPE"),
        (["--type", "f16", "--tensor-type", "ffn_down=q4_9"], "'q4_9': no such tensor type"),
        (["--type", "f16", "--tensor-type", "(=q8_0"], "not a regular expression"),
        (["--type", "f16", "--token-embedding-type", "float"], "'float': no such tensor type"),
        *(
            (["--type", "f16", option, f"{pattern}{name}"], f"type {name}: no weights are written in it")
            for option, pattern in (("--output-tensor-type", ""), ("--tensor-type", "ffn_down="))
            for name in ("i8", "i64", "f64", "q8_1", "q8_k")
        ),
        (["--type", "f16", "--pre-tokenizer", "qwen"], "did you mean 'qwen"),
        (["--type", "f16", "-o", "m.bin"], "m.bin: does not end in .gguf\nHint: write -o m.bin.gguf"),
    ],
)
def test_wishes_that_no_model_could_fulfil_are_usage(flags: list[str], says: str) -> None:
    ran = qconvert("to-gguf", "nowhere", *flags)
    assert ran.code == 2 and ran.err.startswith("Error: ") and says in ran.err and "Hint: " in ran.err


def test_a_folder_or_the_source_is_never_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    said = refused(tmp_path, model, "--type", "f16", "--overwrite")
    assert "m.gguf: is a folder" in said and "--overwrite" not in said
    (tmp_path / "m.gguf").rmdir()
    ran = qconvert("to-gguf", model, "--type", "f16", "-o", tmp_path / "m.gguf", "-q")
    assert ran.code == 0
    said = refused(tmp_path, tmp_path / "m.gguf", "--type", "keep", "--overwrite")
    assert "m.gguf: is the source" in said


def test_nan_is_refused_by_name_unless_allowed(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weight = np.full((384, 256), 0.5, np.float32)
    weight[7, 3] = np.nan
    folder = tiny(tmp_path / "nan", changes={name: weight})
    qwen2_tokenizer().save(str(folder / "tokenizer.json"))
    (tmp_path / "out").mkdir()
    assert f"{name}: NaN or Inf at row 7, column 3" in refused(tmp_path / "out", folder, "--type", "f16")
    out = tmp_path / "out" / "m.gguf"
    assert qconvert("to-gguf", folder, "--type", "f16", "-o", out, "--allow-nonfinite", "-q").code == 0


@pytest.mark.parametrize(
    ("file_type", "what"), [("q8_0", "scales"), ("q4_k_m", "scales"), ("f16", "numbers")]
)
def test_what_half_precision_cannot_hold_is_refused(tmp_path: Path, file_type: str, what: str) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = np.ones((256, 256), np.float32)
    weights[2, 7] = 1e9
    folder = tiny(tmp_path / "m", num_hidden_layers=1, changes={name: weights})
    out = tmp_path / "m.gguf"
    ran = qconvert("to-gguf", folder, "--type", file_type, "--pre-tokenizer", "qwen2", "-o", out)
    what = "numbers" if file_type == "f16" else "scales"
    assert ran.code == 1 and f"Error: {name}: 1 {what} do not fit" in ran.err and "--type bf16" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    bf16 = qconvert("to-gguf", folder, "--type", "bf16", "--pre-tokenizer", "qwen2", "-o", out, "-q")
    assert bf16.code == 0, bf16.err


def test_ctrl_c_leaves_what_the_next_run_goes_on_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qconvert.convert.containers.gguf_file.verify_files", interrupted)
    ran = qconvert("to-gguf", model, "--type", "f16", "-o", tmp_path / "m.gguf")
    left = {path.name for path in tmp_path.iterdir()}
    assert ran.code == 130 and left == {"m.gguf.partial", "m.gguf.partial-journal"}


# What is printed


def test_json_tells_types_sizes_and_hashes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    ran = qconvert("to-gguf", model, "--type", "f16", "-o", out, "--json")
    found = ran.json
    assert found["bytes"] == sum(entry["bytes"] for entry in found["types"])
    assert [entry["type"] for entry in found["types"]] == ["f16", "f32"]
    assert found["sha256"] == {"m.gguf": hashlib.sha256(out.read_bytes()).hexdigest()}
    assert (found["out"], found["dry_run"], found["substituted"]) == (str(out), False, [])


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    ran = qconvert("to-gguf", model, "--type", "f16", "-o", tmp_path / "m.gguf", "--dry-run")
    assert ran.code == 0 and "nothing was written" in ran.err and not list(tmp_path.iterdir())


def test_the_default_name_follows_the_convention(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert qconvert("to-gguf", model, "--type", "f16", "-q").out == "Small-82K-F16.gguf\n"


def test_the_list_of_types() -> None:
    lines = qconvert("to-gguf", "--type", "list").out.splitlines()
    assert lines[0].split() == ["type", "base", "bpw", "of", "base"]
    assert [line.split() for line in lines if line.startswith("q4_k_m")] == [["q4_k_m", "q4_k", "4.50"]]


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_the_same_bytes_for_any_number_of_threads(model: Path, tmp_path: Path, jobs: int) -> None:
    out = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path, flags in zip(out, ([], ["-j", jobs, "--max-memory", "1MB"]), strict=True):
        assert qconvert("to-gguf", model, "--type", "bf16", "-o", path, "-q", *flags).code == 0
    assert out[0].read_bytes() == out[1].read_bytes()


def test_parts_hold_what_the_whole_does(model: Path, tmp_path: Path) -> None:
    qconvert("to-gguf", model, "--type", "f16", "-o", tmp_path / "whole.gguf", "-q")
    ran = qconvert(
        "to-gguf", model, "--type", "f16", "-o", tmp_path / "m.gguf", "--split-max-size", "60KB", "-q"
    )
    assert ran.code == 0, ran.err
    first = next(tmp_path.glob("m-00001-of-*.gguf"))
    assert ran.out == f"{first}\n"
    with GGUFFile(tmp_path / "whole.gguf") as whole, GGUFFile(first) as parts:
        assert len(parts.headers) > 2 and described(whole) == described(parts)


def test_a_pattern_that_matches_no_tensor_is_an_error(tmp_path: Path) -> None:
    ran = qconvert(
        "to-gguf", "embedded", "--type", "q8_0", "--tensor-type", "ffn_dwn=q6_k", "-o", tmp_path / "m.gguf"
    )
    assert (
        ran.code == 1 and "'ffn_dwn': matches no tensor" in ran.err and "did you mean 'ffn_down'?" in ran.err
    )
    assert not (tmp_path / "m.gguf").exists()


def test_a_card_and_a_modelfile_beside_the_file(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    words = ("to-gguf", "embedded", "--type", "q8_0", "--card", "--modelfile", "-o", out)
    assert qconvert(*words).code == 0
    modelfile = (tmp_path / "m.Modelfile").read_text()
    assert modelfile.startswith('FROM ./m.gguf\nTEMPLATE """{{ if .System }}<|im_start|>system\n')
    assert modelfile.endswith('\nPARAMETER stop "<|im_end|>"\n')
    card = (tmp_path / "m.md").read_text()
    assert (
        card.startswith("---\nlicense: apache-2.0\n") and "q8_0" in card and "llama-server -m m.gguf" in card
    )
    out.unlink()
    ran = qconvert(*words)
    assert ran.code == 1 and "m.md: already exists" in ran.err and not out.exists()
    assert qconvert(*words, "--overwrite").code == 0


def test_the_list_of_types_as_json() -> None:
    types = strict_json(qconvert("to-gguf", "--type", "list", "--json").out)["types"]
    assert {"type": "q8_0", "base": "q8_0", "base_bits_per_weight": 8.5} in types


def test_what_serves_the_file_is_told_after_it(tmp_path: Path) -> None:
    assert (
        f"next: llama-server -m {tmp_path / 'm.gguf'}"
        in qconvert("to-gguf", "embedded", "--type", "q4_0", "-o", tmp_path / "m.gguf").err
    )
    assert "next: vllm serve" in qconvert("quantize", "embedded", "--bits", 4, "-o", tmp_path / "int4").err
    assert "next:" not in qconvert("untie", "embedded", "-o", tmp_path / "untied").err
