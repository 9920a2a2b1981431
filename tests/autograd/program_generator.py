"""Random programs: `generate(seed)`.

The generator tracks every value (`Sym`): its kind, whether it requires grad, which code may see its memory. So programs
are well-formed, and mean the same in any order of messages: a kept value is loaded only by blocks that surely run
later, and in-place operations change only memory that no other block sees.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from program import (
    Block,
    Call,
    Fetch,
    Hook,
    Instruction,
    Keep,
    Leaf,
    Load,
    Op,
    Pass,
    Program,
    Proxy,
    Retain,
    Root,
    Wait,
)
from program_ops import DIRECT, NUMBERS, OPERATIONS, Operation

MAX_DEPTH = 4
MAX_CALLS = 15

RECEIVED = "r"
"""How the names of received tensors begin."""


@dataclass
class Sym:
    """What the generator knows about a value."""

    name: str
    kind: str  # "" for a reference
    requires_grad: bool
    memory: int  # values of one memory share storage
    leaf: bool = False  # whether it is the leaf itself
    table: bool = False  # whether it may get sparse gradients
    changeable: bool = False
    view: bool = False
    spread: bool = False  # whether several of its elements share memory
    received: bool = False
    common: bool = False  # whether blocks that run at the same time may have it too
    hooked: bool = False
    sent: int = 0
    owner: int = -1  # the owner of a reference
    inside: tuple[Sym, ...] = ()
    form: str = ""


@dataclass
class _Kept:
    worker: int
    key: str
    sym: Sym


@dataclass
class _Future:
    name: str
    to: int
    results: tuple[Sym, ...]
    kept: list[_Kept]
    form: str
    mode: str


class _Frame:
    """A block that is being generated."""

    def __init__(self, index: int, worker: int, kept: list[_Kept], stack: tuple[int, ...]) -> None:
        self.index = index
        self.worker = worker
        self.stack = stack
        self.kept = kept  # values that are surely kept at this point
        self.kept_here: list[_Kept] = []
        self.syms: list[Sym] = []
        self.futures: list[_Future] = []
        self.made: dict[str, list[_Kept]] = {}  # by reference: values that are surely kept after it was fetched
        self.code: list[Instruction] = []

    def keep_all(self, kept: list[_Kept]) -> None:
        self.kept += kept
        self.kept_here += kept


class _Generator:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.size = 2 + seed % 4
        self.features: Counter[str] = Counter()
        self.leaves: list[Leaf] = []
        self.blocks: dict[int, Block] = {}
        self.calls = 0
        self.memory = 0
        self.names = 0
        # Each program uses some features more than others.
        self.complex = self.random.random() < 0.25
        self.sparse = self.random.random() < 0.3
        self.mixed = self.random.random() < 0.2
        self.steps = self.random.choice((2, 4, 6, 9))
        self.max_calls = MAX_CALLS
        if self.chance(0.03):
            self.steps, self.max_calls = 14, 4 * MAX_CALLS
            self.features["large programs"] += 1

    def program(self) -> Program:
        accumulate: Literal["context", "grad"] = "grad" if self.random.random() < 0.25 else "context"
        self.features["accumulate=" + accumulate] += 1
        self.make_leaves(accumulate)
        driver = self.random.randrange(self.size)
        frame = self.new_frame(driver, [], ())
        self.fill(frame, self.steps + 8)
        while frame.futures and self.chance(0.7):
            self.wait(frame)
        while any(sym.owner >= 0 and not sym.sent for sym in frame.syms) and self.chance(0.5):
            self.fetch(frame)
        self.combine(frame)
        passes = self.make_passes(frame)
        self.finish(frame, (), "tuple")
        tolerance = 1e-9 if not self.mixed else 0.1
        blocks = tuple(self.blocks[index] for index in range(len(self.blocks)))
        return Program(
            self.seed,
            self.size,
            driver,
            tuple(self.leaves),
            blocks,
            passes,
            accumulate,
            tolerance,
            self.features,
        )

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def new_memory(self) -> int:
        self.memory += 1
        return self.memory

    def make_leaves(self, accumulate: str) -> None:
        for worker in range(self.size):
            kinds = ["d.m", "d.m", "d.v"]
            kinds += ["z.m"] * self.complex + ["d.e"] * self.sparse + ["f.m", "h.m"] * self.mixed
            for kind in kinds:
                leaf = Leaf(
                    f"leaf{len(self.leaves)}",
                    worker,
                    kind,
                    self.random.randrange(1 << 30),
                    requires_grad=True,
                    parameter=self.chance(0.5),
                    hook=self.chance(0.15),
                    post_accumulate_hook=self.chance(0.1),
                    has_grad_before=self.chance(0.15),
                )
                self.leaves.append(leaf)
                self.features["hooks on leaves"] += leaf.hook
                self.features["post-accumulate hooks"] += leaf.post_accumulate_hook
                self.features["leaves that have a .grad already"] += leaf.has_grad_before
            constant = Leaf(f"leaf{len(self.leaves)}", worker, "d.m", self.random.randrange(1 << 30), False)
            self.leaves.append(constant)

    # Blocks.

    def new_frame(self, worker: int, kept: list[_Kept], stack: tuple[int, ...]) -> _Frame:
        index = len(self.blocks)
        self.blocks[index] = Block(worker, (), (), (), "tuple")  # a placeholder, replaced when the block is finished
        return _Frame(index, worker, list(kept), (*stack, worker))

    def finish(self, frame: _Frame, results: tuple[str, ...], form: str, params: tuple[str, ...] = ()) -> None:
        self.blocks[frame.index] = Block(frame.worker, params, tuple(frame.code), results, form)

    def fill(self, frame: _Frame, steps: int) -> None:
        for _ in range(steps):
            actions: dict[Callable[[_Frame], object], int] = {
                self.operation: 10,
                self.load: 3,
                self.keep: 1,
                self.hook: 1,
            }
            if self.calls < self.max_calls and len(frame.stack) < MAX_DEPTH:
                actions[self.call] = 7
            if frame.futures:
                actions[self.wait] = 4
            if any(sym.owner >= 0 for sym in frame.syms):
                actions[self.fetch] = 4
            self.random.choices(list(actions), list(actions.values()))[0](frame)

    def tensors(self, frame: _Frame, kind: str = "") -> list[Sym]:
        return [sym for sym in frame.syms if sym.kind and (not kind or sym.kind == kind)]

    def load(self, frame: _Frame, kind: str = "") -> Sym | None:
        """A leaf of this worker, or a value that was kept on it."""
        found: list[tuple[str, Sym | Leaf]] = [
            (leaf.name, leaf)
            for leaf in self.leaves
            if leaf.worker == frame.worker
            and (not kind or leaf.kind == kind)
            and (leaf.requires_grad or self.chance(0.3))
        ]
        kept: list[tuple[str, Sym | Leaf]] = [
            (each.key, each.sym)
            for each in frame.kept
            if each.worker == frame.worker and (not kind or each.sym.kind == kind)
        ]
        found = kept if kept and self.chance(0.5) else found
        if not found:
            return None
        key, source = self.random.choice(found)
        if isinstance(source, Leaf):
            table = source.kind.endswith("e")
            memory = -int(source.name.removeprefix("leaf")) - 1
            sym = Sym(self.name("w"), source.kind, source.requires_grad, memory, leaf=True, table=table)
            self.features["leaves used"] += 1
        else:
            sym = replace(source, name=self.name("k"), changeable=False, common=True)
            self.features["kept values used"] += 1
        frame.code.append(Load(sym.name, key))
        frame.syms.append(sym)
        return sym

    def pick(self, frame: _Frame, kind: str, *, changeable: bool = False, table: bool = False) -> Sym | None:
        found = [
            sym for sym in self.tensors(frame, kind) if (sym.changeable or not changeable) and (sym.table or not table)
        ]
        if not changeable and not table and (not found or self.chance(0.1)):
            return self.load(frame, kind)
        if not found:
            if table and self.chance(0.7):
                loaded = self.load(frame, kind)
                return loaded if loaded is not None and loaded.table else None
            return None
        # The latest values are chosen more often, so that programs get deep.
        return found[-1] if self.chance(0.4) else self.random.choice(found)

    def operation(self, frame: _Frame) -> None:
        if self.sparse and self.chance(0.2):
            name = self.random.choice([name for name, operation in OPERATIONS.items() if operation.table])
            if self.try_operation(frame, name, OPERATIONS[name]):
                return
        for _ in range(10):
            name = self.random.choice(list(OPERATIONS))
            operation = OPERATIONS[name]
            if operation.feature in ("float32", "bfloat16") and not self.mixed:
                continue
            if operation.feature == "complex" and not (self.complex or self.chance(0.1)):
                continue
            if self.try_operation(frame, name, operation):
                return

    def try_operation(self, frame: _Frame, name: str, operation: Operation) -> bool:
        ins: list[Sym] = []
        for position, kind in enumerate(operation.takes):
            first = position == 0
            sym = self.pick(frame, kind, changeable=operation.in_place and first, table=operation.table and first)
            if sym is None or (operation.in_place and not first and sym.memory == ins[0].memory):
                return False
            ins.append(sym)
        self.features[operation.feature] += 1
        self.features["sparse gradients of received tensors"] += operation.table and ins[0].received
        requires_grad = operation.differentiable and any(sym.requires_grad for sym in ins)
        number = self.random.randrange(NUMBERS)
        if operation.in_place:
            target = ins[0]
            self.features["in place on received tensors"] += target.received
            self.features["in place after sending"] += target.sent > 0
            frame.code.append(Op((target.name,), name, tuple(sym.name for sym in ins), number))
            target.requires_grad = requires_grad
            target.changeable = operation.changeable
            for sym in ins[1:]:
                sym.changeable = False
            return True
        for sym in ins:
            self.features["sent and used locally"] += sym.sent > 0
            sym.changeable = False
        outs = []
        for kind in operation.gives:
            memory = ins[0].memory if operation.view else self.new_memory()
            spread = name == "expand" or (operation.view and ins[0].spread)
            outs.append(
                Sym(
                    self.name("x"),
                    kind,
                    requires_grad,
                    memory,
                    changeable=operation.changeable,
                    view=operation.view,
                    spread=spread,
                )
            )
        frame.code.append(Op(tuple(sym.name for sym in outs), name, tuple(sym.name for sym in ins), number))
        frame.syms += outs
        return True

    def combine(self, frame: _Frame) -> None:
        """Join several matrices into one, so that most computed values matter."""
        found = [sym for sym in self.tensors(frame, "d.m") if sym.requires_grad]
        received = [sym for sym in found if sym.received]
        chosen = self.random.sample(found, min(len(found), self.random.randint(1, 3)))
        chosen += self.random.sample(received, min(len(received), self.random.randint(1, 4)))
        if len(chosen) < 2:
            return
        self.random.shuffle(chosen)
        total = chosen[0]
        for sym in chosen[1:]:
            name = self.random.choice(("add", "multiply", "tanh_of_sum"))
            out = Sym(self.name("x"), "d.m", True, self.new_memory(), changeable=OPERATIONS[name].changeable)
            frame.code.append(Op((out.name,), name, (total.name, sym.name), 0))
            for used in (total, sym):
                self.features["sent and used locally"] += used.sent > 0
                used.changeable = False
            frame.syms.append(out)
            total = out

    def keep(self, frame: _Frame) -> None:
        found = self.tensors(frame)
        if not found:
            return
        sym = self.random.choice(found)
        sym.changeable = False
        key = self.name("kept")
        frame.code.append(Keep(sym.name, key))
        frame.keep_all([_Kept(frame.worker, key, sym)])

    def hook(self, frame: _Frame) -> None:
        found = [sym for sym in self.tensors(frame) if sym.requires_grad]
        found = [sym for sym in found if not (sym.leaf or sym.common or sym.hooked)]
        if not found:
            return
        sym = self.random.choice(found)
        sym.changeable = False
        sym.hooked = True
        if self.chance(0.5):
            frame.code.append(Hook(sym.name))
            self.features["hooks on tensors"] += 1
        else:
            frame.code.append(Retain(sym.name))
            self.features["retain_grad"] += 1

    # Calls.

    def call(self, frame: _Frame) -> None:
        self.calls += 1
        to = self.random.randrange(self.size)
        mode = self.random.choices(
            ("sync", "async", "remote", "then", "coroutine", "forward", "direct"), (5, 4, 4, 1, 1, 1, 1)
        )[0]
        if mode == "direct":
            self.call_directly(frame, to)
            return
        found = list(frame.syms)
        if not found or self.chance(0.3):
            loaded = self.load(frame)
            found += [] if loaded is None else [loaded]
        if self.chance(0.5):
            found = [sym for sym in found if sym.owner >= 0 or (sym.requires_grad and not sym.leaf)][-5:] or found
        args = self.random.sample(found, min(len(found), self.random.choice((0, 1, 1, 2, 2, 3, 4))))
        table = self.load(frame, "d.e") if self.sparse and self.chance(0.25) else None
        args += [] if table is None else [table]
        if args and self.chance(0.05):
            args.append(args[0])
            self.features["a tensor twice in one message"] += 1
        stack = frame.stack
        self.features["calls to oneself"] += to == frame.worker
        self.features["nested calls"] += len(stack) > 1
        self.features["rings"] += to in stack[:-1] and to != frame.worker
        via = self.random.randrange(self.size) if mode == "forward" else -1
        for sym in args:
            sym.sent += 1
            self.features["values sent to several workers"] += sym.sent == 2
            self.features["leaves sent"] += sym.leaf
            self.features["references sent"] += sym.owner >= 0
            self.features["received tensors sent on"] += sym.received
        self.features["messages with several tensors"] += len([sym for sym in args if sym.kind]) > 1
        if any(sym.requires_grad for sym in args) and not all(sym.requires_grad for sym in args if sym.kind):
            self.features["messages of which only some need grad"] += 1
        block = self.new_frame(to, frame.kept, stack)
        params = self.arrive(args)
        block.syms += params
        self.fill(block, self.random.randrange(self.steps + 1))
        if self.chance(0.7):
            self.combine(block)
        if mode == "coroutine" and any(isinstance(each, Call | Wait | Fetch | Proxy) for each in block.code):
            mode = "sync"  # a coroutine would block its worker's event loop here
        self.features[f"mode {mode}"] += 1
        form = self.random.choice(("tuple", "tuple", "dict"))
        results = self.results(block)
        self.features["messages with several tensors"] += len(results) > 1
        result_form = "bare" if len(results) == 1 and self.chance(0.7) else form
        self.finish(block, tuple(sym.name for sym in results), result_form, tuple(sym.name for sym in params))
        names = tuple(sym.name for sym in args)
        if mode in ("async", "then", "remote"):
            name = self.name("future" if mode != "remote" else "rref")
            frame.code.append(Call(mode, to, block.index, names, (name,), form))
            if mode == "remote":
                rref = Sym(name, "", False, self.new_memory(), owner=to, inside=tuple(results), form=result_form)
                frame.syms.append(rref)
                frame.made[name] = block.kept_here
            else:
                future = _Future(name, to, tuple(results), block.kept_here, result_form, mode)
                frame.futures.append(future)
                self.features["results never used"] += 1  # taken back if the result is waited for
        else:
            outs = self.arrive(results)
            frame.code.append(Call(mode, to, block.index, names, tuple(sym.name for sym in outs), form, via))
            frame.syms += outs
            frame.keep_all(block.kept_here)

    def call_directly(self, frame: _Frame, to: int) -> None:
        function = self.random.choice(list(DIRECT))
        args = [self.pick(frame, "d.m") for _ in range(DIRECT[function][1])]
        known = [sym for sym in args if sym is not None]
        for sym in known:
            sym.sent += 1
        out = Sym(self.name("y"), "d.m", any(sym.requires_grad for sym in known), self.new_memory(), received=True)
        names = tuple(sym.name for sym in known)
        frame.code.append(Call("direct", to, -1, names, (out.name,), "tuple", function=function))
        frame.syms.append(out)
        self.features["mode direct"] += 1

    def results(self, block: _Frame) -> list[Sym]:
        found = list(block.syms)
        if not found or self.chance(0.1):
            loaded = self.load(block)
            found += [] if loaded is None else [loaded]
        count = min(len(found), self.random.choice((0, 1, 1, 1, 1, 2, 2, 2, 3)))
        # Mostly the latest values, but also values that were just received.
        late = ([sym for sym in found if sym.requires_grad and not sym.leaf] or found)[-3:]
        results = (
            self.random.sample(late, min(count, len(late))) if self.chance(0.7) else self.random.sample(found, count)
        )
        self.features["calls that return nothing"] += not results
        self.features["calls that return a leaf"] += any(sym.leaf for sym in results)
        return results

    def arrive(self, values: Sequence[Sym]) -> list[Sym]:
        """What the receiver of a message knows about its values."""
        shared = Counter(sym.memory for sym in values)
        memory = {sym.memory: self.new_memory() for sym in values}
        arrived = []
        for sym in values:
            arrived.append(
                replace(
                    sym,
                    name=self.name(RECEIVED if sym.kind else "ref"),
                    memory=memory[sym.memory],
                    leaf=False,
                    view=False,
                    changeable=bool(sym.kind) and shared[sym.memory] == 1 and not sym.spread,
                    received=True,
                    common=False,
                    hooked=False,
                    sent=0,
                )
            )
            self.features["views sent"] += sym.view
        return arrived

    def wait(self, frame: _Frame) -> None:
        future = frame.futures.pop(self.random.randrange(len(frame.futures)))
        outs = self.arrive(future.results)
        if future.mode == "then":
            for sym in outs:
                sym.table = False  # the callback has replaced the tensors
                sym.changeable = False
        frame.code.append(Wait(future.name, tuple(sym.name for sym in outs)))
        frame.syms += outs
        frame.keep_all(future.kept)
        self.features["results never used"] -= 1

    def fetch(self, frame: _Frame) -> None:
        rref = self.random.choice([sym for sym in frame.syms if sym.owner >= 0])
        if rref.form == "bare" and rref.inside[0].kind == "d.m" and self.chance(0.2):
            out = Sym(self.name("y"), "d.m", rref.inside[0].requires_grad, self.new_memory(), received=True)
            frame.code.append(Proxy(rref.name, out.name))
            frame.syms.append(out)
            self.features["methods of references"] += 1
            return
        outs = self.arrive(rref.inside)
        if rref.owner == frame.worker:
            # The owner gets the value itself, which other blocks may see.
            for sym, inside in zip(outs, rref.inside, strict=True):
                sym.changeable = False
                sym.leaf = inside.leaf
                sym.memory = inside.memory
                sym.common = True
            self.features["references fetched by their owner"] += 1
        frame.code.append(Fetch(rref.name, tuple(sym.name for sym in outs)))
        frame.syms += outs
        frame.keep_all(frame.made.get(rref.name, []))
        self.features["references fetched"] += 1
        self.features["references fetched by another worker"] += rref.received
        rref.sent += 1

    # Backward.

    def make_passes(self, frame: _Frame) -> tuple[Pass, ...]:
        count = self.random.choice((1, 1, 1, 2, 2, 3))
        passes: list[Pass] = []
        for number in range(count):
            others = [kept for kept in frame.kept if kept.sym.requires_grad and not kept.sym.leaf]
            others = [kept for kept in others if kept.worker != frame.worker]
            if passes and self.chance(0.3):
                roots, initiator = passes[-1].roots, passes[-1].initiator
                self.features["a second backward over the same roots"] += 1
            elif others and self.chance(0.3):
                kept = self.random.choice(others)
                initiator = kept.worker
                roots = (self.root(Sym(kept.key, kept.sym.kind, True, 0)),)
                self.features["backward by another worker"] += 1
            else:
                initiator, roots = frame.worker, self.roots(frame)
                self.features["backwards over different roots"] += number > 0
            passes.append(Pass(initiator, roots, number < count - 1 or self.chance(0.3)))
            self.features["retain_graph"] += passes[-1].retain_graph
            self.features["roots"] += len(roots)
            self.features["several roots"] += len(roots) > 1
        return tuple(passes)

    def roots(self, frame: _Frame) -> tuple[Root, ...]:
        good = [sym for sym in self.tensors(frame) if sym.requires_grad and not sym.leaf]
        if not good:
            out = Sym(self.name("x"), "d.m", True, self.new_memory())
            leaf = next(leaf for leaf in self.leaves if leaf.worker == frame.worker and leaf.kind == "d.m")
            loaded = self.name("w")
            frame.code += [Load(loaded, leaf.name), Op((out.name,), "sin", (loaded,), 0)]
            frame.syms.append(out)
            good = [out]
        count = self.random.choice((1, 1, 2, 3))
        chosen = [good[-1]] if self.chance(0.7) else []
        chosen += self.random.sample(good[:-1], min(len(good) - 1, count - len(chosen)))
        roots = [self.mean(frame, sym) if self.chance(0.6) else self.root(sym) for sym in chosen or good[:1]]
        rrefs = [
            sym
            for sym in frame.syms
            if sym.form == "bare"
            and sym.owner >= 0
            and sym.inside[0].requires_grad
            and not sym.inside[0].leaf
            and sym.inside[0].kind
        ]
        if rrefs and self.chance(0.4):
            rref = self.random.choice(rrefs)
            roots.append(self.root(Sym(rref.name, rref.inside[0].kind, True, 0)))
            self.features["roots that are references"] += 1
        without = [sym for sym in self.tensors(frame) if not sym.requires_grad]
        if without and self.chance(0.3):
            roots.append(self.root(self.random.choice(without)))
            self.features["roots without grad"] += 1
        if self.chance(0.05):
            roots.append(roots[0])
            self.features["a root given twice"] += 1
        self.random.shuffle(roots)
        return tuple(roots)

    def mean(self, frame: _Frame, sym: Sym) -> Root:
        if sym.kind != "d.m":
            return self.root(sym)
        out = Sym(self.name("x"), "d.s", True, self.new_memory())
        sym.changeable = False
        frame.code.append(Op((out.name,), "mean", (sym.name,), 0))
        frame.syms.append(out)
        return Root(out.name)

    def root(self, sym: Sym) -> Root:
        if sym.kind.endswith("s") and self.chance(0.5):
            return Root(sym.name)
        self.features["grad_tensors"] += 1
        return Root(sym.name, sym.kind, self.random.randrange(1 << 30))


def generate(seed: int) -> Program:
    """The program of a seed. The seed modulo 4 determines the number of workers, 2 to 5."""
    return _Generator(seed).program()
