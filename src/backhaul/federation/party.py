"""Party: a module, its optimizer and its data, which stay with their owner, and the methods that others may call.

Other workers hold a reference to a party, and call the public methods of this class and of a subclass. None of the
methods here takes code, gives away the module, or lets the caller choose more than a training step needs.
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
    """A party's part of a model, which other workers of a federation may use. Subclass it, and expose the subclass.

    You can also expose a function that returns a Party.

    - ``module``: the party's part of the model. Its parameters do not leave the party.
    - ``optimizer``: steps the parameters, with the learning rate and all other options that the party chooses.
    - ``loader``: the source of the module's inputs. A function is called with the arguments of `forward`, and returns
      the input, or a tuple of inputs: the caller chooses rows, and the rows stay here. An iterable, such as a
      ``DataLoader``, gives the next batch at each call, and starts again after the last. Without a loader, the module
      gets the arguments themselves.
    - ``share_state``: let others read the parameters, with `state`.
    - ``max_rows``: the most rows that a tensor may have, in the arguments of a call and in what ``loader`` returns.

    Others use it as ``RemoteModule("shop", Shop)``, with `DistributedOptimizer` and `Pipeline`. A subclass may override
    `forward`; its own public methods are exposed as those of any class are. Everything that they return leaves through
    the `Edge` to the caller.
    """

    instances: ClassVar[int | None] = None
    """The most instances of a class that may exist at a time. A subclass that does not set it has 4."""

    _living: ClassVar[weakref.WeakSet[Party]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _collected: ClassVar[float] = -math.inf  # the time of the last gc.collect(), which a peer could cause all the time

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "instances" not in vars(cls):
            cls.instances = _INSTANCES

    def __new__(cls, *args: Any, **kwargs: Any) -> Party:
        # Checked before __init__, which makes a model, because a peer may ask for more and more parties.
        with Party._lock:
            collect = cls._is_full() and time.monotonic() - Party._collected > _COLLECT_SECONDS
            if collect:
                Party._collected = time.monotonic()
        if collect:
            gc.collect()  # a party whose loader is its own method is in a reference cycle
        self = super().__new__(cls)
        with Party._lock:
            if cls._is_full():
                raise QuotaError(
                    f"{cls.__qualname__} allows {cls.instances} instances at a time, and all of them exist: drop one. "
                    "To give one instance to several peers, expose a function that returns it"
                )
            Party._living.add(self)
        return self

    @classmethod
    def _is_full(cls) -> bool:
        """Whether the limit of instances is reached. The caller holds the lock."""
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
            raise OptionError(f"a Party needs a torch optimizer, or None, not a {type(optimizer).__name__}")
        if loader is not None and not callable(loader) and not isinstance(loader, Iterable):
            raise OptionError(f"a Party's loader must be a function or an iterable, not a {type(loader).__name__}")
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise OptionError(f"max_rows={max_rows!r} must be a whole number of at least 1")
        self.module = module
        self.optimizer = optimizer
        self.loader = loader
        self.share_state = bool(share_state)
        self.max_rows = max_rows
        self.steps = 0
        """The number of steps that the optimizer has made."""
        self._key = secrets.randbits(_KEY_BITS)
        self._turn = threading.Lock()
        # Guarded by _turn:
        self._batches: Iterator[Any] | None = None
        self._used: OrderedDict[int, None] = OrderedDict()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for the party's data, or for the arguments if there is no loader.

        Raises `QuotaError` for tensors of more than ``max_rows`` rows.
        """
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
        """Step with the gradients of a context; or with ``.grad``, which is cleared afterwards.

        Each context can be used once: a second `step` with it raises `ContextError`.
        """
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
        """Add the gradients of a context to ``.grad``, for a `step` without a context. Each context works once."""
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
        """Set the module to training mode, or to evaluation mode."""
        if not isinstance(mode, bool):
            raise MisuseError("train() takes True or False")
        self.module.train(mode)

    def state(self) -> dict[str, torch.Tensor]:
        """The state dict of the module. Raises `RefusedError` if the party does not share it."""
        if not self.share_state:
            raise RefusedError(
                f"{type(self).__qualname__} does not share its parameters: let its party save them, or share them with "
                "Party(share_state=True)"
            )
        edges = current().agent.execution.edges
        if edges is not None and edges.transforms:
            raise RefusedError(
                f"{type(self).__qualname__} shares its parameters, but on_send changes everything that leaves its "
                "worker, and changed parameters are useless: let its party save them"
            )
        return {name: value.detach().cpu() for name, value in self.module.state_dict().items()}

    def describe(self) -> tuple[str, bool, str, int]:
        """What a `RemoteModule` knows about it: its class, whether it is in training mode, its device, and its key."""
        return type(self).__name__, self.module.training, str(device_of(self.module, "cpu")), self._key

    def _params(self) -> list[torch.Tensor]:
        if self.optimizer is None:
            return list(self.module.parameters())
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise MisuseError(
                f"{type(self).__qualname__} has no optimizer, so it cannot step: let its party give it one"
            )
        return self.optimizer

    def _use(self, what: str, context_id: Any) -> None:
        """Note that the gradients of a context are used. Raises `ContextError` the second time.

        With repeated steps, a peer could use one gradient to move the parameters as far as it likes.
        """
        if isinstance(context_id, bool) or not isinstance(context_id, int):
            raise MisuseError(f"{what}() takes the id of an autograd context, or nothing")
        gradients.require(context_id)
        with self._turn:
            if context_id in self._used:
                raise ContextError(
                    f"{type(self).__qualname__} has already used the gradients of this context: open a context for "
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
                f"{type(self).__qualname__} takes its batches from its own loader, in order: call it without arguments"
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
                    f"{what} of {type(self).__qualname__} may have at most {self.max_rows} rows, not {len(value)}: "
                    "split the batch, or let the party raise max_rows"
                )
