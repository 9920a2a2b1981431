"""A program under ``backhaul run``: one call, and a look at the metrics of this worker."""

import logging
import os
import sys
import urllib.request

from backhaul import rpc

if "configured" in sys.argv:
    logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
rpc.init_rpc()
if rpc.get_worker_info().id == 0:
    rpc.rpc_sync("worker1", abs, (-1,))
    port = int(os.environ["BACKHAUL_METRICS_PORT"]) + int(os.environ["LOCAL_RANK"])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        print(*(line for line in answer.read().decode().splitlines() if line.startswith("backhaul_calls_total")))
rpc.shutdown()
