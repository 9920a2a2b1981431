"""What people call the function of a request; see `agent.naming`."""

from __future__ import annotations

from backhaul.agent.naming import name_of_request

__all__ = ["name_of_request"]
