"""Random programs of a user around a training loop, on all ranks and by one process that does the averaged work.

A seed makes a program: actions with their settings. Each program is right, refused (an error on all ranks, with words), or wrong; a
wrong one is made as short as it can be, and printed. LOOPS_SAY=1: each rank prints each program before it runs, which tells where
one hangs.
"""

import os
import random

import numpy as np

MOST_REFUSED = 0.02
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)


def name_of(kind):
    return getattr(kind, "__name__", kind)


class Settings:
    """What an action does in particular. ways: of the program's models, what a forward pass may take; zeros: how gradients go."""

    def __init__(self, rng, zeros=(), ways=()):
        self.seed = rng.randrange(10**6)
        self.zero = rng.choice(zeros) if zeros else None
        self.way = rng.choice(ways) if ways else None
        self.coin = rng.random() < 0.5
        self.number = rng.randrange(4)

    def __repr__(self):
        return f"seed={self.seed} zero={self.zero!r} way={self.way} coin={self.coin} number={self.number}"


class Loops:
    """front: its name. world(front, seed, ranks, kind): one side, which does the work of these ranks, and which actions are called
    with; front is None for the process alone. Its close() gives the parameters at the end. gather(object): a list of all ranks'.
    """

    steps = 8
    close_enough = 1e-4

    def __init__(self, front, world, actions, plain, kinds, size, rank, gather, **settings):
        self.front, self.world, self.actions, self.plain, self.kinds = front, world, actions, plain, kinds
        self.size, self.rank, self.gather, self.settings = size, rank, gather, settings

    def program_of(self, seed):
        rng = random.Random(f"{self.front} {seed}")
        kind = rng.choice(self.kinds)
        program = []
        for _ in range(self.steps):
            action = rng.choice(self.actions) if rng.random() < 0.75 else self.plain
            program.append((action, Settings(rng, **self.settings)))
        return kind, program

    def run(self, seed, kind, program):
        """How it went here: "right", "wrong: ...", or "refused: ..."."""
        self.trace(f"seed {seed} {name_of(kind)} {[(a.__name__, s) for a, s in program]}")
        alone = self.world(None, seed, range(self.size), kind)
        try:
            for action, settings in program:
                action(alone, settings)
            wanted = alone.close()
        except RuntimeError:
            return "right"  # whatever comes of it: one process refuses it
        try:
            ours = self.world(self.front, seed, [self.rank], kind)
            for action, settings in program:
                action(ours, settings)
            got = ours.close()
        except REFUSALS as error:
            return f"refused: {type(error).__name__}: {error}"
        far = np.abs(np.asarray(got) - np.asarray(wanted)).max()
        return "right" if far < self.close_enough else f"wrong: rank {self.rank} is {far:.2g} off"

    def outcome_of(self, seed, kind, program):
        """Of all ranks together."""
        mine = self.run(seed, kind, program)
        if mine != "right":
            self.trace(f"seed {seed}: {mine}")
        everyone = self.gather(mine)
        wrong = [text for text in everyone if text.startswith("wrong")]
        refused = [text for text in everyone if text.startswith("refused")]
        if refused and len(refused) < len(everyone):
            return f"wrong: ranks are apart: {everyone}"
        return (wrong or refused or ["right"])[0]

    def shrunk(self, seed, kind, program):
        """The shortest that is still wrong."""
        at = len(program) - 1
        while at >= 0:
            shorter = program[:at] + program[at + 1 :]
            if self.outcome_of(seed, kind, shorter).startswith("wrong"):
                program = shorter
            at -= 1
        return program

    def all_of(self, first, last):
        """The seeds from first to last - 1. The status: 1 if one was wrong, or more than MOST_REFUSED of them were refused."""
        right, refused, wrong = 0, [], 0
        for seed in range(first, last):
            kind, program = self.program_of(seed)
            outcome = self.outcome_of(seed, kind, program)
            if outcome == "right":
                right += 1
            elif outcome.startswith("refused"):
                refused.append((seed, outcome))
            else:
                wrong += 1
                self.say(f"{self.front}, seed {seed}: {outcome}")
                if "apart" not in outcome:
                    for action, settings in self.shrunk(seed, kind, program):
                        self.say(f"    {name_of(kind)}: {action.__name__} {settings}")
        for seed, text in refused:
            self.say(f"{self.front}, seed {seed}: {text}")
        self.say(f"{self.front}: {right} right, {len(refused)} refused, {wrong} wrong")
        return 1 if wrong or len(refused) > MOST_REFUSED * (last - first) else 0

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def trace(self, text):
        if os.environ.get("LOOPS_SAY"):
            print(f"rank {self.rank} {text}", flush=True)
