"""Screen: what ``backhaul top`` shows, and what its keys do. Pure: turns a view and keys into output for rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from backhaul.seeing.findings import Stuck
from backhaul.seeing.view import Row

SORTS = {
    "n": ("name", lambda row: row.rank),
    "c": ("calls", lambda row: -(row.calls_sent + row.calls_served)),
    "b": ("bytes", lambda row: -(row.bytes_sent + row.bytes_received)),
    "m": ("memory", lambda row: -row.memory),
    "p": ("processor", lambda row: -row.processor),
    "r": ("running", lambda row: -max((each["seconds"] for each in row.running), default=0.0)),
}
"""The keys that sort: by what, and in which order."""

_NARROW = 116
_LONGEST_NAME = 24

_HELP = "c calls  b bytes  m memory  p processor  r running  n name    ↑↓ Enter open    s stuck?    q quit"
_COLOURS = {"cycle": "bold red", "lost": "red", "blocked": "yellow", "unknown": "yellow", "late": "cyan"}
_STATES = {"live": "green", "lost": "bold red", "silent": "yellow", "unknown": "dim"}


class Screen:
    """Which part is shown. ``mode`` is "workers", "worker" or "stuck"."""

    def __init__(self, sort: str = "name") -> None:
        self.mode = "workers"
        self.sort = next(key for key, (name, _) in SORTS.items() if name == sort)
        self.selected = ""
        self.scroll = 0
        self.over = False
        self._number = ""

    def press(self, key: str, rows: Sequence[Row]) -> None:
        """Handle a key: a character, or "up", "down", "enter", "escape"."""
        names = [row.name for row in self.sorted(rows)]
        if key in ("q", "\x04"):
            self.over = True
        elif self.mode == "workers":
            self._press_in_list(key, names)
        elif key in ("escape", "left", "backspace"):
            self.mode, self.scroll = "workers", 0
        elif key == "s":
            self.mode, self.scroll = ("workers" if self.mode == "stuck" else "stuck"), 0
        elif key in ("up", "k", "down", "j", "page up", "page down"):
            step = 10 if key.startswith("page") else 1
            self.scroll = max(0, self.scroll + (-step if key in ("up", "k", "page up") else step))

    def _press_in_list(self, key: str, names: list[str]) -> None:
        if key.isdecimal():
            self._number += key
        elif key == "enter":
            place = int(self._number) - 1 if self._number else -1
            if 0 <= place < len(names):
                self.selected = names[place]
            if (self.selected or not self._number) and names:
                self.selected = self.selected if self.selected in names else names[0]
                self.mode, self.scroll = "worker", 0
            self._number = ""
        else:
            self._number = ""
            if key in SORTS:
                self.sort = key
            elif key == "s":
                self.mode, self.scroll = "stuck", 0
            elif key in ("up", "down", "k", "j") and names:
                place = names.index(self.selected) if self.selected in names else -1 if key in ("down", "j") else 0
                self.selected = names[(place + (1 if key in ("down", "j") else -1)) % len(names)]

    def sorted(self, rows: Sequence[Row]) -> list[Row]:
        return sorted(rows, key=SORTS[self.sort][1])

    def draw(
        self, rows: Sequence[Row], detail: Any, height: int | None = None, width: int | None = None
    ) -> RenderableType:
        """The picture. ``detail`` is the content for the open worker or the stuck view; None while it is unknown.

        ``height`` and ``width`` are those of the terminal, in lines and columns.
        """
        if self.mode == "worker":
            body = draw_worker(next((row for row in rows if row.name == self.selected), None), detail)
        elif self.mode == "stuck":
            body = draw_stuck(detail)
        else:
            narrow = width is not None and width < _NARROW
            table = draw_workers(self.sorted(rows), self.selected, SORTS[self.sort][0], narrow=narrow)
            return Group(_headline(rows), table, _help(_HELP))
        lines = body[self.scroll :] if self.scroll < len(body) else body[-1:]
        if height is not None:
            lines = lines[: max(1, height - 3)]
        return Group(_headline(rows), *lines, _help("↑↓ scroll    s stuck?    Esc back    q quit"))


def _headline(rows: Sequence[Row]) -> Text:
    states = [row.state for row in rows]
    text = Text()
    text.append("backhaul top", style="bold")
    text.append(f"   {len(rows)} worker{'s' * (len(rows) != 1)}")
    for state in ("lost", "silent"):
        if count := states.count(state):
            text.append(f", {count} {state}", style=_STATES[state])
    calls = sum(row.calls_sent for row in rows)
    sent = sum(row.bytes_sent for row in rows)
    text.append(f"   {number(calls)} calls/s   {size(sent)}/s")
    return text


def _help(text: str) -> Text:
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


_COLUMNS: tuple[tuple[str, str, bool, Callable[[Row], str]], ...] = (
    ("calls/s →", "calls", True, lambda row: number(row.calls_sent)),
    ("← calls/s", "calls", True, lambda row: number(row.calls_served)),
    ("bytes/s →", "bytes", True, lambda row: size(row.bytes_sent)),
    ("← bytes/s", "bytes", False, lambda row: size(row.bytes_received)),
    ("cpu", "processor", True, lambda row: f"{row.processor:.0f}%"),
    ("memory", "memory", True, lambda row: size(row.memory)),
    ("gates", "", True, lambda row: str(row.gates)),
    ("ctx", "", False, lambda row: str(row.contexts)),
    ("refs", "", False, lambda row: str(row.references)),
)
"""For each column: its title, the sort order it belongs to, whether a narrow terminal shows it, and the figure."""


def draw_workers(rows: Sequence[Row], selected: str = "", by: str = "", *, narrow: bool = False) -> Table:
    """One line for each worker. ``by``: the sort order."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1), show_edge=False)
    columns = [column for column in _COLUMNS if column[2] or not narrow]
    longest = min(max((len(row.name) for row in rows), default=6), _LONGEST_NAME)
    table.add_column("#", justify="right", header_style="bold")
    table.add_column("worker", no_wrap=True, min_width=longest, overflow="ellipsis", header_style="bold")
    for title, order, _, _ in columns:
        style = "bold underline" if order and order == by else "bold"
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title), header_style=style)
    style = "bold underline" if by == "running" else "bold"
    table.add_column("running", no_wrap=True, ratio=1, header_style=style, overflow="ellipsis")
    for place, row in enumerate(rows, 1):
        cells = [Text(str(place), style="dim"), Text(clean(row.name), style=_STATES[row.state])]
        for title, _, _, figure in columns:
            text = Text(figure(row) if row.state == "live" else "-")
            text.stylize(
                "yellow" if title == "gates" and row.gates else "dim" if text.plain in ("0", "-", "0 B") else ""
            )
            cells.append(text)
        live = row.state == "live"
        cells.append(_running(row) if live else Text(_what_happened(row), style=_STATES[row.state]))
        table.add_row(*cells, style="reverse" if row.name == selected else "")
    return table


