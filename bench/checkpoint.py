#!/usr/bin/env python3
"""Saves and loads a model with Adam's state here and in Python, on the same disk, in turn.

    bench/checkpoint.py PATH_OF_FSDP2 FOLDER [--gib 1] [--ranks 2] [--repeats 3]

Prints medians in seconds and GB/s, beside what dd with fsync reaches in the same minutes, and their ratios; then what
loading costs on other numbers of ranks than those that have saved.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh


def state_of(gib, mesh, values):
    def sharded():
        local = torch.empty(2048 // mesh.size(), 2048)
        local = local.normal_() if values else local.zero_()
        return DTensor.from_local(local, mesh, [Shard(0)])

    names = [f"layers.{i}.weight" for i in range(int(gib * 64))]
    return {"model": {name: sharded() for name in names},
            "optim": {"state": {name: {"exp_avg": sharded(), "exp_avg_sq": sharded()} for name in names}}}


def rank_main(rank, ranks, folder, gib, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731", RANK=str(rank), WORLD_SIZE=str(ranks),
                      GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    state, target = state_of(gib, mesh, True), state_of(gib, mesh, False)
    times = []
    load = functools.partial(dcp.load, target, checkpoint_id=folder)
    for body in (functools.partial(dcp.save, state, checkpoint_id=folder), load, load):
        if len(times) == 1 and rank == 0:
            forget(folder)
        dist.barrier()
        start = time.perf_counter()
        body()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        results.put(times)
    dist.destroy_process_group()


def python(ranks, folder, gib):
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=rank_main, args=(r, ranks, folder, gib, results)) for r in range(ranks)]
    for process in processes:
        process.start()
    times = results.get()
    for process in processes:
        process.join()
    return times


def forget(folder):
    """The system's cache keeps nothing of these files: a load then comes from the disk, as after a restart elsewhere."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def here(fsdp2, ranks, folder, gib, *arguments):
    """What `fsdp2 bench checkpoint` reports."""
    done = subprocess.run([fsdp2, "run", "-n", str(ranks), fsdp2, "bench", "checkpoint", str(folder), "--gib", str(gib),
                           *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(done[done.index("{"):])


def other_worlds(fsdp2, folder, gib, ranks, repeats):
    """Loads on `ranks`, more and fewer, in turn, what `ranks` have saved; seconds by number of ranks."""
    here(fsdp2, ranks, folder, gib, "--only", "save", "--repeats", "1")
    worlds = [ranks, ranks + 1, max(1, ranks // 2)]
    seconds = {world: [] for world in worlds}
    for _ in range(repeats):
        for world in worlds:
            seconds[world] += here(fsdp2, world, folder, gib, "--only", "load", "--repeats", "1")["load"]
    shutil.rmtree(folder / "bench")
    return {world: statistics.median(values) for world, values in seconds.items()}


def dd(folder, gib):
    start = time.perf_counter()
    subprocess.run(["dd", "if=/dev/zero", f"of={folder}/dd", "bs=64M", f"count={int(3 * gib * 16)}", "conv=fsync"],
                   check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    os.remove(f"{folder}/dd")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp2")
    parser.add_argument("folder")
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = Path(options.folder)
    rows = {"dd": [], "python save": [], "python load": [], "python load, cached": [], "save": [], "load": [],
            "load, cached": [], "async blocked, first": [], "async blocked, later": []}
    for _ in range(options.repeats):
        rows["dd"].append(dd(folder, options.gib))
        save, load, again = python(options.ranks, str(folder / "python"), options.gib)
        shutil.rmtree(folder / "python")
        rows["python save"].append(save)
        rows["python load"].append(load)
        rows["python load, cached"].append(again)
        report = here(options.fsdp2, options.ranks, folder, options.gib, "--repeats", "2")
        # Python's are the first of their process: so are these. A background save is also shown once its memory is there.
        rows["save"].append(report["save"][0])
        rows["load"].append(report["load"][0])
        rows["load, cached"].append(report["load_cached"][0])
        rows["async blocked, first"].append(report["async_blocked"][0])
        rows["async blocked, later"].append(report["async_blocked"][1])
    median = {name: statistics.median(values) for name, values in rows.items()}
    gigabytes = 3 * options.gib * 2**30 / 1e9
    print(f"{gigabytes:.2f} GB, {options.ranks} ranks, medians of {options.repeats}")
    for name, seconds in median.items():
        print(f"{name:21} {seconds:8.3f} s  {gigabytes / seconds:6.2f} GB/s")
    print(f"save: {median['python save'] / median['save']:.2f} times as fast as Python, "
          f"{median['dd'] / median['save']:.2f} of dd")
    for load in ("load", "load, cached"):
        print(f"{load}: {median['python ' + load] / median[load]:.2f} times as fast as Python")
    for which in ("first", "later"):
        print(f"async save, {which}: blocks for {median[f'async blocked, {which}'] / median['save']:.1%} of a save's time")
    loads = other_worlds(options.fsdp2, folder, options.gib, options.ranks, options.repeats)
    for world, seconds in loads.items():
        print(f"saved on {options.ranks} ranks, loaded on {world}: {seconds:.3f} s, "
              f"{seconds / loads[options.ranks]:.2f} times a load on as many")


if __name__ == "__main__":
    main()
