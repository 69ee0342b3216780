#!/usr/bin/env python3
"""Times a training step here and elsewhere, in turn, and prints the ratios.

    bench/run.py PATH_OF_FSDP2 [--peer PROGRAM.py] [--sizes tiny small medium] [--repeats 5] [--json FILE]
                 [--svg FILE]

For each size, in alternation: the same compute unsharded on every rank at the same time (the limit), fully_shard,
replicate (DDP) and HSDP over one copy a rank, in fp32; fully_shard computing in bf16; and, where PROGRAM is given, PyTorch's
FSDP2. PROGRAM takes the arguments of `fsdp2 bench step` and writes the same report; it runs under torchrun. Medians over
the runs of each run's median step. Memory is the peak of the proportional set sizes of all ranks together, sampled: pages
that ranks share count once. "first step" is the time from the command's start to the end of a run of one step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import plots

STEPS = {"tiny": 40, "small": 8, "medium": 4}
OURS = {
    "unsharded": ["--mode", "local", "--local-replicas", "true"],
    "fsdp2": [],
    "ddp": ["--mode", "ddp"],
    "hsdp": ["--replicate", "{ranks}"],
    "fsdp2 bf16": ["--param-dtype", "bf16"],
}
PEERS = {"peer": [], "peer bf16": ["--param-dtype", "bf16"]}


def descendants(pid):
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        found.append(parent)
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            pass
    return found


def proportional_kib(pid):
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def timed(command, sample_memory):
    """Seconds and, sampled, the largest proportional set size in MiB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    errors = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    while process.poll() is None:
        if sample_memory:
            peak = max(peak, sum(proportional_kib(pid) for pid in descendants(process.pid)))
        time.sleep(0.2 if sample_memory else 0.005)
    seconds = time.perf_counter() - start
    reader.join()
    if process.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{errors[0][-2000:]}")
    return seconds, peak / 1024


class Runner:
    def __init__(self, options):
        self.options = options

    def command(self, name, size, steps, warmup, report):
        ranks = str(self.options.ranks)
        arguments = ["--preset", size, "--steps", str(steps), "--warmup", str(warmup), "--norm-impl", "fast",
                     "--json", report]
        if name in PEERS:
            return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", "29741",
                    self.options.peer, "--mode", "fsdp2", *PEERS[name], *arguments]
        extra = [text.format(ranks=ranks) for text in OURS[name]]
        return [self.options.fsdp2, "run", "-n", ranks, "--", self.options.fsdp2, "bench", "step", *extra, *arguments]

    def step(self, name, size, sample_memory=False):
        """Milliseconds of a step, and MiB."""
        with tempfile.TemporaryDirectory() as folder:
            report = str(Path(folder) / "report.json")
            steps = 2 if sample_memory else STEPS[size]
            _, memory = timed(self.command(name, size, steps, 2, report), sample_memory)
            return statistics.median(json.loads(Path(report).read_text())["step_ms"]), memory

    def first_step(self, name, size):
        with tempfile.TemporaryDirectory() as folder:
            return timed(self.command(name, size, 1, 0, str(Path(folder) / "report.json")), False)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp2")
    parser.add_argument("--peer")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=list(STEPS))
    parser.add_argument("--variants", nargs="+", choices=[*OURS, *PEERS])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--svg", help="a plot of the steps' times")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = options.variants or [*OURS, *(PEERS if options.peer else [])]
    runner = Runner(options)
    report = {}
    for size in options.sizes:
        times = {name: [] for name in names}
        for _ in range(options.repeats):
            for name in names:
                times[name].append(runner.step(name, size)[0])
        step = {name: statistics.median(values) for name, values in times.items()}
        some = [name for name in ("fsdp2", "peer") if name in names]
        memory = {name: runner.step(name, size, sample_memory=True)[1] for name in some}
        first = {name: statistics.median(runner.first_step(name, size) for _ in range(3)) for name in some}
        report[size] = {"step_ms": step, "runs_ms": times, "memory_mib": memory, "first_step_s": first}
        print(f"{size}: {options.ranks} ranks, medians of {options.repeats} runs")
        for name in names:
            against = f"{step[name] / step['unsharded']:7.3f} x unsharded" if "unsharded" in step else ""
            print(f"  {name:12} {step[name]:10.1f} ms {against}")
        if "peer" in step and "fsdp2" in step:
            print(f"  PyTorch's step is {step['peer'] / step['fsdp2']:.2f} times ours")
            if "peer bf16" in step and "fsdp2 bf16" in step:
                print(f"  in bf16 it is {step['peer bf16'] / step['fsdp2 bf16']:.2f} times ours")
            for what, values, unit in (("peak memory", memory, "MiB"), ("start to first step", first, "s")):
                print(f"  {what}: {values['fsdp2']:.2f} {unit}, PyTorch {values['peer']:.2f} {unit}, "
                      f"ratio {values['fsdp2'] / values['peer']:.2f}")
        sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.svg:
        groups = [(size, list(of_size["step_ms"].items())) for size, of_size in report.items()]
        svg = Path(options.svg)
        svg.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(plots.bars(f"A training step on {options.ranks} ranks", "ms", groups))


if __name__ == "__main__":
    main()
