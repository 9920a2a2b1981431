"""Adversarial programs as plain data. Each has a source text, which is run as it is, and can be made smaller.

A program is a tree of *blocks*. The block ``main`` runs on worker0. A step may have a block as its body: a function for
another worker, a part that is compiled, checkpointed or given to ``torch.func``, or the body of a ``with``. All names
are different, so a step needs exactly the steps that make the names it uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

LINES: dict[str, str] = {
    # Dense tensors. {0} and {1} are the results, {a} to {d} the operands, {n} is a number.
    "times": "{0} = times({a}, {b})",
    "product": "{0} = {a} * torch.cos({b})",
    "sum": "{0} = {a} + {b}",
    "tanh": "{0} = torch.tanh({a})",
    "softmax": "{0} = functional.softmax({a}, dim={n} % 2)",
    "norm": "{0} = functional.layer_norm({a}, (SIZE,))",
    "attend": "{0} = functional.scaled_dot_product_attention({a}[None], {b}.to({a}.dtype)[None], {a}[None])[0]",
    "choose": "{0} = torch.where({a} > 0, {a}, {b}.to({a}.dtype))",
    "transposed": "{0} = {a}.t()",
    "spread": "{0} = spread({a}, {n} % SIZE)",
    "flipped": "{0} = {a}.flip(0)",
    "reshaped": "{0} = {a}.reshape(2, 8)[:, :].reshape(SIZE, SIZE)",
    "split": "{0}, {1} = (torch.cat([part, part]) for part in {a}.split(2))",
    "double": "{0} = {a}.double()",
    "float": "{0} = {a}.float()",
    "half": "{0} = {a}.bfloat16()",
    "detached": "{0} = {a}.detach()",
    "written": "{0} = written({a}, {b})",
    "fresh": "{0} = {a} * 1",
    "in place": "{a}.add_(0.25)",
    "in place with": "{a}.mul_(torch.cos({b}).to({a}.dtype))",
    "dropped": "{0} = dropped({a}, {n})",
    "saving": "{0} = saving({a}, {b})",
    "dirty": "{0} = dirty({a})",
    "ranked": "{0} = ranked({a})",
    "once": "{0} = once({a})",
    "halves": "{0}, {1} = halves({a})",
    "straight": "{0} = straight({a})",
    "nothing": "{0} = nothing_of({a})",
    "with nothing": "{0} = with_nothing({a}, {b})",
    "cloned": "{0} = {a}.clone()",
    "restored": "{0} = {a}.detach().clone()",
    "total": "{0} = total({all})",
    # Other kinds, and ways back.
    "complex": "{0} = to_complex({a}, {b})",
    "complex product": "{0} = {a} * {b}.conj() / 2",
    "complex exp": "{0} = torch.exp({a} * 0.5j)",
    "real": "{0} = {a}.real",
    "abs": "{0} = torch.abs({a} + 0.5)",
    "as real": "{0} = torch.view_as_real({a}).sum(-1)",
    "pair": "{0} = pair_of({a})",
    "pair work": "{0} = torch.tanh({a}) * {a}",
    "pair sum": "{0} = {a} + torch.sin({b})",
    "joined": "{0} = joined({a})",
    "labelled": "{0} = labelled({a})",
    "labelled work": "{0} = torch.sin({a}) * {a}",
    "unlabelled": "{0} = unlabelled({a})",
    "jagged": "{0} = jagged({a})",
    "jagged work": "{0} = {a}.sin() * {a}",
    "values": "{0} = {a}.values()",
    "masked": "{0} = masked({a})",
    "masked bare": "{0} = masked_bare({a})",
    "masked work": "{0} = torch.exp({a}) * {a}",
    "unmasked": "{0} = unmasked({a})",
    "embedded": "{0} = embedded({a}, {n}, sparse=True)",
    "embedded densely": "{0} = embedded({a}, {n}, sparse=False)",
    "compressed product": "{0} = torch.tanh({a} @ {b}.double())",
    "compressed double": "{0} = {a} * 2",
    "compressed dense": "{0} = {a}.to_dense()",
    "made csr": "{0} = {a}.to_sparse_csr()",
    "made csc": "{0} = {a}.to_sparse_csc()",
    "made bsr": "{0} = {a}.to_sparse_bsr((2, 2))",
    "made coo": "{0} = {a}.to_sparse()",
    "fetched": "{0} = {a}.to_here()",
    # What a worker has.
    "load": '{0} = here("{key}")',
    "module": '{0} = here("{key}")({a})',
    "remote module": '{0} = here("remote {key}")({a})',
    # Hooks.
    "hook": 'hook("{a} hook {n}", {a})',
    "halving hook": 'hook("{a} hook {n}", {a}, 0.5)',
    "retain": 'retain("{a}", {a})',
    "node prehook": 'node_prehook("{a} prehook {n}", {a})',
    "node halving prehook": 'node_prehook("{a} prehook {n}", {a}, 0.5)',
    "node hook": 'node_hook("{a} node hook {n}", {a})',
    "multi-grad hook": 'multi_hook("multi {n} {key}", "{key}", {all})',
}

WITH: dict[str, str] = {
    "no_grad": "torch.no_grad()",
    "enable_grad": "torch.enable_grad()",
    "inference_mode": "torch.inference_mode()",
    "autocast": 'torch.autocast("cpu", dtype=torch.bfloat16)',
    "autocast float16": 'torch.autocast("cpu", dtype=torch.float16)',
    "autocast off": 'torch.autocast("cpu", enabled=False)',
    "save_on_cpu": "torch.autograd.graph.save_on_cpu()",
    "packed": "packed()",
    "dispatch mode": "Passing()",
    "function mode": "Through()",
    "device": 'torch.device("cpu")',
}

PARTS: dict[str, str] = {
    "compiled": 'torch.compile({f}, backend="eager")({all})',
    "compiled by aot": 'torch.compile({f}, backend="aot_eager")({all})',
    "checkpoint": "checkpoint({f}, {all}, use_reentrant=False)",
    "reentrant checkpoint": "checkpoint({f}, {all}, use_reentrant=True)",
    "func.grad": "torch.func.grad(lambda *args: total({f}(*args)))({all})",
    "vmap": "torch.vmap({f})({all})",
    "vjp": "torch.func.vjp({f}, {all})[0]",
}

CALLS = (
    "sync",
    "async",
    "then",
    "coroutine",
    "awaited",
    "forwarded",
    "remote",
    "proxy",
    "reference",
    "compiled function",
    "compiled function by aot",
)
LATE = {
    "async": "{outs}late_{f}.wait()",
    "then": "{outs}late_{f}.wait()",
    "remote": "{outs}late_{f}.to_here()",
    "proxy": "{outs}late_{f}.rpc_sync().sin()",
    "reference": "{reference}.to_here()",
}
"""Code that is placed before the first use of a call's result, or at the end of its block."""


