"""The trial: does what a worker does when it starts and meets a peer, with itself as the peer."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from backhaul.doctor.report import Report
from backhaul.errors import AuthenticationError, BackhaulError, OptionError
from backhaul.ids import Addresses
from backhaul.options import RpcOptions

if TYPE_CHECKING:
    import torch

    from backhaul.transport.base import Channel, Listener, Transport

_PATIENCE = 2.0
_BYTES = 1 << 20

# Errors that say what to do. Any other exception is a bug of ours, and is raised.
_SAID = (BackhaulError, OSError)


def run(report: Report, options: RpcOptions, name: str) -> None:
    """As the worker with this name: listen, greet over each transport, send a tensor, and try shared memory."""
    report.section("tried")
    begin = time.perf_counter()
    try:
        import torch
    except Exception as error:
        report.fault(f"torch cannot be imported: {type(error).__name__}: {error}. Install it again")
        return
    seconds = time.perf_counter() - begin
    report.fact("import torch", f"{seconds:.1f} s", seconds=seconds)
    from backhaul.transport.stream import StreamTransport

    tensor = torch.arange(_BYTES // torch.int64.itemsize)
    try:
        options = options.policy.transport_options(options)
        transport = StreamTransport(options)
    except _SAID as error:
        report.fault(str(error))
        return
    try:
        try:
            listeners = transport.listen()
        except OSError as error:
            raise OptionError(f"cannot listen: {error}; see the directory of the sockets above") from error
        transport.introduce(name)
        here = transport.addresses
        if here.unix is not None:
            _greet(
                report,
                "unix sockets",
                here.unix,
                transport,
                listeners,
                Addresses(here.host, unix=here.unix),
                name,
                tensor,
            )
        if here.tcp is not None:
            where = f"{here.tcp[0]}, port {here.tcp[1]}, TLS 1.3"
            _greet(report, "TCP", where, transport, listeners, Addresses(here.host, tcp=here.tcp), name, tensor)
    except _SAID as error:
        report.fault(_words(error))
    finally:
        transport.close()
    if options.segment_pool_bytes and options.transport != "tcp":
        _share(report, options, tensor)


def _greet(
    report: Report,
    label: str,
    where: str,
    transport: Transport,
    listeners: Sequence[Listener],
    addresses: Addresses,
    name: str,
    tensor: torch.Tensor,
) -> None:
    from backhaul.security.handshake import Hello, Welcome
    from backhaul.transport.base import ChannelClosed

    deadline = time.monotonic() + _PATIENCE
    begin = time.perf_counter()
    porter = _Porter(listeners, lambda hello: Welcome(0, name), deadline)
    try:
        channel, _ = transport.connect(addresses, Hello("doctor", 0, name, 0), deadline)
    except (*_SAID, ChannelClosed) as error:
        why = porter.join()[1]
        said = f"; the listening side says: {why}" if isinstance(why, AuthenticationError) else ""
        report.fact(label, f"{where}: failed", ok=False)
        report.fault(
            f"this worker is unreachable over {label} at {where}, even from this machine: {_words(error)}{said}"
        )
        return
    seconds = time.perf_counter() - begin
    other, why = porter.join()
    try:
        if other is None:
            raise AuthenticationError(f"the greeting failed on the listening side: {why}")
        _send(channel, other, tensor, deadline)
    except (*_SAID, ChannelClosed) as error:
        report.fact(label, f"{where}: failed", ok=False)
        report.fault(f"data sent over {label} at {where} does not arrive: {_words(error)}")
    else:
        report.fact(
            label, f"{where}: greeted in {seconds * 1000:.1f} ms, and a tensor arrived", ok=True, seconds=seconds
        )
    finally:
        channel.close()
        if other is not None:
            other.close()


class _Porter:
    """The listening side of one greeting, on a thread of its own."""

    def __init__(self, listeners: Sequence[Listener], judge: Callable[..., object], deadline: float) -> None:
        self._listeners = listeners
        self._judge = judge
        self._deadline = deadline
        self._channel: Channel | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> tuple[Channel | None, Exception | None]:
        self._thread.join()
        return self._channel, self._error

    def _run(self) -> None:
        try:
            self._channel = self._receive()
        except Exception as error:
            self._error = error

    def _receive(self) -> Channel:
        found = self._wait({listener.fileno(): select.POLLIN for listener in self._listeners})
        visitor = next(listener for listener in self._listeners if listener.fileno() in found).accept()
        if visitor is None:
            raise TimeoutError("nothing connected")
        while isinstance(outcome := visitor.step(self._judge), str):  # type: ignore[arg-type]
            self._wait({visitor.fileno(): select.POLLIN if outcome == "read" else select.POLLOUT})
        if outcome is None:
            raise TimeoutError("nothing connected")
        return outcome[0]

    def _wait(self, events: dict[int, int]) -> list[int]:
        poll = select.poll()
        for descriptor, event in events.items():
            poll.register(descriptor, event)
        found = poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)
        if not found:
            raise TimeoutError("no connection arrived")
        return [descriptor for descriptor, _ in found]


def _send(channel: Channel, other: Channel, tensor: torch.Tensor, deadline: float) -> None:
    """Write a tensor into one end, and check that it comes out of the other."""
    import torch

    from backhaul.wire.frames import encode
    from backhaul.wire.messages import Result

    out = channel.write(encode(Result(1, None), [tensor]))
    while (envelope := other.next()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the tensor took too long")
        out = out or channel.flush()
        other.read(0.01)
    if not torch.equal(envelope.tensors[0], tensor):
        raise OSError("the tensor arrived with other values")


def _share(report: Report, options: RpcOptions, tensor: torch.Tensor) -> None:
    """Check that tensors go through shared memory: the second one of a size does, if possible."""
    from backhaul.transport.base import ChannelClosed
    from backhaul.transport.segments import Budget
    from backhaul.transport.stream import StreamChannel

    budget = Budget(options.segment_pool_bytes)
    deadline = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        ends = [StreamChannel(end, options, budget) for end in socket.socketpair()]
        for end in ends:
            stack.callback(end.close)
        try:
            for _ in range(2):
                _send(ends[0], ends[1], tensor, deadline)
        except (*_SAID, ChannelClosed) as error:
            report.fact("shared memory", "failed", ok=False)
            report.fault(
                f"tensors cannot be sent through shared memory: {_words(error)}; segment_pool_bytes=0 avoids shared "
                "memory"
            )
            return
        shared = budget.warm > 0  # lent segments are returned at the end
    if shared:
        report.fact("shared memory", "a sealed memfd was made, passed and mapped", ok=True)
        return
    report.fact("shared memory", "not used", ok=False)
    report.fault(
        "shared memory is not available here (memfd_create, its seals, and mapping 16 MiB): large tensors between "
        "workers of this host go through the socket, which is slower. See the limits above, and what the container "
        "allows"
    )


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
