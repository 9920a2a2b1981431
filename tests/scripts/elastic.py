"""A worker whose group torchrun starts again: the first one of the second node dies in the first round."""

import os
import signal
import threading

import backhaul.rpc as rpc

_has_asked = threading.Event()


def attempt() -> str:
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def await_that_it_has_asked() -> None:
    """Return when this worker has heard of all attempts."""
    _has_asked.wait()


def main() -> None:
    # The same port each time: what listens there is never one of the round before.
    port = int(os.environ["FIRST_PORT"]) + int(os.environ["LOCAL_RANK"])
    rpc.init_rpc(rpc_backend_options=rpc.RpcOptions(port=port))
    names = [worker.name for worker in rpc.get_worker_infos()]
    counts = [rpc.rpc_sync(name, attempt) for name in names]
    _has_asked.set()
    if counts == ["0"] * len(names):
        if os.environ["GROUP_RANK"] == "1":
            for name in names:  # a worker that still asks would fail, and count a restart of its own
                rpc.rpc_sync(name, await_that_it_has_asked, timeout=0)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # until torchrun ends it
    line = " ".join(["restarts", *sorted(counts)])
    os.write(1, f"{line}\n".encode())  # one write: `print` may make several, between those of other workers
    rpc.shutdown()


if __name__ == "__main__":
    main()
