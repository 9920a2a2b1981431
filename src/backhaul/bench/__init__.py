"""The benchmark behind ``backhaul bench``: Backhaul beside torch RPC and beside the limits of the machine.

| module | what it knows |
|---|---|
| `command` | the command line; imports no torch |
| `compare` | the rounds: which system does which work when |
| `entrants` | the systems of a run, each started afresh after a failure |
| `systems`, `life`, `orders` | the processes of a system, from outside and from inside, and the messages between |
| `ports` | what a workload can ask of a system |
| `workloads`, `gradients`, `training`, `busy` | what is measured |
| `footprint` | the cost of a system before and between calls: start-up, idle CPU, memory |
| `launched`, `rest` | idle workers as the launchers leave them, and the resources they use |
| `rows` | the numbers of the rounds, and their ratios |
| `floors`, `baseline` | how fast it must be, and how fast it was |
| `table`, `plot` | what is shown |
"""
