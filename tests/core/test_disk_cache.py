"""Compiled kernels on disk run in who loads them: only the user and root may write them."""

import os
import sys
from pathlib import Path

import pytest

from syncbn_core import disk_cache
from syncbn_core.disk_cache import load_or_claim, read_checked, write_checked

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no modes of files")

CONTENT = b"a kernel"
USER = 12345


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_warned", [])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the cache, written while everybody may read and write new files."""
    before = os.umask(0)
    path = tmp_path / "kept" / "here" / "one.kernel"
    write_checked(path, CONTENT)
    os.umask(before)
    return path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_files_and_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        for user, of_file, of_folder in ((USER, 0o600, 0o700), (0, 0o644, 0o755)):
            monkeypatch.setattr(os, "geteuid", lambda user=user: user)
            path = tmp_path / str(user) / "folder" / "one.kernel"
            _, release = load_or_claim(path.parent, path.name, lambda: None)
            write_checked(path, CONTENT)
            release()
            assert mode(path) == mode(path.with_name(disk_cache.LOCK_FILE)) == of_file
            assert mode(path.parent) == mode(path.parent.parent) == of_folder
    finally:
        os.umask(before)


def test_what_is_written_is_read(file: Path) -> None:
    assert read_checked(file) == CONTENT
    file.parent.chmod(0o500)
    file.chmod(0o400)
    assert read_checked(file) == CONTENT  # as in a container
    file.parent.chmod(0o1777)  # where only the owner of a file can replace it
    assert read_checked(file) == CONTENT


def test_what_root_has_made_is_read_by_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if file.stat().st_uid != 0:
        pytest.skip("not root")
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    assert read_checked(file) == CONTENT


@pytest.mark.parametrize(
    ("what", "named"),
    [("file", "one.kernel"), ("group's file", "one.kernel"), ("folder", "this folder")],
)
def test_what_others_can_write_is_not_loaded_and_said_once(
    what: str, named: str, file: Path
) -> None:
    changed = file.parent if what == "folder" else file
    changed.chmod(mode(changed) | (0o020 if what == "group's file" else 0o002))
    with pytest.warns(RuntimeWarning, match=f"{file.parent}: other users can change {named}") as it:
        assert [read_checked(file) for _ in range(2)] == [None, None]
    (said,) = it
    assert "delete the folder, or set SYNCBN_CACHE_DIR" in str(said.message)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_another_user_is_not_loaded(
    what: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(file if what == "file" else file.parent, USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: USER)
    with pytest.warns(RuntimeWarning, match="other users"):
        assert read_checked(file) is None


def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    other.write_bytes(b"mine")
    folder.mkdir()
    missing = tmp_path / "missing"
    (folder / "one.kernel").symlink_to(other)
    (folder / disk_cache.LOCK_FILE).symlink_to(missing)
    load_or_claim(folder, "one.kernel", lambda: None)
    write_checked(folder / "one.kernel", CONTENT)
    assert other.read_bytes() == b"mine"
    assert not missing.exists()
    assert read_checked(folder / "one.kernel") == CONTENT
