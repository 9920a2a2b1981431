"""Device maps: what users write, what workers check at start-up, and to which device a tensor goes."""

from __future__ import annotations

import pytest
import torch

from backhaul import rpc
from backhaul.devices.maps import Devices, check, inverted, map_between
from backhaul.devices.names import name_of, parse_map
from backhaul.errors import OptionError
from backhaul.testing import InProcessCluster


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (0, "cuda:0"),
        (3, "cuda:3"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cpu", "cpu"),
        (torch.device("cuda", 2), "cuda:2"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_a_device_has_one_name(given: object, name: str) -> None:
    assert name_of(given) == name


@pytest.mark.parametrize("given", [-1, True, "mps", "cuda:x", "cpu:1", None, 1.5])
def test_an_invalid_device_is_refused(given: object) -> None:
    with pytest.raises(OptionError, match="not a device"):
        name_of(given)


def test_a_map_is_one_to_one() -> None:
    assert parse_map({0: 1, "cpu": 0}) == {"cuda:0": "cuda:1", "cpu": "cuda:0"}
    assert parse_map({"cpu": "cpu"}) == {}
    with pytest.raises(OptionError, match="1-to-1"):
        parse_map({0: 1, 1: 1})


def test_options_take_maps_of_all_forms() -> None:
    assert rpc.RpcOptions(device_maps={"b": {0: 1}}).device_maps == {"b": {"cuda:0": "cuda:1"}}
    assert rpc.RpcOptions(device_maps="same").device_maps == "same"
    assert rpc.RpcOptions().device_maps is None
    for wrong in ("other", {"b": 1}, 3):
        with pytest.raises(OptionError, match="device_maps"):
            rpc.RpcOptions(device_maps=wrong)  # type: ignore[arg-type]


def test_entries_are_added_and_not_replaced() -> None:
    options = rpc.RpcOptions()
    options.set_device_map("b", {0: 1})
    options.set_device_map("b", {1: 0})
    assert options.device_maps == {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}
    options.set_device_map("b", {0: 1})
    with pytest.raises(OptionError, match="1-to-1"):
        options.set_device_map("b", {0: 2})
    with pytest.raises(OptionError, match="1-to-1"):
        options.set_device_map("b", {2: 0})
    options.device_maps = "same"
    with pytest.raises(OptionError, match="same"):
        options.set_device_map("b", {0: 1})


def test_the_map_of_equal_indices_goes_as_far_as_both_have_gpus() -> None:
    all = {"a": Devices(3, same=True), "b": Devices(2)}
    assert map_between(all, "a", "b") == {"cuda:0": "cuda:0", "cuda:1": "cuda:1"}
    assert map_between(all, "b", "a") == {}


def test_the_way_back_is_the_inverse() -> None:
    assert inverted({"cuda:0": "cuda:1", "cpu": "cuda:0"}) == {"cuda:1": "cuda:0", "cuda:0": "cpu"}


TWO = Devices(2)


@pytest.mark.parametrize(
    ("maps", "theirs", "message"),
    [
        ({"c": {"cuda:0": "cuda:0"}}, TWO, "Node a has invalid target node names in its device maps"),
        ({"b": {"cuda:2": "cuda:0"}}, TWO, "Node a has source devices with invalid indices in its device map for b"),
        (
            {"b": {"cuda:0": "cuda:2"}},
            TWO,
            "target devices with invalid indices .* for b: cuda:2, and b has cuda:0, cuda:1",
        ),
        (
            {"b": {"cuda:0": "cuda:2"}},
            Devices(2, used=(1,)),
            "target devices with invalid indices .* and b has cuda:1$",
        ),
        ({"b": {"cuda:0": "cuda:0"}}, Devices(0), "Node a has target devices with invalid indices"),
        ({"b": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}}, TWO, "Node a has duplicated target devices"),
        ({"b": {"cuda:0": "cuda:1"}}, Devices(2, used=(0,)), "Node a has unexpected target devices in its device map"),
    ],
)
def test_maps_are_checked_against_the_existing_devices(
    maps: dict[str, dict[str, str]], theirs: Devices, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        check({"a": Devices(2, maps), "b": theirs})


def test_a_map_that_fits_is_taken() -> None:
    check({"a": Devices(2, {"b": {"cuda:1": "cuda:0", "cpu": "cuda:1"}}), "b": TWO})


def test_a_worker_without_gpus_cannot_have_a_map_to_one() -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(OptionError, match="invalid indices"):
        InProcessCluster(2, options=rpc.RpcOptions(device_maps={"worker1": {0: 0}}))


def test_a_map_of_the_cpu_alone_changes_nothing() -> None:
    with InProcessCluster(2, options=rpc.RpcOptions(device_maps="same")) as workers:
        x = torch.rand(3, 4)
        assert torch.equal(workers[0].rpc_sync("worker1", torch.neg, args=(x,)), -x)
