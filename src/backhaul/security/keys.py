"""The cluster's key: a file with 32 random bytes that every host of a cluster has a copy of.

It holds hexadecimal text, so that it survives being copied and pasted. Nothing that is raised here shows what
is in it.
"""

from __future__ import annotations

import os
import secrets
import stat

from backhaul.errors import OptionError

KEY_BYTES = 32
KEY_FILE_VARIABLE = "BACKHAUL_KEY_FILE"
"""Names the key file of workers that are not given one as an option."""

_LONGEST = 4096


def make_key_file(path: str) -> None:
    """Write a new key to a new file that only its owner can read. Raises `OptionError` if there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise OptionError(
            f"{path} exists, and what it holds may be in use: choose another name, or remove it first"
        ) from None
    except OSError as error:
        raise OptionError(f"cannot make the key file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask says
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key_file(path: str) -> bytes:
    """The key in a file that nobody else can read or write. Raises `OptionError` that says what to do."""
    data = read_private(path, "key file", _LONGEST)
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        raise OptionError(
            f"the key file {path} does not hold a key in hexadecimal; make one with `backhaul keygen`"
        ) from None
    if len(key) < KEY_BYTES:
        raise OptionError(
            f"the key file {path} holds {len(key)} bytes, and a key has at least {KEY_BYTES}; make one with "
            "`backhaul keygen`"
        )
    return key


def read_private(path: str, what: str, longest: int) -> bytes:
    """The content of a file that belongs to this user, or to root, and is closed to others.

    Root may give it to this user by way of a group: Kubernetes mounts a Secret for a user that is not root so. Raises
    `OptionError` that calls the file ``what``.
    """
    try:
        # Not to wait for the other end, should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OptionError(f"there is no {what} {path}") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the {what} {path}: {getattr(error, 'strerror', error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OptionError(f"the {what} {path} is no regular file")
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
            raise OptionError(f"the {what} {path} is too long to be one: {status.st_size} bytes")
        return os.read(descriptor, longest)
    finally:
        os.close(descriptor)


def _is_lent(status: os.stat_result) -> bool:
    """Whether the file is root's, and one of this user's groups says who may read it besides."""
    return status.st_uid == 0 != os.geteuid() and status.st_gid in {os.getegid(), *os.getgroups()}