def _what_happened(row: Row) -> str:
    if row.since is None:
        return "no answer yet"
    when = time.strftime("%H:%M:%S", time.localtime(row.since))
    return f"{row.state} since {when}: {clean(row.reason)}"


def _running(row: Row) -> Text:
    if not row.running:
        if not row.waiting:
            return Text("idle", style="dim")
        wait = row.waiting[0]
        if wait["kind"] in ("gate", "pass"):
            return Text(f"waits: {wait['kind']}", style="dim")
        return Text(f"waits: {clean(wait['what']) if wait.get('what') else describe_wait(wait)}", style="dim")
    oldest = row.running[0]
    more = f"  +{len(row.running) - 1}" if len(row.running) > 1 else ""
    return Text(f"{clean(oldest['what'])} {seconds(oldest['seconds'])}, from {clean(oldest['peer'])}{more}")


def draw_worker(row: Row | None, threads: Any) -> list[RenderableType]:
    """What each thread of a worker does, line by line."""
    if row is None:
        return [Text("that worker is gone", style="red")]
    title = Text(f"\n{clean(row.name)}", style="bold")
    title.append(f"   rank {row.rank}, process {row.pid} on {clean(row.host)}", style="not bold dim")
    lines: list[RenderableType] = [title]
    if row.state != "live":
        lines.append(Text(_what_happened(row), style=_STATES[row.state]))
    if threads is None:
        return [*lines, Text("asking …", style="dim")]
    if isinstance(threads, str):
        return [*lines, Text(clean(threads), style="red")]
    for thread in threads:
        if not (thread["handles"] and thread["handles"][0]["kind"] == "Inspect"):  # the thread that answers us
            lines += _thread(thread)
    return lines


