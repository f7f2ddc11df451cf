"""Hugging Face folders: what makes one up, where its files disagree, and what is not one."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.formats.huggingface.folder import open_hf_folder, weight_files
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE

ARRAYS = {name: np.full((4, 3), number, "<f4") for number, name in enumerate("abcz")}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: "ab", SECOND: "c"}


def write_config(folder: Path, **fields: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **fields}))


def write_single(folder: Path, name: str = "model.safetensors", tensors: str = "abc") -> None:
    safetensors.numpy.save_file({t: ARRAYS[t] for t in tensors}, folder / name, metadata={"format": "pt"})


def write_shards(folder: Path, weight_map: dict[str, Any] | None = None, total_size: int = 144) -> None:
    for name, tensors in SHARDS.items():
        write_single(folder, name, tensors)
    real = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    index = {"metadata": {"total_size": total_size}, "weight_map": real | (weight_map or {})}
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config and nothing else."""
    write_config(tmp_path / "model")
    return tmp_path / "model"


def test_one_file(model: Path) -> None:
    write_single(model)
    with open_hf_folder(model) as checkpoint:
        assert checkpoint.config == {"model_type": "qwen2"}
        assert dict(checkpoint.specs) == {name: TensorSpec(name, DType.F32, (4, 3)) for name in "abc"}
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.has_weights
        assert checkpoint.warnings == ()
        assert checkpoint.index_sha256 is None
        np.testing.assert_array_equal(checkpoint.read("b", 1, 3), ARRAYS["b"][1:3])


def test_shards_are_one_source(model: Path) -> None:
    write_shards(model)
    with open_hf_folder(model) as checkpoint:
        assert list(checkpoint.specs) == ["a", "b", "c"]
        assert [file.path.name for file in checkpoint.files] == list(SHARDS)
        assert checkpoint.index_sha256 == hashlib.sha256((model / INDEX_FILE).read_bytes()).hexdigest()
        for name in "abc":
            rows = ARRAYS[name]
            np.testing.assert_array_equal(checkpoint.read(name, 0, 4), rows)
            home, offset = checkpoint.source_offset(name)
            assert (model / list(SHARDS)[home]).read_bytes()[offset:].startswith(rows.tobytes())


def test_headers_are_hashed_not_files(model: Path) -> None:
    write_single(model)
    blob = (model / "model.safetensors").read_bytes()
    header = blob[8 : 8 + int.from_bytes(blob[:8], "little")]
    (file,) = open_hf_folder(model).files
    assert file.header_sha256 == hashlib.sha256(header).hexdigest()
    assert file.size == len(blob)


def test_names_of_shared_tensors_are_kept(model: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_model

    module = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 2, bias=False)})
    module["head"] = module["embed"]
    save_model(module, str(model / "model.safetensors"))
    checkpoint = open_hf_folder(model)
    assert list(checkpoint.specs) == ["embed.weight"]
    assert checkpoint.metadata["head.weight"] == "embed.weight"


def test_an_index_that_is_merely_wrong_is_warned_of(model: Path) -> None:
    write_shards(model, total_size=1)
    write_single(model, FIRST, "abz")
    assert open_hf_folder(model).warnings == (
        f"{INDEX_FILE}: does not list z; read anyway",
        f"{INDEX_FILE}: total_size is 1, the tensors have 192 bytes",
    )
    assert list(open_hf_folder(model).specs) == ["a", "b", "z", "c"]


def test_the_index_decides_between_two_shards(model: Path) -> None:
    write_shards(model)
    safetensors.numpy.save_file({"b": ARRAYS["b"] + 9, "c": ARRAYS["c"]}, model / SECOND)
    with open_hf_folder(model) as checkpoint:
        (warning,) = checkpoint.warnings
        assert warning == f"{INDEX_FILE}: several shards hold b; the index decides which is read"
        np.testing.assert_array_equal(checkpoint.read("b", 0, 4), ARRAYS["b"])


@pytest.mark.parametrize("file", ["../x", "..\\x", "/etc/x", "C:x"])
def test_an_index_cannot_point_outside(model: Path, file: str) -> None:
    write_shards(model, {"a": f"{file}.safetensors"})
    with pytest.raises(CorruptCheckpoint) as refused:
        open_hf_folder(model)
    what = f"a maps to {file}.safetensors, not to a .safetensors file beside it"
    assert refused.value.fact == f"{INDEX_FILE}: {what}"


