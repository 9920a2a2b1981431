"""What a worker on this machine would do, tried out, and what is wrong: ``backhaul doctor``.

- `command`      the command line
- `checkup`      the order in which things are looked at
- `report`       what was found: facts, notes, and what is wrong
- `machine`      versions, limits, memory, processors
- `credentials`  how peers are told from strangers
- `environment`  this worker's place, as the environment says it: which variable won
- `places`       where it listens, what it announces, where the group meets
- `trial`        does it: listens, greets itself, sends a tensor
- `ready`        apart from all of this: whether workers are up here, for probes

Nothing here imports torch before the trial: it takes longer than all the rest.
"""
