"""Logs: logs every message on a link, for debugging.

The link with a peer has its own logger, ``backhaul.link.<peer>``. Dots in the peer's name are replaced by ``_``. If
that logger is enabled for DEBUG when a line is opened, everything on the line is logged:

    = open over unix, by worker0
    > Call worker0/7 mymodule.step 187 B         this worker has sent it
    < Result worker0/7 61 B                      this worker has received it
    > Gradients pass 68719476737 4160 B
    = closed

Both ends write the same text after ``>`` and ``<``. A request is identified by its sender and its id, and a reply by
the request that it answers. Names that come from a peer are shortened and made printable.

A line that is not logged costs nothing: the logging is a wrapper around the channel, made only for logged lines.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from backhaul.agent.naming import name_of_request
from backhaul.compat import StreamHandler
from backhaul.devices.segments import DeviceLending
from backhaul.errors import OptionError
from backhaul.ids import WorkerInfo
from backhaul.options import LOG_LEVEL_VARIABLE, LOG_LEVELS
from backhaul.transport.base import Channel, Way
from backhaul.trust.permissions import printable
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.lanes import messages
from backhaul.wire.messages import REPLIES, Call, Create, Failure, Inspect

_LONGEST_NAME = 200
_CALLS = (Call, Create)


def link_logger(peer: str) -> logging.Logger:
    """The logger of the link with a peer."""
    return logging.getLogger(f"backhaul.link.{printable(peer).replace('.', '_')}")


def logged(channel: Channel, me: WorkerInfo, peer: WorkerInfo, opener: WorkerInfo) -> Channel:
    """The channel, wrapped in a `LoggedChannel` if the logger of the link is enabled for DEBUG."""
    log = link_logger(peer.name)
    if not log.isEnabledFor(logging.DEBUG):
        return channel
    log.debug("= open over %s, by %s", channel.path, printable(opener.name))
    return LoggedChannel(channel, log, me, peer)


class LoggedChannel(Channel):
    """A channel that logs the messages that pass through it."""

    def __init__(self, inside: Channel, log: logging.Logger, me: WorkerInfo, peer: WorkerInfo) -> None:
        self._inside = inside
        self._log = log
        self._me = printable(me.name)
        self._peer = printable(peer.name)
        self._closed = False

    @property
    def path(self) -> str:  # type: ignore[override]
        return self._inside.path

    @property
    def sent(self) -> int:  # type: ignore[override]
        return self._inside.sent

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self._inside.shared

    @property
    def on_devices(self) -> int:  # type: ignore[override]
        return self._inside.on_devices

    @property
    def received(self) -> int:  # type: ignore[override]
        return self._inside.received

    @property
    def device_lending(self) -> DeviceLending | None:  # type: ignore[override]
        return self._inside.device_lending

    def fileno(self) -> int:
        return self._inside.fileno()

    @property
    def between(self) -> bool:  # type: ignore[override]
        return self._inside.between

    @property
    def awaits(self) -> bool:  # type: ignore[override]
        return self._inside.awaits

    @property
    def fills(self) -> bool:  # type: ignore[override]
        return self._inside.fills

    def write(self, frame: Frame) -> bool:
        self._show(frame)
        return self._inside.write(frame)

    def interject(self, frame: Frame) -> bool:
        self._show(frame)
        return self._inside.interject(frame)

    def _show(self, frame: Frame) -> None:
        for message, size in messages(frame):
            self._log.debug("> %s %d B", _describe(message, self._me, self._peer), size)

    def copy_unsent(self) -> None:
        self._inside.copy_unsent()

    def way(self) -> Way:
        return self._inside.way()

    def flush(self) -> bool:
        return self._inside.flush()

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        return self._inside.wait(read=read, write=write, timeout=timeout)

    def read(self, timeout: float | None) -> bool:
        return self._inside.read(timeout)

    def next(self) -> Envelope | None:
        envelope = self._inside.next()
        if envelope is not None:
            self._log.debug("< %s %d B", _describe(envelope.message, self._peer, self._me), envelope.size)
        return envelope

    def shutdown(self) -> None:
        self._inside.shutdown()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._log.debug("= closed")
        self._inside.close()


def _describe(message: Any, sender: str, receiver: str) -> str:
    """The description of a message, the same on both ends."""
    words = [type(message).__name__]
    if isinstance(message, REPLIES):
        words.append(f"{receiver}/{message.id}")
    elif hasattr(message, "id"):
        words.append(f"{sender}/{message.id}")
    if isinstance(message, _CALLS):
        words.append(printable(name_of_request(message), _LONGEST_NAME))
    elif isinstance(message, Failure):
        words.append(printable(message.type_name, _LONGEST_NAME))
    elif isinstance(message, Inspect):
        words.append(printable(message.topic, _LONGEST_NAME))
    if (backward := getattr(message, "backward", None)) is not None:
        words.append(f"pass {backward.id}")
    if (context := getattr(message, "context", None)) is not None:
        words.append(f"context {context}")
    return " ".join(words)


class _Fallback(StreamHandler):
    """Writes to stderr unless the program has set up its own logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def set_up_logging(worker: str | None) -> None:
    """Set the log level that ``backhaul run --log-level`` passes in the environment.

    Lines go to stderr with the time and the worker's name. If the program has its own handlers, they go there instead.
    Raises `OptionError` for an unknown level.
    """
    text = os.environ.get(LOG_LEVEL_VARIABLE)
    if not text:
        return
    level = text.lower()
    if level not in LOG_LEVELS:
        raise OptionError(f"environment variable {LOG_LEVEL_VARIABLE}: {text!r} must be one of {', '.join(LOG_LEVELS)}")
    log = logging.getLogger("backhaul")
    log.setLevel(level.upper())
    handler = next((each for each in log.handlers if isinstance(each, _Fallback)), None)
    if handler is None:
        handler = _Fallback()
        log.addHandler(handler)
    name = (worker or "worker").replace("%", "%%")
    layout = f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(name)s %(message)s"
    handler.setFormatter(logging.Formatter(layout, "%H:%M:%S"))


__all__ = ["LoggedChannel", "link_logger", "logged", "set_up_logging"]
