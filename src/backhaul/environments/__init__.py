"""What the environment of a process says about its place in a group, in the words of whatever has started it.

- `table`       one row for each thing: which variable says it, and which others were passed over
- `launchers`   what each launcher says
- `nodelists`   Slurm's lists of nodes, ``node[01-16,20]``

All of it is pure: an environment goes in, rows come out, and only the user of a row raises what is wrong with it.
"""
