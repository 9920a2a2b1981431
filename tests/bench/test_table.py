"""How the table shows each kind of number."""

from __future__ import annotations

import io
import json

import pytest

from backhaul.bench import table
from backhaul.bench.compare import Result
from backhaul.bench.entrants import Fault
from backhaul.bench.footprint import idle_figure
from backhaul.bench.rows import Row, Stall
from backhaul.bench.workloads import Figure


def text(row: Row) -> list[str]:
    file = io.StringIO()
    result = Result(["backhaul", "torch"], [row], [Stall("torch", "nested", 4.0)], 0.5, {"ping-pong": "is out"})
    table.write(result, file)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("figure", "number", "shown"),
    [
        (Figure("a"), 42.1e-6, "42.1 us (42.1..42.1)"),
        (Figure("a"), 4.213e-3, "4.21 ms (4.21..4.21)"),
        (Figure("a"), 2.5, "2.50 s (2.50..2.50)"),
        (Figure("a", as_rate=True), 1e-4, "10,000/s (10,000..10,000)"),
        (Figure("a", unit="share"), 0.06, "6.00 % (6.00..6.00)"),
        (Figure("a", unit="bytes"), 3 << 20, "3.00 MiB (3.00..3.00)"),
        (Figure("a", unit="wake-ups"), 48, "48.0 times (48.0..48.0)"),
        (idle_figure(10.0), 19.8, "19.8 s (19.8..19.8)"),
        (idle_figure(10.0), 0.002, "2.00 ms (2.00..2.00)"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(figure: Figure, number: float, shown: str) -> None:
    assert shown in text(Row(figure, {"backhaul": [number]}))[2]


def test_a_table_has_headings_rows_and_remarks() -> None:
    first, heading, line, *rest = text(Row(Figure("chain of 4"), {"backhaul": [1.0], "torch": [3.5]}))

    assert "rounds: 1; load before: 0.50" in first
    assert heading.split() == ["work", "backhaul", "torch", "torch/backhaul", "met"]
    assert line.split()[-2:] == ["aim", "3x"]
    assert [line.strip() for line in rest] == [
        "stalled: torch, nested: 4.0 s for one repetition",
        "left out: ping-pong: is out",
    ]


def test_tls_has_a_table_of_its_own() -> None:
    rows = [
        Row(Figure("no-op p50"), {"backhaul": [1.0], "torch": [4.0]}),
        Row(Figure("TLS no-op p50", ours="backhaul-tls"), {"backhaul-tls": [2.0], "torch": [4.0], "ssl": [1.0]}),
    ]
    file = io.StringIO()
    table.write(Result(["backhaul", "torch", "backhaul-tls", "ssl"], rows, [], 0.5, {}), file)
    _, plain, first, tls, second = file.getvalue().splitlines()

    assert plain.split() == ["work", "backhaul", "torch", "torch/backhaul", "met"]
    assert first.startswith("no-op p50 ")
    ratios = ["torch/backhaul-tls", "ssl/backhaul-tls", "backhaul-tls/backhaul"]
    assert tls.split() == ["work", "backhaul-tls", "backhaul", "torch", "ssl", *ratios, "met"]
    assert second.startswith("TLS no-op p50 ")
    assert second.split()[-2:] == ["floor", "2x"]
    assert "0.50x" in second


def test_faults_and_missed_floors_are_listed_below_the_table() -> None:
    hangs, ends = Fault("torch", "nested", "hangs", "..."), Fault("torch", "the end", "does not shut down well", "...")
    rows = [
        Row(Figure("nested"), {"backhaul": [1.0]}, {"torch": "hangs"}),
        Row(Figure("chain of 4"), {"backhaul": [1.0], "torch": [1.0]}),
    ]
    file = io.StringIO()
    table.write(Result(["backhaul", "torch"], rows, [], 0.5, {}, [hangs, ends]), file)

    assert [line.strip() for line in file.getvalue().splitlines()[-2:]] == [
        "failed: torch, the end: does not shut down well",
        "missed: chain of 4",
    ]


def test_a_run_on_one_processor_says_so_and_has_other_floors() -> None:
    row = Row(Figure("chain of 4"), {"backhaul": [1.0], "torch": [1.5]})
    result = Result(["backhaul", "torch"], [row], [], 0.5, {}, pinned=True)
    file = io.StringIO()
    table.write(result, file)

    assert "on one processor" in file.getvalue()
    assert "missed" not in file.getvalue()
    (found,) = table.as_json(result)["rows"]
    assert found["floor"] == {"at_least": 1.0, "aim": 1.0, "against": "torch"}
    assert found["met"] == "aim"


def test_a_note_stands_in_place_of_a_number() -> None:
    line = text(Row(Figure("a"), {"backhaul": [1.0]}, {"torch": "hangs"}))[2]
    assert " hangs " in line


def test_the_tables_for_the_documentation() -> None:
    rows = [
        Row(Figure("chain of 4"), {"backhaul": [1.0], "torch": [3.5]}),
        Row(Figure("a"), {"backhaul": [1.0]}, {"torch": "hangs"}),
        Row(Figure("TLS no-op p50", ours="backhaul-tls"), {"backhaul-tls": [2.0], "torch": [4.0]}),
    ]
    page = table.as_markdown(Result(["backhaul", "torch", "backhaul-tls"], rows, [], 0.5, {}))
    machine, blank, heading, rule, chain, hung, between, tls, *_ = page.splitlines()

    assert "rounds: 1; load before: 0.50. " in machine
    assert blank == between == ""
    assert heading == "| work | backhaul | torch | torch/backhaul | met |"
    assert rule == "| --- | ---: | ---: | ---: | --- |"
    assert chain == "| chain of 4 | 1.00 s (1.00..1.00) | 3.50 s (3.50..3.50) | 3.50x (3.50..3.50) | aim 3x |"
    assert hung == "| a | 1.00 s (1.00..1.00) | hangs |  |  |"
    assert tls.startswith("| work | backhaul-tls | backhaul | torch |")


def test_the_data_are_plain() -> None:
    row = Row(Figure("chain of 4"), {"backhaul": [1.0, 1.0], "torch": [2.5, 2.5]})
    data = json.loads(json.dumps(table.as_json(Result(["backhaul", "torch"], [row], [], 0.0, {}))))

    (found,) = data["rows"]
    assert found["systems"]["torch"] == {"median": 2.5, "low": 2.5, "high": 2.5, "rounds": [2.5, 2.5]}
    assert found["ratios"] == {"torch/backhaul": {"median": 2.5, "low": 2.5, "high": 2.5}}
    assert found["floor"] == {"at_least": 2.0, "aim": 3.0, "against": "torch"}
    assert found["ours"] == "backhaul"
    assert found["met"] == "floor"
