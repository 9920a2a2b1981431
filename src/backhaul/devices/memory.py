"""Device memory that two processes of one host share by file descriptor. It is allocated from the driver.

The IPC handles of the CUDA runtime cover a whole block of torch's allocator, with unrelated tensors in it, and need a
common PID namespace. Memory from the driver is used only here, and its descriptor travels over a unix socket like any
other.
"""

from __future__ import annotations

import ctypes
import os

import torch

from backhaul.devices.driver import check, library

_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POSIX = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, handles=_POSIX, location=_Location(_DEVICE, device))


def granularity(device: int) -> int:
    """The size of shared memory must be a multiple of this many bytes."""
    size = ctypes.c_size_t()
    properties = _properties(device)
    check(
        library().cuMemGetAllocationGranularity(ctypes.byref(size), ctypes.byref(properties), 0),
        "asking for the granularity",
    )
    return size.value


class SharedMemory:
    """A block of device memory. It is freed when this object is deleted."""

    def __init__(self, device: int, size: int, descriptor: int | None = None) -> None:
        """Allocate memory on a device; or, with a descriptor, map the memory of another process on that device.

        The caller must close the descriptor. Raises `DriverError`.
        """
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._process = os.getpid()
        self.device = device
        step = granularity(device)
        self.size = -(-size // step) * step
        self._handle = ctypes.c_ulonglong()
        self._address = ctypes.c_ulonglong()
        self._mapped = False
        driver = library()
        if descriptor is None:
            properties = _properties(device)
            check(
                driver.cuMemCreate(
                    ctypes.byref(self._handle),
                    ctypes.c_size_t(self.size),
                    ctypes.byref(properties),
                    ctypes.c_ulonglong(0),
                ),
                f"taking {self.size} bytes",
            )
        else:
            check(
                driver.cuMemImportFromShareableHandle(ctypes.byref(self._handle), ctypes.c_void_p(descriptor), _POSIX),
                "opening the memory of another process",
            )
        try:
            self._map()
        except BaseException:
            self.close()
            raise

    def _map(self) -> None:
        driver = library()
        size = ctypes.c_size_t(self.size)
        zero = ctypes.c_ulonglong(0)
        check(
            driver.cuMemAddressReserve(ctypes.byref(self._address), size, ctypes.c_size_t(0), zero, zero),
            "reserving addresses",
        )
        check(driver.cuMemMap(self._address, size, ctypes.c_size_t(0), self._handle, zero), "mapping")
        self._mapped = True
        access = _Access(_Location(_DEVICE, self.device), _READ_WRITE)
        check(
            driver.cuMemSetAccess(self._address, size, ctypes.byref(access), ctypes.c_size_t(1)), "making it accessible"
        )

    def export(self) -> int:
        """A descriptor for another process. The caller must close it."""
        descriptor = ctypes.c_int()
        check(
            library().cuMemExportToShareableHandle(
                ctypes.byref(descriptor), self._handle, _POSIX, ctypes.c_ulonglong(0)
            ),
            "exporting",
        )
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    @property
    def address(self) -> int:
        return self._address.value

    def close(self) -> None:
        if os.getpid() != self._process:  # the driver cannot be used in a forked child, and the memory is the parent's
            return
        driver = library()
        size = ctypes.c_size_t(self.size)
        if self._mapped:
            driver.cuMemUnmap(self._address, size)
            self._mapped = False
        if self._address.value:
            driver.cuMemAddressFree(self._address, size)
            self._address.value = 0
        if self._handle.value:
            driver.cuMemRelease(self._handle)
            self._handle.value = 0

    def __del__(self) -> None:
        self.close()