@pytest.mark.parametrize(
    ("weight_map", "fact"),
    [
        ({"a": "x\0.safetensors"}, f"{INDEX_FILE}: a maps to 'x\\x00.safetensors', not to a .safetensors"),
        ({"a": "pytorch_model.bin"}, f"{INDEX_FILE}: a maps to pytorch_model.bin, not to a .safetensors"),
        ({"a": 7}, f"{INDEX_FILE}: a maps to 7, not to a .safetensors file beside it"),
        ({"a": "x.safetensors"}, f"x.safetensors: named by {INDEX_FILE}, but not there (1 of 3 shards"),
        ({"a": SECOND}, f"a: {INDEX_FILE} says it is in {SECOND}, but {FIRST} holds it"),
        ({"z": SECOND}, f"z: {INDEX_FILE} says it is in {SECOND}, but no shard holds it"),
    ],
)
def test_an_index_that_lies_is_refused(model: Path, weight_map: dict[str, Any], fact: str) -> None:
    write_shards(model, weight_map)
    with pytest.raises(CorruptCheckpoint) as refused:
        open_hf_folder(model)
    assert refused.value.fact.startswith(fact)


def test_one_file_goes_before_an_index(model: Path) -> None:
    write_shards(model)
    safetensors.numpy.save_file({"a": ARRAYS["a"] + 5}, model / "model.safetensors")
    with open_hf_folder(model) as checkpoint:
        assert list(checkpoint.specs) == ["a"]
        assert checkpoint.read("a", 0, 1)[0, 0] == 5
        assert "both there" in checkpoint.warnings[0]
    assert weight_files(model) == (model / "model.safetensors",)
    (model / "model.safetensors").unlink()
    assert weight_files(model) == tuple(model / name for name in SHARDS)


def test_an_index_of_one_file_is_followed_in_silence(model: Path) -> None:
    write_single(model)
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys("abc", "model.safetensors")}))
    checkpoint = open_hf_folder(model)
    assert checkpoint.warnings == ()
    assert checkpoint.index_sha256


