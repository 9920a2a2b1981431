"""``backhaul top``, ``backhaul stuck`` and ``backhaul dashboard``: looking at a running cluster."""

from __future__ import annotations

import argparse

# Nothing here imports torch before a command runs, because every command line imports this module.


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    where = _where()
    top = commands.add_parser(
        "top",
        parents=[where],
        help="watch the workers of a running cluster",
        description="Show the workers of a running cluster: calls and bytes a second, what is running, waiting gates, "
        "contexts, references, memory, processor. Keys sort the workers, open one of them to see what each of its "
        "threads does, and show what hangs. It changes nothing in the cluster.",
    )
    top.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    top.add_argument("--once", action="store_true", help="print one picture and exit; needs no terminal")
    top.add_argument("--json", action="store_true", help="with --once: print it as JSON")
    top.add_argument("--sort", choices=("name", "calls", "bytes", "memory", "processor", "running"), default="name")
    top.set_defaults(handle=_top, parser=top)

    stuck = commands.add_parser(
        "stuck",
        parents=[where],
        help="say what each waiting thread of a cluster waits for",
        description="Say what each waiting thread of a running cluster waits for, over all workers, and name cycles, "
        "dead ends and lost workers. This explains why a call or a backward pass hangs. The exit code is 1 if there "
        "is a cycle, or a worker is lost.",
    )
    stuck.add_argument("--json", action="store_true", help="print the graph as JSON")
    stuck.set_defaults(handle=_stuck, parser=stuck)

    dashboard = commands.add_parser(
        "dashboard",
        parents=[where],
        help="the same and more as a web page, for this machine only",
        description="Serve a web page on loopback with the workers of a running cluster, the traffic between them, "
        "latencies, the last backward passes, drawings of live contexts, stacks, and what hangs. The page "
        "opens only with the printed address, which contains a secret token. It changes nothing in the cluster.",
    )
    dashboard.add_argument("--port", type=int, default=0, metavar="P", help="the port (default: any free port)")
    dashboard.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )
    dashboard.add_argument("--no-browser", action="store_true", help="do not try to open a browser")
    dashboard.set_defaults(handle=_dashboard, parser=dashboard)


def _where() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "where",
        nargs="?",
        metavar="WHERE",
        help="host:port of one of the workers, or the directory with their sockets "
        "(default: your only cluster on this machine)",
    )
    parser.add_argument("--key-file", metavar="FILE", help="the cluster's key, for workers on other hosts")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 3600 seconds")
    return seconds


def _top(options: argparse.Namespace) -> int:
    from backhaul.seeing import top

    return top.run(options)


def _stuck(options: argparse.Namespace) -> int:
    from backhaul.seeing import top

    return top.print_stuck(options)


def _dashboard(options: argparse.Namespace) -> int:
    from backhaul.seeing.dashboard import server

    return server.run(options)
