"""The machine: versions, clock, limits, memory, processors."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import platform
import re
import resource
import ssl
import sys
from importlib import metadata
from pathlib import Path

from backhaul.doctor.report import Report
from backhaul.options import RpcOptions
from backhaul.transport.awake import most_awake

_PACKAGES = ("torch", "msgspec", "cryptography")
_MIB, _GIB = 1 << 20, 1 << 30
_UNSYNCHRONISED = 5  # adjtimex(2): TIME_ERROR
_FEW_DESCRIPTORS = 256
_CGROUP = Path("/sys/fs/cgroup")


def own_version() -> str:
    try:
        return metadata.version("backhaul")
    except metadata.PackageNotFoundError:  # run from a folder
        return "(not installed)"


def versions(report: Report) -> None:
    report.section("versions")
    report.fact("Python", f"{platform.python_version()}, {sys.executable}", version=platform.python_version())
    wanted = _required()
    for package in _PACKAGES:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            report.fact(package, "is not installed", version=None)
            report.fault(f"{package} is not installed here: `{sys.executable} -m pip install {package}`")
            continue
        least = wanted.get(package, "")
        report.fact(package, found, version=found)
        if _numbers(found) < _numbers(least):
            report.fault(f"{package} {found} is older than {least}: `{sys.executable} -m pip install -U {package}`")
    report.fact(
        "OpenSSL", f"{ssl.OPENSSL_VERSION}{', TLS 1.3' if ssl.HAS_TLSv1_3 else ''}", version=ssl.OPENSSL_VERSION
    )
    if not ssl.HAS_TLSv1_3:
        report.fault(
            "the ssl module of this Python has no TLS 1.3: use a Python that is built with OpenSSL 1.1.1 or later"
        )
    if sys.platform != "linux":
        report.fault(f"this system is {sys.platform}: Backhaul runs on Linux only")


def _required() -> dict[str, str]:
    """Package -> the oldest version that this version of Backhaul supports."""
    try:
        lines = metadata.requires("backhaul") or []
    except metadata.PackageNotFoundError:
        lines = []
    return {match[1]: match[2] for line in lines if (match := re.fullmatch(r"([\w-]+)>=([\d.]+)", line))}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def clock(report: Report) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    # Modes 0 only reads; the struct is far smaller than this buffer.
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(1024))
    kept = {-1: "", _UNSYNCHRONISED: ", not synchronised according to the kernel"}.get(
        state, ", synchronised according to the kernel"
    )
    report.fact("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC{kept}", utc=now.isoformat(), synchronised=0 <= state < 5)


def processors(report: Report, options: RpcOptions) -> None:
    report.section("processors")
    mine = sorted(os.sched_getaffinity(0))
    count = os.cpu_count() or len(mine)
    share = _cpu_quota()
    text = f"{len(mine)} of {count}" if len(mine) < count else f"{count}"
    text += "" if share is None else f", of which a control group allows {share:g}"
    report.fact("usable", f"{text}; load {os.getloadavg()[0]:.2f}", count=count, usable=mine, quota=share)
    enough = len(mine) > 1
    seconds = most_awake(options.busy_poll)
    awake = seconds > 0
    why = (
        f"for up to {seconds * 1000:g} ms during an exchange (option busy_poll)"
        if awake
        else "the option busy_poll is 0"
        if enough
        else "with one processor the peer could not run at the same time"
    )
    report.fact("busy polling", f"{'on' if awake else 'off'}: {why}", on=awake, seconds=seconds)
    if awake and share is not None and share < 2:
        report.note(
            f"a control group allows this process {share:g} processors: busy polling may use up this quota, and the "
            "kernel then suspends the process; RpcOptions(busy_poll=0) turns polling off"
        )


def _cpu_quota() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def memory(report: Report, options: RpcOptions) -> None:
    report.section("memory")
    amounts = _meminfo()
    limit = _memory_limit()
    total, free = amounts.get("MemTotal", 0), amounts.get("MemAvailable", 0)
    text = f"{_size(free)} available of {_size(total)}"
    text += "" if limit is None else f"; a control group allows {_size(limit)}"
    report.fact("memory", text, total=total, available=free, limit=limit)
    pool = options.segment_pool_bytes
    report.fact("segments", f"up to {_size(pool)} for sending large tensors (option segment_pool_bytes)", bytes=pool)
    room = min(free, free if limit is None else limit)
    if pool > room > 0:
        report.note(
            f"segment_pool_bytes allows {_size(pool)} of shared memory, but there are only {_size(room)} of memory: "
            "RpcOptions(segment_pool_bytes=...) sets it"
        )
    with contextlib.suppress(OSError):
        status = os.statvfs("/dev/shm")
        size, left = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
        report.fact(
            "/dev/shm",
            f"{_size(left)} free of {_size(size)}; segments do not need it, a DataLoader's workers do",
            size=size,
            free=left,
        )
    _limits(report)


def _limits(report: Report) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    peers = max(0, soft * 3 // 4 - 32) // 2
    text = f"{_limit(soft)}, and `ulimit -n` may set up to {_limit(hard)}; enough for some {peers:,} peers"
    report.fact("descriptors", text, soft=soft, hard=hard)
    if 0 <= soft < _FEW_DESCRIPTORS:
        report.fault(
            f"this process may have {soft} descriptors open, and each peer takes two: raise the limit with "
            "`ulimit -n 4096`"
        )
    for name, which, what in (
        ("address space", resource.RLIMIT_AS, "`ulimit -v unlimited`"),
        ("file size", resource.RLIMIT_FSIZE, "`ulimit -f unlimited`"),
    ):
        soft, hard = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            report.fact(name, f"limited to {_size(soft)}", soft=soft, hard=hard)
            report.note(f"the limit on {name} also applies to shared memory: {what} lifts it")


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


def _meminfo() -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return {}


def _memory_limit() -> int | None:
    for path in (_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text())
            return limit if limit < 1 << 60 else None
    return None


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
