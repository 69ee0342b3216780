"""Checkpoints both ways with torch.distributed.checkpoint: dcp_parity.py PATH_OF_FSDP2 PATH_OF_CHECKPOINT_WORKER

Python trains and saves in every layout; C++ loads each in several others, saves what it loaded and trains on;
Python loads that and trains on. All files hold the same bits, and all runs go on with the same losses. Layout "tp" is
FSDP2 on top of tensor parallelism, which C++ loads as FSDP of any number of ranks.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

LAYOUTS = {"1": 1, "2": 2, "3": 3, "4": 4, "2x2": 4, "tp": 4}
BEFORE, AFTER = 3, 2  # steps
OURS = ("train", "epoch", "name", "history")  # what the worker asks for and saves again


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
        self.low = torch.nn.Linear(3, 3).bfloat16()
        self.register_buffer("seen", torch.tensor(5))
        with torch.no_grad():
            for salt, parameter in enumerate(self.parameters()):
                at = torch.arange(parameter.numel(), dtype=torch.float32) + 7 * salt
                parameter.copy_((torch.remainder(at * 37, 101) / 101 - 0.5).reshape(parameter.shape))

    def forward(self, x):
        y = self.fc2(self.norm(torch.relu(self.fc1(x))))
        return y + self.low(y.bfloat16()).float()


def parallelized(net):
    """Over the second of two mesh dimensions; the first is returned. 7 rows over 2 x 2 do not divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    rows = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh["tensor"], {"fc1": rows, "fc2": RowwiseParallel(input_layouts=Replicate()), "low": rows})
    return mesh["shard"]


def make(layout):
    net = Net()
    mesh = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if layout == "2x2"
            else parallelized(net) if layout == "tp"
            else init_device_mesh("cpu", (LAYOUTS[layout],), mesh_dim_names=("shard",)))
    for block in net.children():
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(net, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert layout != "tp" or type(net.fc1.weight.placements[0]).__name__ == "_StridedShard"
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1,
                                  foreach=False)  # which would mix parameters of several meshes
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.25  # as a learning rate scheduler leaves it: C++ does not know it
    return net, optimizer


def train(net, optimizer, steps):
    x = torch.arange(40, dtype=torch.float32).reshape(8, 5) / 40 - 0.5
    target = x[:, :3].square()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(net, optimizer, epoch):
    model, optim = get_state_dict(net, optimizer)
    return {"train": {"model": model, "optim": optim}, "epoch": epoch, "name": "run",
            "history": [{"loss": 1.5}, {"loss": 0.5}], "tags": ["a", "b"], "nothing": None, "pair": (1, 2.5)}


def rank_main(rank, ranks, port, body, arguments):
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks),
                          GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo")
        body(rank, *arguments)
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        os._exit(1)


def in_processes(count, body, *arguments):
    """Runs body(rank, *arguments) in as many ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, count, port, body, arguments)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.exitcode != 0:
            for other in ranks:
                other.kill()
            raise SystemExit(f"a rank of Python ended with {rank.exitcode}: {body.__name__}{arguments}")


def train_on(rank, layout, source, target, results):
    net, optimizer = make(layout)
    if source is None:
        train(net, optimizer, BEFORE)
    else:
        state = {key: value for key, value in state_of(net, optimizer, 0).items() if key in OURS}
        dcp.load(state, checkpoint_id=source)
        set_state_dict(net, optimizer, model_state_dict=state["train"]["model"],
                       optim_state_dict=state["train"]["optim"])
    if target is not None:
        dcp.save(state_of(net, optimizer, BEFORE), checkpoint_id=target)
    losses = train(net, optimizer, AFTER)
    if rank == 0:
        results.put(losses)


def python(layout, source=None, target=None):
    """Trains on from `source`, or anew; saves to `target` before the last steps; returns their losses."""
    results = mp.get_context("fork").SimpleQueue()
    in_processes(LAYOUTS[layout], train_on, layout, source, target, results)
    return results.get()


def cpp(fsdp2, worker, layout, source, target):
    done = subprocess.run([fsdp2, "run", "-n", str(LAYOUTS[layout]), worker, "2x2" if layout == "2x2" else "shard",
                           source, target, str(AFTER)], stdout=subprocess.PIPE, text=True, timeout=60)
    if done.returncode != 0:
        raise SystemExit(f"the worker in {layout} ended with {done.returncode} ({source} -> {target})")
    return json.loads(done.stdout[done.stdout.rindex("["):])


def everything(folder):
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(),
                     no_dist=True)
    flat = {}

    def walk(path, value):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(path + (key,), item)
        elif isinstance(value, list) and any(isinstance(item, (dict, torch.Tensor)) for item in value):
            for index, item in enumerate(value):
                walk(path + (index,), item)
        else:
            flat[path] = value

    walk((), state)
    return flat


def expect_same(folder, reference, only=None):
    given, wanted = everything(folder), everything(reference)
    if only is not None:
        wanted = {path: value for path, value in wanted.items() if path[0] in only}
    assert set(given) == set(wanted), f"{folder}: {set(given) ^ set(wanted)}"
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            same = given[path].dtype == value.dtype and torch.equal(given[path], value)
        else:
            same = type(given[path]) is type(value) and given[path] == value
        assert same, f"{folder}: {path} is {given[path]!r} instead of {value!r}"


def expect_close(losses, wanted, what, layouts=()):
    within = 1e-4 if "tp" in layouts else 1e-5  # other sums, that are rounded to bfloat16
    for got, want in zip(losses, wanted, strict=True):
        assert abs(got - want) <= within * abs(want), f"{what}: losses {losses} instead of {wanted}"


def main():
    fsdp2, worker = sys.argv[1:]
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            source = str(Path(folder, f"python_{layout}"))
            losses = python(layout, target=source)
            for other in ("1", "2", "3", "4") if layout == "tp" else ("1", "3", "2x2"):
                target = str(Path(folder, f"cpp_{layout}_{other}"))
                expect_close(cpp(fsdp2, worker, other, source, target), losses, f"C++ in {other} after Python in {layout}",
                             (layout,))
                expect_same(target, source, only=OURS)
                rows.append(f"Python {layout} -> C++ {other}")
        for layout, other in (("1", "3"), ("2", "1"), ("4", "2x2"), ("tp", "3")):
            source = str(Path(folder, f"cpp_{layout}_{other}"))
            before = python(layout, source=str(Path(folder, f"python_{layout}")))
            for again in ("1", "2", "2x2", "tp"):
                expect_close(python(again, source=source), before, f"Python in {again} after C++ in {other}", (layout, again))
                rows.append(f"C++ {other} -> Python {again}")
    for row in rows:
        print(row)
    print(f"{len(rows)} combinations hold the same bits and go on with the same losses")


if __name__ == "__main__":
    main()
