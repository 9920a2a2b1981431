"""About two hundred pickles that run code when they are loaded, with several callables and ways to call them."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any


@dataclasses.dataclass
class Point:
    """For a pickle in the field of a dataclass."""

    x: Any
    y: Any


_CALLS: dict[str, tuple[str, ...]] = {
    "os\nsystem": ("true",),
    "posix\nsystem": ("true",),
    "os\npopen": ("true",),
    "os\nexecl": ("/bin/true", "true"),
    "os\nunlink": ("/nonexistent",),
    "subprocess\nPopen": ("true",),
    "subprocess\ncheck_output": ("true",),
    "builtins\neval": ("1+1",),
    "builtins\nexec": ("x=1",),
    "builtins\ncompile": ("1", "f", "eval"),
    "builtins\n__import__": ("antigravity",),
    "builtins\nopen": ("/dev/null",),
    "builtins\ngetattr": ("x", "upper"),
    "importlib\nimport_module": ("this",),
    "ctypes\nCDLL": ("libc.so.6",),
    "_ctypes\ndlopen": ("libc.so.6",),
    "pty\nspawn": ("true",),
    "runpy\nrun_path": ("/dev/null",),
    "runpy\n_run_code": ("x=1",),
    "shutil\nrmtree": ("/nonexistent",),
    "socket\ncreate_connection": ("127.0.0.1",),
    "code\nInteractiveInterpreter": (),
    "timeit\ntimeit": ("1",),
    "operator\nattrgetter": ("__class__",),
    "functools\npartial": ("x",),
    "types\nCodeType": (),
    "marshal\nloads": ("c",),
    "pickle\nloads": ("N.",),
    "torch\nload": ("/dev/null",),
    "torch.hub\nload": ("x", "y"),
    "torch._C\n_jit_init": (),
    "numpy\nload": ("/dev/null",),
    "webbrowser\nopen": ("http://127.0.0.1:9",),
    "backhaul.rpc\nshutdown": (),
}


def _text(value: str) -> bytes:
    return b"S" + repr(value).encode() + b"\n"


def _bodies(name: str, args: tuple[str, ...]) -> list[bytes]:
    module, function = name.split("\n")
    texts = b"".join(map(_text, args))
    named = f"c{module}\n{function}\n".encode()
    return [
        named + b"(" + texts + b"tR.",  # REDUCE
        b"(" + texts + f"i{module}\n{function}\n.".encode(),  # INST
        b"(" + named + texts + b"o.",  # OBJ
        b"\x80\x02" + named + b"(" + texts + b"t\x81.",  # NEWOBJ
        b"\x80\x04" + _short(module) + _short(function) + b"\x93(" + texts + b"tR.",  # STACK_GLOBAL
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f" + named + b"(" + texts + b"tR.",  # in a frame with a false length
    ]


def _short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def payloads() -> list[bytes]:
    found = [body for name, args in _CALLS.items() for body in _bodies(name, args)]
    found += [pickle.dumps(ValueError("harmless"), protocol) for protocol in range(6)]
    return found