class Leaf(NamedTuple):
    name: str
    worker: int
    kind: str
    dtype: str
    seed: int
    requires_grad: bool = True
    flags: tuple[str, ...] = ()


class Module(NamedTuple):
    name: str
    worker: int
    kind: str
    dtype: str
    seed: int
    remote: bool = False
    """Whether worker0 calls it through a `RemoteModule`."""


class Block(NamedTuple):
    name: str
    worker: int
    params: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    results: tuple[str, ...] = ()


class Step(NamedTuple):
    do: str
    outs: tuple[str, ...] = ()
    ins: tuple[str, ...] = ()
    number: int = 0
    key: str = ""
    how: str = ""
    body: Block | None = None

    @property
    def kind(self) -> str:
        return f"{self.do}: {self.how}" if self.how else self.do


class Pass(NamedTuple):
    roots: tuple[int, ...]
    retain_graph: bool = False


@dataclass(frozen=True)
class Program:
    seed: int
    size: int
    leaves: tuple[Leaf, ...]
    modules: tuple[Module, ...]
    main: Block
    passes: tuple[Pass, ...]
    accumulate: Literal["context", "grad"]
    optimizer: str = ""
    iterations: int = 1
    scheduled: bool = False
    """Whether messages arrive in random order."""

    @property
    def features(self) -> Counter[str]:
        found = Counter([step.kind for step in steps_of(self.main)])
        found.update(flag for leaf in self.leaves for flag in leaf.flags)
        found.update(f"leaf: {leaf.kind}" for leaf in self.leaves)
        found.update(f"module: {module.kind}" for module in self.modules)
        found.update([f"accumulate={self.accumulate}"])
        found.update([f"optimizer: {self.optimizer}"] if self.optimizer else [])
        return found

    @property
    def text(self) -> str:
        return "\n\n\n".join(_functions(self.main, "main"))

    def __str__(self) -> str:
        head = [f"# program {self.seed}: {self.size} workers, {self.iterations} steps, accumulate={self.accumulate!r}"]
        head += [f"# optimizer: {self.optimizer}"] if self.optimizer else []
        head += [f"# {each}" for each in (*self.leaves, *self.modules, *self.passes)]
        return "\n".join([*head, self.text])


