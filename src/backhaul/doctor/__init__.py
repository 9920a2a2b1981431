"""``backhaul doctor``: what a worker on this machine would do, tried out, and what is wrong.

- `command`      the command line
- `checkup`      the order of the examinations
- `report`       the findings: facts, notes and faults
- `machine`      versions, limits, memory, processors
- `credentials`  how a worker tells peers from strangers
- `environment`  this worker's place according to the environment: which variable won
- `places`       where the worker listens, what it announces, where the group meets
- `trial`        a trial: listens, greets itself, sends a tensor
- `ready`        separate from the rest: whether workers are up here, for probes

Nothing here imports torch before the trial, because that import takes longer than everything else.
"""
