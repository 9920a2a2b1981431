"""A language model whose embedding table and decoder live on a parameter server.

    trainer (this process)                      ps
    ┌───────────────────────┐                   ┌───────────────┐
    │ words ────────────────┼── words ────────► │ embedding     │
    │            LSTM   ◄───┼── vectors ─────── │               │
    │              └────────┼── hidden ───────► │ decoder       │
    │ loss  ◄───────────────┼── scores ──────── │               │
    └───────────────────────┘                   └───────────────┘

The tables for a large vocabulary are the bulk of such a model. Here they need not fit into the trainer. One step is one
autograd context: forward, backward over both processes, clipping by the norm of all gradients, and the optimizer. Each
worker does its part for its own parameters. The state of the LSTM goes from one piece of text to the next, detached.

At the end the program compares the trained model with the same model, trained in one process.
"""

from __future__ import annotations

import random
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import backhaul
import backhaul.autograd as dist_autograd
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer, clip_grad_norm_

WIDTH, STREAMS, STRETCH, EPOCHS = 32, 16, 12, 3
LARGEST_NORM = 0.3

torch.set_num_threads(1)  # the processes share the cores, and sums are made in the same order in each

# A sentence takes one word of each list.
GRAMMAR = [["Ada", "Bo", "Cleo"], ["feeds", "sees", "likes"], ["red", "blue", "old"], ["cats", "dogs", "owls"], ["."]]
WORDS = [word for words in GRAMMAR for word in words]
State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """``embedding`` and ``decoder`` are local modules, or `RemoteModule`s that stand for remote ones."""

    def __init__(self, embedding: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = embedding
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.decoder = decoder

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.embedding(words), state)
        return self.decoder(hidden), state


def make_embedding() -> nn.Module:
    torch.manual_seed(1)  # the same values, wherever it is made
    return nn.Embedding(len(WORDS), WIDTH)


def make_decoder() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(WIDTH, len(WORDS))


def make_text(sentences: int) -> Tensor:
    """Sentences such as "Ada feeds old cats .", as numbers of words."""
    chance = random.Random(3)
    return torch.tensor([WORDS.index(chance.choice(words)) for _ in range(sentences) for words in GRAMMAR])


def stretches(text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The text in parallel streams, cut into pieces: the words of each piece, and the word that follows each."""
    streams = text[: len(text) // STREAMS * STREAMS].view(STREAMS, -1).t().contiguous()
    starts = range(0, len(streams) - STRETCH, STRETCH)
    return [(streams[i : i + STRETCH], streams[i + 1 : i + 1 + STRETCH]) for i in starts]


def no_state(streams: int = STREAMS) -> State:
    return torch.zeros(1, streams, WIDTH), torch.zeros(1, streams, WIDTH)


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def train(model: LanguageModel, text: Tensor) -> None:
    params = parameter_rrefs(model)  # the LSTM's here and the others' on ps, in the order of model.parameters()
    optimizer = DistributedOptimizer(torch.optim.Adam, params, lr=0.02)
    for epoch in range(EPOCHS):
        losses, norms, state = [], [], no_state()
        for words, following in stretches(text):
            # Gradients end here, at the start of the piece. They could not go further: the graph of the piece
            # before belongs to a context that has ended.
            state = state[0].detach(), state[1].detach()
            with dist_autograd.context() as context_id:
                scores, state = model(words, state)
                loss = loss_of(scores, following)
                dist_autograd.backward(context_id, [loss])
                norms.append(clip_grad_norm_(context_id, params, LARGEST_NORM))
                optimizer.step(context_id)
            losses.append(loss.item())
        perplexity = torch.tensor(losses).mean().exp()
        clipped = sum(norm > LARGEST_NORM for norm in norms)
        print(f"epoch {epoch}   perplexity {perplexity:5.2f}   clipped {clipped:2} of {len(norms)} steps", flush=True)


def train_alone(model: LanguageModel, text: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(EPOCHS):
        state = no_state()
        for words, following in stretches(text):
            state = state[0].detach(), state[1].detach()
            scores, state = model(words, state)
            optimizer.zero_grad()
            loss_of(scores, following).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()


@torch.no_grad()
def continued(model: LanguageModel, start: str, count: int) -> str:
    """What the model writes after a first word. Without gradients, no context is needed."""
    text, state = [start], no_state(streams=1)
    for _ in range(count):
        scores, state = model(torch.tensor([[WORDS.index(text[-1])]]), state)
        text.append(WORDS[int(torch.multinomial(scores.flatten().softmax(0), 1))])
    return " ".join(text)


def main() -> int:
    text = make_text(800)
    with backhaul.cluster(1, name="trainer", names=["ps"]):
        model = LanguageModel(RemoteModule("ps", make_embedding), RemoteModule("ps", make_decoder))
        print(f"text of {len(text)} words; chance would be a perplexity of {len(WORDS)}")
        train(model, text)
        print(f"it writes: {continued(model, 'Ada', 14)}")
        trained = model.state_dict()  # includes the modules on ps, under the names of one process

    alone = LanguageModel(make_embedding(), make_decoder())
    train_alone(alone, text)
    differ = [name for name, value in alone.state_dict().items() if not torch.equal(trained[name], value)]
    if differ:
        print(f"✗ not as in one process: {', '.join(differ)}")
        return 1
    print(f"✓ all {len(trained)} tensors of the trained model are, bit by bit, those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
