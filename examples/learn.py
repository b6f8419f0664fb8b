"""A loop that learns: a trainer and a serving rollout exchange weights in each step. It takes two cores and torch.

python examples/learn.py [STEPS]: a tiny transformer learns to say three digits backwards, from a reward alone. The
rollout is a process of its own that generates answers in BF16. The trainer counts the right digits, makes a step of
REINFORCE in float32, and brings the new weights into the rollout with `putget_transfer.weights`. Each answer carries
the version of the weights that made it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

import torch
from torch import nn

import putget_transfer as pt
from putget_transfer import weights

DIGITS, LENGTH, PROMPTS, SAMPLES = 6, 3, 32, 8
WIDTH, HEADS, LAYERS, SEED = 48, 4, 2, 3
STEPS, SHOWN = 100, 10


class Policy(nn.Module):
    """A causal transformer: prompt and answer are one sequence of digits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.digits = nn.Embedding(DIGITS, WIDTH)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the digit behind each digit."""
        length = tokens.shape[1]
        found = self.digits(tokens) + self.places.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.layers:
            found = layer(found, src_mask=mask)
        return self.out(found)  # type: ignore[no-any-return]


def make_engine() -> pt.Engine:
    """Return an engine that reaches the other processes of this host."""
    return pt.Engine.builder().group(pt.DeviceGroup.host()).build()


class Server:
    """The rollout, in a process of its own."""

    def __init__(self, params: list[weights.Param]) -> None:
        torch.set_num_threads(1)
        self.policy = Policy().to(torch.bfloat16).eval()
        self.slots = weights.record(self.policy, weights.checkpoint(params))
        self.rollout = weights.Rollout(make_engine(), self.slots, weights.plan(params, [self.slots]), 0)

    def answer(self, prompts: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return sampled answers, and the version of the weights that made them."""
        tokens = prompts
        with torch.no_grad():
            for _ in range(LENGTH):
                chances = self.policy(tokens)[:, -1].float().softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
        return tokens, self.rollout.version

    def call(self, name: str, *arguments: Any) -> Any:
        """Carry out a call: a request, or one of the controller. Calls come between two requests."""
        if name == "slots":
            return self.slots
        return (self.answer if name == "answer" else getattr(self.rollout, name))(*arguments)


def serve(params: list[weights.Param], pipe: Any) -> None:
    """Carry out calls that come through a pipe."""
    server = Server(params)
    while (call := pipe.recv()) is not None:
        try:
            pipe.send((True, server.call(*call)))
        except Exception as error:
            pipe.send((False, error))


class Remote:
    """The rollout, as its users and the controller see it."""

    def __init__(self, params: list[weights.Param]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(params, other), daemon=True)
        self.process.start()
        other.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.call(name, *arguments)

    def call(self, *call: Any) -> Any:
        """Call it there."""
        self.pipe.send(call)
        done, result = self.pipe.recv()
        if not done:
            raise result
        return result


def step(policy: Policy, optimiser: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Make a step of REINFORCE with answers to prompts, `SAMPLES` to each; return their reward."""
    prompts, answers = tokens[:, :LENGTH], tokens[:, LENGTH:]
    rewards = (answers == prompts.flip(1)).float()
    by_prompt = rewards.view(PROMPTS, SAMPLES, LENGTH)
    gains = (by_prompt - by_prompt.mean(1, keepdim=True)).view_as(rewards)
    chosen = policy(tokens)[:, LENGTH - 1 : -1].log_softmax(-1).gather(2, answers[:, :, None])[:, :, 0]
    loss = -(gains * chosen).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return float(rewards.mean())


def main() -> None:
    """Train; print the reward."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    torch.set_num_threads(1)
    policy = Policy()
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    params = weights.describe(policy, rank=0)
    server = Remote(params)
    schedule = weights.plan(params, [server.call("slots")])
    trainer = weights.Trainer(make_engine(), schedule, 0, policy)
    controller = weights.Controller([trainer], {"rollout": [server]})
    controller.update(1, deadline_s=60)
    rewards, seconds = [], 0.0
    for version in range(1, steps + 1):
        prompts = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(SAMPLES, 0)
        tokens, made_by = server.call("answer", prompts)
        assert made_by == version, f"version {made_by} answered; {version} is in force"
        rewards.append(step(policy, optimiser, tokens))
        begin = time.monotonic()
        controller.update(version + 1, deadline_s=60)
        seconds += time.monotonic() - begin
        if version == 1 or version % SHOWN == 0:
            last = rewards[-SHOWN:]
            print(f"version {version:3}: {sum(last) / len(last):6.1%} of the digits are right", flush=True)
    print(f"{steps} updates of {schedule.num_bytes / 1e3:.0f} kB took {1e3 * seconds / steps:.1f} ms each")
    server.pipe.send(None)


if __name__ == "__main__":
    main()
