"""``backhaul bench [--quick] [--pin] [--only NAME]… [--json PATH] [--plot PATH] [--check FILE]``"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul.bench.compare import Plan, Result

# Nothing here imports torch before a benchmark runs, because every command line imports this module.


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure calls and gradients beside torch RPC and the limits of this machine",
        description="Measure Backhaul, torch.distributed.rpc and .autograd, a bare socket and a bare copy on the same "
        "work, in rounds that take turns, and print the medians and their ratios; some of it over TLS as well, beside "
        "bare ssl and TCP. Takes up to ten minutes. "
        "Run it on a quiet machine. If a system fails in some work, the table says so in place of its figures, and the "
        "rest continues. The exit code is 0 if Backhaul did all of its work and shut down cleanly; "
        "how fast it was matters only to --check.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="takes under three minutes")
    size.add_argument(
        "--smoke", dest="size", action="store_const", const="smoke", help="takes seconds; its figures mean nothing"
    )
    parser.add_argument("--pin", action="store_true", help="run all processes of all systems on one processor")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this work; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the names for --only")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures to PATH")
    parser.add_argument(
        "--markdown", type=Path, metavar="PATH", help="also write the tables to PATH, for documentation"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PATH",
        help="also plot the figures, as PNG and SVG: into a directory, or to this file name (needs matplotlib)",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compare the ratios to torch with those in FILE; what has lost more than a quarter, or is below its "
        "floor, is measured once more, and fails if that is no better",
    )
    parser.add_argument("--write-baseline", type=Path, metavar="FILE", help="write FILE for --check from this run")
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--explain",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="instead, show where the microseconds of a call go; all further arguments are for it",
    )
    others.add_argument(
        "--growth",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="instead, measure how the cost of a call grows with peers, contexts, references and messages; "
        "all further arguments are for it",
    )
    others.add_argument(
        "--looking",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="instead, measure what the meter, a dashboard and profilers cost; all further arguments are for it",
    )
    others.add_argument(
        "--cuda",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="instead, measure tensors on a GPU beside torch RPC; all further arguments are for it",
    )
    others.add_argument(
        "--between",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="instead, measure calls between two hosts, with TLS and without; all further arguments are for it",
    )
    others.add_argument(
        "--scale",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="instead, measure groups of many workers beside torch RPC; all further arguments are for it",
    )
    parser.set_defaults(handle=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    if options.explain is not None:
        from backhaul.bench import explain

        return explain.main([*_before(options), *options.explain])
    if options.growth is not None:
        from backhaul.bench import growth

        return growth.main([*_before(options), *options.growth])
    if options.looking is not None:
        from backhaul.bench import looking

        return looking.main([*_before(options), *options.looking])
    if options.cuda is not None:
        from backhaul.bench import cuda

        return cuda.main([*_before(options), *options.cuda])
    if options.between is not None:
        from backhaul.bench import between

        return between.main([*_before(options), *options.between])
    if options.scale is not None:
        from backhaul.bench import scale

        return scale.main([*_before(options), *options.scale])
    return _compare(options)


def _before(options: argparse.Namespace) -> list[str]:
    """The options before ``--explain`` or ``--growth``, which also apply to these."""
    for name in ("check", "write_baseline", "pin", "markdown"):
        if getattr(options, name):
            options.parser.error(f"--{name.replace('_', '-')} is for the comparison with torch only")
    given = [("--only", name) for name in options.only or ()]
    given += [(f"--{name}", str(path)) for name in ("json", "plot") if (path := getattr(options, name)) is not None]
    return [*([f"--{options.size}"] if options.size else []), *(part for pair in given for part in pair)]


def _compare(options: argparse.Namespace) -> int:
    if options.pin:
        # Before torch is imported: threads and processes inherit the affinity from their creator.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from backhaul.bench import baseline, compare, plot, table

    parser: argparse.ArgumentParser = options.parser
    if options.list:
        print("\n".join(compare.NAMES))
        return 0
    plan = _plan(options)
    try:
        before = baseline.read(options.check) if options.check else {}
    except baseline.BadBaseline as error:
        parser.error(str(error))
    for path in (options.json, options.markdown, options.write_baseline, options.plot and plot.paths(options.plot)[0]):
        if path is not None:
            _make_room(parser, path)
    result = compare.run(plan)
    table.write(result, sys.stdout)
    data = table.as_json(result)
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(table.as_markdown(result))
    if options.plot is not None:
        print(*plot.draw(data, options.plot) if plot.is_available() else [plot.HOW_TO_GET_IT])
    if options.write_baseline is not None:
        baseline.write(options.write_baseline, result.rows, data["host"])
    code = 0
    if options.check is not None:
        code = check(
            options.check,
            before,
            result,
            lambda names: compare.run(plan.closer(names)),
            floors=options.size != "smoke",  # its single round says nothing about floors
        )
    return 1 if result.failed else code


def _plan(options: argparse.Namespace) -> Plan:
    from backhaul.bench import compare

    plan = {None: compare.FULL, "quick": compare.QUICK, "smoke": compare.SMOKE}[options.size]
    if options.only is None:
        return plan
    for name in options.only:
        if name not in compare.NAMES:
            known = ", ".join(f'"{known}"' for known in compare.NAMES)
            options.parser.error(f"there is no work called {name!r}; there are {known}")
    return plan.only(options.only)


def _make_room(parser: argparse.ArgumentParser, path: Path) -> None:
    # Fail now, not after minutes of measuring.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to {path.parent}: {error.strerror}")


def check(
    path: Path, before: dict[str, float], result: Result, again: Callable[[list[str]], Result], *, floors: bool = True
) -> int:
    """Hold a run against the baseline that was read from a file, and against the floors; returns the exit code.

    What has lost too much, or is below its floor, is measured ``again`` before that counts: the machine may have been
    busy with something else.
    """
    from backhaul.bench import baseline, compare, table

    now = baseline.ratios(result.rows)
    if not now:
        print(f"nothing to compare with {path}: no ratio to torch was measured", file=sys.stderr)
        return 1
    lost = baseline.losses(now, before)
    below = _below(result) if floors else {}
    failed = False
    if lost or below:
        names = compare.workloads_of([*(loss.work for loss in lost), *below])
        reasons = [f"lost more than {baseline.MOST_LOST:.0%}"] if lost else []
        reasons += ["is below a floor"] if below else []
        print(f"measuring again what {' or '.join(reasons)}: {', '.join(names)}", flush=True)
        second = again(names)
        table.write(second, sys.stdout)
        later = baseline.ratios(second.rows)
        lost = baseline.losses({loss.work: later.get(loss.work, loss.now) for loss in lost}, before)
        measured = {row.figure.name for row in second.rows}
        still = _below(second)
        below = {work: still.get(work, text) for work, text in below.items() if work in still or work not in measured}
        failed = bool(second.failed)
    for loss in lost:
        print(f"lost: {loss}")
    for work, text in below.items():
        print(f"floor: {work}: {text}")
    unknown = baseline.gone(before, compare.FIGURES)
    for work in unknown:
        print(f"gone: {work}: {path} has it, but nothing measures it any more")
    for work in now:
        if work not in before:
            print(f"new: {work}: not in {path}")
    held = sum(work in before for work in now) - len(lost)
    print(f"{held} of {held + len(lost)} ratios are no more than {baseline.MOST_LOST:.0%} below those in {path}")
    return 1 if lost or below or unknown or failed else 0


def _below(result: Result) -> dict[str, str]:
    """The figures that do not reach their floors, and which floors those are."""
    from backhaul.bench.floors import standing

    found = ((row.figure.name, standing(row, result.pinned)) for row in result.rows)
    return {name: stands.text for name, stands in found if stands is not None and stands.met == "nothing"}
