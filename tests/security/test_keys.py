"""The key file: made once, readable only by its owner, and refused otherwise."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from backhaul.errors import OptionError
from backhaul.options import SECRET_VARIABLE, RpcOptions
from backhaul.security.keys import KEY_BYTES, KEY_FILE_VARIABLE, make_key_file, read_key_file

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    make_key_file(str(path))
    return path


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (SECRET_VARIABLE, KEY_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def test_a_new_key_is_32_random_bytes_that_only_the_owner_can_read(path: Path, tmp_path: Path) -> None:
    key = read_key_file(str(path))
    assert len(key) == KEY_BYTES == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == key.hex() + "\n"
    make_key_file(str(tmp_path / "other.key"))
    assert read_key_file(str(tmp_path / "other.key")) != key


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_key_file(str(tmp_path / "key"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(path: Path, tmp_path: Path) -> None:
    before = path.read_text()
    with pytest.raises(OptionError, match="exists, and its key may be in use: choose another name"):
        make_key_file(str(path))
    assert path.read_text() == before
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OptionError, match="exists"):
        make_key_file(str(tmp_path / "link"))
    assert not target.exists()


def test_a_key_file_that_cannot_be_made() -> None:
    with pytest.raises(OptionError, match="cannot make the key file /no/such/place/key: No such file"):
        make_key_file("/no/such/place/key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o610])
def test_a_key_file_that_is_open_to_others_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(OptionError, match=rf"open to other users \(mode {mode:04o}\): `chmod 600 {path}`"):
        read_key_file(str(path))
    path.chmod(0o400)
    assert len(read_key_file(str(path))) == KEY_BYTES


@as_root
def test_a_key_file_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, NOBODY, -1)
    with pytest.raises(OptionError, match=rf"belongs to user {NOBODY}, not to this one \(0\): `chown` it"):
        read_key_file(str(path))


CONTENTS = [
    ("", "contains 0 bytes, and a key has at least 32"),
    ("ab" * 31, "contains 31 bytes, and a key has at least 32"),
    ("a" * 63, "does not contain a key in hexadecimal; make one with `backhaul keygen`"),
    ("zz" * 32, "does not contain a key in hexadecimal"),
    ("\xe4" * 64, "does not contain a key in hexadecimal"),
    ("-----BEGIN PRIVATE KEY-----\n", "does not contain a key in hexadecimal"),
    ("ab" * 5000, "is too long to be a key file: 10000 bytes"),
]


@pytest.mark.parametrize(("content", "text"), CONTENTS)
def test_an_invalid_key_is_refused_and_not_shown(path: Path, content: str, text: str) -> None:
    path.write_text(content)
    with pytest.raises(OptionError, match=text) as refusal:
        read_key_file(str(path))
    assert not content or content[:8] not in str(refusal.value)
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_longer_keys_and_other_ways_to_write_them(path: Path) -> None:
    path.write_text("  " + "Ab" * 40 + "\r\n\n")
    assert read_key_file(str(path)) == b"\xab" * 40
    path.write_text("ab" * 16 + "\n" + "cd" * 16 + "\n")
    assert read_key_file(str(path)) == b"\xab" * 16 + b"\xcd" * 16


def test_a_path_that_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no key file"):
        read_key_file(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="is not a regular file"):
        read_key_file(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OptionError, match="is not a regular file"):
        read_key_file(str(tmp_path / "pipe"))
    with pytest.raises(OptionError, match="cannot read the key file"):
        read_key_file("a\0b")


# Where the key comes from.


def test_the_option_key_file(path: Path) -> None:
    options = RpcOptions(key_file=str(path))
    assert options.key_file == str(path)
    assert options.secret_or_inherited() == bytes.fromhex(path.read_text())
    assert path.read_text().strip() not in repr(options)


def test_a_relative_key_file_stays_the_same_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    options = RpcOptions(key_file=path.name)
    monkeypatch.chdir("/")
    assert options.secret_or_inherited() == bytes.fromhex(path.read_text())


def test_a_bad_key_file_is_refused_when_it_is_set(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(
        OptionError, match=r"option key_file: .* cannot be used: the key file .* is open to other users"
    ):
        RpcOptions(key_file=str(path))


def test_a_key_file_that_changed_since_is_checked_again(path: Path) -> None:
    options = RpcOptions(key_file=str(path))
    path.chmod(0o644)
    with pytest.raises(OptionError, match="open to other users"):
        options.secret_or_inherited()


def test_the_first_source_of_a_key_that_is_set_wins(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = read_key_file(str(path))
    make_key_file(str(tmp_path / "other"))
    other = read_key_file(str(tmp_path / "other"))
    assert RpcOptions().secret_or_inherited() is None
    monkeypatch.setenv(SECRET_VARIABLE, "ab" * 32)
    assert RpcOptions().secret_or_inherited() == b"\xab" * 32
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    assert RpcOptions().secret_or_inherited() == key
    assert RpcOptions(key_file=str(tmp_path / "other")).secret_or_inherited() == other
    assert RpcOptions(key_file=str(path), secret=bytes(32)).secret_or_inherited() == bytes(32)


def test_a_bad_key_file_in_the_environment_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "ab" * 32)
    monkeypatch.setenv(KEY_FILE_VARIABLE, "/no/such/key")
    with pytest.raises(OptionError, match="there is no key file /no/such/key"):
        RpcOptions().secret_or_inherited()


GROUP = 2000


@as_root
@pytest.mark.parametrize(
    ("mode", "group", "groups", "refused"),
    [
        (0o440, GROUP, [GROUP], None),
        (0o640, GROUP, [GROUP], None),
        (0o440, GROUP, [], "cannot read|Permission denied"),
        (0o444, GROUP, [GROUP], "open to other users"),
        (0o460, GROUP, [GROUP], "open to other users"),
        (0o450, GROUP, [GROUP], "open to other users"),
        (0o404, GROUP, [], "open to other users"),
    ],
)
def test_a_secret_that_kubernetes_mounts_for_a_user_who_is_not_root(
    mode: int, group: int, groups: list[int], refused: str | None
) -> None:
    """With `fsGroup`, the files of a Secret belong to root and to that group, which may read them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "key"
        make_key_file(str(path))
        os.chown(path, 0, group)
        path.chmod(mode)
        before = os.getgroups()
        try:
            os.setgroups(groups)
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
            if refused is None:
                assert len(read_key_file(str(path))) == KEY_BYTES
            else:
                with pytest.raises(OptionError, match=refused):
                    read_key_file(str(path))
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(before)
