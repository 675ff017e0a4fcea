"""Which directories compiled kernels may lie in: those that nobody but this user can write to, or put another for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tieredemb.kernels.cache_directory import fault_of, find_place, make


@pytest.fixture
def home(tmp_path):
    """A directory of this user's own, and one in it."""
    (tmp_path / "home" / "kernels").mkdir(parents=True, mode=0o700)
    (tmp_path / "home").chmod(0o700)
    return tmp_path / "home"


def test_directory_of_this_user_is_used_and_one_yet_to_be_made(home):
    assert fault_of(str(home / "kernels")) is None
    assert fault_of(str(home / "kernels" / "a" / "b")) is None
    assert make(str(home / "kernels" / "a" / "b")) is None
    assert (home / "kernels" / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770, 0o707, 0o1777])
def test_directory_that_others_can_write_to_is_refused(home, mode):
    (home / "kernels").chmod(mode)
    assert fault_of(str(home / "kernels")) == f"other users can write to {home / 'kernels'} (mode {mode:04o})"


@pytest.mark.parametrize(("mode", "is_safe"), [(0o777, False), (0o703, False), (0o755, True), (0o1777, True)])
def test_directory_that_others_can_replace_is_refused(home, mode, is_safe):
    home.chmod(mode)
    assert (fault_of(str(home / "kernels")) is None) == is_safe
    assert (fault_of(str(home / "yet" / "to" / "be" / "made")) is None) == is_safe


def test_link_is_as_safe_as_what_it_leads_through(home, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "kernels").mkdir()
    links = {"to_safe": "home/../home/kernels", "to_open": "open", "through_open": tmp_path / "open" / "kernels"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    assert fault_of(str(tmp_path / "to_safe")) is None
    for name in ("to_open", "through_open"):
        assert "other users can write to" in fault_of(str(tmp_path / name))
    (tmp_path / "endless").symlink_to("endless")
    assert "more than 40 links" in fault_of(str(tmp_path / "endless"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_directory_or_link_of_another_user_is_refused(home, tmp_path):
    (tmp_path / "link").symlink_to(home / "kernels")
    assert fault_of(str(tmp_path / "link")) is None
    os.lchown(tmp_path / "link", 12345, 12345)
    assert fault_of(str(tmp_path / "link")) == f"{tmp_path / 'link'} belongs to another user (user 12345)"
    os.chown(home, 12345, 12345)
    assert fault_of(str(home / "kernels")) == f"{home} belongs to another user (user 12345)"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize(("name", "members", "is_safe"), [
    ("user", [], True), ("user", ["user"], True), ("user", ["other"], False), ("staff", [], False),
])  # fmt: skip
def test_directory_above_may_be_open_to_the_group_of_this_user_alone(home, monkeypatch, name, members, is_safe):
    """As distributions make a group for each user, and an umask that lets it write."""
    for path in (home, home / "kernels"):
        os.chown(path, 12345, 12346)
    home.chmod(0o775)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr("pwd.getpwuid", lambda user: SimpleNamespace(pw_name="user"))
    monkeypatch.setattr("grp.getgrgid", lambda group: SimpleNamespace(gr_name=name, gr_mem=members))
    assert (fault_of(str(home / "kernels")) is None) == is_safe
    (home / "kernels").chmod(0o775)
    assert fault_of(str(home / "kernels")) is not None


def test_file_in_the_place_of_a_directory_is_refused(home):
    (home / "file").write_text("")
    assert fault_of(str(home / "file")) == f"{home / 'file'} is no directory"
    assert fault_of(str(home / "file" / "kernels")) == f"{home / 'file'} is no directory"


def test_places_follow_each_other(home, tmp_path, monkeypatch):
    """The chosen one, the user's cache directory, and that of temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    chosen = tmp_path / "chosen"
    assert find_place(str(chosen)).path == str(chosen / "tieredemb" / "kernels")
    chosen.mkdir()
    chosen.chmod(0o777)
    assert find_place(str(chosen)).path == str(home / "tieredemb" / "kernels")
    assert [*find_place(str(chosen)).refused] == [str(chosen)]
    home.chmod(0o777)
    assert find_place("").path == str(tmp_path / f"tieredemb-{os.geteuid()}" / "kernels")
    monkeypatch.setattr("tempfile.tempdir", str(chosen))
    assert find_place(str(chosen)).path is None
    assert len(find_place(str(chosen)).refused) == 3


def test_cache_directory_of_the_user_is_in_the_home_without_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert find_place("").path == str(tmp_path / ".cache" / "tieredemb" / "kernels")
