"""All state hangs off a Worker: what the modules of the package keep besides, and that each says why."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import backhaul

ROOT = Path(backhaul.__file__).parent

# What makes something that nothing changes afterwards.
CONSTANTS = {
    "Decoder",
    "Encoder",
    "Path",
    "Struct",
    "TypeVar",
    "attrgetter",
    "bool",
    "bytes",
    "cache",
    "compile",
    "datetime",
    "device",
    "frozenset",
    "getLogger",
    "getattr",
    "int",
    "namedtuple",
    "range",
    "staticmethod",
    "sysconf",
    "timedelta",
    "tuple",
}

# Methods that change a container.
CHANGES = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "move_to_end",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def name_of_call(node: ast.expr) -> str:
    """What an expression calls, without its module: ``a.b.C[int](…)`` is a call of ``C``."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def is_container(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def changed(tree: ast.Module) -> set[str]:
    """Names of a module that one of its functions rebinds, or whose contents a function changes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            found.add(ast.unparse(node.func.value))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            found.update(ast.unparse(each.value) for each in targets if isinstance(each, ast.Subscript))
    return found


def imported(tree: ast.Module) -> set[str]:
    """The names that a module has from others."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return ast.unparse(node)


def state(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """What a module keeps and may change, by name; what it sets of others; which functions of others it calls."""
    changes, foreign = changed(tree), imported(tree)
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and root(node.value.func) in foreign:
            yield f"{ast.unparse(node.value.func)}()", node
        for target in targets(node):
            value = getattr(node, "value", None)
            if not isinstance(target, ast.Name) or target.id.startswith("__") or value is None:
                continue
            is_constant = target.id.lstrip("_").isupper() or name_of_call(value) in CONSTANTS
            made = isinstance(value, ast.Call) or is_container(value)
            if target.id in changes or (made and not is_constant):
                yield target.id, node
    for node in ast.walk(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute) and root(target) in foreign:
                assert isinstance(node, ast.stmt)
                yield ast.unparse(target), node


def explained(node: ast.stmt, tree: ast.Module, lines: list[str]) -> bool:
    """Whether there is a comment on a statement, or above the lines that it stands with, or a text below it."""
    if "  # " in lines[node.lineno - 1]:
        return True
    for line in reversed(lines[: node.lineno - 1]):
        if line.lstrip().startswith("#"):
            return True
        if not line.strip():
            break
    after = tree.body[tree.body.index(node) + 1 :] if node in tree.body else []
    return bool(after) and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant)


@functools.cache
def found_in_package() -> dict[str, bool]:
    """All of it: ``module:name``, and whether its reason stands where it is defined."""
    found = {}
    # The benchmark runs in processes of its own, which end with it.
    for path in (path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT / "bench"):
        text = path.read_text()
        tree = ast.parse(text)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name, node in state(tree):
            found[f"{module}:{name}"] = explained(node, tree, text.splitlines())
    return found


