#!/usr/bin/env python3
"""Learns embeddings of the words of real text, with sparse gradients, on one process or on many, and logs the same curve.

    python train_embedding.py --single --log single.json
    bpslaunch -np 4 python train_embedding.py --log distributed.json
    python plot.py single.json distributed.json

The text is Python's own standard library; the model is word2vec's: a word and one from beside it belong together, a word and
one drawn at random do not (skip-gram with negative samples). Each step touches a few hundred rows of two tables of
--words rows; bps sends and sums those rows alone. Lines marked "bps" are what a program for one process gains.
"""

import argparse
import collections
import json
import pathlib
import re
import sys
import sysconfig
import time

import torch
import torch.nn.functional as F

import bps.torch as bps

WINDOW = 3  # how far from a word its neighbours are


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--single", action="store_true", help="one process, without bps")
    parser.add_argument("--log", help="JSON file to write losses to (rank 0)")
    parser.add_argument("--text", help="folder with .py or .txt files, instead of Python's standard library")
    parser.add_argument("--words", type=int, default=20000, help="most frequent words that have a row of their own")
    parser.add_argument("--width", type=int, default=64, help="elements of a row")
    parser.add_argument("--negatives", type=int, default=5, help="random words for each pair")
    parser.add_argument("--batch", type=int, default=256, help="pairs of one step, over all ranks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.0, help="default: 150 for sgd, 0.01 for adam")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def read_words(folder, n_words):
    """The text as a tensor of word numbers, the most frequent being 0. Rarer words than n_words are left out."""
    folder = pathlib.Path(folder or sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.*") if path.suffix in (".py", ".txt"))
    words = [w for path in files for w in re.findall(r"[A-Za-z_]\w+", path.read_text(errors="ignore").lower())]
    # Equally frequent words by the alphabet: the same numbers on every rank.
    ranked = sorted(collections.Counter(words).items(), key=lambda item: (-item[1], item[0]))
    numbers = {word: i for i, (word, _) in enumerate(ranked[:n_words])}
    if not numbers:
        sys.exit(f"train_embedding.py: no words in the .py and .txt files of {folder}")
    return torch.tensor([numbers[word] for word in words if word in numbers])


class Net(torch.nn.Module):
    def __init__(self, n_words, width):
        super().__init__()
        self.word = torch.nn.Embedding(n_words, width, sparse=True)
        self.beside = torch.nn.Embedding(n_words, width, sparse=True)
        torch.nn.init.uniform_(self.word.weight, -0.5 / width, 0.5 / width)
        torch.nn.init.zeros_(self.beside.weight)

    def forward(self, words, candidates):
        """How well each row of candidates fits its word."""
        return (self.beside(candidates) @ self.word(words).unsqueeze(2)).squeeze(2)


def batches(text, arguments):
    """(words, candidates), the same on every rank. The first candidate was beside the word, the others are random."""
    generator = torch.Generator().manual_seed(arguments.seed)
    frequency = torch.bincount(text).float() ** 0.75
    for _ in range(arguments.steps):
        at = torch.randint(WINDOW, len(text) - WINDOW, (arguments.batch,), generator=generator)
        distance = torch.randint(1, WINDOW + 1, (arguments.batch,), generator=generator)
        side = torch.randint(0, 2, (arguments.batch,), generator=generator) * 2 - 1
        n = arguments.batch * arguments.negatives
        random = torch.multinomial(frequency, n, replacement=True, generator=generator).view(arguments.batch, -1)
        yield text[at], torch.cat([text[at + distance * side].unsqueeze(1), random], 1)


def make_optimizer(arguments, model):
    if arguments.optimizer == "adam":
        return torch.optim.SparseAdam(model.parameters(), lr=arguments.lr or 0.01)
    return torch.optim.SGD(model.parameters(), lr=arguments.lr or 150)


def main():
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    text = read_words(arguments.text, arguments.words)
    model = Net(int(text.max()) + 1, arguments.width)
    optimizer = make_optimizer(arguments, model)

    rank, size = 0, 1
    if not arguments.single:
        bps.init()  # bps
        bps.broadcast_parameters(model.state_dict(), root_rank=0)  # bps
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())  # bps
        rank, size = bps.rank(), bps.size()
    if arguments.batch % size:
        sys.exit(f"train_embedding.py: a batch of {arguments.batch} cannot be shared evenly by {size} ranks")

    losses, start = [], time.monotonic()
    for words, candidates in batches(text, arguments):
        words, candidates = words[rank::size], candidates[rank::size]
        targets = torch.zeros(candidates.shape)
        targets[:, 0] = 1
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(words, candidates), targets)
        loss.backward()
        optimizer.step()
        # The mean of the ranks' losses is the loss of the whole batch: their shares are of one size.
        whole = loss if arguments.single else bps.push_pull(loss.detach(), name="loss")
        losses.append(whole.item())
        if rank == 0 and len(losses) % 50 == 0:
            print(f"step {len(losses)}: loss {sum(losses[-50:]) / 50:.4f}", flush=True)

    if rank == 0:
        seconds = time.monotonic() - start
        print(f"{len(losses)} steps in {seconds:.1f} s on {size} rank(s), {model.word.num_embeddings} words")
        if arguments.log:
            log = {"size": size, "seconds": seconds, "losses": losses, **vars(arguments)}
            pathlib.Path(arguments.log).write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
