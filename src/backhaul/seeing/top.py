"""``backhaul top`` and ``backhaul stuck``: a running cluster in the terminal."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from backhaul.errors import BackhaulError
from backhaul.options import RpcOptions
from backhaul.seeing.guest import Member, find_cluster, transport_for
from backhaul.seeing.lookout import Lookout
from backhaul.seeing.screen import Screen, draw_stuck
from backhaul.transport.base import Transport

_WIDTH = 140  # without a terminal
_FIRST_SECONDS = 5.0

_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOD": "left",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
}


def reach(where: str | None, key_file: str | None) -> tuple[list[Member], Transport]:
    """The members of a cluster, and a transport to reach them. Raises `BackhaulError`."""
    options = RpcOptions() if key_file is None else RpcOptions(key_file=key_file)
    return find_cluster(where, options), transport_for(options)


def run(options: argparse.Namespace) -> int:
    """Run ``backhaul top``; returns the exit code."""
    parser: argparse.ArgumentParser = options.parser
    if options.json and not options.once:
        parser.error("--json needs --once")
    if not options.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("backhaul top needs a terminal; --once prints one picture without one")
    try:
        members, transport = reach(options.where, options.key_file)
    except BackhaulError as error:
        print(f"backhaul top: {error}", file=sys.stderr)
        return 1
    with Lookout(members, transport, min(options.interval, 0.5) if options.once else options.interval) as lookout:
        screen = Screen(options.sort)
        if options.once:
            _print_once(lookout, screen, as_json=options.json)
        else:
            _watch(lookout, screen, options.interval)
    return 0


def print_stuck(options: argparse.Namespace) -> int:
    """Run ``backhaul stuck``; returns the exit code."""
    from backhaul.seeing.asking import ask_guests
    from backhaul.seeing.stuck import explain

    try:
        members, transport = reach(options.where, options.key_file)
    except BackhaulError as error:
        print(f"backhaul stuck: {error}", file=sys.stderr)
        return 2
    stuck = explain(ask_guests(members, transport, ("threads", "snapshot")))
    if options.json:
        print_json(stuck)
    else:
        console = _console()
        for line in draw_stuck(stuck):
            console.print(line)
    return int(bool(stuck.silent) or any(chain.end in ("cycle", "lost") for chain in stuck.chains))


def print_json(value: Any) -> None:
    """Print a value as JSON. The reader, such as ``head``, may close its end early."""
    try:
        print(msgspec.json.encode(value).decode(), flush=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # Python flushes the rest at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _print_once(lookout: Lookout, screen: Screen, *, as_json: bool) -> None:
    # Rates need two answers of each worker.
    lookout.wait_until(
        lambda view: all(row.state in ("lost", "silent") or row.history for row in view.rows()), _FIRST_SECONDS
    )
    with lookout.reading:
        rows = lookout.look().rows()
    if as_json:
        print_json(screen.sorted(rows))
    else:
        console = _console()
        console.print(screen.draw(rows, None, width=console.width))


class _Detail:
    """The content of the detail view. Asked on its own thread, because workers may hang."""

    def __init__(self, lookout: Lookout) -> None:
        self._lookout = lookout
        self._about = ""
        self._found: Any = None
        self._asking: threading.Thread | None = None
        self._asked = 0.0

    def about(self, screen: Screen, every: float) -> Any:
        """The latest known content for this screen; asks again in the background."""
        about = f"{screen.mode} {screen.selected}" if screen.mode == "worker" else screen.mode
        if about != self._about:
            self._about, self._found, self._asked = about, None, 0.0
        if screen.mode == "workers":
            return None
        idle = self._asking is None or not self._asking.is_alive()
        if idle and time.monotonic() - self._asked >= every:
            self._asked = time.monotonic()
            question = self._lookout.stuck if screen.mode == "stuck" else self._threads_of(screen.selected)
            self._asking = threading.Thread(target=self._ask, args=(about, question), daemon=True)
            self._asking.start()
        return self._found

    def _threads_of(self, worker: str) -> Callable[[], Any]:
        return lambda: self._lookout.ask(worker, "threads")

    def _ask(self, about: str, question: Callable[[], Any]) -> None:
        try:
            found = question()
        except BackhaulError as error:
            found = str(error)
        if about == self._about:
            self._found = found


def _watch(lookout: Lookout, screen: Screen, interval: float) -> None:
    console = Console(highlight=False)
    detail = _Detail(lookout)
    with _keys() as read, Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.over:
            with lookout.reading:
                rows = lookout.look().rows()
            found = detail.about(screen, interval)
            live.update(screen.draw(rows, found, console.height, console.width), refresh=True)
            for key in read(min(interval, 0.25)):
                screen.press(key, rows)


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """A context in which keys can be read as they are pressed. The terminal is always restored."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    ends = (signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in ends}

    def read(seconds: float) -> list[str]:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(descriptor, 1024)
        return keys_of(data.decode(errors="replace")) if data else ["q"]

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    try:
        for number in ends:
            signal.signal(number, end)
        tty.setcbreak(descriptor)
        mode = termios.tcgetattr(descriptor)
        mode[6][termios.VSUSP] = b"\0"  # suspending here would leave the terminal in this mode
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        yield read
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def keys_of(text: str) -> list[str]:
    """The pressed keys: characters, and names of special keys."""
    found = []
    while text:
        length = next((n for n in (4, 3) if text[:n] in _KEYS), 1)
        key, text = text[:length], text[length:]
        found.append(_KEYS.get(key, key))
    return found
