"""The cluster's key: a file with 32 random bytes, of which every host of a cluster has a copy.

The file contains hexadecimal text, so that it can be copied and pasted. No error here shows the contents.
"""

from __future__ import annotations

import os
import secrets
import stat

from backhaul.errors import OptionError

KEY_BYTES = 32
KEY_FILE_VARIABLE = "BACKHAUL_KEY_FILE"
"""The environment variable with the key file of workers without the option."""

_LONGEST = 4096


def make_key_file(path: str) -> None:
    """Write a new key to a new file that only its owner can read. Raises `OptionError` if the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise OptionError(
            f"{path} exists, and its key may be in use: choose another name, or remove the file first"
        ) from None
    except OSError as error:
        raise OptionError(f"cannot make the key file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask says
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key_file(path: str) -> bytes:
    """The key in a file that no other user can read or write. Raises `OptionError` with what to do."""
    data = read_private(path, "key file", _LONGEST)
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        raise OptionError(
            f"the key file {path} does not contain a key in hexadecimal; make one with `backhaul keygen`"
        ) from None
    if len(key) < KEY_BYTES:
        raise OptionError(
            f"the key file {path} contains {len(key)} bytes, and a key has at least {KEY_BYTES}; make one with "
            "`backhaul keygen`"
        )
    return key


def read_private(path: str, what: str, longest: int) -> bytes:
    """The contents of a file that belongs to this user, or to root, and that other users cannot read.

    A file of root may be readable for a group of this user: Kubernetes mounts a Secret this way for a user that is not
    root. Raises `OptionError`, which calls the file ``what``.
    """
    try:
        # O_NONBLOCK: if the path is a pipe, opening it must not wait for the other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OptionError(f"there is no {what} {path}") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the {what} {path}: {getattr(error, 'strerror', error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OptionError(f"the {what} {path} is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise OptionError(
                f"the {what} {path} belongs to user {status.st_uid}, not to this one ({os.geteuid()}): `chown` it, or "
                "use a copy of your own"
            )
        if status.st_mode & (0o037 if _is_lent(status) else 0o077):
            raise OptionError(
                f"the {what} {path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): "
                f"`chmod 600 {path}`, and make a new one if somebody may have read it"
            )
        if status.st_size > longest:
            raise OptionError(f"the {what} {path} is too long to be a {what}: {status.st_size} bytes")
        return os.read(descriptor, longest)
    finally:
        os.close(descriptor)


def _is_lent(status: os.stat_result) -> bool:
    """Whether the file belongs to root and to one of this user's groups."""
    return status.st_uid == 0 != os.geteuid() and status.st_gid in {os.getegid(), *os.getgroups()}
