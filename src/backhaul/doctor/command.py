"""``backhaul doctor [--key-file FILE] [--host HOST] …``"""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what a worker on this machine would do, and what is wrong",
        description="Report what a worker with these options and this environment would listen on, how it would tell "
        "peers from strangers, and which address it would announce. Then try all of it, and list what is wrong, each "
        "with a remedy. The exit code is 0 if nothing is wrong. The doctor contacts no other machine, except that it "
        "tries to connect to the store. With --ready, report only whether the workers that run here answer; the exit "
        "code is 0 if they do.",
    )
    parser.add_argument("--key-file", metavar="FILE", help="the cluster's key, as `backhaul keygen` makes it")
    parser.add_argument("--host", metavar="HOST", help="the address to listen on for other hosts (default: loopback)")
    parser.add_argument("--port", type=int, metavar="PORT", help="the port to listen on (default: any free port)")
    for what, text in (("ca", "trusted issuers"), ("cert", "this worker's certificate"), ("key", "its private key")):
        parser.add_argument(f"--tls-{what}", metavar="FILE", help=f"your own certificates, PEM: {text}")
    parser.add_argument("--trust", choices=("cluster", "federation"), help="what peers may do (default: cluster)")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), help="how to reach peers (default: auto)")
    parser.add_argument("--init-method", metavar="URL", help="where the group meets (default: env://)")
    parser.add_argument("--name", metavar="NAME", help="the worker's name (default: as init_rpc would choose it)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="only report whether a worker of this user is up on this machine; for probes",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="with --ready: how many workers must be up (default: 1)"
    )
    parser.set_defaults(handle=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    # Imported here, so that the other commands need not wait for these imports.
    if options.ready:
        from backhaul.doctor import ready

        if options.workers < 1:
            options.parser.error(
                f"--workers {options.workers} must be at least 1: any machine has that many workers up"
            )

        return ready.run(options.workers, options.name)
    from backhaul.doctor import checkup

    return checkup.run(options)
