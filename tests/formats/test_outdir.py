"""Output folders: whole under their name, or not there at all, whoever is killed and whenever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qconvert.errors import BadRecipe, OutputExists, QConvertError
from qconvert.formats.io import output_folder
from qconvert.formats.io.output_folder import OutputDir, check_target


def make(out: Path, text: str = "new", *, overwrite: bool = False) -> None:
    with OutputDir(out, overwrite=overwrite) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text(text)
        (folder / "qconvert.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_folder_gets_its_name(tmp_path: Path) -> None:
    make(tmp_path / "new" / "out")
    assert names(tmp_path / "new") == ["out"]
    assert names(tmp_path / "new" / "out") == ["qconvert.json", "sub"]


def test_nothing_is_there_before_the_end(tmp_path: Path) -> None:
    with OutputDir(tmp_path / "out") as folder:
        assert folder == tmp_path / "out.partial"
        assert names(tmp_path) == ["out.partial"]


@pytest.mark.parametrize("error", [QConvertError("x", "y"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), OutputDir(tmp_path / "out") as folder:
        (folder / "weights").touch()
        raise error
    assert names(tmp_path) == []


def test_an_existing_name_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    with pytest.raises(OutputExists) as refused:
        make(out)
    assert refused.value.fact == f"{out}: already exists"
    assert "--overwrite" in (refused.value.hint or "")
    (out / "qconvert.json").unlink()
    with pytest.raises(OutputExists, match="not written by qconvert"):
        make(out, overwrite=True)
    with pytest.raises(OutputExists) as refused:
        make(out)
    assert "--overwrite" not in refused.value.hint
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(OutputExists):
        check_target(tmp_path / "link")
    assert names(tmp_path) == ["link", "out"]


def test_overwriting_replaces_the_whole_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    (out / "left over").touch()
    make(out, overwrite=True)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["qconvert.json", "sub"]
    assert (out / "sub" / "weights").read_text() == "new"


def test_a_replaced_folder_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    make(out, "old")
    probe = tmp_path / "probe"
    probe.touch()
    if not output_folder._exchange(probe, out):
        pytest.skip("this system or disk exchanges no two names")
    assert output_folder._exchange(probe, out)
    rename, seen = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        seen.append((out / "sub" / "weights").read_text())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    make(out, "new", overwrite=True)
    assert seen == ["new"] and names(tmp_path) == ["out", "probe"]


def test_a_failed_rename_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "_exchange", lambda a, b: False)
    out = tmp_path / "out"
    make(out, "old")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "out.partial":
            raise PermissionError(1, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(QConvertError, match="out: cannot be finished: Operation not permitted"):
        make(out, overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (out / "sub" / "weights").read_text() == "old"


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputExists), OutputDir(out):
        out.mkdir()
        (out / "theirs").touch()
    assert names(tmp_path) == ["out"]
    assert names(out) == ["theirs"]


def test_sources_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "models" / "source")
    (tmp_path / "models" / "qconvert.json").touch()
    (tmp_path / "link").symlink_to("models/source")
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "models" / "source"
    for out in ("models/source", "models", "link", "models/../models/source/."):
        with pytest.raises(BadRecipe, match="is or holds the source"):
            check_target(Path(out), overwrite=True, sources=[source])
    with pytest.raises(BadRecipe, match="is or holds the source"):
        check_target(Path("out"), sources=[tmp_path / "out.partial"])
    check_target(Path("models/source/quantized"), sources=[source])


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    with OutputDir(tmp_path / "out") as folder:
        (folder / "weights").touch()
        with pytest.raises(QConvertError, match="another run is writing it"), OutputDir(tmp_path / "out"):
            pass
        assert (folder / "weights").exists()
    assert names(tmp_path / "out") == ["weights"]


def test_what_is_in_the_way_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").touch()
    with pytest.raises(OutputExists, match=r"out\.partial: is in the way"):
        make(tmp_path / "out")
    assert names(tmp_path / "out.partial") == ["mine"]
    (tmp_path / "file.partial").touch()
    with pytest.raises(QConvertError, match=r"file\.partial: cannot be created: File exists"):
        make(tmp_path / "file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.partial").symlink_to("elsewhere")
    with pytest.raises(QConvertError, match=r"link\.partial: cannot be created"):
        make(tmp_path / "link")


WRITER = """
import sys, time
from pathlib import Path
from qconvert.formats.io.planned_files import FileSink
from qconvert.formats.io.output_folder import OutputDir
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.core.dtypes import DType, TensorSpec
import numpy as np
with OutputDir(Path(sys.argv[1]), overwrite=True) as folder:
    sink = FileSink(folder, plan_files([TensorSpec("w", DType.F32, (1000, 10))]))
    sink.write("w", 0, np.zeros((500, 10), "<f4"))
    print("half", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("existing", [False, True])
def test_killing_a_run_leaves_nothing_new_under_its_name(tmp_path: Path, end: int, existing: bool) -> None:
    out = tmp_path / "out"
    if existing:
        make(out, "old")
    command = [sys.executable, "-c", WRITER, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"half\n"
        with pytest.raises(QConvertError, match="another run is writing it"):
            make(out, overwrite=True)
        os.kill(run.pid, end)
    assert run.returncode != 0
    assert out.exists() == existing
    if existing:
        assert (out / "sub" / "weights").read_text() == "old"
    make(out, overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (out / "sub" / "weights").read_text() == "new"


def test_what_a_kill_left_of_a_replaced_folder_is_cleared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    make(tmp_path / "out.replaced-123", "older")
    (tmp_path / "out.replaced-124").mkdir()
    (tmp_path / "out.replaced-125").mkdir()
    (tmp_path / "out.replaced-125" / "letters").write_text("not ours")
    make(tmp_path / "out.replaced-x", "not ours")
    make(out, "new", overwrite=True)
    assert names(tmp_path) == ["out", "out.replaced-125", "out.replaced-x"]
    assert (out / "sub" / "weights").read_text() == "new"


def test_a_folder_that_lost_its_name_to_a_kill_gets_it_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(tmp_path / "out.replaced-123", "old")
    with pytest.raises(OutputExists, match="already exists"):
        make(out)
    assert names(tmp_path) == ["out"] and (out / "sub" / "weights").read_text() == "old"


def test_a_manifest_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a kill leaves of an old folder is known to be ours."""
    out = tmp_path / "out"
    make(out, "old")
    make(tmp_path / "out.replaced-1", "older")
    seen: list[bool] = []
    rmtree = output_folder.shutil.rmtree

    def watched(path: Path, **options: bool) -> None:
        seen.append((tmp_path / "out.replaced-1" / "qconvert.json").exists())
        rmtree(path, **options)

    monkeypatch.setattr(output_folder.shutil, "rmtree", watched)
    with OutputDir(out, overwrite=True):
        assert seen == [True, True] and names(tmp_path) == ["out", "out.partial"]
