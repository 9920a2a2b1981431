"""The files of a checkpoint, written so that a crash at any point leaves the previous checkpoint whole.

::

    path/index.json                    replaced in one step, after everything it refers to is on the disk
    path/index.json.<32 digits>.tmp    the next index, or what a crash left of it
    path/data-<32 digits>/*.pt         the files; a directory that the index does not name is a left-over
    path/lock                          held with flock during a save; never removed

A save makes its own data directory, waits until the files are written and synced, swaps the index, and removes the
files that the index no longer names. So the old checkpoint becomes the new one at a single moment, both for readers and
after a crash of the machine.
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
    """Hold the lock for saving to this directory, which is made if missing. Raises `MisuseError` if it is taken."""
    _make(path)
    descriptor = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MisuseError(
                f"another process is saving to {path!r} at this moment; let one worker save at a time, or save "
                "elsewhere"
            ) from None
        try:
            yield
        finally:
            # Closing alone does not release the lock if the process forked in the meantime.
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
        raise BackhaulError(f"{os.path.join(path, INDEX)!r} is unusable: {error}") from None


def new_data(path: str) -> str:
    """Make an empty data directory; returns its name."""
    name = f"data-{secrets.token_hex(16)}"
    os.mkdir(os.path.join(path, name))
    return name


def commit(path: str, index: Index) -> None:
    """Make this index the checkpoint. All its files must be written and synced already."""
    sync(os.path.join(path, index.data))
    following = os.path.join(path, f"{INDEX}.{secrets.token_hex(16)}.tmp")
    with open(following, "xb") as file:
        file.write(encode(index))
        file.flush()
        os.fsync(file.fileno())
    # The data directory's name must be on the disk before an index that refers to it.
    sync(path)
    os.replace(following, os.path.join(path, INDEX))
    sync(path)


def clean(path: str) -> None:
    """Remove everything that the index does not name: the previous checkpoint's data, and remains of crashed saves.

    Call only under the lock. Files that cannot be removed are left to the next save.
    """
    # The swap must be on the disk before the data of the older index goes, even if another process swapped.
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
            _log.warning("cannot remove an unused file in the checkpoint %r: %s", path, error)


def sync(directory: str) -> None:
    """Sync a directory, so that the names in it are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep names safe without this, or never, and refuse the call.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def write(directory: str, name: str, content: Mapping[str, Any]) -> int:
    """Write and sync a new file, and check that it can be read again; returns its size.

    Raises OSError if writing fails, and `MisuseError`, naming the parts of the content, if some cannot be saved.
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
            # torch's own error only says that the file is too short.
            if writer.error is not None:
                raise writer.error from None
            raise _unfit(content, error) from error
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def check(directory: str, name: str, size: int) -> None:
    """Raise OSError if the file is missing here, has another size, or is not a plain file."""
    full = os.path.join(directory, name)
    # Opened, not only stat'ed: on a network file system that asks the server, not a cache.
    descriptor = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "this is not a plain file", full)
    if found.st_size != size:
        raise OSError(errno.EIO, f"the file should have {size} bytes but has {found.st_size}", full)


def read(directory: str, name: str, size: int, *, mmap: bool) -> dict[str, Any]:
    """The content of a file. With ``mmap``, tensors are read at first use.

    Raises OSError if this process does not see the file as it was written, `BackhaulError` if the file is damaged.
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
    """The file object for torch.save. Keeps the OSError that torch does not pass on."""

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
    """An error that names the parts of the content that cannot be saved, found by trying each part."""
    found = list(_culprits(content, ())) or [_first_line(error)]
    return MisuseError(
        "a checkpoint must be readable by torch.load(weights_only=True): tensors, numbers, strings, containers of "
        "those, and types registered with torch.serialization.add_safe_globals. These parts are not:" + shortened(found)
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
    # For unknown types torch's message only says how to load them anyway.
    reason = "" if isinstance(why, pickle.UnpicklingError) else f": {_first_line(why)}"
    yield f"{' -> '.join(map(repr, place))}, a {type(content).__qualname__}{reason}"


def _why_not(value: Any) -> Exception | None:
    """The error that prevents a value from being saved, or None."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        return error
    return None


def _first_line(error: BaseException) -> str:
    """An error's message without the pages that torch adds."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _make(path: str) -> None:
    """Make a directory and its parents, syncing each before it is used."""
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
