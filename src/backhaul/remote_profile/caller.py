"""Calls from a profiled thread. `profilers.is_on` decides whether calls go through here."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd.profiler import record_function

from backhaul.agent.agent import Agent
from backhaul.agent.execution import name_for_people
from backhaul.agent.future import Future
from backhaul.agent.routes import To
from backhaul.errors import BackhaulError, UnsendableError
from backhaul.remote_profile.callee import collect, run_for_reference, run_profiled
from backhaul.remote_profile.profilers import Options, watching
from backhaul.remote_profile.rows import Span

if TYPE_CHECKING:
    from backhaul.refs.rref import RRef

_operator: Callable[[Any], str | None] = torch.jit._builtins._find_builtin
_numbers = itertools.count(1)  # numbers of spans; torch's profiles are global to the process
_reports: WeakKeyDictionary[Any, Future[Any]] = WeakKeyDictionary()
"""For references made while a profiler was on: futures that complete when their reports arrive."""


class Request(NamedTuple):
    """A call to make."""

    to: To
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    seconds: float
    what: str | None = None
    """Its name in errors."""
    name: str | None = None
    """Its name in profiles."""

    @property
    def plain(self) -> tuple[Any, ...]:
        return self.to, self.function, self.args, self.kwargs, self.seconds, self.what

    def profiled(self, options: Options) -> tuple[Any, ...]:
        arguments = (tuple(options), self.function, tuple(self.args), dict(self.kwargs))
        return self.to, run_profiled, arguments, {}, self.seconds, self.what or name_for_people(self.function)


def call(agent: Agent, request: Request) -> Any:
    """See `Agent.call`."""
    begun = _begin(agent, "sync", request)
    if begun is None:
        return agent.call(*request.plain)
    span, options = begun
    report = None
    try:
        with span.block():
            future = _ask(agent, request, options)
            if future is None:
                return agent.call(*request.plain)
            value, report = future.wait()
            return value
    finally:
        span.finish(report)


def call_async(agent: Agent, request: Request) -> Future[Any]:
    """See `Agent.call_async`."""
    begun = _begin(agent, "async", request)
    if begun is None:
        return agent.call_async(*request.plain)
    span, options = begun
    with span.block():
        inner = _ask(agent, request, options)
        if inner is None:
            plain = agent.call_async(*request.plain)
            plain.when_done(lambda _: span.finish())
            return plain
    return _unwrapped(inner, span)


def remote(
    agent: Agent,
    create: Callable[..., RRef[Any]],
    request: Request,
    timeout: float,
) -> RRef[Any]:
    """See `References.remote`, which is ``create``."""
    function, args, kwargs = request.function, request.args, request.kwargs
    begun = _begin(agent, "remote", request)
    if begun is None:
        return create(request.to, function, args, kwargs, timeout)
    span, options = begun
    token = secrets.token_hex(8)
    with span.block():
        rref = None
        if options is not None:
            arguments = (tuple(options), token, function, tuple(args), dict(kwargs))
            with contextlib.suppress(UnsendableError):  # raised below, with the original arguments
                rref = create(request.to, run_for_reference, arguments, {}, timeout, name_for_people(function))
        if rref is None:
            rref = create(request.to, function, args, kwargs, timeout)
            span.finish()
            return rref
    done: Future[None] = Future()
    _reports[rref] = done

    def finish(report: Any) -> None:
        span.finish(report)
        done.settle(None)

    try:
        report = agent.call_async(rref.owner(), collect, (rref, token), {}, math.inf, "the profile of a value")
    except BackhaulError:  # using the reference raises the error
        finish(None)
    else:
        report.has_callbacks = True
        report.when_done(lambda answer: finish(_value_or_none(answer)))
    return rref


def to_here(rref: RRef[Any], timeout: float) -> Any:
    """See `RRef.to_here`. When it returns, the report on how the value was made has arrived too."""
    with record_function(f"to_here#({rref._references.me.name})->({rref.owner_name()})"):
        value = rref._references.fetch(rref._ref, timeout)
    reported = _reports.get(rref)
    if reported is not None:
        reported.wait()
    return value


def reported(rref: Any) -> Future[Any] | None:
    """A future that completes when the report on how the value was made arrives. None if none will."""
    return _reports.get(rref)


def _begin(agent: Agent, mode: str, request: Request) -> tuple[Span, Options | None] | None:
    """The span of a call, and what its callee records. None if the call will fail."""
    try:
        agent.require_usable()
        callee = agent.membership.find(request.to).info
    except (BackhaulError, TypeError):
        return None
    holders, options = watching()
    number = next(_numbers) if holders else 0
    span = Span(number, mode, request.name or function_name(request.function), agent.me, callee)
    for spans in holders:
        spans[span.number] = span
    return span, options if agent.trust.shows else None


def _ask(agent: Agent, request: Request, options: Options | None) -> Future[Any] | None:
    """A future of the value and the report. None if the callee should not report, or the arguments cannot be sent."""
    if options is None:
        return None
    try:
        return agent.call_async(*request.profiled(options))
    except UnsendableError:
        return None  # the call without a profile raises an error with the original arguments


def _unwrapped(inner: Future[Any], span: Span) -> Future[Any]:
    """A future of the value alone."""
    outer: Future[Any] = Future(help=inner.help, attend=inner.attend)

    def settle(done: Any) -> None:
        try:
            value, report = done.value()
        except BaseException as error:
            span.finish()
            outer.settle(None, error)
        else:
            span.finish(report)
            outer.settle(value)

    inner.has_callbacks = True  # the callbacks of the outer future
    inner.when_done(settle)
    return outer


def _value_or_none(done: Any) -> Any:
    try:
        return done.value()
    except Exception:
        return None


def function_name(function: Any) -> str:
    """A function's name in torch's profiles: an operator has the name of its schema."""
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return _operator(function) or name_for_people(function)
