"""What the environment of a process says about its place in a group, in the terms of the launcher that started it.

- `table`       one row for each fact: the variable that decides it, and the variables that were overruled
- `launchers`   the facts that each launcher gives
- `nodelists`   Slurm's lists of nodes, ``node[01-16,20]``
- `reach`       whether the other nodes can reach the place where the group is to meet

All but the last is pure: an environment goes in, rows come out. A problem in a row is raised only when the row is used.
"""
