"""Holds `fsdp2 bench step` against PyTorch's FSDP2 in Python: step_parity.py PATH_OF_FSDP2 [WORLD ...]

The same model, weights, data and optimizer on 1 to 4 ranks must give the same losses, gradient norms and parameters.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import torch

import reference

BOUNDS = {"losses": 1e-5, "grad_norms": 1e-4, "checksums": 1e-4}  # relative
# 501 words, 3 layers and heads of 12: nothing divides by 2, 3 and 4 alike.
MODEL = dict(dim=48, layers=3, heads=4, kv_heads=2, ffn=101, vocab=501, seq=32, batch=2)


def ours(binary, world, c, mode="fsdp2"):
    """The report of `fsdp2 bench step` on `world` ranks; in mode local, of the plain model on all their batches."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = {**c, "warmup": 2, "steps": c["steps"] - 2, "norm_impl": "fp64", "mode": mode, "json": report}
        command = [binary, "bench", "step", "--local-world", str(world)]
        if mode == "fsdp2":
            command = [binary, "run", "-n", str(world), "--", *command]
        for name, value in options.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            command += ["--" + name.replace("_", "-"), text]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}\nexited with {done.returncode}:\n{done.stdout}")
        result = json.loads(report.read_text())
        result["checksums"] = {name: sums[1] for name, sums in result["final_checksums"].items()}
        return result


def difference(a, b):
    if isinstance(a, dict):
        assert list(a) == list(b), f"parameters differ: {list(a)} and {list(b)}"
        a, b = list(a.values()), list(b.values())
    assert len(a) == len(b), f"{len(a)} and {len(b)} values"
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b))


def main():
    torch.set_num_threads(1)
    binary, worlds = sys.argv[1], [int(world) for world in sys.argv[2:]] or [1, 2, 3, 4]
    agree = True
    for world in worlds:
        c = dict(MODEL, lr=1e-3, seed=1234 + world, steps=20, clip=1.5 if world == 3 else 0)
        mine, theirs = ours(binary, world, c), reference.run(world, c)
        differences = {key: difference(mine[key], theirs[key]) for key in BOUNDS}
        agree &= all(differences[key] <= BOUNDS[key] for key in BOUNDS)
        print(f"{world} ranks: " + "  ".join(f"{k} {v:.1e} (<= {BOUNDS[k]:.0e})" for k, v in differences.items()))
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