def steps_of(block: Block) -> Iterator[Step]:
    for step in block.steps:
        yield step
        if step.body is not None:
            yield from steps_of(step.body)


# Their source text.


def _functions(block: Block, how: str) -> list[str]:
    """The function of a block, after those that it calls."""
    found: list[str] = []
    for step in block.steps:
        if step.body is not None:
            if step.do == "call":
                found += _functions(step.body, step.how)
                if step.how == "forwarded":
                    name = step.body.name
                    found.append(
                        f"@rpc.functions.async_execution\ndef via_{name}(*args):\n"
                        f'    return rpc.rpc_async("worker{step.body.worker}", {name}, args=args)'
                    )
            else:
                found += _functions(step.body, "")[:-1]
    backend = {"compiled function": "eager", "compiled function by aot": "aot_eager"}.get(how)
    lines = [f'@torch.compile(backend="{backend}")'] if backend else []
    kind = "async def" if how == "coroutine" else "def"
    lines += [f"{kind} {block.name}({', '.join(block.params)}):  # on worker{block.worker}"]
    lines += [f"    {line}" for line in _body(block, notes=backend is None and how != "")]
    return [*found, "\n".join(lines)]


def _body(block: Block, *, notes: bool) -> list[str]:
    pending: list[tuple[Step, str]] = []
    lines: list[str] = []

    def settle(names: set[str] | None) -> None:
        for step, line in list(pending):
            if names is None or (step.how != "reference" and names & {*step.outs}):
                lines.append(line)
                pending.remove((step, line))

    for step in block.steps:
        settle(_names(step))
        lines += _lines(step)
        if step.do == "call" and step.how in LATE and step.body is not None:
            names = ", ".join(step.outs)
            line = LATE[step.how].format(outs=f"{names} = " if names else "", reference=names, f=step.body.name)
            pending.append((step, line))
    settle(None)
    if notes and block.results:
        lines.append(f'see("{block.name}", {", ".join(block.results)})')
    if block.name:
        lines.append(f"return {', '.join(block.results) or None}")
    return lines or ["pass"]


def _names(step: Step) -> set[str]:
    """All names that it uses."""
    found = {*step.ins}
    if step.body is not None and step.do == "with":
        for inner in step.body.steps:
            found |= _names(inner)
    return found


def _lines(step: Step) -> list[str]:
    body, outs = step.body, ", ".join(step.outs)
    if body is None:
        names = dict(zip("abcd", step.ins, strict=False))
        made = LINES[step.do].format(*step.outs, **names, all=", ".join(step.ins), n=step.number, key=step.key)
        return [made]
    if step.do == "with":
        return [f"with {WITH[step.how]}:", *(f"    {line}" for line in _body(body, notes=False))]
    args = ", ".join(step.ins)
    if step.do == "part":
        lines = [f"def {body.name}({', '.join(body.params)}):", *(f"    {line}" for line in _body(body, notes=False))]
        call = PARTS[step.how].format(f=body.name, all=args)
        return [*lines, f"{outs} = {call}" if outs else call]
    to, call_args = f'"worker{body.worker}"', f"args=({args}{',' if len(step.ins) == 1 else ''})"
    match step.how:
        case "awaited":
            made = f"await rpc.rpc_async({to}, {body.name}, {call_args})"
        case "async":
            return [f"late_{body.name} = rpc.rpc_async({to}, {body.name}, {call_args})"]
        case "then":
            return [f"late_{body.name} = rpc.rpc_async({to}, {body.name}, {call_args}).then(lambda done: done.wait())"]
        case "remote" | "proxy":
            return [f"late_{body.name} = rpc.remote({to}, {body.name}, {call_args})"]
        case "reference":
            return [f"{outs} = rpc.remote({to}, {body.name}, {call_args})"]
        case "forwarded":
            made = f'rpc.rpc_sync("worker{step.number}", via_{body.name}, {call_args})'
        case _:
            made = f"rpc.rpc_sync({to}, {body.name}, {call_args})"
    return [f"{outs} = {made}" if outs else made]


# Shrinking.


