"""A program that starts processes in the ways given as arguments: ``fork``, ``spawn``, ``forkserver``, ``cluster``.

They print what is behind torch's name there. Only this process installs Backhaul. PACKAGES holds the package path:
run this with ``python -S``, so that child processes do not know the path unless they are told.
"""

import multiprocessing
import os
import sys

if __name__ == "__main__":
    sys.path[:0] = os.environ.pop("PACKAGES", "").split(os.pathsep)

    import backhaul
    import backhaul.dropin

    backhaul.dropin.install()

import torch.distributed.rpc as rpc


def behind():
    return rpc.__name__


def tell(how):
    os.write(1, f"{how}: {behind()}\n".encode())


def main():
    multiprocessing.set_forkserver_preload(["__main__", "starting_library"])
    for how in sys.argv[1:]:
        if how == "cluster":
            with backhaul.cluster(1) as (worker,):
                os.write(1, f"cluster: {worker.rpc_sync(behind)}\n".encode())
        else:
            process = multiprocessing.get_context(how).Process(target=tell, args=(how,))
            process.start()
            process.join()
            assert process.exitcode == 0, how


if __name__ == "__main__":
    main()
