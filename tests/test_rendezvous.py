"""Where workers meet: a place from arguments and launchers, and a store from a URL."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from backhaul import rendezvous
from backhaul.agent import membership
from backhaul.agent.member import Member
from backhaul.agent.membership import Membership
from backhaul.agent.rejoining import goes_on
from backhaul.errors import MisuseError, OptionError, RpcTimeoutError, UnknownWorkerError
from backhaul.ids import Addresses
from backhaul.rendezvous import INIT_METHOD_VARIABLE, Place, meet, place_from, visit_store
from backhaul.transport.stream import host_id

NAME_VARIABLE = "BACKHAUL_NAME"
LAUNCHERS = ("SLURM", "OMPI", "PMI", "PET_", "VC_", "JOB", "TORCHELASTIC", "MPI")
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    NAME_VARIABLE,
    INIT_METHOD_VARIABLE,
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [*VARIABLES, *(each for each in os.environ if each.startswith(LAUNCHERS))]:
        monkeypatch.delenv(variable, raising=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# Places.

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "3"}
NAMED = {**LAUNCHED, NAME_VARIABLE: "trainer"}
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}

PLACES: list[tuple[dict[str, str], tuple[Any, ...], Place]] = [
    # no launcher
    ({}, ("a", 0, 2), Place("a", 0, 2)),
    ({}, (None, 1, 2), Place("worker1", 1, 2)),
    ({}, ("a", 3, None), Place("a", 3, None)),
    ({}, (None, 3, None), Place("worker3", 3, None)),
    ({}, ("a", -1, None), Place("a", None, None)),
    ({}, (None, -1, None), Place(None, None, None)),
    # torchrun
    (LAUNCHED, (None, -1, None), Place("worker1", 1, 3)),
    (LAUNCHED, ("a", -1, None), Place("a", 1, 3)),
    (LAUNCHED, ("a", -1, 3), Place("a", 1, 3)),
    (LAUNCHED, ("a", 2, 3), Place("a", 2, 3)),
    (LAUNCHED, (None, 0, 1), Place("worker0", 0, 1)),
    # a rank alone means a dynamic group, whatever the launcher says
    (LAUNCHED, ("a", 7, None), Place("a", 7, None)),
    # ours gives a name too
    (NAMED, (None, -1, None), Place("trainer", 1, 3)),
    (NAMED, ("a", -1, None), Place("a", 1, 3)),
    ({NAME_VARIABLE: ""}, (None, 0, 1), Place("worker0", 0, 1)),
    # half of a launcher's variables
    ({"RANK": "1"}, ("a", -1, None), Place("a", None, None)),
    ({"WORLD_SIZE": "3"}, ("a", -1, None), Place("a", None, None)),
    ({"RANK": "1"}, ("a", -1, 2), Place("a", 1, 2)),
    # a task of Slurm; and its batch script, which is not a task
    (TASK, (None, -1, None), Place("worker2", 2, 4)),
    (TASK, ("a", 0, 1), Place("a", 0, 1)),
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("a", -1, None), Place("a", None, None)),
    # a contradiction does not matter to a caller that gives everything
    ({**TASK, "RANK": "1"}, ("a", 3, 4), Place("a", 3, 4)),
]


@pytest.mark.parametrize(("environment", "given", "expected"), PLACES)
def test_places(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], given: tuple[Any, ...], expected: Place
) -> None:
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    assert place_from(*given) == expected


BAD_PLACES: list[tuple[dict[str, str], tuple[Any, ...], str]] = [
    ({}, ("a", -2, 2), "rank -2 must be a whole number"),
    ({}, ("a", "0", 2), "rank '0' must be a whole number"),
    ({}, ("a", True, 2), "rank True must be a whole number"),
    ({}, ("a", 0.0, 2), "rank 0.0 must be a whole number"),
    ({}, ("a", None, 2), "rank None must be a whole number"),
    ({}, ("a", 0, 0), "world_size 0 must be at least 1; None means a dynamic group"),
    ({}, ("a", 0, -1), "world_size -1 must be at least 1"),
    ({}, ("a", 0, "2"), "world_size '2' must be at least 1"),
    ({}, ("a", 0, True), "world_size True must be at least 1"),
    ({}, ("", 0, 1), "name '' must be a string of 1 to 128 characters"),
    ({}, (5, 0, 1), "name 5 must be a string"),
    ({}, ("x" * 129, 0, 1), "must be a string of 1 to 128 characters"),
    ({}, ("a", 2, 2), r"rank 2 is not in 0..1 \(world_size 2\)"),
    ({}, ("a", -1, 2), "init_rpc needs a rank: give one, or start the script with `backhaul run` or torchrun"),
    (LAUNCHED, ("a", -1, 1), r"rank 1 is not in 0..0 \(world_size 1\)"),
    ({"RANK": "one", "WORLD_SIZE": "3"}, ("a", -1, None), "the environment variable RANK='one' must be a whole number"),
    ({"RANK": "1", "WORLD_SIZE": ""}, ("a", -1, None), "the environment variable WORLD_SIZE='' must be a whole number"),
    ({"RANK": "-3", "WORLD_SIZE": "3"}, ("a", -1, None), "rank -3 is not in 0..2"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, ("a", -1, None), "rank 0 is not in"),
    ({**TASK, "RANK": "1"}, ("a", -1, None), r"RANK=1 \(the environment\) and SLURM_PROCID=2 \(Slurm\)"),
    ({"JOB_COMPLETION_INDEX": "1"}, (None, -1, None), "set WORLD_SIZE to the completions of the Job"),
    ({"SLURM_JOB_ID": "7"}, ("a", -1, 2), "needs a rank: .* batch script of job 7 of Slurm.* with srun"),
]


@pytest.mark.parametrize(("environment", "given", "text"), BAD_PLACES)
def test_bad_places(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], given: tuple[Any, ...], text: str
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError, match=text):
        place_from(*given)


def test_the_longest_name() -> None:
    assert place_from("x" * 128, 0, 1).name == "x" * 128


# Stores.

FIRST, SECOND = Place("a", 0, 2), Place("b", 1, 2)


def check_meeting(first: dist.Store, second: dist.Store) -> None:
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_file(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/point"
    check_meeting(meet(method, FIRST, 5), meet(method, SECOND, 5))


def test_a_file_and_a_dynamic_group(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/point"
    check_meeting(meet(method, Place("a", None, None), 5), meet(method, Place("b", None, None), 5))


def test_tcp() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    first = meet(method, FIRST, 5)
    check_meeting(first, meet(method, SECOND, 5))
    assert first is not None


def test_the_store_listens_at_its_address_only() -> None:
    port = free_port()
    store = meet(f"tcp://127.0.0.1:{port}", FIRST, 5)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    for other in ("127.0.0.2", "::1", socket.gethostbyname(socket.gethostname())):
        if other != "127.0.0.1":
            with pytest.raises(OSError), socket.create_connection((other, port), timeout=5):
                pass
    assert store is not None


def test_a_store_on_localhost() -> None:
    port = free_port()
    check_meeting(meet(f"tcp://localhost:{port}", FIRST, 5), meet(f"tcp://localhost:{port}", SECOND, 5))


def test_an_address_of_another_machine_cannot_be_hosted() -> None:
    with pytest.raises(MisuseError, match=r"cannot host the store at 192.0.2.9:29500: .* an address of rank 0"):
        meet("tcp://192.0.2.9:29500", FIRST, 5)
    with pytest.raises(MisuseError, match=r"cannot host the store at no\.such.host.invalid:29500"):
        meet("tcp://no.such.host.invalid:29500", FIRST, 5)


def test_the_store_is_found_at_one_of_several_addresses() -> None:
    """Rank 0 hosts the store at the address of its own machine, and the others try all addresses."""
    port = free_port()
    method = f"tcp://192.0.2.9:{free_port()},127.0.0.1:{port}"
    first = meet(method, FIRST, 5)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        check_meeting(first, meet(method, SECOND, 10))


def test_several_addresses_of_other_machines_cannot_be_hosted() -> None:
    with pytest.raises(MisuseError, match=r"192.0.2.9:29500 or 192.0.2.8:29500: none is an address of this machine"):
        meet("tcp://192.0.2.9:29500,192.0.2.8:29500", FIRST, 5)


def test_several_addresses_where_there_is_no_store() -> None:
    method = f"tcp://127.0.0.1:{free_port()},127.0.0.2:{free_port()}"
    with pytest.raises(RpcTimeoutError, match=r"no store at 127.0.0.1:\d+ or 127.0.0.2:\d+; is rank 0 up"):
        meet(method, SECOND, 0.1)


@pytest.mark.parametrize("method", ["tcp://a:1,b", "tcp://a:1,", "tcp://a:1,b:no", "tcp://a:1,b:0"])
def test_several_addresses_that_are_wrong(method: str) -> None:
    with pytest.raises(OptionError, match=r"host and a port|port of its own"):
        meet(method, SECOND, 0.1)


def test_two_groups_of_one_process_share_the_store() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    first, again = meet(method, FIRST, 5), meet(method, Place("c", 0, None), 5)
    check_meeting(first, meet(method, SECOND, 5))
    check_meeting(again, meet(method, Place("d", 1, None), 5))


def test_the_host_may_come_later() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    made: dict[int, dist.Store] = {}
    thread = threading.Thread(target=lambda: made.update({1: meet(method, SECOND, 20)}))
    thread.start()
    made[0] = meet(method, FIRST, 20)
    thread.join()
    check_meeting(made[0], made[1])


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    first = meet("env://", FIRST, 5)
    check_meeting(first, meet("env://", SECOND, 5))


def test_the_launcher_s_variable_gives_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(INIT_METHOD_VARIABLE, f"file://{tmp_path}/point")
    check_meeting(meet("env://", FIRST, 5), meet(f"file://{tmp_path}/point", SECOND, 5))


def test_the_launcher_s_variable_may_not_be_env_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INIT_METHOD_VARIABLE, "env://")
    with pytest.raises(OptionError, match="needs MASTER_ADDR and MASTER_PORT"):
        meet("env://", FIRST, 5)


def test_torchrun_hosts_the_store_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check_meeting(meet("env://", FIRST, 5), meet("env://", SECOND, 5))
    # Then a dynamic group needs no ranks.
    check_meeting(meet("env://", Place("a", None, None), 5), meet("env://", Place("b", None, None), 5))
    assert agent is not None


def test_workers_meet_with_the_variables_of_slurm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in {**TASK, "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "here"}.items():
        monkeypatch.setenv(variable, text)
    places = [Place("a", 0, 4), Place("b", 1, 4)]
    check_meeting(meet("env://", places[0], 5), meet("env://", places[1], 5))


def test_a_job_with_the_port_of_another_says_that_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of one group takes no part in the other group."""
    port = free_port()
    for variable, text in {**TASK, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(variable, text)
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        first = meet("env://", Place("a", 0, 4), 5)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(MisuseError, match=f"cannot host the store at 127.0.0.1:{port}: .*in use"):
        meet("env://", Place("a", 0, 4), 1)
    assert first is not None
    assert server is not None


@pytest.mark.parametrize("source", ["SLURM_STEP_NODELIST", "MASTER_ADDR"])
def test_a_name_that_means_loopback_at_rank_0_only(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    for variable, text in {**TASK, "SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(variable, text)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    if source == "MASTER_ADDR":
        monkeypatch.setenv("MASTER_ADDR", "localhost")  # set by hand, so it is taken as meant
        assert meet("env://", Place("a", 0, 4), 5) is not None
        return
    with pytest.raises(
        MisuseError, match=r"at localhost \(first of SLURM_STEP_NODELIST\), but on this machine that name means"
    ):
        meet("env://", Place("a", 0, 4), 5)


NOWHERE = Addresses(tcp=("127.0.0.1", 1))  # nothing listens there


def join_both(method: str, addresses: Addresses = NOWHERE) -> list[Membership]:
    """A group of two that meets at this place."""
    places = [FIRST, SECOND]
    members = [Membership(meet(method, place, 5), 2) for place in places]

    def join(rank: int) -> None:
        members[rank].join(places[rank].name, rank, addresses, time.monotonic() + 5)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(join, range(2)))
    return members


def join_both_again(method: str, there: Addresses) -> list[Membership]:
    """The two members of a group that is not the first one in its store."""
    for member in join_both(method, there):
        member.leave(ended=True)
    return join_both(method, there)


@pytest.mark.parametrize("how", ["shut down", "left", "died"])
def test_a_group_that_meets_again_in_the_same_store_gets_a_part_of_its_own(tmp_path: Path, how: str) -> None:
    method = f"file://{tmp_path}/point"
    before = join_both(method)
    for member in before if how != "died" else ():
        member.leave(ended=how == "shut down")
    after = join_both(method)
    assert after[0].group == after[1].group != before[0].group
    assert not after[0].replaces


def test_a_rank_may_start_again_before_others_have_shut_down(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/point"
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = join_both(method, Addresses(tcp=server.getsockname()))
        before[0].leave(ended=True)
        first = meet(method, FIRST, 5)
        first.set("key", "value")
        before[1].leave(ended=True)
    assert meet(method, SECOND, 5).get("key") == b"value"


@pytest.mark.parametrize("how", ["left", "died"])
def test_a_rank_that_comes_again_joins_the_living_group(tmp_path: Path, how: str) -> None:
    method = f"file://{tmp_path}/point"
    with socket.create_server(("127.0.0.1", 0)) as server:
        first, second = join_both(method, Addresses(tcp=server.getsockname()))
        if how == "left":
            second.leave()
        again = Membership(meet(method, SECOND, 5), 2, lambda addresses: False)
        again.join("b", 1, NOWHERE, time.monotonic() + 5)
    assert again.group == first.group
    assert again.replaces
    assert again.incarnation != second.incarnation
    successor = first.successor(first.find("b"))
    assert successor is not None
    assert successor.incarnation == again.incarnation
    assert successor.addresses == NOWHERE


def test_a_group_that_torchrun_has_started_again_on_the_same_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the addresses of the old workers, the new ones listen."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Addresses(tcp=server.getsockname(), process="another")
        before = join_both("env://", there)
        after = join_both("env://", there)
    assert after[0].group == after[1].group != before[0].group
    assert not after[0].replaces
    assert agent is not None


def test_a_second_living_worker_of_one_rank_is_refused_at_once(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/point"
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Addresses(tcp=server.getsockname())
        join_both(method, there)
        began = time.monotonic()
        second = Membership(meet(method, SECOND, 5), 2, lambda addresses: addresses == there)
        with pytest.raises(OptionError, match="rank 1 is taken by worker 'b'"):
            second.join("b", 1, NOWHERE, time.monotonic() + 60)
        assert time.monotonic() - began < 10


def test_a_rank_comes_after_the_others_died_waiting_for_it(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/point"
    alone = Membership(meet(method, FIRST, 5), 2)
    with pytest.raises(RpcTimeoutError):
        alone.join("a", 0, NOWHERE, 0.0)
    first, second = join_both(method)
    assert first.group == second.group != alone.group


def started(size: int) -> dist.Store:
    """The store of a fixed group of three, in which the first ranks wait for the others."""
    store = dist.HashStore()
    for rank in range(size):
        member = Member(
            rank, f"worker{rank}", Addresses(host=f"host{rank}", tcp=("10.0.0.1", 1 + rank)), incarnation="aa"
        )
        store.set(f"member/{rank}", msgspec.json.encode(member).decode())
    return store


@pytest.mark.parametrize("rank", [1, 2], ids=["one that comes again", "the last one"])
def test_hosts_that_are_cut_off_for_a_moment_do_not_split_a_group(rank: int) -> None:
    looks: list[str] = []

    def look(addresses: Addresses) -> bool | None:
        looks.append(addresses.host)
        return None if len(looks) < 6 else addresses.host == "host0"

    assert goes_on(started(2), rank, 3, look, lambda: False, 60.0)
    assert looks.count("host0") > 1


@pytest.mark.parametrize(
    ("look", "moved", "rank", "joins"),
    [
        (False, False, 1, False),  # all have died, this one included
        (False, False, 2, False),  # they died while they waited for this one, and meet again
        (None, True, 2, False),
        (True, True, 2, True),
    ],
)
def test_one_look_decides_whether_a_group_goes_on(look: bool | None, moved: bool, rank: int, joins: bool) -> None:
    begun = time.monotonic()
    assert goes_on(started(2), rank, 3, lambda addresses: look, lambda: moved, 60.0) is joins
    assert time.monotonic() - begun < 30.0


def test_hosts_that_stay_unreachable_are_given_up() -> None:
    assert not goes_on(started(2), 2, 3, lambda addresses: None, lambda: False, 0.2)


@pytest.mark.parametrize("tcp", [None, ("127.0.0.1", 9), ("::1", 9)], ids=str)
def test_a_member_that_only_its_own_host_can_reach_counts_as_there(tcp: tuple[str, int] | None) -> None:
    """Without a key, or without BACKHAUL_HOST, workers of two hosts form one group, whose calls say what is missing."""
    elsewhere = Addresses(host="elsewhere", unix="/tmp/nothing", tcp=tcp)
    here = msgspec.structs.replace(elsewhere, host=host_id(), unix=None)
    for addresses, joins in ((elsewhere, True), (here, False)):
        store = dist.HashStore()
        store.set("member/0", msgspec.json.encode(Member(0, "worker0", addresses, incarnation="aa")).decode())
        assert goes_on(store, 1, 2, rendezvous._look, lambda: False, 0.2) is joins


def test_two_groups_of_different_kinds_do_not_meet(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/point"
    fixed, dynamic = meet(method, FIRST, 5), meet(method, Place("a", None, None), 5)
    fixed.set("key", "value")
    assert not dynamic.check(["key"])


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("file://", "needs a path: file:///tmp/meeting-point"),
        ("file:///no/such/directory/point", "must be a file in a directory that exists"),
        ("file:///tmp", "must be a file in a directory that exists"),
        ("tcp://", "needs a host and a port: tcp://127.0.0.1:29500"),
        ("tcp://127.0.0.1", "needs a host and a port"),
        ("tcp://:29500", "needs a host and a port"),
        ("tcp://127.0.0.1:port", "needs a host and a port"),
        ("tcp://127.0.0.1:99999", "needs a host and a port"),
        ("env://", "needs MASTER_ADDR and MASTER_PORT in the environment"),
    ],
)
def test_bad_methods(method: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        meet(method, FIRST, 5)


@pytest.mark.parametrize(
    ("address", "port", "text"),
    [
        ("", "29500", "needs MASTER_ADDR and MASTER_PORT"),
        ("127.0.0.1", None, "needs MASTER_ADDR and MASTER_PORT"),
        ("127.0.0.1", "http", "the environment variable MASTER_PORT='http' must be a whole number"),
        ("127.0.0.1", "99999", "MASTER_PORT=99999 is not a port"),
        ("127.0.0.1", "-1", "MASTER_PORT=-1 is not a port"),
    ],
)
def test_a_bad_environment(monkeypatch: pytest.MonkeyPatch, address: str, port: str | None, text: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(OptionError, match=text):
        meet("env://", FIRST, 5)


def test_a_dynamic_group_over_tcp_needs_to_know_who_hosts() -> None:
    with pytest.raises(OptionError, match="needs a rank for each worker; rank 0 hosts the store"):
        meet("tcp://127.0.0.1:29500", Place("a", None, None), 5)


def test_a_batch_script_that_starts_no_tasks_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    with pytest.raises(OptionError, match=r"needs a rank .* batch script of job 7 of Slurm.* with srun"):
        meet("env://", place_from(None, -1, None), 5)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MisuseError, match=f"cannot host the store at 127.0.0.1:{port}: .*in use"):
            meet(f"tcp://127.0.0.1:{port}", FIRST, 1)


def test_no_process_hosts_the_store(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(RpcTimeoutError, match=f"no store at 127.0.0.1:{port}; is rank 0 up?"):
        meet(f"tcp://127.0.0.1:{port}", SECOND, 0.5)
    capfd.readouterr()  # torch reports it at length


# A store that dies with its host.


def enter(method: str, rank: int, world_size: int | None = None) -> Membership:
    """A member of a group, which the test keeps alive. If it hosts the store, the store dies with it."""
    member = Membership(meet(method, Place(f"w{rank}", rank, world_size), 5), world_size, lambda addresses: False)
    member.join(f"w{rank}", rank, NOWHERE, time.monotonic() + 5)
    return member


def test_a_living_member_takes_the_store_over_and_newcomers_find_the_group() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    host, second = enter(method, 0), enter(method, 1)
    third = enter(method, 2)
    second.refresh()
    assert [info.name for info in second.members()] == ["w0", "w1", "w2"]
    group = host.group
    del host  # and its store
    second.check_store()
    third.check_store()
    newcomer = enter(method, 5)
    assert newcomer.group == group == second.group
    assert [info.name for info in newcomer.members()] == ["w0", "w1", "w2", "w5"]
    assert second.find("w5").id == third.find("w5").id == 5
    assert enter(method, 0).group == group  # the first one again


def test_rank_0_comes_again_to_a_store_that_was_taken_over() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Addresses(tcp=server.getsockname())
        first, second = join_both_again(method, there)
        group = first.group
        del first
        second.check_store()
        again = Membership(meet(method, FIRST, 5), 2, lambda addresses: False)
        again.join("a", 0, NOWHERE, time.monotonic() + 5)
    assert again.group == group
    assert again.replaces


def test_a_restarted_rank_0_waits_for_the_group_that_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine was lost with the store. No member elsewhere can host the store, but they all know the group."""
    port = free_port()
    method = f"tcp://127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as other_machine:
        there = Addresses(tcp=server.getsockname())
        first, second = join_both_again(method, there)
        group = first.group
        del first
        monkeypatch.setenv("BACKHAUL_RESTARTS", "1")
        meeting = other_machine.submit(meet, method, FIRST, 20)
        visit_store("127.0.0.1", port, 20).wait(["backhaul/awaited"])
        second.check_store()
        again = Membership(meeting.result(20), 2, lambda addresses: False)
        again.join("a", 0, NOWHERE, time.monotonic() + 5)
    assert again.group == group
    assert again.replaces


def test_a_restarted_rank_0_whose_group_has_ended_begins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_RESTARTS", "1")
    method = f"tcp://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:  # the other one has been restarted, too
        assert len(list(threads.map(lambda place: meet(method, place, 20), [FIRST, SECOND]))) == 2
    assert time.monotonic() - began < 10
    monkeypatch.setattr(rendezvous, "_RETURN_SECONDS", 0.2)
    meet(f"tcp://127.0.0.1:{free_port()}", FIRST, 5)  # the other one does not come


def test_a_store_with_several_addresses_is_taken_over() -> None:
    """The store's host is gone; another worker hosts a new store at its machine's address, and all find it there."""
    method = f"tcp://127.0.0.1:{free_port()},127.0.0.2:{free_port()}"
    host, second = enter(method, 0), enter(method, 1)
    group = host.group
    del host
    second.check_store()
    newcomer = enter(method, 5)
    assert newcomer.group == second.group == group
    assert [info.name for info in newcomer.members()] == ["w0", "w1", "w5"]
    assert enter(method, 0).group == group


def test_taking_the_store_over_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may ask this worker for the store any more, and newcomers wait for it."""
    monkeypatch.setattr(rendezvous, "_RENEW_SECONDS", 0.1)
    monkeypatch.setattr(membership, "_RENEW_PAUSE", 0.0)
    port = free_port()
    host, second = enter(f"tcp://127.0.0.1:{port}", 0), enter(f"tcp://127.0.0.1:{port}", 1)
    del host
    pauses = []
    with socket.create_server(("127.0.0.1", port)) as other:

        def stopped(seconds: float) -> bool:
            pauses.append(seconds)
            other.close()  # it had the port for a moment
            monkeypatch.setattr(rendezvous, "_RENEW_SECONDS", 5.0)
            return False

        second.check_store(stopped)
    assert len(pauses) == 1
    assert enter(f"tcp://127.0.0.1:{port}", 2).group == second.group


@pytest.mark.slow
def test_another_program_has_taken_the_port_of_the_store() -> None:
    """Workers that have met continue without the store. The program that has the port never answers."""
    port = free_port()
    host, second = enter(f"tcp://127.0.0.1:{port}", 0), enter(f"tcp://127.0.0.1:{port}", 1)
    del host
    with socket.create_server(("127.0.0.1", port)):
        second.check_store()
        assert second.find("w0").id == 0
        with pytest.raises(UnknownWorkerError):
            second.find("w7")
