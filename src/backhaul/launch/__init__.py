"""Starts worker processes, here and on other hosts, and makes sure that none outlives its launcher.

- `session`      what the workers of one launch share: directory, secret, port
- `guardian`     the process that cleans up when the launcher is killed outright
- `supervisor`   starts, watches and stops processes; carries their output
- `prefix`       the worker's name in front of every line
- `outlet`       a thread that writes what workers print
- `console`      prints the output of the workers here, and waits for its reader
- `job`          all or nothing: the first failure stops the rest
- `command`      ``backhaul run``
- `keygen`       ``backhaul keygen``
- `members`      the worker processes of ``cluster(n)``
- `main_module`  gives a worker the driver's ``__main__``
- `interactive`  ships what was typed into a notebook or an interpreter

Over several hosts:

- `over_hosts`   ``backhaul run --hosts``: the command line becomes terms
- `placement`    hosts, and which worker goes where, pure
- `terms`        what is launched, where and how, pure
- `course`       decides what to do next from what the hosts report, pure
- `ssh`          the command that starts a steward, and what its failures mean, pure
- `steward`      the process on each host that starts and ends the workers there
- `protocol`     the messages between launcher and steward, without I/O
- `lease`        how long a steward runs without an answer from the launcher, pure

Nothing here imports torch.
"""
