"""Reinforcement learning: observers play on workers, and ask one agent for each move.

    observer1, observer2                    agent (this process)
    ┌─────────────────────┐                 ┌──────────────────────────────┐
    │ an environment      │ ─ observation ► │ policy: draws an action, and │
    │                     │ ◄─── action ─── │ keeps the graph of its log   │
    │ an episode is over  │ ─── rewards ──► │ probability for the update   │
    └─────────────────────┘                 └──────────────────────────────┘

The agent learns with REINFORCE. The environment is a corridor. The door at its right end opens only with the key from
its left end. The best path is known, and the agent must find it. ``--gym`` uses gymnasium's CartPole instead, if it is
installed.

At the end the program compares the gradient of a round played over RPC with that of the same moves in one process.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import backhaul
from backhaul import rpc

OBSERVERS = ["observer1", "observer2"]
ROUNDS, EPISODES = 20, 5  # episodes of each observer in a round
GYM = "--gym" in sys.argv
# The number of inputs of the agent, the mean reward that it must reach, and the best possible one.
INPUTS, ENOUGH, BEST = (4, 60.0, 500.0) if GYM else (12, 0.8, 1 - 7 * 0.02)

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores


class Corridor:
    """Six cells. The start is the third, the key is at the left end, the door at the right end. Each move costs."""

    def reset(self, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        self.cell, self.key, self.moves = 2, False, 0
        return self.seen(), {}

    def step(self, action: int) -> tuple[Tensor, float, bool, bool, dict[str, Any]]:
        self.cell = min(5, max(0, self.cell + (1 if action else -1)))
        self.key = self.key or self.cell == 0
        self.moves += 1
        out = self.key and self.cell == 5
        return self.seen(), (1.0 if out else 0.0) - 0.02, out, self.moves == 50, {}

    def seen(self) -> Tensor:
        return nn.functional.one_hot(torch.tensor(self.cell + 6 * self.key), INPUTS)


@dataclass
class Episode:
    observations: list[Tensor] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class Observer:
    """Has an environment. Lives on the worker of its name."""

    def __init__(self) -> None:
        self.name = rpc.get_worker_info().name
        self.environment = importlib.import_module("gymnasium").make("CartPole-v1") if GYM else Corridor()
        self.environment.reset(seed=OBSERVERS.index(self.name))

    def play(self, agent: rpc.RRef[Agent]) -> list[Episode]:
        episodes = [Episode() for _ in range(EPISODES)]
        for episode in episodes:
            seen, _ = self.environment.reset()
            over = False
            while not over:
                observation = torch.as_tensor(seen, dtype=torch.float64)
                action = agent.rpc_sync().act(self.name, observation)
                seen, reward, ended, cut_off, _ = self.environment.step(action)
                episode.observations.append(observation)
                episode.actions.append(action)
                episode.rewards.append(reward)
                over = ended or cut_off
        return episodes


class Agent:
    """Has the policy. Lives here."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        # Observers call concurrently, in any order. Each has its own generator, so the order does not matter.
        self.dice = {name: torch.Generator().manual_seed(number) for number, name in enumerate(OBSERVERS)}
        self.kept: dict[str, list[Tensor]] = {name: [] for name in OBSERVERS}

    def act(self, observer: str, observation: Tensor) -> int:
        """The action for an observer. The observers call this."""
        log_probabilities = self.policy(observation).log_softmax(dim=0)
        action = int(torch.multinomial(log_probabilities.exp(), 1, generator=self.dice[observer]))
        self.kept[observer].append(log_probabilities[action])
        return action

    def loss(self, episodes: list[Episode]) -> Tensor:
        """The loss of the last round, with the graphs that `act` has kept."""
        log_probabilities = torch.stack([each for name in OBSERVERS for each in self.kept[name]])
        self.kept = {name: [] for name in OBSERVERS}
        return reinforce(log_probabilities, episodes)


def reinforce(log_probabilities: Tensor, episodes: list[Episode]) -> Tensor:
    """Makes actions with more reward than others more probable."""
    returns: list[float] = []
    for episode in episodes:
        to_come, backwards = 0.0, []
        for reward in reversed(episode.rewards):
            to_come = reward + 0.97 * to_come
            backwards.append(to_come)
        returns += reversed(backwards)
    advantages = torch.tensor(returns)
    return -(log_probabilities * (advantages - advantages.mean()) / (advantages.std() + 1e-6)).mean()


def loss_alone(policy: nn.Module, episodes: list[Episode]) -> Tensor:
    """The loss of recorded episodes in one process, with all observations in one batch."""
    observations = torch.stack([seen for episode in episodes for seen in episode.observations])
    actions = torch.tensor([action for episode in episodes for action in episode.actions])
    log_probabilities = policy(observations).log_softmax(dim=1)
    return reinforce(log_probabilities[torch.arange(len(actions)), actions], episodes)


def main() -> int:
    if GYM and importlib.util.find_spec("gymnasium") is None:
        sys.exit("--gym needs gymnasium: pip install gymnasium")
    agent, rewards = Agent(), []
    with backhaul.cluster(len(OBSERVERS), name="agent", names=OBSERVERS):
        reference = rpc.RRef(agent)
        observers = [rpc.remote(name, Observer) for name in OBSERVERS]
        for number in range(ROUNDS):
            played = torch.futures.wait_all([observer.rpc_async().play(reference) for observer in observers])
            episodes = [episode for each in played for episode in each]
            rewards.append(sum(sum(episode.rewards) for episode in episodes) / len(episodes))
            if number % 5 == 0 or number == ROUNDS - 1:
                moves = " ".join(f"{len(episode.actions):3}" for episode in episodes)
                print(f"round {number:2}   mean reward {rewards[-1]:6.2f}   moves in each episode {moves}", flush=True)
            before = copy.deepcopy(agent.policy)
            agent.optimizer.zero_grad()
            agent.loss(episodes).backward()  # type: ignore[no-untyped-call]
            agent.optimizer.step()

    alone = torch.autograd.grad(loss_alone(before, episodes), list(before.parameters()))
    found = [parameter.grad for parameter in agent.policy.parameters()]
    apart = max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True) if a is not None)
    reached = sum(rewards[-5:]) / 5
    print(f"mean reward of the last five rounds {reached:.2f}; the best possible is {BEST:.2f}")
    print(f"gradients of the last round: at most {apart:.1g} from those of one process")
    if reached < ENOUGH or apart > 1e-12:
        print(f"✗ the reward should be at least {ENOUGH}, the distance at most 1e-12")
        return 1
    print("✓ the agent has learned it, by the gradients of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
