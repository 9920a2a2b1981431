"""Trust is a policy that the layers ask: one for clusters, one for federations."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import backhaul
from backhaul.errors import OptionError
from backhaul.options import Quotas, RpcOptions
from backhaul.trust.policy import CLUSTER, FEDERATION, POLICIES, Trust

ROOT = Path(backhaul.__file__).parent


def questions(policy: Trust) -> dict[str, bool]:
    return {name: getattr(policy, name) for name in Trust.__annotations__ if name != "name"}


def test_the_option_names_the_policy() -> None:
    assert RpcOptions().policy is CLUSTER
    assert RpcOptions(trust="federation").policy is FEDERATION
    assert {name: policy.name for name, policy in POLICIES.items()} == {name: name for name in POLICIES}


def test_a_cluster_trusts_and_a_federation_does_not() -> None:
    assert set(questions(CLUSTER).values()) == {True}
    assert set(questions(FEDERATION).values()) == {False}
    assert questions(CLUSTER).keys() == questions(FEDERATION).keys()


def test_a_peer_that_is_not_believed_has_quotas_and_one_connection() -> None:
    assert RpcOptions().limits is None
    assert RpcOptions(trust="federation").limits == Quotas()
    assert RpcOptions(connections=4).most_connections == 4
    assert RpcOptions(trust="federation", connections=4).most_connections == 1


def test_an_unknown_policy_is_refused() -> None:
    for wrong in ("", "clusters", None, ["cluster"]):
        with pytest.raises(OptionError, match="must be 'cluster' or 'federation'"):
            RpcOptions(trust=wrong)  # type: ignore[arg-type]


def test_the_members_of_a_federation_are_known() -> None:
    CLUSTER.check_group(None)
    FEDERATION.check_group(2)
    with pytest.raises(OptionError, match="a group of known members"):
        FEDERATION.check_group(None)


def test_a_cluster_leaves_the_transport_options_unchanged() -> None:
    options = RpcOptions(transport="unix")
    assert CLUSTER.transport_options(options) is options
    with pytest.raises(OptionError, match="needs a certificate for each peer"):
        FEDERATION.transport_options(options)


def test_no_module_compares_the_name_of_a_policy() -> None:
    """A module asks the policy, so that the answer has a name and one place."""
    found = []
    for path in ROOT.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        compared = [ast.unparse(node) for node in nodes if isinstance(node, ast.Compare)]
        found += [
            (path, text) for text in compared if ".trust " in f"{text} " or "'federation'" in text.replace('"', "'")
        ]
    assert found == []
