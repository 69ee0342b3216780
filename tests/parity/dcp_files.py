"""What torch.distributed.checkpoint can write beyond FSDP2's state: dcp_files.py PATH_OF_FSDP2 PATH_OF_CHECKPOINT_WORKER

Tensors of all kinds of placements (but Partial, which Python refuses to save, as we do), saved with several planners and
writers. C++ loads each file as shards of one and of three ranks and saves them; what Python then reads is what it reads of
its own file. Or C++ refuses the file, and says what it is.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from dcp_parity import dcp, dist, everything, expect_same, in_processes, init_device_mesh, torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS = 4


def mixed_state():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (RANKS,))
    whole = torch.arange(35.0).view(7, 5)
    kinds = {"replicate": [Replicate(), Replicate()], "first": [Shard(0), Replicate()], "second": [Replicate(), Shard(1)],
             "tiles": [Shard(0), Shard(1)], "turned": [Shard(1), Shard(0)], "twice": [Shard(0), Shard(0)]}
    state = {name: distribute_tensor(whole + at, grid, kind) for at, (name, kind) in enumerate(kinds.items())}
    state["row"] = distribute_tensor(torch.arange(3.0).bfloat16(), line, [Shard(0)])
    state["plain"] = torch.arange(6).view(2, 3)
    state["scalar"] = torch.tensor(0.5)
    return {"mixed": state, "epoch": 3, "names": ["a", "b"], "pair": (1, 2.5)}


SAVES = {
    "default": {},
    "lowest_rank": {"planner": lambda: dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)},
    "dedup_argument": {"planner": lambda: dcp.DefaultSavePlanner(dedup_replicated_tensors=True)},
    "cached_plans": {"planner": lambda: dcp.DefaultSavePlanner(enable_plan_caching=True)},
    "many_files": {"storage_writer": lambda folder: dcp.FileSystemWriter(folder, single_file_per_rank=False)},
    "two_threads": {"storage_writer": lambda folder: dcp.FileSystemWriter(folder, thread_count=2)},
    "no_collectives": {"use_collectives": False},
}


def save(rank, name, folder):
    warnings.simplefilter("ignore")
    how = dict(SAVES[name])
    if "planner" in how:
        how["planner"] = how["planner"]()
    if "storage_writer" in how:
        how["storage_writer"] = how["storage_writer"](folder)
    dcp.save(mixed_state(), checkpoint_id=folder, **how)
    dist.barrier()


def copy(fsdp2, worker, ranks, source, target):
    return subprocess.run([fsdp2, "run", "-n", str(ranks), worker, "copy", source, target], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=60)


def main():
    fsdp2, worker = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in SAVES:
            source = str(Path(folder, name))
            in_processes(RANKS, save, name, source)
            for ranks in (1, 3):
                target = f"{source}_{ranks}"
                done = copy(fsdp2, worker, ranks, source, target)
                if name == "no_collectives":
                    assert done.returncode != 0 and "use_collectives=False" in done.stdout, done.stdout
                    assert not os.path.exists(target)
                    print(f"{name}: refused by name in {ranks} ranks")
                    continue
                assert done.returncode == 0, f"{name} in {ranks} ranks: {done.stdout}"
                expect_same(target, source)
                print(f"{name}: the same bits in {ranks} ranks, {len(everything(source))} values")


if __name__ == "__main__":
    main()
