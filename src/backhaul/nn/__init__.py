"""Modules on other workers: a model that is spread over a group and used like a model in one process."""

from __future__ import annotations

from backhaul.nn.members import parameter_rrefs
from backhaul.nn.pipeline import Pipeline
from backhaul.nn.remote_module import RemoteModule

__all__ = ["Pipeline", "RemoteModule", "parameter_rrefs"]
