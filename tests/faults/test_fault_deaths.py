"""SIGKILL: waiting threads get an error, nothing of the dead worker stays, and the others go on."""

from __future__ import annotations

import time

import baseline
import load
import pytest
import training
from load import Outcome
from measuring import Measure

from crew import Crew


def assert_lost(found: Outcome, worker: str) -> None:
    assert found.error.startswith("WorkerLostError"), found
    assert found.worker == worker, found
    assert worker in found.error


@pytest.mark.fault("SIGKILL of the callee in a call", "every waiting caller gets an error that names it, within 1 s")
def test_sigkill_of_the_callee_in_a_call(measure: Measure) -> None:
    with Crew(3, transport="unix") as crew:
        baseline.note_all(crew)
        crew[0].run(load.start_calls, ["worker1", "worker2"])
        nested = crew[2].start(load.call, "worker1", load.block, "nested")
        crew[1].run(load.await_entered, "nested")
        direct = crew[0].start(load.call, "worker2", load.block_via, "worker1", "direct")
        crew[1].run(load.await_entered, "direct")
        ran = crew[1].run(load.runs)
        killed = time.time()
        crew[1].kill()
        for outcome in (nested.result(20), direct.result(20)):
            assert_lost(outcome, "worker1")
            measure.seconds("heard after", outcome.at - killed, within=1.0)
        books = crew[0].run(load.stop_calls)
        load.assert_sound(books, [ran, crew[2].run(load.runs)])
        assert all("worker1" in text for text in books[0].failed.values())
        assert not crew[0].run(load.call, "worker2", load.who).error
        baseline.await_all_back(crew, (0, 2))


@pytest.mark.slow
@pytest.mark.fault("SIGKILL of the middle of 3 hops in backward", "the pass fails with its name within 2 s")
def test_sigkill_of_the_middle_of_three_hops_in_backward(measure: Measure) -> None:
    names = ["worker1", "worker2", "worker3"]
    with Crew(4) as crew:
        crew[0].run(training.make_trainer, names)
        crew[0].run(training.train, 2, 60.0)
        baseline.note_all(crew)
        crew[2].run(training.latch, "worker2")
        running = crew[0].start(training.one_pass)
        crew[2].run(load.await_entered, "worker2")
        killed = time.time()
        crew[2].kill()
        outcome = running.result(30)
        assert_lost(outcome, "worker2")
        measure.seconds("heard after", outcome.at - killed, within=2.0)
        baseline.await_all_back(crew, (0, 1, 3))
        # The remaining workers can train, from unchanged parameters.
        crew[0].run(training.make_trainer, ["worker1", "worker3"], 7)
        assert crew[0].run(training.train, 2, 60.0) == 0
        crew[0].run(training.check_parameters)


@pytest.mark.slow
@pytest.mark.fault("SIGKILL of an owner", "uses of its values raise an error that names it, within 1 s")
def test_sigkill_of_an_owner(measure: Measure) -> None:
    with Crew(2) as crew:
        baseline.note_all(crew)
        crew[0].run(load.hold, "worker1", 20)
        assert crew[0].run(load.read_all) == list(range(20))
        crew[1].kill()
        start = time.monotonic()
        found = crew[0].run(load.read_all)
        measure.seconds("20 uses raised after", time.monotonic() - start, within=1.0)
        assert all("worker1" in str(text) and "LostError" in str(text) for text in found), found
        crew[0].run(load.let_go)
        baseline.await_all_back(crew, (0,))


@pytest.mark.slow
@pytest.mark.fault("SIGKILL of a holder of 1,000 references", "the owner frees the values within 6 s")
def test_sigkill_of_a_worker_that_holds_1000_references(measure: Measure) -> None:
    with Crew(3) as crew:
        baseline.note_all(crew)
        crew[2].run(load.hold, "worker0", 5)
        crew[1].run(load.hold, "worker0", 1000)
        assert crew[0].run(load.values) == 1005
        crew[1].kill()
        measure.seconds("freed after", crew[0].run(load.await_values, 5, 8.0), within=6.0)
        assert crew[2].run(load.read_all) == list(range(5))
        crew[2].run(load.let_go)
        crew[0].run(load.await_values, 0, 6.0)
        baseline.await_all_back(crew, (0, 2))


@pytest.mark.slow
@pytest.mark.fault("SIGKILL of an initiator", "its contexts and references are gone everywhere within 6 s")
def test_sigkill_of_an_initiator(measure: Measure) -> None:
    with Crew(3) as crew:
        baseline.note_all(crew)
        crew[0].run(training.make_trainer, ["worker1", "worker2"])
        crew[0].run(training.open_contexts, 3)
        for rank in (1, 2):
            crew[rank].run(training.await_contexts, 3, 10.0)
        killed = time.monotonic()
        crew[0].kill()
        for rank in (1, 2):
            crew[rank].run(training.await_contexts, 0, 8.0)
            crew[rank].run(load.await_values, 0, 8.0)
        measure.seconds("gone after", time.monotonic() - killed, within=6.0)
        baseline.await_all_back(crew, (1, 2))
        assert not crew[1].run(load.call, "worker2", load.who).error


@pytest.mark.slow
@pytest.mark.fault("SIGKILL during an optimizer step", "the error lists the workers that have stepped, within 2 s")
def test_sigkill_during_an_optimizer_step(measure: Measure) -> None:
    names = ["worker1", "worker2", "worker3"]
    with Crew(4) as crew:
        crew[0].run(training.make_trainer, names)
        crew[0].run(training.train, 2, 60.0)
        crew[2].run(training.latch, "step on worker2")
        running = crew[0].start(training.one_step)
        crew[2].run(load.await_entered, "step on worker2")
        killed = time.time()
        crew[2].kill()
        outcome, done, errors = running.result(30)
        measure.seconds("heard after", outcome.at - killed, within=2.0)
        assert outcome.error.startswith("PartialError"), outcome
        assert (sorted(done), errors) == (["worker1", "worker3"], ["worker2"])
        assert "worker 'worker2' failed, but may have done its part" in outcome.error
        measure.note(f"done: {', '.join(sorted(done))}; in doubt: worker2")
