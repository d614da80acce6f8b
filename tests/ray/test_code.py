import io
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from meshrl.engines.ray import code
from meshrl.engines.ray.code import Package, packaged, settle_in
from meshrl.errors import ConfigError
from meshrl.user_code import import_file


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("train.py", "letters.toml", "big.safetensors", "notes.md"):
        (tmp_path / name).write_text("", "utf-8")
    return tmp_path


def package_of(*folders: Path, imported: Iterable[ModuleType] = ()) -> Package:
    package = packaged([*folders], {each.__name__: each for each in imported})
    assert package
    return package


def names(*folders: Path, imported: Iterable[ModuleType] = ()) -> list[str]:
    return sorted(zipfile.ZipFile(io.BytesIO(package_of(*folders, imported=imported).content)).namelist())


def written(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def test_code_and_its_settings_are_carried_and_no_data(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert names(project) == ["0/letters.toml", "0/train.py"]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "own.py").write_text("", "utf-8")
    (project / "linked.py").symlink_to(elsewhere / "own.py")
    (project / "nowhere.py").symlink_to(elsewhere / "gone.py")
    assert names(project) == ["0/letters.toml", "0/linked.py", "0/train.py"]


def test_what_is_ignored_and_runs_and_environments_are_left_out(project: Path) -> None:
    beside = ("runs/one/metrics.jsonl", "env/pyvenv.cfg", "made/kept.txt")
    code = ("runs/one/own.py", "env/own.py", ".git/own.py", "kept/secret.json", "kept/own.py", "made/own.py")
    written(project, **dict.fromkeys((*beside, *code), ""))
    written(project, **{"kept/.gitignore": "secret.*\n", ".gitignore": "made/\n"})
    assert names(project) == ["0/kept/own.py", "0/letters.toml", "0/train.py"]
    assert names(project / "kept") == ["0/own.py"]


def test_too_much_is_refused_with_the_largest_files(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST", 2**20)
    (project / "kernels.so").write_bytes(bytes(2**21))
    with pytest.raises(ConfigError, match=rf"2\.0 MiB, more than .* 1 MiB.*\n  2\.0 MiB {project}/kernels\.so\n"):
        packaged([project], {})


def test_large_files_are_left_out_and_named_and_end_no_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rows.json", "words.txt", "kernels.so", "rows.jsonl", "rows.parquet"):
        with (project / name).open("wb") as file:
            file.truncate(code.MOST if name[0] in "rw" else code.MOST_OF_A_TEXT + 1)
    (project / "small.json").write_bytes(bytes(code.MOST_OF_A_TEXT))
    assert names(project) == ["0/kernels.so", "0/letters.toml", "0/small.json", "0/train.py"]
    assert f"files='{project}/rows.json, {project}/words.txt'" in capsys.readouterr().err


def test_a_packages_folder_is_carried_and_all_beside_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("lib/meshrl_test_mine/__init__.py", "lib/meshrl_test_mine/words.py", "lib/other.py", "apart/one.py")
    written(tmp_path, **dict.fromkeys(files, ""))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib")])
    mine = __import__("meshrl_test_mine.words")
    one = import_file(tmp_path / "apart" / "one.py")
    imported = mine, sys.modules["meshrl_test_mine.words"], one
    assert package_of(imported=imported).folders == [str(tmp_path / "apart"), str(tmp_path / "lib")]
    found = ["0/one.py", "1/meshrl_test_mine/__init__.py", "1/meshrl_test_mine/words.py"]
    assert names(imported=imported) == found


def test_what_is_installed_and_meshrl_itself_are_not_carried() -> None:
    theirs = {"pytest": pytest, "meshrl": sys.modules["meshrl"], "io": io, "code": code}
    assert packaged([Path(pytest.__file__).parent], theirs) is None


def test_an_imported_module_is_carried_if_ignored_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("one.py", "site-packages/six.py", "kept/conda-meta/history", "kept/other.py")
    written(tmp_path / "mine", **{**dict.fromkeys(files, ""), ".gitignore": "one.py\n"})
    written(tmp_path / "home", **{"reward.py": "", "other.py": ""})
    monkeypatch.setattr(code, "_TOO_WIDE", {tmp_path / "home"})
    mine = [import_file(tmp_path / "mine" / file) for file in ("one.py", "site-packages/six.py")]
    assert names(imported=mine) == ["0/one.py"]
    reward = import_file(tmp_path / "home" / "reward.py")
    assert names(tmp_path / "home", imported=[reward]) == ["0/reward.py"]


def test_a_machine_that_has_all_of_a_folder_uses_it_and_no_copy(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_of(project)
    assert package.uri == package_of(project).uri
    here = tmp_path_factory.mktemp("here")
    zipfile.ZipFile(io.BytesIO(package.content)).extractall(here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(project)])
    monkeypatch.setattr("meshrl.user_code._copies", {})
    settle_in(package.folders, [str(project)])
    assert sys.path == [str(project)]
    (project / "train.py").write_text("OLD = 1", "utf-8")
    assert package.uri != package_of(project).uri, "the name is that of the content"
    settle_in(package.folders, [str(project)])
    assert sys.path == [str(here / "0"), str(project)]
