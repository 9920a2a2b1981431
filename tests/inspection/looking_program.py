"""Inspects the threads repeatedly while others start threads, and garbage with finalizers is collected."""

import gc
import threading
import time

from backhaul.agent.activity import Activity
from backhaul.inspection.threads import describe_threads

SECONDS = 2.0


class Garbage:
    """Only the collector frees it, and its finalizer releases the GIL."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


def start_threads(over: threading.Event) -> None:
    while not over.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


def main() -> None:
    over = threading.Event()
    starters = [threading.Thread(target=start_threads, args=(over,), daemon=True) for _ in range(4)]
    for starter in starters:
        starter.start()
    gc.set_threshold(5)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(4):
            Garbage()
        describe_threads(Activity())
    over.set()
    for starter in starters:
        starter.join()
    assert gc.isenabled()
    print("done")


main()
