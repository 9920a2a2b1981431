"""Processes that stand still for a while: SIGSTOP, and code that holds the GIL."""

from __future__ import annotations

import ctypes
import signal
import time

import baseline
import load
import pytest
import training
from measuring import Measure

from crew import Crew

pytestmark = pytest.mark.timeout(400)

REFERENCES = 20
NUMBERS = list(range(REFERENCES))
LIMIT = 30.0  # the default of unresponsive_after
SLACK = 2.0


def hold_the_interpreter(seconds: float) -> str:
    """A C call that does not release the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "done"


def check_all_goes_on(crew: Crew) -> None:
    """Calls and references work in both directions, and a training step is right."""
    crew[0].run(load.call_until_good, "worker1", 10.0)
    crew[1].run(load.call_until_good, "worker0", 10.0)
    assert [crew[rank].run(load.read_all) for rank in (0, 1)] == [NUMBERS, NUMBERS]
    crew[0].run(training.train, 1, 30.0)
    crew[0].run(training.check_parameters)


def prepare(crew: Crew) -> None:
    crew[0].run(load.hold, "worker1", REFERENCES)
    crew[1].run(load.hold, "worker0", REFERENCES)
    crew[0].run(training.make_trainer, ["worker1", "worker0"])
    crew[0].run(training.train, 1, 60.0)
    baseline.note_all(crew)


@pytest.mark.parametrize("transport", ["unix", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.slow
@pytest.mark.fault("SIGSTOP of the callee for 5 s", "the caller waits; all goes on")
def test_callee_stopped_for_5_seconds(measure: Measure, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SECRET", "5a" * 32)
    with Crew(2, transport=transport) as crew:
        prepare(crew)
        crew[1].signal(signal.SIGSTOP)
        running = crew[0].start(load.call, "worker1", load.who)
        time.sleep(5.0)
        assert not running.done()
        crew[1].signal(signal.SIGCONT)
        assert running.result(20).value == "worker1"
        measure.note("the call waited and was good")
        check_all_goes_on(crew)
        baseline.await_all_back(crew)


@pytest.mark.slow
@pytest.mark.fault(
    "SIGSTOP of the callee for 60 s", "suspected at the limit + 2 s, then all goes on, references included"
)
def test_callee_stopped_for_60_seconds(measure: Measure) -> None:
    with Crew(2) as crew:
        prepare(crew)
        stopped = time.time()
        crew[1].signal(signal.SIGSTOP)
        found = crew[0].run(load.call_within, 0, "worker1", load.who, timeout=90)
        assert found.worker == "worker1", found
        measure.seconds("suspected after", found.at - stopped, within=LIMIT + SLACK)
        time.sleep(max(0.0, stopped + 60 - time.time()))
        crew[1].signal(signal.SIGCONT)
        check_all_goes_on(crew)
        baseline.await_all_back(crew)


@pytest.mark.slow
@pytest.mark.fault("SIGSTOP of the initiator for 60 s, in a pass", "its contexts and references are still there")
def test_initiator_stopped_for_60_seconds(measure: Measure) -> None:
    with Crew(2) as crew:
        prepare(crew)
        crew[0].run(training.open_contexts, 1)
        contexts = crew[1].run(training.count_contexts)
        stopped = time.time()
        crew[0].signal(signal.SIGSTOP)
        found = crew[1].run(load.call_within, 0, "worker0", load.who, timeout=90)
        assert found.worker == "worker0", found
        measure.seconds("suspected after", found.at - stopped, within=LIMIT + SLACK)
        time.sleep(max(0.0, stopped + 60 - time.time()))
        crew[0].signal(signal.SIGCONT)
        crew[0].run(load.call_until_good, "worker1", 10.0)
        assert crew[1].run(training.count_contexts) == contexts
        crew[0].run(training.backward_of_open)
        crew[0].run(training.close_open)
        check_all_goes_on(crew)
        baseline.await_all_back(crew)


@pytest.mark.slow
@pytest.mark.fault("SIGSTOP of rank 0 for 60 s, all others parked in shutdown()", "they wait, and serve afterwards")
def test_rank_0_stopped_for_60_seconds_with_all_others_parked(measure: Measure) -> None:
    with Crew(3) as crew:
        crew[0].run(training.make_trainer, ["worker1", "worker2"])
        crew[0].run(training.train, 1, 60.0)
        parked = [crew[rank].start(load.shut_down) for rank in (1, 2)]
        crew[0].run(load.call_until_good, "worker1", 10.0)
        crew[0].signal(signal.SIGSTOP)
        time.sleep(60.0)
        assert not any(each.done() for each in parked), [each.result(0) for each in parked if each.done()]
        crew[0].signal(signal.SIGCONT)
        assert crew[0].run(training.train, 2, 30.0) == 0
        crew[0].run(training.check_parameters)
        assert crew[0].run(load.shut_down, timeout=30) == "done"
        assert [each.result(30) for each in parked] == ["done", "done"]
        measure.note("both waited, served, and left with rank 0")


@pytest.mark.slow
@pytest.mark.fault("user code holds the interpreter for 20 s", "not dead: the caller waits")
def test_the_interpreter_held_for_20_seconds(measure: Measure) -> None:
    with Crew(2) as crew:
        prepare(crew)
        found = crew[0].run(load.call_within, 0, "worker1", hold_the_interpreter, 20.0, timeout=90)
        assert found.value == "done", found
        measure.note("the call was good")
        check_all_goes_on(crew)


@pytest.mark.slow
@pytest.mark.fault("user code holds the interpreter for 40 s", "suspected at the limit + 2 s, then all goes on")
def test_the_interpreter_held_for_40_seconds(measure: Measure) -> None:
    with Crew(2) as crew:
        prepare(crew)
        began = time.time()
        found = crew[0].run(load.call_within, 0, "worker1", hold_the_interpreter, 40.0, timeout=90)
        assert found.worker == "worker1", found
        measure.seconds("suspected after", found.at - began, within=LIMIT + SLACK)
        time.sleep(max(0.0, began + 41 - time.time()))
        check_all_goes_on(crew)
        baseline.await_all_back(crew)


@pytest.mark.slow
@pytest.mark.fault("SIGSTOP for longer than the limit, which is 1 s here", "suspected, then all goes on")
def test_a_stop_beyond_a_short_limit(measure: Measure) -> None:
    with Crew(2, unresponsive_after=1.0) as crew:
        prepare(crew)
        stopped = time.time()
        crew[1].signal(signal.SIGSTOP)
        found = crew[0].run(load.call_within, 0, "worker1", load.who)
        assert found.worker == "worker1", found
        measure.seconds("suspected after", found.at - stopped, within=1.0 + SLACK)
        # Longer than one probe of the owner of its values.
        time.sleep(3.0)
        crew[1].signal(signal.SIGCONT)
        check_all_goes_on(crew)