def smaller(program: Program) -> Iterator[Program]:
    """Smaller programs, each without one item and without what depends on it."""
    if program.iterations > 1:
        yield replace(program, iterations=1)
    if program.optimizer:
        yield replace(program, optimizer="")
    if program.scheduled:
        yield replace(program, scheduled=False)
    for place in range(len(program.passes)):
        if len(program.passes) > 1:
            yield replace(program, passes=_without(program.passes, place))
    for block in _smaller_blocks(program.main):
        yield repaired(replace(program, main=block))
    for place, leaf in enumerate(program.leaves):
        for flag in range(len(leaf.flags)):
            fewer = leaf._replace(flags=_without(leaf.flags, flag))
            yield replace(program, leaves=_with(program.leaves, place, fewer))
    used = {step.key for step in steps_of(program.main)}
    for place, leaf in enumerate(program.leaves):
        if leaf.name not in used:
            yield replace(program, leaves=_without(program.leaves, place))
    for place, module in enumerate(program.modules):
        if module.name not in used:
            yield replace(program, modules=_without(program.modules, place))


def _smaller_blocks(block: Block) -> Iterator[Block]:
    for place in range(len(block.steps) - 1, -1, -1):
        yield block._replace(steps=_without(block.steps, place))
    for place, step in enumerate(block.steps):
        if step.do in ("total", "multi-grad hook") and len(step.ins) > 1:
            for at in range(len(step.ins)):
                changed = step._replace(ins=_without(step.ins, at))
                yield block._replace(steps=_with(block.steps, place, changed))
        if step.body is None:
            continue
        if step.do == "with":
            yield block._replace(steps=(*block.steps[:place], *step.body.steps, *block.steps[place + 1 :]))
        for inner in _smaller_blocks(step.body):
            yield block._replace(steps=_with(block.steps, place, step._replace(body=inner)))
        if step.do == "call" and step.how not in ("sync", "reference", "proxy", "awaited"):
            calm = step.body._replace(steps=tuple(_unawaited(inner) for inner in step.body.steps))
            step = step._replace(body=calm)
            yield block._replace(steps=_with(block.steps, place, step._replace(how="sync")))
        if step.do == "call":
            for at in range(len(step.ins)):
                params = step.body._replace(params=_without(step.body.params, at))
                changed = step._replace(ins=_without(step.ins, at), body=params)
                yield block._replace(steps=_with(block.steps, place, changed))


def _unawaited(step: Step) -> Step:
    return step._replace(how="sync") if step.how == "awaited" else step


def _without(items: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return items[:place] + items[place + 1 :]


def _with(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def repaired(program: Program) -> Program:
    """The program without items that refer to removed names."""
    main, _ = _repaired(program.main, set())
    lost = len(program.main.results) - len(main.results)
    passes = program.passes
    if lost:
        kept = [place for place, name in enumerate(program.main.results) if name in main.results]
        numbers = {old: new for new, old in enumerate(kept)}
        passes = tuple(
            each._replace(roots=tuple(numbers[root] for root in each.roots if root in numbers)) for each in passes
        )
        passes = tuple(each for each in passes if each.roots)
    return replace(program, main=main, passes=passes)


def _repaired(block: Block, known: set[str]) -> tuple[Block, set[str]]:
    known = known | {*block.params}
    steps = []
    for step in block.steps:
        changed = _repaired_step(step, known)
        if changed is not None:
            steps.append(changed)
            known |= {*changed.outs}
            if changed.do == "with" and changed.body is not None:
                known |= {name for inner in changed.body.steps for name in inner.outs}
    results = tuple(name for name in block.results if name in known)
    return block._replace(steps=tuple(steps), results=results), known


def _repaired_step(step: Step, known: set[str]) -> Step | None:
    body = step.body
    if step.do in ("total", "multi-grad hook"):
        step = step._replace(ins=tuple(name for name in step.ins if name in known))
        return step if step.ins else None
    if body is None:
        return step if {*step.ins} <= known else None
    if step.do == "with":
        inner, _ = _repaired(body, known)
        return step._replace(body=inner) if inner.steps else None
    good = [place for place, name in enumerate(step.ins) if name in known]
    body = body._replace(params=tuple(body.params[place] for place in good))
    ins = tuple(step.ins[place] for place in good)
    inner, _ = _repaired(body, set())
    if step.how == "reference" or (step.how == "proxy" and step.outs):
        return step._replace(ins=ins, body=inner) if inner.results else None
    outs = tuple(out for out, name in zip(step.outs, body.results, strict=True) if name in inner.results)
    if step.do == "part" and (not outs or not ins):
        return None
    return step._replace(ins=ins, outs=outs, body=inner)
