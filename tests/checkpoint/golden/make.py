"""Writes a small checkpoint with the torch that runs this: make.py FOLDER

FOLDER/torch_<version> is kept in the repository, and read by tests/checkpoint/golden_test.cpp.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def rank_main(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29661", RANK=str(rank), WORLD_SIZE="2",
                      GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo")
    net = torch.nn.Linear(3, 5)
    with torch.no_grad():
        net.weight.copy_(torch.arange(15.0).view(5, 3))
        net.bias.copy_(torch.arange(5.0))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim, "half": torch.arange(4).bfloat16(), "scalar": torch.tensor(7.0),
              "epoch": 3, "name": "golden", "nothing": None, "pair": (1, 2.5), "tags": ["a", "b"],
              "history": [{"loss": 1.5}, {"loss": 0.5}], "raw": b"\x00\xff"}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    version = "_".join(torch.__version__.split("+")[0].split(".")[:2])
    target = str(Path(sys.argv[1], f"torch_{version}"))
    context = mp.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, target)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))
