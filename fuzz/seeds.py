"""The inputs with which fuzzing starts: valid ones for each target."""

from __future__ import annotations

import functools
import math
import operator
import random
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import live
import msgspec
import numpy
import torch
from targets import LIVE, Colour, Frozen, Handle, Pair, Point, Right, codec

from backhaul.ids import Addresses, RefId, ShareId
from backhaul.security.handshake import Hello, Welcome
from backhaul.security.handshake import encode as greeting
from backhaul.wire import headers, trees
from backhaul.wire.frames import DEVICE_PLACE, HEADER, MAGIC, PLACED, VERSION, encode, place
from backhaul.wire.messages import (
    KIND_OF,
    AwaitReady,
    Call,
    Check,
    Create,
    Failed,
    Failure,
    Fetch,
    Goodbye,
    Gradients,
    Inquire,
    Leave,
    Mark,
    Notices,
    Pass,
    Ping,
    Recall,
    Register,
    Registered,
    Release,
    Report,
    Resolve,
    Result,
    Sweep,
    Swept,
    TakePart,
    Tally,
    Unpin,
)
from backhaul.wire.tensors import pack_tensors

_pack = msgspec.msgpack.encode


def tensor_lists() -> list[list[torch.Tensor]]:
    """Lists of tensors as messages carry them: of every layout, with and without shared memory."""
    base = torch.arange(24.0)
    matrix = torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0]])
    return [
        [torch.ones(3)],
        [torch.tensor(1.5, dtype=torch.float64)],
        [torch.ones(2, 2, requires_grad=True)],
        [torch.nn.Parameter(torch.ones(2))],
        [base[:4], base[2:8], base.reshape(4, 6).t()],
        [base[::3]],
        [torch.ones(1).expand(1000)],
        [torch.tensor([1 + 2j]).conj(), torch.tensor([1.0])._neg_view()],
        [torch.zeros(0, 4), torch.empty(1 << 30, device="meta")],
        [matrix.to_sparse(), matrix.to_sparse().coalesce()],
        [matrix.to_sparse_csr(), matrix.to_sparse_csc()],
        [matrix.to_sparse_bsr((2, 2)), matrix.to_sparse_bsc((2, 2))],
        [torch.arange(6, dtype=torch.int16), torch.tensor([True]), torch.zeros(4, dtype=torch.float8_e5m2)],
    ]


def python_values() -> list[Any]:
    """A value of each kind that the codec carries, and some nested ones."""
    atoms = [None, True, -1, 1 << 70, -(1 << 64), 0.5, math.nan, "text", "\u20ac", "\ud800", b"\0\xff", bytearray(b"x")]
    scalars = [2j, ..., range(1, 9, 2), slice(1, None), torch.float16, torch.device("cpu"), torch.Size([2, 3])]
    constants = [torch.sparse_coo, torch.channels_last, operator.add, ValueError, Colour.RED, Right.READ | Right.WRITE]
    arrays = [numpy.arange(6.0).reshape(2, 3), numpy.float32(1.5), numpy.array(["ab"]), numpy.datetime64("2020-01-01")]
    objects = [Pair(1, [2]), Point((1,), {"a": None}), Frozen(b"x"), Handle(7), functools.partial(operator.add, 1)]
    nested = [
        [1, [2, [3, [4]]]],
        {"a": [1], "b": {"c": (2,)}},
        {1: 2, (3, 4): 5},
        OrderedDict(a=1, b=2),
        {1, "a", frozenset({2})},
        torch.return_types.max((torch.ones(1), torch.ones(1))),
        torch.ones(2).add,
    ]
    return [*atoms, *scalars, *constants, *arrays, *objects, *nested, [atoms, scalars, constants, objects]]


def frame_seeds() -> list[bytes]:
    ref, share = RefId(1, 3, 1 << 40), ShareId(2, 70_000)
    backward = Pass((3 << 48) + 7, (3 << 48) + 1, (3 << 48) + 7, False, True)
    big = (2 << 48) + 1
    bare = [
        Call(6, None, ((ref, share),), Mark(1, 2)),
        Failure(2, "worker1", "builtins.ValueError", "no", "Traceback ..."),
        Ping(0),
        AwaitReady(3, 0),
        Tally(5),
        Create(7, ref, None, ((ref, share),)),
        Fetch(8, ref, Mark(1)),
        Notices(9, 1 << 60, 1, (Register(ref), Registered(ref, False), Unpin(share), Release(ref))),
        Notices(9, 1 << 60, 2, (Sweep((1, 2)), Swept((3,)), Recall((share,)))),
        TakePart(backward, (big, big + 1)),
        Resolve(backward),
        Report(backward, True, (0,), (big,)),
        Failed(backward, "w", "T", "x", "t"),
        Check(12, backward, 1),
        Leave(1),
        Inquire(13, (1,)),
        Goodbye(),
    ]
    found = [bytes(encode(message)) for message in bare]
    for value in python_values():
        tree, packing = codec().pack(value)
        found.append(bytes(encode(Result(1, tree), packing.tensors)))
    for tensors in tensor_lists():
        found.append(bytes(encode(Gradients(backward, (1,), (0,)), tensors)))
    large = [torch.zeros(1 << 18, dtype=torch.uint8), torch.zeros(1 << 18, dtype=torch.uint8)]
    found += [bytes(place(encode(Result(1, None), large), places)) for places in ([1, 2], [2, 2])]
    found += [on_device(code, size) for code in (0, 2, 255) for size in (4, 1 << 20)]
    return [*(b"\0" + one for one in found), b"\x03\x01\x13\x40" + b"".join(found[:6]), b"\0" + found[0] + found[2]]


