"""The contents of ``torch.distributed.rpc.constants``."""

from __future__ import annotations

from datetime import timedelta

from backhaul.options import DEFAULT_RPC_TIMEOUT
from backhaul.worker import UNSET_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_RPC_TIMEOUT
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT
