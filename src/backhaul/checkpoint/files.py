"""The files of a checkpoint: written so that a crash at any point leaves the one before it whole.

::

    path/index.json                    replaced in one step, after all that it speaks of is on the disk
    path/index.json.<32 digits>.tmp    the next index, or what a crash left of it
    path/data-<32 digits>/*.pt         the files; a directory that the index does not name is a left-over
    path/lock                          held with flock while somebody saves; it stays

A save makes a data directory of its own, lets the files be written and synced, swaps the index, and removes what the
index no longer names. So there is one moment at which the old checkpoint becomes the new one, for whoever loads it,
and after a crash of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import pickle
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch

from backhaul.checkpoint.index import Index, decode, encode, is_data_name, shortened
from backhaul.errors import BackhaulError, MisuseError

INDEX = "index.json"
LOCK = "lock"

_NEXT_INDEX = re.compile(r"index\.json\.[0-9a-f]{32}\.tmp")
_MAX_INDEX = 1 << 30

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Be the only one that saves to this directory, which is made if need be. Raises `MisuseError` if somebody does."""
    _make(path)
    descriptor = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MisuseError(
                f"somebody else is saving to {path!r} at this moment; let one worker save at a time, or save elsewhere"
            ) from None
        try:
            yield
        finally:
            # Closing does not release it if the process was forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def read_index(path: str) -> Index:
    """The index of the checkpoint. Raises FileNotFoundError if there is none, `BackhaulError` if it is damaged."""
    index = read_index_if_any(path)
    if index is None:
        raise FileNotFoundError(
            errno.ENOENT, f"there is no checkpoint here: no {INDEX} in this directory", os.fspath(path)
        )
    return index


def read_index_if_any(path: str) -> Index | None:
    """The index of the checkpoint, or None. Raises `BackhaulError` if it is damaged."""
    try:
        with open(os.path.join(path, INDEX), "rb") as file:
            content = file.read(_MAX_INDEX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return decode(content)
    except BackhaulError as error:
        raise BackhaulError(f"{os.path.join(path, INDEX)!r} cannot be used: {error}") from None


def new_data(path: str) -> str:
    """Make an empty data directory; returns its name."""
    name = f"data-{secrets.token_hex(16)}"
    os.mkdir(os.path.join(path, name))
    return name


def commit(path: str, index: Index) -> None:
    """Make this the checkpoint. All its files are there already, and synced."""
    sync(os.path.join(path, index.data))
    following = os.path.join(path, f"{INDEX}.{secrets.token_hex(16)}.tmp")
    with open(following, "xb") as file:
        file.write(encode(index))
        file.flush()
        os.fsync(file.fileno())
    # The name of the data directory has to be on the disk before an index that has it.
    sync(path)
    os.replace(following, os.path.join(path, INDEX))
    sync(path)


def clean(path: str) -> None:
    """Remove what the index does not name: the data of the checkpoint before, and what crashed saves left.

    Under the lock only. What cannot be removed is left to the next save.
    """
    # Before the data of an older index goes, the swap has to be on the disk, whoever made it.
    sync(path)
    index = read_index_if_any(path)
    for name in os.listdir(path):
        left_over = is_data_name(name) and (index is None or name != index.data)
        if not left_over and _NEXT_INDEX.fullmatch(name) is None:
            continue
        full = os.path.join(path, name)
        try:
            if stat.S_ISDIR(os.lstat(full).st_mode):
                shutil.rmtree(full)
            else:
                os.unlink(full)
        except OSError as error:
            _log.warning("a left-over in the checkpoint %r cannot be removed: %s", path, error)


def sync(directory: str) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep names safe themselves, or not at all, and refuse to be asked.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def write(directory: str, name: str, content: Mapping[str, Any]) -> int:
    """Write a new file, have it on the disk, and make sure that it can be read again; returns its size.

    Raises OSError if it cannot be written, and `MisuseError` naming the parts of the content that cannot be kept.
    """
    full = os.path.join(directory, name)
    try:
        size = _write(full, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, full) from error
    sync(directory)
    try:
        torch.load(full, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        raise _unfit(content, error) from error
    return size


def _write(full: str, content: Mapping[str, Any]) -> int:
    with open(full, "xb") as file:
        writer = _Writer(file)
        try:
            torch.save(dict(content), writer)  # type: ignore[arg-type]
        except Exception as error:
            # torch's own error only says that the file came out too short.
            if writer.error is not None:
                raise writer.error from None
            raise _unfit(content, error) from error
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def check(directory: str, name: str, size: int) -> None:
    """Raise OSError if the file is not here, or not of this size, or not a file."""
    full = os.path.join(directory, name)
    # Opened, not only looked at: over a network that asks the server, not a cache.
    descriptor = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "this is not a plain file", full)
    if found.st_size != size:
        raise OSError(errno.EIO, f"the file should have {size} bytes and has {found.st_size}", full)


def read(directory: str, name: str, size: int, *, mmap: bool) -> dict[str, Any]:
    """The content of a file; with ``mmap``, tensors are read when they are used.

    Raises OSError if this process cannot see the file as it was written, `BackhaulError` if it is damaged.
    """
    check(directory, name, size)
    full = os.path.join(directory, name)
    try:
        content = torch.load(full, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:
        raise BackhaulError(f"the file {full!r} is damaged: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise BackhaulError(f"the file {full!r} is damaged: it holds no dict")
    return content


class _Writer:
    """What torch.save writes to. It keeps the error that torch does not pass on."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _unfit(content: Mapping[str, Any], error: Exception) -> MisuseError:
    """An error that says which parts of a content are to blame, found out by trying each."""
    found = list(_culprits(content, ())) or [_first_line(error)]
    return MisuseError(
        "what is saved must be readable by torch.load(weights_only=True): tensors, numbers, strings, containers of "
        "those, and types that torch.serialization.add_safe_globals has been told of. Not so:" + shortened(found)
    )


def _culprits(content: Any, place: tuple[Any, ...]) -> Iterator[str]:
    why = _why_not(content)
    if why is None:
        return
    parts = content.items() if isinstance(content, Mapping) else ()
    inside = [found for key, part in parts for found in _culprits(part, (*place, key))]
    if inside:
        yield from inside
        return
    # Of what it does not know, torch says no more than how to read it in spite of that.
    reason = "" if isinstance(why, pickle.UnpicklingError) else f": {_first_line(why)}"
    yield f"{' -> '.join(map(repr, place))}, a {type(content).__qualname__}{reason}"


def _why_not(value: Any) -> Exception | None:
    """What prevents a value from being kept, if anything does."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        return error
    return None


def _first_line(error: BaseException) -> str:
    """What an error says, without the pages that torch adds."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _make(path: str) -> None:
    """Make a directory and those above it, each on the disk before it is used."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        _make(os.path.dirname(path))
        _make(path)
        return
    except FileExistsError:
        if not os.path.isdir(path):
            raise MisuseError(f"{path!r} is a file; a checkpoint is a directory") from None
        return
    sync(os.path.dirname(path))
