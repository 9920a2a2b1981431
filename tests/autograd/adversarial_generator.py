"""Generates adversarial programs from seeds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from adversarial import Block, Leaf, Module, Pass, Program, Step

DENSE = (
    "times",
    "times",
    "product",
    "product",
    "sum",
    "tanh",
    "softmax",
    "norm",
    "attend",
    "choose",
    "transposed",
    "spread",
    "flipped",
    "reshaped",
    "split",
    "detached",
    "written",
    "fresh",
    "saving",
    "dirty",
    "ranked",
    "once",
    "halves",
    "straight",
    "cloned",
)
TWO = {"times", "product", "sum", "choose", "written", "saving", "attend", "in place with"}
PAIRS_OUT = {"split", "halves"}
ELEMENTWISE = ("tanh", "product", "sum", "product")
TRACED = ("times", "product", "sum", "tanh", "softmax", "norm", "transposed", "flipped", "choose", "cloned")
CASTS = ("double", "float", "half")

OTHERS: dict[str, tuple[str, str, str]] = {
    # For each kind: how it is made, what is done with it, and how it becomes a dense tensor.
    "pair": ("pair", "pair work", "joined"),
    "labelled": ("labelled", "labelled work", "unlabelled"),
    "jagged": ("jagged", "jagged work", "values"),
    "masked": ("masked", "masked work", "unmasked"),
    "complex": ("complex", "complex exp", "real"),
}
LEAF_HOOKS = (
    "hook",
    "halving hook",
    "post-accumulate hook",
    "accumulate prehook",
    "accumulate halving prehook",
    "accumulate hook",
    "multi-grad hook",
)
HOOKS = (
    "hook",
    "hook",
    "halving hook",
    "retain",
    "retain",
    "node prehook",
    "node halving prehook",
    "node hook",
    "multi-grad hook",
)
OPTIMIZERS = ("SGD", "SGD momentum", "Adam foreach", "AdamW", "Adagrad", "RMSprop foreach")
CAN_SHARD = hasattr(torch.cpu.Stream, "record_event")
"""Before torch 2.7 `fully_shard` fails on CPUs, and what it leaves behind disturbs later programs."""
STATEFUL = {"tied", "normed"}
"""Modules in which concurrent calls would disturb each other."""


class _Scope:
    """The names that a step may use, by kind."""

    def __init__(self, worker: int, depth: int) -> None:
        self.worker = worker
        self.depth = depth
        self.names: dict[str, list[str]] = {}
        self.changeable: list[str] = []

    def add(self, kind: str, name: str) -> str:
        self.names.setdefault(kind, []).append(name)
        return name

    def has(self, kind: str) -> bool:
        return bool(self.names.get(kind))

    def copy(self) -> _Scope:
        made = _Scope(self.worker, self.depth)
        made.names = {kind: list(names) for kind, names in self.names.items()}
        return made


class _Generator:
    def __init__(self, seed: int, compiles: bool) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        draw = self.random.random
        self.size = self.random.choice([2, 2, 3])
        self.coarse = draw() < 0.4
        self.compiles = compiles and draw() < 0.5
        self.rng = not self.compiles and draw() < 0.15
        self.funcs = not self.compiles and draw() < 0.1
        self.modes = not self.compiles and draw() < 0.15
        self.kinds = [kind for kind in OTHERS if draw() < 0.25]
        if self.coarse and "masked" in self.kinds:
            self.kinds.remove("masked")
        self.zero = draw() < 0.15
        self.sparse = draw() < 0.1
        self.alone = self.rng  # calls only one at a time
        self.leaves: list[Leaf] = []
        self.modules: list[Module] = []
        self.count = 0
        self.blocks = 0
        self.joint = draw() < 0.12
        self.dtype = "float32" if self.coarse else "float64"
        self.uses: dict[str, int] = {}

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def number(self) -> int:
        return self.random.randrange(1000)

    # What workers have.

    def make_leaves(self) -> None:
        for worker in range(self.size):
            for _ in range(self.random.choice([1, 2, 2])):
                self.leaf(worker, self.random.choice(["tensor", "parameter", "parameter", "weight", "labelled leaf"]))
            if self.chance(0.2):
                self.leaf(worker, "table")
            if self.chance(0.1):
                self.leaf(worker, "csr")
            if "pair" in self.kinds and self.chance(0.3):
                self.leaf(worker, "pair leaf")
            if "jagged" in self.kinds and self.chance(0.3):
                self.leaf(worker, "jagged leaf")
            if self.chance(0.1):
                self.leaf(worker, "zero")
            if self.chance(0.4):
                kind = self.random.choice(["plain", "tied", "normed", "skewed", "checkpointed", "listening"])
                self.module(worker, kind)
            if self.joint and self.chance(0.6):
                kind = self.random.choice(["ddp", "fsdp"])
                self.module(worker, kind if CAN_SHARD else "ddp")

    def leaf(self, worker: int, kind: str) -> None:
        plain = kind in ("tensor", "parameter", "weight")
        flags: list[str] = []
        if plain and self.chance(0.35):
            flags = sorted(self.random.sample(LEAF_HOOKS, self.random.choice([1, 1, 2])))
        elif kind in ("pair leaf", "jagged leaf", "labelled leaf", "table") and self.chance(0.2):
            flags = ["hook"]
        if plain and self.chance(0.1):
            flags.append("has a .grad before")
        dtype = self.dtype if plain or kind == "labelled leaf" else "float64"
        if kind == "tensor" and self.coarse and self.chance(0.3) and "has a .grad before" not in flags:
            dtype = "bfloat16"
            flags.append("grad_dtype float32")
        requires_grad = not (kind == "tensor" and self.chance(0.15))
        if not requires_grad:
            flags = []
        name = f"w{len(self.leaves)}"
        self.leaves.append(Leaf(name, worker, kind, dtype, self.number(), requires_grad, tuple(flags)))

    def module(self, worker: int, kind: str) -> None:
        remote = worker > 0 and self.chance(0.4)
        if kind in STATEFUL or kind in ("ddp", "fsdp"):
            self.alone = True
        name = f"m{len(self.modules)}"
        self.modules.append(Module(name, worker, kind, self.dtype, self.number(), remote))

    # Steps.

    def fill(self, scope: _Scope, budget: int, *, where: str = "") -> list[Step]:
        """Steps that use the names of the scope. ``where``: inside a part, only some steps are possible."""
        steps: list[Step] = []
        if where in ("", "coroutine"):
            steps += self.loads(scope)
        for _ in range(budget):
            steps += self.step(scope, where)
        return steps

    def loads(self, scope: _Scope) -> list[Step]:
        mine = [leaf for leaf in self.leaves if leaf.worker == scope.worker]
        steps = []
        for leaf in self.random.sample(mine, min(len(mine), self.random.choice([1, 2, 2, 3]))):
            kind = {"table": "table", "pair leaf": "pair", "jagged leaf": "jagged", "zero": "zero"}.get(leaf.kind, "r")
            kind = "labelled" if leaf.kind == "labelled leaf" else kind
            kind = "compressed" if leaf.kind in ("csr", "csc", "bsr") else kind
            if kind == "compressed" and self.uses.setdefault(leaf.name, 0):
                continue  # torch adds such gradients only for some layouts
            self.uses[leaf.name] = 1
            name = self.name()
            steps.append(Step("load", (name,), key=leaf.name))
            scope.add(kind, name)
        if not scope.has("r"):
            steps += self.dense_from_others(scope)
        return steps

    def dense_from_others(self, scope: _Scope) -> list[Step]:
        """A dense tensor, made from a value of any kind in the scope."""
        for kind, (_, _, back) in OTHERS.items():
            if scope.has(kind):
                return [self.make(scope, back, "r", [self.pick(scope, kind)])]
        if scope.has("table"):
            return [self.make(scope, "embedded", "r", [self.pick(scope, "table")])]
        for leaf in self.leaves:
            if leaf.worker == scope.worker and leaf.kind in ("tensor", "parameter", "weight"):
                name = self.name()
                scope.add("r", name)
                return [Step("load", (name,), key=leaf.name)]
        if scope.has("compressed"):
            return [self.make(scope, "compressed dense", "r", [self.pick(scope, "compressed")])]
        self.leaf(scope.worker, "parameter")
        name = self.name()
        scope.add("r", name)
        return [Step("load", (name,), key=self.leaves[-1].name)]

    def pick(self, scope: _Scope, kind: str) -> str:
        names = scope.names[kind]
        if self.chance(0.6):
            return names[-1 - self.random.randrange(min(3, len(names)))]
        return self.random.choice(names)

    def make(self, scope: _Scope, do: str, kind: str, ins: Sequence[str]) -> Step:
        name = self.name()
        scope.add(kind, name)
        return Step(do, (name,), tuple(ins), self.number())

    def step(self, scope: _Scope, where: str) -> list[Step]:
        if not scope.has("r"):
            return self.dense_from_others(scope)
        draw = self.random.random()
        calls = scope.depth < 3 and self.blocks < 8
        if where == "func":
            calls = calls and scope.depth < 1
            return self.call(scope, where) if calls and draw < 0.1 else [self.dense(scope, ELEMENTWISE)]
        if where == "compiled":
            return self.call(scope, where) if calls and draw < 0.25 else [self.dense(scope, TRACED)]
        if calls and draw < 0.25:
            return self.call(scope, where)
        if draw < 0.36 and not where and scope.depth < 3:
            return self.within(scope)
        if draw < 0.46 and where in ("", "with") and scope.depth < 3:
            return self.part(scope)
        if draw < 0.58 and where in ("", "coroutine"):
            return self.hook(scope)
        if draw < 0.66 and where in ("", "with"):
            return self.module_step(scope)
        if draw < 0.80:
            return self.other(scope, where)
        return [self.dense(scope, DENSE)]

    def dense(self, scope: _Scope, choices: Sequence[str]) -> Step:
        do = self.random.choice(choices)
        if choices is DENSE:
            if self.rng and self.chance(0.2):
                do = "dropped"
            elif self.coarse and self.chance(0.15):
                do = self.random.choice(CASTS)
            elif scope.changeable and self.chance(0.15):
                do = self.random.choice(["in place", "in place with"])
        ins = [self.pick(scope, "r")] + ([self.pick(scope, "r")] if do in TWO else [])
        if do.startswith("in place"):
            ins[0] = self.random.choice(scope.changeable)
            return Step(do, (), tuple(ins), self.number())
        outs = tuple(scope.add("r", self.name()) for _ in range(2 if do in PAIRS_OUT else 1))
        if do in ("fresh", "cloned", "sum"):
            scope.changeable.append(outs[0])
        return Step(do, outs, tuple(ins), self.number())

    def other(self, scope: _Scope, where: str) -> list[Step]:
        """Make a value that is not a dense tensor, compute with one, or turn one into a dense tensor."""
        if self.zero and self.chance(0.3):
            if scope.has("zero"):
                return [self.make(scope, "with nothing", "r", [self.pick(scope, "r"), self.pick(scope, "zero")])]
            return [self.make(scope, "nothing", "zero", [self.pick(scope, "r")])]
        if scope.has("table") and self.chance(0.5):
            do = "embedded" if self.chance(0.7) else "embedded densely"
            return [self.make(scope, do, "r", [self.pick(scope, "table")])]
        if scope.has("compressed") and self.chance(0.7):
            name = scope.names["compressed"].pop()
            if self.chance(0.3):
                return [self.make(scope, "compressed double", "compressed", [name])]
            do = self.random.choice(["compressed dense", "compressed product"])
            if do == "compressed product":
                return [self.make(scope, do, "r", [name, self.pick(scope, "r")])]
            return [self.make(scope, do, "r", [name])]
        if scope.has("reference") and where != "coroutine" and self.chance(0.6):
            return [self.make(scope, "fetched", "r", [self.pick(scope, "reference")])]
        if self.sparse and self.chance(0.3):
            do = self.random.choice(["made csr", "made csc", "made bsr", "made coo"])
            return [self.make(scope, do, "compressed", [self.pick(scope, "r")])]
        if not self.kinds:
            return [self.dense(scope, DENSE)]
        kind = self.random.choice(self.kinds)
        make, work, back = OTHERS[kind]
        if not scope.has(kind):
            ins = [self.pick(scope, "r") for _ in range(2 if kind == "complex" else 1)]
            if make == "masked" and self.chance(0.1):
                make = "masked bare"
            return [self.make(scope, make, kind, ins)]
        name = self.pick(scope, kind)
        if self.chance(0.4):
            if kind == "pair" and self.chance(0.4):
                return [self.make(scope, "pair sum", "pair", [name, self.pick(scope, "pair")])]
            if kind == "complex" and self.chance(0.4):
                return [self.make(scope, "complex product", "complex", [name, self.pick(scope, "complex")])]
            return [self.make(scope, work, kind, [name])]
        if kind == "complex":
            back = self.random.choice(["real", "abs", "as real"])
        return [self.make(scope, back, "r", [name])]

    def hook(self, scope: _Scope) -> list[Step]:
        kinds = [kind for kind in ("r", "r", "r", "pair", "labelled", "complex", "jagged", "zero") if scope.has(kind)]
        kind = self.random.choice(kinds)
        do = self.random.choice(HOOKS) if kind == "r" else "hook"
        if do == "multi-grad hook":
            names = list(dict.fromkeys(self.pick(scope, "r") for _ in range(self.random.choice([2, 3]))))
            mode = self.random.choice(["all", "all", "any"])
            where = " in main" if not scope.depth else ""
            return [Step(do, (), tuple(names), self.number(), key=mode + where)]
        return [Step(do, (), (self.pick(scope, kind),), self.number())]

    def module_step(self, scope: _Scope) -> list[Step]:
        found = [module for module in self.modules if module.worker == scope.worker]
        if scope.worker == 0 and scope.depth == 0:
            found += [module for module in self.modules if module.remote]
        if not found:
            return [self.dense(scope, DENSE)]
        module = self.random.choice(found)
        if module.kind in ("ddp", "fsdp", "listening") and self.uses.setdefault(module.name, 0):
            return [self.dense(scope, DENSE)]
        self.uses[module.name] = 1
        do = "module" if module.worker == scope.worker else "remote module"
        step = self.make(scope, do, "r", [self.pick(scope, "r")])
        return [step._replace(key=module.name)]

    def call(self, scope: _Scope, where: str = "") -> list[Step]:
        worker = self.random.choice([rank for rank in range(self.size) if rank != scope.worker] * 4 + [scope.worker])
        self.blocks += 1
        block = f"f{self.blocks}"
        inner = _Scope(worker, scope.depth + 1)
        ins, params = [], []
        for _ in range(self.random.choice([1, 1, 2, 3])):
            kinds = [kind for kind in scope.names if scope.names[kind] and kind != "compressed"]
            kind = "r" if self.chance(0.6) else self.random.choice(kinds)
            if where in ("compiled", "func"):
                kind = "r"
            ins.append(self.pick(scope, kind))
            params.append(inner.add(kind, self.name()))
        if scope.has("compressed") and not where and self.chance(0.5):
            ins.append(scope.names["compressed"].pop())
            params.append(inner.add("compressed", self.name()))
        how = "sync"
        if where == "coroutine":
            how = "awaited"
        elif not self.alone and where not in ("func",):
            how = self.random.choice(
                ["sync", "sync", "sync", "async", "then", "coroutine", "forwarded", "remote", "proxy", "reference"]
            )
        if self.compiles and where == "" and how != "coroutine" and self.chance(0.3):
            how = self.random.choice(["compiled function", "compiled function by aot"])
        compiled = how.startswith("compiled function")
        if compiled:
            inner.names = {"r": inner.names.get("r", [])}
            keep = [place for place, name in enumerate(params) if name in inner.names["r"]]
            ins, params = [ins[place] for place in keep], [params[place] for place in keep]
            if not params:
                ins, params = [self.pick(scope, "r")], [inner.add("r", self.name())]
        inside = "compiled" if compiled else "coroutine" if how == "coroutine" else ""
        steps = self.fill(inner, self.random.choice([2, 3, 5]), where=inside)
        results: list[str] = []
        if not inner.has("r"):
            steps += self.dense_from_others(inner)
        kinds_out: list[str] = []
        single = how in ("proxy", "reference")
        for _ in range(1 if single else self.random.choice([1, 1, 2, 3])):
            kinds = [kind for kind in inner.names if inner.names[kind] and kind not in ("compressed", "reference")]
            kind = "r" if single or self.chance(0.6) or where in ("compiled", "func") else self.random.choice(kinds)
            results.append(self.pick(inner, kind))
            kinds_out.append(kind)
        outs = [self.name() for _ in results]
        for kind, out in zip(kinds_out, outs, strict=True):
            scope.add("reference" if how == "reference" else kind, out)
        body = Block(block, worker, tuple(params), tuple(steps), tuple(results))
        via = self.random.randrange(self.size)
        made = [Step("call", tuple(outs), tuple(ins), via, how=how, body=body)]
        if how == "reference" and self.chance(0.5):
            made.append(self.make(scope, "fetched", "r", [outs[0]]))
        return made

    def within(self, scope: _Scope) -> list[Step]:
        choices = ["no_grad", "enable_grad", "inference_mode", "save_on_cpu", "packed"]
        if self.coarse:
            choices += ["autocast"] * 6 + ["autocast off"] * 2
        if self.modes:
            choices += ["dispatch mode", "function mode", "device"] * 3
        how = self.random.choice(choices)
        inner = scope.copy()
        inner.names.pop("reference", None)
        before = {kind: set(names) for kind, names in inner.names.items()}
        inner.depth = scope.depth + (0 if how.startswith("autocast") else 1)
        steps = self.fill(inner, self.random.choice([1, 2, 4]), where="with")
        if how.startswith("autocast") and inner.depth < 2 and self.chance(0.5):
            steps += [self.dense(inner, ("times",)), *self.call(inner, "with")]
        made = {
            kind: [name for name in names if name not in before.get(kind, set())] for kind, names in inner.names.items()
        }
        found: list[Step] = [Step("with", how=how, body=Block("", scope.worker, (), tuple(steps)))]
        for kind, names in made.items():
            for name in names:
                if how != "inference_mode":
                    scope.add(kind, name)
                elif kind == "r":
                    found.append(self.make(scope, "restored", "r", [name]))
        return found

    def part(self, scope: _Scope) -> list[Step]:
        choices = ["checkpoint"] * 4 + ["reentrant checkpoint"]
        if self.compiles:
            choices = ["compiled", "compiled by aot"] * 3 + choices
        if self.funcs:
            choices += ["func.grad", "vmap", "vjp"] * 2
        how = self.random.choice(choices)
        where = "compiled" if how.startswith("compiled") else "func" if how in ("func.grad", "vmap", "vjp") else "part"
        self.blocks += 1
        inner = _Scope(scope.worker, scope.depth)
        ins, params = [], []
        for _ in range(self.random.choice([1, 2])):
            ins.append(self.pick(scope, "r"))
            params.append(inner.add("r", self.name()))
        if where == "part":
            for kind in self.kinds:
                if scope.has(kind) and kind != "masked" and self.chance(0.3):
                    ins.append(self.pick(scope, kind))
                    params.append(inner.add(kind, self.name()))
        steps = self.fill(inner, self.random.choice([1, 2, 4]), where=where)
        results = [self.pick(inner, "r") for _ in range(1 if where == "func" or self.chance(0.6) else 2)]
        if how == "reentrant checkpoint" and any(_gives_own_leaves(step, scope.worker) for step in steps):
            # Torch makes the checkpoint's node the grad_fn of every result. A leaf that is not an argument thereby
            # becomes a result of the checkpoint, whose backward reaches itself again when it runs the function: the
            # recursion does not end, in one process either.
            steps += [Step("cloned", (f"{result}_cloned",), (result,)) for result in dict.fromkeys(results)]
            results = [f"{result}_cloned" for result in results]
        outs = [scope.add("r", self.name()) for _ in results]
        body = Block(f"part{self.blocks}", scope.worker, tuple(params), tuple(steps), tuple(results))
        return [Step("part", tuple(outs), tuple(ins), how=how, body=body)]

    def program(self) -> Program:
        self.make_leaves()
        scope = _Scope(0, 0)
        self.leaf(0, "parameter")
        always = self.name()
        first = Step("load", (always,), key=self.leaves[-1].name)
        steps = [first, *self.fill(scope, self.random.choice([4, 6, 9, 12]))]
        while not any(step.do in ("call", "remote module") for step in steps):
            steps += self.call(scope)
        for kind, (_, _, back) in OTHERS.items():
            for name in scope.names.get(kind, [])[-2:]:
                steps.append(self.make(scope, back, "r", [name]))
        roots = []
        for _ in range(self.random.choice([1, 1, 2])):
            latest = scope.names["r"][-4:]
            picked = [self.pick(scope, "r") for _ in range(3)]
            ins = list(dict.fromkeys([*self.random.sample(latest, min(3, len(latest))), *picked]))
            if self.chance(0.9):
                ins.append(always)
            root = self.name()
            steps.append(Step("total", (root,), tuple(ins)))
            roots.append(root)
        passes = [Pass(tuple(range(len(roots))))]
        if len(roots) > 1 and self.chance(0.5):
            passes = [Pass((0,), True), Pass((1,))]
        elif self.chance(0.15):
            passes = [Pass((0,), True), Pass((0,))]
        if any(module.kind in ("ddp", "fsdp", "listening") for module in self.modules):
            passes = [Pass(tuple(range(len(roots))))]
        fragile = any(leaf.kind == "jagged leaf" for leaf in self.leaves)
        if fragile:  # torch cannot add to its .grad
            passes = [Pass(tuple(range(len(roots))))]
        optimizer = ""
        # Torch has dense gradients for some products with CSR tensors, which no assignment to .grad takes.
        if self.chance(0.3) and not any(leaf.kind == "csr" for leaf in self.leaves):
            sparse = any(leaf.kind == "table" for leaf in self.leaves)
            wrapped = any(leaf.kind in ("pair leaf", "jagged leaf", "labelled leaf") for leaf in self.leaves)
            optimizer = self.random.choice(OPTIMIZERS if not sparse and not wrapped else ["SGD"])
        return Program(
            self.seed,
            self.size,
            tuple(self.leaves),
            tuple(self.modules),
            Block("main", 0, (), tuple(steps), tuple(roots)),
            tuple(passes),
            self.random.choice(["context", "grad"]),
            optimizer,
            2 if self.chance(0.4) and not fragile else 1,
            self.chance(0.3),
        )


def _gives_own_leaves(step: Step, worker: int) -> bool:
    """Whether a call returns its worker's own tensors: a reference does so at its owner, while a result is a copy."""
    return step.body is not None and step.body.worker == worker and step.how in ("remote", "proxy", "reference")


def generate(seed: int, *, compiles: bool | None = None) -> Program:
    """The program of a seed. One in eight may use ``torch.compile``, which is slow; ``compiles`` says which."""
    made = _Generator(seed, seed % 8 == 0 if compiles is None else compiles)
    return made.program()