def _thread(thread: Mapping[str, Any]) -> list[RenderableType]:
    head = Text(f"\n{clean(thread['name'])}", style="bold cyan")
    for handled in thread["handles"]:
        head.append(f"  handles {clean(handled['what'])} for {clean(handled['peer'])}", style="not bold green")
        head.append(f" {seconds(handled['seconds'])}", style="not bold dim")
    for wait in thread["waits"]:
        head.append(f"  waits for {describe_wait(wait)}", style="not bold yellow")
        head.append(f" {seconds(wait['seconds'])}", style="not bold dim")
    if (blocked := thread.get("blocked")) and (thread["handles"] or not thread["waits"]):
        head.append(f"  at {clean(blocked['on'])} {clean(blocked.get('what') or '')}".rstrip(), style="not bold red")
    lines: list[RenderableType] = [head]
    for frame in reversed(relevant(thread.get("stack", ()))):
        own = frame.get("whose") == "user"
        text = Text(f"  {clean(frame['function'])}", style="" if own else "dim")
        text.append(f"  {clean(frame['file'])}:{frame['line']}", style="dim")
        if frame.get("code"):
            text.append(f"  {clean(frame['code'])}", style="italic" if own else "dim italic")
        text.no_wrap, text.overflow = True, "ellipsis"
        lines.append(text)
    return lines


def relevant(stack: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """A stack without the frames that only start the thread. Without user code: the innermost frames."""
    first = next((number for number, frame in enumerate(stack) if frame.get("whose") == "user"), None)
    return stack[-3:] if first is None else stack[first:]


def describe_wait(wait: Mapping[str, Any]) -> str:
    """What a thread waits for, in a few words."""
    kind = wait["kind"]
    if kind == "reply":
        return f"{clean(wait['what'])} on {clean(wait['peer'])}"
    if kind == "gate":
        return f"gradients from {clean(wait['peer'])}, at a gate"
    if kind == "pass":
        return f"backward on ranks {', '.join(map(str, wait['ranks']))}" if wait["ranks"] else "backward to end"
    if kind == "value":
        return f"the value {clean(wait['ref'])}"
    if kind == "connection":
        return f"a connection to {clean(wait['peer'])}"
    if kind == "room":
        return f"{clean(wait['peer'])} to take {size(wait['bytes'])}"
    return clean(str(wait.get("what", kind)))


def draw_stuck(stuck: Stuck | str | None) -> list[RenderableType]:
    """The chains of what waits for what, the worst first."""
    if stuck is None:
        return [Text("\nasking all workers …", style="dim")]
    if isinstance(stuck, str):
        return [Text(clean(stuck), style="red")]
    lines: list[RenderableType] = [
        Text(f"\n{clean(worker)}: {clean(reason)}", style="bold red") for worker, reason in stuck.silent.items()
    ]
    for chain in stuck.lasting:
        text = Text(f"\n{chain.end:>8}  ", style=_COLOURS.get(chain.end, "dim"))
        text.append(seconds(chain.seconds).rjust(7), style="dim not bold")
        lines.append(text)
        lines.append(Padding(Text(clean(chain.sentence)), (0, 0, 0, 2)))
    return [*lines, Text(f"\n{stuck.remark}", style="dim")] if stuck.remark else lines


def clean(text: str) -> str:
    """The text without terminal control characters: names come from other machines."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def number(value: float) -> str:
    """A short number, such as 12, 3.4k, 5.6M."""
    if value < 9.95:
        return f"{value:.1f}" if value else "0"
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if value >= 9.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def size(value: float) -> str:
    """A size in bytes, such as 12 B, 3.4 KiB."""
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000:
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{value:.0f} PiB"


def seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min" if value < 6000 else f"{value / 3600:.1f} h"
