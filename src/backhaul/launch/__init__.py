"""Starts worker processes on this machine, and sees that none outlives its launcher.

- `session`      what the workers of one launch share: directory, secret, port
- `guardian`     the process that cleans up when the launcher is killed outright
- `supervisor`   starts, watches and stops processes; carries their output
- `prefix`       the worker's name in front of every line
- `job`          all or nothing: the first failure stops the rest
- `command`      ``backhaul run``
- `keygen`       ``backhaul keygen``
- `members`      the worker processes of ``cluster(n)``
- `main_module`  gives a worker the driver's ``__main__``
- `interactive`  ships what was typed into a notebook or an interpreter

Nothing here imports torch.
"""