def on_device(code: int, size: int) -> bytes:
    """A message whose only tensor is in a segment of device memory, for the device with this code."""
    body = _pack(Ping(5))
    table = headers.encode_single(1, 0, (size,), size, code) + struct.pack("<I", DEVICE_PLACE | 1)
    return HEADER.pack(MAGIC, VERSION, KIND_OF[Ping] | PLACED, len(body), len(table), 0) + body + table


def greeting_seeds() -> list[bytes]:
    hello = greeting(Hello("group", 1, "worker1", 0, Addresses("host", "/tmp/x", ("127.0.0.1", 80))))
    welcomes = [greeting(Welcome(0, "worker0")), greeting(Welcome(0, "worker0", "it is shutting down"))]
    found = [b"\0" + hello, *(b"\1" + welcome for welcome in welcomes)]
    records = [b"\x16\x03\x01\x00\x05hello", b"\x16\x03\x01\x40\x00", b"\x15\x03\x03\x00\x02\x02\x28", b"GET / HTTP"]
    return [*found, *(bytes([choice]) + record for choice in (8, 9) for record in records)]


def value_seeds() -> list[bytes]:
    found = [_pack(codec().pack(value)[0]) for value in python_values()]
    odd = [
        [trees.PICKLE, b"cos\nsystem\n(S'true'\ntR."],
        [trees.PICKLE, b"\x80\x04N.", [trees.TENSOR, 0]],
        [trees.ARRAY, "<f4", 0, 2, 2],
        [trees.ARRAY, "|S4", None, 0],
        [trees.ARRAY, "<M8[ns]", 0, 2],
        [trees.NUMPY_SCALAR, "<U1", b"a\0\0\0"],
        *([trees.TENSOR, index] for index in range(6)),
        [trees.METHOD, [trees.TENSOR, 1], "add"],
        [trees.LIST, *range(40)],
    ]
    return found + [_pack(tree) for tree in odd]


def tensor_seeds() -> list[bytes]:
    found = []
    for tensors in tensor_lists():
        packed = pack_tensors(tensors)
        payload = b"".join(map(bytes, packed.buffers))
        for way in (0, 2, 4):
            found.append(struct.pack("<HBB", len(packed.table), way, 0) + packed.table + payload)
        places = packed.table + bytes(4 * len(packed.buffers))
        found.append(struct.pack("<HBB", len(places), 1, 0) + places + payload)
    dtypes = [code for code, dtype in enumerate(headers.DTYPES) if dtype is not None]
    for code in dtypes:
        table = headers.encode_single(code, 0, (2,), 2 * (headers.DTYPES[code] or torch.int8).itemsize)
        payload = bytes(2 * (headers.DTYPES[code] or torch.int8).itemsize)
        found.append(struct.pack("<HBB", len(table), 0, 0) + table + payload)
    return found


def compressed_seeds() -> list[bytes]:
    found = []
    for shape in ((4,), (2, 8), (), (0, 1 << 40), (1 << 40,)):
        for code in ("bf16", "int8", "topk"):
            for dtype in ("float32", "bfloat16", "int64"):
                for chosen in (b"\x05", b"\x06\x07", b"\x07\x09", b"\x06\x08", b"\x0b\x07", b"\x0c", b"\x07\x0a"):
                    message = [[0, code, dtype, shape, len(found) % 2 == 0]]
                    found.append(bytes([len(chosen)]) + chosen + _pack(message))
    found.append(
        b"\x03\x05\x06\x07" + _pack([[1, "int8", "float32", (2, 8), True], [0, "bf16", "float64", (4,), False]])
    )
    return found


def reference_seeds() -> list[bytes]:
    choose = random.Random(8)
    return [bytes([strict]) + choose.randbytes(4 * length) for strict in (0, 1) for length in (1, 4, 8, 16, 32, 32)]


SEEDS: dict[str, Sequence[bytes]] = {}


def seeds(target: str) -> Sequence[bytes]:
    """The first inputs of a target."""
    makers = {
        "frames": frame_seeds,
        "greetings": greeting_seeds,
        "values": value_seeds,
        "tensors": tensor_seeds,
        "compressed": compressed_seeds,
        "references": reference_seeds,
        **dict.fromkeys([target.__name__ for target in LIVE], lambda: list(live.seeds())),
    }
    if target not in SEEDS:
        SEEDS[target] = makers[target]()
    return SEEDS[target]
