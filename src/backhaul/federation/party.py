"""Party: a module, its optimizer and its data, which stay with their owner, and what others may have done with them.

Others hold a reference to a party and call the public methods that are written here, and in a subclass. None of them
takes code, gives away the module, or lets the caller choose more than what a step of training needs.
"""

from __future__ import annotations

import gc
import math
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backhaul.errors import ContextError, MisuseError, OptionError, QuotaError, RefusedError
from backhaul.nn.device import arrived, device_of, leaving
from backhaul.optim import gradients
from backhaul.optim.claims import claims
from backhaul.trust.exposure import expose
from backhaul.worker import current

_KEY_BITS = 62
_REMEMBERED = 4096
_INSTANCES = 4
_COLLECT_SECONDS = 5.0
MAX_ROWS = 1 << 16


@expose
class Party:
    """What a party of a federation lets others use of its model. Fill it, and expose the subclass or a function.

    - ``module``: the party's part of the model. Its parameters do not leave.
    - ``optimizer``: what steps them, with the learning rate and all else as the party wants it.
    - ``loader``: where the module's inputs come from. A function is called with the arguments of `forward`, and returns
      the input, or a tuple of several: who calls chooses rows, and the rows stay here. An iterable, such as a
      ``DataLoader``, gives the next batch at each call, and begins anew after the last. Without one, the module gets
      the arguments themselves.
    - ``share_state``: let others have the parameters, with `state`.
    - ``max_rows``: the most rows that a call may have, among its tensors and in what ``loader`` returns.

    Others use it as ``RemoteModule("shop", Shop)``, with `DistributedOptimizer` and `Pipeline`. A subclass may override
    `forward`; its own public methods are exposed as those of any class are. What they return leaves through the `Edge`
    to the caller, as everything does.
    """

    instances: ClassVar[int | None] = None
    """How many of a class there may be at a time: 4 in a subclass that does not say otherwise."""

    _living: ClassVar[weakref.WeakSet[Party]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _collected: ClassVar[float] = -math.inf  # when garbage was; a peer can ask for that all the time

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "instances" not in vars(cls):
            cls.instances = _INSTANCES

    def __new__(cls, *args: Any, **kwargs: Any) -> Party:
        # Before __init__, which makes a model: a peer may ask for ever more of them.
        with Party._lock:
            collect = cls._is_full() and time.monotonic() - Party._collected > _COLLECT_SECONDS
            if collect:
                Party._collected = time.monotonic()
        if collect:
            gc.collect()  # one whose loader is a method of it refers to itself
        self = super().__new__(cls)
        with Party._lock:
            if cls._is_full():
                raise QuotaError(
                    f"there may be {cls.instances} of {cls.__qualname__} at a time, and there are: drop one. To give "
                    "the same to several peers, the party exposes a function that returns it"
                )
            Party._living.add(self)
        return self

    @classmethod
    def _is_full(cls) -> bool:
        """Under the lock."""
        return cls.instances is not None and sum(type(each) is cls for each in Party._living) >= cls.instances

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loader: Callable[..., Any] | Iterable[Any] | None = None,
        *,
        share_state: bool = False,
        max_rows: int = MAX_ROWS,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise OptionError(f"a Party needs an nn.Module, not a {type(module).__name__}")
        if optimizer is not None and not callable(getattr(optimizer, "step", None)):
            raise OptionError(f"a Party needs an optimizer of torch's, or None, not a {type(optimizer).__name__}")
        if loader is not None and not callable(loader) and not isinstance(loader, Iterable):
            raise OptionError(f"a Party's loader is a function or an iterable, not a {type(loader).__name__}")
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise OptionError(f"max_rows={max_rows!r} must be a whole number of at least 1")
        self.module = module
        self.optimizer = optimizer
        self.loader = loader
        self.share_state = bool(share_state)
        self.max_rows = max_rows
        self.steps = 0
        """How many steps the optimizer has made."""
        self._key = secrets.randbits(_KEY_BITS)
        self._turn = threading.Lock()
        # Guarded by _turn:
        self._batches: Iterator[Any] | None = None
        self._used: OrderedDict[int, None] = OrderedDict()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module makes of the party's data, or of the arguments."""
        self._require_few_rows((args, kwargs), "the arguments")
        where = device_of(self.module, "cpu")
        if self.loader is None:
            given, named = args, kwargs
        else:
            found = self._batch(self.loader, args, kwargs)
            given, named = tuple(found) if isinstance(found, tuple | list) else (found,), {}
            self._require_few_rows(given, "a batch")
        return leaving(self.module(*arrived(given, where), **arrived(named, where)), where)

    def step(self, context_id: int | None = None) -> None:
        """Step with the gradients of a context, once for each; or with ``.grad``, which is cleared."""
        optimizer = self._require_optimizer()
        params = self._params()
        if context_id is not None:
            self._use("step", context_id)
        with claims.on([self, *params]), gradients.as_grad(params, context_id):
            if all(param.grad is None for param in params):
                return
            optimizer.step()
            self.steps += 1
            if context_id is None:
                optimizer.zero_grad()

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to ``.grad``, once for each, for a `step` without a context."""
        self._require_optimizer()
        params = self._params()
        self._use("accumulate", context_id)
        with claims.on([self, *params]):
            gradients.add_to_grad(params, context_id)

    def zero_grad(self) -> None:
        """Clear ``.grad``."""
        params = self._params()
        with claims.on([self, *params]):
            for param in params:
                param.grad = None

    def train(self, mode: bool = True) -> None:
        """Set the module to training, or to evaluation."""
        if not isinstance(mode, bool):
            raise MisuseError("train() takes True or False")
        self.module.train(mode)

    def state(self) -> dict[str, torch.Tensor]:
        """The state dict of the module, if the party shares it."""
        if not self.share_state:
            raise RefusedError(
                f"{type(self).__qualname__} keeps its parameters: its party saves them itself, or shares them with "
                "Party(share_state=True)"
            )
        edges = current().agent.execution.edges
        if edges is not None and edges.transforms:
            raise RefusedError(
                f"{type(self).__qualname__} shares its parameters, but what leaves its worker is changed by on_send, "
                "and parameters with noise are no parameters: its party saves them itself"
            )
        return {name: value.detach().cpu() for name, value in self.module.state_dict().items()}

    def describe(self) -> tuple[str, bool, str, int]:
        """What a `RemoteModule` knows of it: its kind, whether it is in training, its device, and its key."""
        return type(self).__name__, self.module.training, str(device_of(self.module, "cpu")), self._key

    def _params(self) -> list[torch.Tensor]:
        if self.optimizer is None:
            return list(self.module.parameters())
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise MisuseError(
                f"{type(self).__qualname__} has no optimizer, so it does not step: its party gives it one"
            )
        return self.optimizer

    def _use(self, what: str, context_id: Any) -> None:
        """The gradients of a context may be used once: again and again, a peer could go anywhere with one of them."""
        if isinstance(context_id, bool) or not isinstance(context_id, int):
            raise MisuseError(f"{what}() takes the id of an autograd context, or nothing")
        gradients.require(context_id)
        with self._turn:
            if context_id in self._used:
                raise ContextError(
                    f"{type(self).__qualname__} has used the gradients of this context already: open a context for "
                    "each step"
                )
            self._used[context_id] = None
            if len(self._used) > _REMEMBERED:
                self._used.popitem(last=False)

    def _batch(self, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if callable(loader):
            return loader(*args, **kwargs)
        if args or kwargs:
            raise MisuseError(
                f"the batches of {type(self).__qualname__} come from its own loader, one after the other: call it "
                "without arguments"
            )
        with self._turn:
            for _ in range(2):
                if self._batches is None:
                    self._batches = iter(loader)
                try:
                    return next(self._batches)
                except StopIteration:
                    self._batches = None
        raise MisuseError(f"the loader of {type(self).__qualname__} has no batches")

    def _require_few_rows(self, values: Any, what: str) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.dim() and len(value) > self.max_rows:
                raise QuotaError(
                    f"{what} of {type(self).__qualname__} may have {self.max_rows} rows, and not {len(value)}"
                )
