"""A training script for two processes, as people write them; knows nothing of torch-echo. Run by test_distributed.

Options say what is different: the way the processes are started, and what goes wrong.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(index: int, args: argparse.Namespace) -> None:
    if args.spawn:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": args.spawn}
        dist.init_process_group("gloo", rank=index, world_size=2)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 64
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(8):
        x, y = torch.randn(512, width), torch.randint(10, (512,))
        if step == args.fail_at and rank == args.failing_rank:
            raise ValueError("this rank fails")
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"loss {loss.item()}")
    torch.save([*model.parameters(), torch.get_rng_state()], args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--spawn", metavar="PORT")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--failing-rank", type=int)
    given = parser.parse_args()
    if given.spawn:
        mp.spawn(main, args=(given,), nprocs=2)
    else:
        main(0, given)