def test_a_snapshot_of_links_is_read(tmp_path: Path, model: Path) -> None:
    write_single(model)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(model.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    assert list(open_hf_folder(model).specs) == ["a", "b", "c"]


def test_links_to_nothing_and_loops_are_refused(model: Path) -> None:
    for target in ("nothing", "model.safetensors"):
        (model / "model.safetensors").symlink_to(target)
        with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors: cannot be opened"):
            open_hf_folder(model)
        (model / "model.safetensors").unlink()


def test_a_path_to_one_file_is_enough(model: Path, tmp_path: Path) -> None:
    write_shards(model)
    assert list(open_hf_folder(model / "config.json").specs) == ["a", "b", "c"]
    assert list(open_hf_folder(model / INDEX_FILE).specs) == ["a", "b", "c"]
    one = open_hf_folder(model / SECOND)
    assert list(one.specs) == ["c"]
    assert one.config == {"model_type": "qwen2"}
    write_single(tmp_path, "alone.safetensors", "a")
    alone = open_hf_folder(tmp_path / "alone.safetensors")
    assert (alone.config, alone.warnings) == ({}, ("alone.safetensors: no config.json beside it",))


def test_a_bare_config_is_enough_without_weights(model: Path) -> None:
    (model / "qwen.json").write_bytes((model / "config.json").read_bytes())
    for path in (model, model / "config.json", model / "qwen.json"):
        checkpoint = open_hf_folder(path)
        assert checkpoint.config == {"model_type": "qwen2"}
        assert not checkpoint.has_weights
        assert not checkpoint.specs


@pytest.mark.parametrize(
    ("entry", "kind", "fact", "hint"),
    [
        ("adapter_config.json", UnsupportedModel, "holds a LoRA adapter, not a model", "with its base"),
        ("model.gguf", UnsupportedModel, "holds a GGUF file, model.gguf", "name the file"),
        ("pytorch_model.bin", UnsupportedModel, "holds weights as a pickle, pytorch_mod", "save_pretrained"),
        ("consolidated.00.pth", UnsupportedModel, "holds weights as a pickle, consolid", "save_pretrained"),
        ("optimizer.safetensors", CorruptCheckpoint, "holds optimizer.safetensors, but neither", "name it"),
        ("consolidated.safetensors", UnsupportedModel, "holds consolidated.safetensors in the", "Hub, too"),
    ],
)  # fmt: skip
def test_what_is_not_a_checkpoint_is_told_apart(
    model: Path, entry: str, kind: type[QConvertError], fact: str, hint: str
) -> None:
    (model / entry).write_bytes(b"{}")
    with pytest.raises(kind) as refused:
        open_hf_folder(model)
    assert refused.value.fact.startswith(f"{model}: {fact}")
    assert hint in (refused.value.hint or "")


def rename_shards(model: Path, *names: str) -> None:
    write_shards(model)
    (model / "model.safetensors.index.json").unlink()
    for file, name in zip(sorted(model.glob("*.safetensors")), names, strict=True):
        file.rename(model / name)


def test_all_shards_are_read_without_their_index(model: Path) -> None:
    rename_shards(model, "weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors")
    (model / "consolidated.safetensors").touch()
    with open_hf_folder(model) as checkpoint:
        assert len(checkpoint.shards) == 2 and len(checkpoint.specs) > 1
        assert checkpoint.warnings[0].startswith("no model.safetensors.index.json: weights-00001")


def test_shards_without_an_index_must_all_be_here(model: Path) -> None:
    rename_shards(model, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"2 of its 3 shards.*model-00002-of-00003"):
        open_hf_folder(model)


def test_shards_of_two_models_are_none(model: Path) -> None:
    rename_shards(model, "a-00001-of-00001.safetensors", "b-00001-of-00001.safetensors")
    with pytest.raises(CorruptCheckpoint, match="but neither"):
        open_hf_folder(model)


def test_the_only_file_is_the_model(model: Path) -> None:
    write_single(model)
    (model / "model.safetensors").rename(model / "weights.00.safetensors")
    (model / "optimizer.safetensors").touch()
    with open_hf_folder(model) as checkpoint:
        assert checkpoint.warnings == ("no model.safetensors.index.json: weights.00.safetensors is read",)


def test_what_is_not_there_is_told(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    write_single(model)
    (model / "config.json").unlink()
    for path, fact in {
        tmp_path / "none": "no such file or folder",
        tmp_path / "empty": "holds no checkpoint, neither config.json nor model.safetensors",
        model: "has no config.json",
    }.items():
        with pytest.raises(QConvertError) as refused:
            open_hf_folder(path)
        assert refused.value.fact == f"{path}: {fact}"
    with pytest.raises(UnsupportedModel, match=r"notes\.txt: neither a safetensors nor a GGUF file"):
        open_hf_folder(tmp_path / "notes.txt")


def test_pickles_stay_shut(model: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    write_single(model)
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (model / name).write_bytes(pickle.dumps(Trap()))
    (model / "modeling.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    skipped = open_hf_folder(model).sidecars.skipped
    assert {path.name for path in skipped} == {
        *("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"),
        "modeling.py",
    }
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "sprung").exists(), "the trap works"


def test_sidecars_travel_by_name(model: Path) -> None:
    write_single(model)
    travel = ["LICENSE", "NOTICE.txt", "chat_template.jinja", "generation_config.json", "merges.txt",
              "preprocessor_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
              "tokenizer_config.json", "vocab.json"]  # fmt: skip
    stay = [
        ".gitattributes",
        "LICENSE.py",
        "logits.safetensors",
        "quantize_config.json",
        "run.py",
        "vocab.json.bin",
    ]
    for name in [*travel, *stay, "README.md"]:
        (model / name).touch()
    (model / "original").mkdir()
    (model / "vocab.txt").mkdir()
    checkpoint = open_hf_folder(model)
    assert [path.name for path in checkpoint.sidecars.copied] == travel
    assert [path.name for path in checkpoint.sidecars.skipped] == sorted([*stay, "original", "vocab.txt"])
    assert checkpoint.readme == model / "README.md"


def test_real_checkpoints_are_read_as_by_the_library(assets: Path) -> None:
    folders = [*(assets / "fixtures" / "zoo").iterdir(), *(assets / "models").iterdir()]
    for folder in filter(Path.is_dir, folders):
        with open_hf_folder(folder) as checkpoint:
            assert checkpoint.warnings == ()
            with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as library:
                found = {name: (spec.dtype.code, list(spec.shape)) for name, spec in checkpoint.specs.items()}
                slices = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118
            assert found == {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}


def test_opening_a_folder_loads_neither_torch_nor_numba() -> None:
    code = (
        "import sys, qconvert.formats.huggingface.folder; "
        "print({'torch', 'numba', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
