"""Modules on other workers: one model, spread over a group, that is used like a model of one process."""

from __future__ import annotations

from backhaul.nn.members import parameter_rrefs
from backhaul.nn.pipeline import Pipeline
from backhaul.nn.remote_module import RemoteModule

__all__ = ["Pipeline", "RemoteModule", "parameter_rrefs"]