# Why something is of the process and not of a worker. The reason stands where it is defined, too.
ALLOWED = {
    "It says which worker, context or run a thread is in.": """
        autograd.contexts:current_context autograd.functions:thread autograd.runner:thread.run
        current_worker:variable current_worker:process_worker worker:_becoming dropin.rpc:_becoming
    """,
    "Torch has one for the process, and tells no worker from another: hooks, patches, profilers, the compiler.": """
        autograd.contexts:everywhere autograd.joint_hooks:_hooks autograd.joint_hooks:_MultiHandle.__init__
        autograd.mistakes:torch.autograd._engine_run_backward autograd.node_hooks:_dicts autograd.node_hooks:_seen
        autograd.node_hooks:torch.autograd.Function._register_hook autograd.replicas:_composed
        autograd.replicas:replicas autograd.replicas:register_module_module_registration_hook()
        autograd.replicas:DistributedDataParallel.__setstate__ eager:_off profiler.torch_session:_claiming
        profiler.torch_session:_active remote_profile.caller:_numbers remote_profile.caller:_reports
        remote_profile.profilers:_installing remote_profile.profilers:_installed remote_profile.profilers:_here
        remote_profile.profilers:_latest
    """,
    "Tensors and modules belong to no worker, and several workers may use them.": """
        autograd.functions:_on_gpus autograd.gradients:_lending inspection.contexts:_seen optim.claims:claims
        optim.local:_here
    """,
    "It is about the interpreter, the processors, the memory, the GPUs or the log of the process.": """
        agent.agent:Future.devices agent.interpreter:switch_interval devices.driver:_device_of devices.driver:_handles
        devices.driver:_state devices.driver:_streams devices.pages:_ends devices.pages:_here
        devices.pages:_inherited devices.pages:os.register_at_fork() devices.staging:_ended
        devices.staging:_freeing devices.staging:_spare devices.streams:_in_use edges.transforms:_warned
        inspection.metrics:_collectors inspection.metrics:_registering inspection.threads:_looking
        profiler.parcel:_lock profiler.parcel:_pauses profiler.parcel:_was_on transport.awake:_turn
        transport.segments:_leases transport.segments:_fork transport.plain:_making wire.landing:_pinning
    """,
    "It is filled at import, or in a process that has no worker.": """
        launch.main_module:_role launch.members:beginning trust.exposure:registry
    """,
    "It is a cache on which no result depends, or it never changes.": """
        autograd.functions:_LiftNode autograd.local_pass:_gradient_edge seeing.guest:_codec transport.segments:_libc
        wire.callables:_hints
        wire.decoder:_decoders wire.headers:_alone wire.headers:_made wire.headers:singles wire.headers:_parsed
        wire.headers:_parsed_bytes wire.lanes:_decoders wire.shards:_meshes wire.tensors:_tables
    """,
    "It belongs to each worker, by worker: the Worker is below and does not know this layer.": """
        profiler.session:_sessions profiler.session:_lock
    """,
    "It stands for what torch's modules keep for the process.": """
        dropin.__main__:sys.argv dropin.autograd:_opened dropin.children:multiprocessing.forkserver.ensure_running
        dropin.children:multiprocessing.spawn.get_preparation_data dropin.futures:Future.callback_error
        dropin.futures:torch.futures.wait_all dropin.installing:_installed
        dropin.rpc._testing.faulty_agent_backend_registry:backend_registry.register_backend()
        dropin.rpc.agent:_agents dropin.rpc.agent:_gil_profiling dropin.rpc.agent:_other
        dropin.rpc.api:_ALL_WORKER_NAMES dropin.rpc.api:_all_gather_dict_lock
        dropin.rpc.api:_all_gather_sequence_id dropin.rpc.api:_all_gather_sequence_id_to_states
        dropin.rpc.api:_default_pickler dropin.rpc.api:_thread_local_var dropin.rpc.backend_registry:_members
        dropin.rpc.internal:_internal_rpc_pickler dropin.rpc.internal:_tables dropin.rpc.rrefs:_ids
        dropin.rpc.rrefs:_made dropin.rpc.rrefs:_numbers dropin.rpc.rrefs:_types
    """,
}


def test_every_global_of_the_process_is_listed_with_its_reason() -> None:
    """If this fails for something new: make it an attribute of the Worker, or of something that the Worker has."""
    allowed = [each for names in ALLOWED.values() for each in names.split()]
    assert len(allowed) == len(set(allowed))
    found = set(found_in_package())
    assert found - set(allowed) == set()
    assert set(allowed) - found == set(), "these are gone"


def test_every_global_states_its_reason_where_it_is_defined() -> None:
    assert [name for name, explains in found_in_package().items() if not explains] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("_table = {}", ["_table"]),
        ("_table: dict[str, int] = dict()", ["_table"]),
        ("TABLE = {1: 2}", []),
        ("TABLE = {1: 2}\ndef add(x): TABLE[x] = 1", ["TABLE"]),
        ("TABLE = []\ndef add(x): TABLE.append(x)", ["TABLE"]),
        ("_on = False\ndef start():\n    global _on\n    _on = True", ["_on"]),
        ("_on = False", []),
        ("_lock = threading.Lock()", ["_lock"]),
        ("_log = logging.getLogger(__name__)", []),
        ("T = TypeVar('T')", []),
        ("import torch\ntorch.add = print", ["torch.add"]),
        ("from a import B\ndef set(x):\n    B.devices = x", ["B.devices"]),
        ("from torch import register_hook\nregister_hook(print)", ["register_hook()"]),
        ("class A:\n    def set(self):\n        self.x = 1", []),
    ],
)
def test_globals_are_found_in_a_source(source: str, found: list[str]) -> None:
    assert [name for name, _ in state(ast.parse(source))] == found


def test_a_reason_is_a_comment_or_a_text_nearby() -> None:
    source = "# why\n_a = {}\n_b = {}\n\n_c = {}\n\n_d = {}  # why\n\n_e = {}\n'why'"
    tree = ast.parse(source)
    said = {name: explained(node, tree, source.splitlines()) for name, node in state(tree)}
    assert said == {"_a": True, "_b": True, "_c": False, "_d": True, "_e": True}
