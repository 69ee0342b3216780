#!/usr/bin/env python3
"""Holds every behaviour of fully_shard, alone and in pairs, against PyTorch's FSDP2 in Python.

    bench/parity.py PATH_OF_FSDP2 [--write docs/parity.md] [--quick]

The same decoder, weights, tokens and optimizer on 2 and 4 gloo ranks: losses and gradient norms of ten steps have to
agree within 1e-5 (computing in bf16: 1e-2), relatively. Exits with 1 if they do not. --quick runs a few cases. What Python refuses is held against the plain model on all batches.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "parity"))

import torch

import reference
from step_parity import MODEL, difference, ours

# Each behaviour: its options (of `fsdp2 bench step`, with '_'), and the numbers of ranks that it makes sense on.
BEHAVIOURS = {
    "reshard_after_forward": ({"reshard_after_forward": True}, (2, 4)),
    "reshard_after_forward=False": ({"reshard_after_forward": False}, (2, 4)),
    "reshard_after_forward=2": ({"reshard_to": 2}, (4,)),
    "HSDP 2x2": ({"replicate": 2}, (4,)),
    "Shard(1)": ({"shard_dim": 1}, (2, 4)),
    "param bf16, reduce fp32": ({"param_dtype": "bf16"}, (2, 4)),
    "param bf16, reduce bf16": ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, (2, 4)),
    "cast_forward_inputs=False": ({"param_dtype": "bf16", "cast_forward_inputs": False}, (2, 4)),
    "output_dtype": ({"output_dtype": "bf16"}, (2, 4)),
    "CPU offload": ({"offload": True}, (2, 4)),
    "ignored_params": ({"ignore": "layers.1.feed_forward.w2.weight"}, (2, 4)),
    "3 micro-batches": ({"accum": 3}, (2, 4)),
    "set_requires_gradient_sync": ({"accum": 3, "sync": "last"}, (2, 4)),
    "set_requires_all_reduce": ({"accum": 3, "replicate": 2, "all_reduce": "last"}, (4,)),
    "set_is_last_backward": ({"accum": 3, "sync": "last", "is_last_backward": True}, (2, 4)),
    "set_reshard_after_backward": ({"accum": 3, "reshard_after_backward": False}, (2, 4)),
    "clipping": ({"clip": 0.5}, (2, 4)),
}

PAIRS = [
    ("HSDP 2x2", "reshard_after_forward=False"),
    ("HSDP 2x2", "Shard(1)"),
    ("HSDP 2x2", "param bf16, reduce fp32"),
    ("HSDP 2x2", "CPU offload"),
    ("HSDP 2x2", "ignored_params"),
    ("HSDP 2x2", "set_requires_gradient_sync"),
    ("HSDP 2x2", "clipping"),
    ("reshard_after_forward=False", "param bf16, reduce fp32"),
    ("reshard_after_forward=False", "set_requires_gradient_sync"),
    ("reshard_after_forward=2", "param bf16, reduce fp32"),
    ("reshard_after_forward=2", "Shard(1)"),
    ("reshard_after_forward=2", "set_requires_gradient_sync"),
    ("Shard(1)", "param bf16, reduce fp32"),
    ("Shard(1)", "CPU offload"),
    ("Shard(1)", "set_requires_gradient_sync"),
    ("output_dtype", "param bf16, reduce fp32"),
    ("output_dtype", "set_requires_gradient_sync"),
    ("CPU offload", "param bf16, reduce fp32"),
    ("CPU offload", "clipping"),
    ("CPU offload", "set_requires_gradient_sync"),
    ("ignored_params", "Shard(1)"),
    ("ignored_params", "set_requires_gradient_sync"),
    ("param bf16, reduce fp32", "set_requires_gradient_sync"),
    ("param bf16, reduce bf16", "set_requires_gradient_sync"),
    ("param bf16, reduce fp32", "set_requires_all_reduce"),
    ("param bf16, reduce fp32", "clipping"),
    ("set_requires_gradient_sync", "set_reshard_after_backward"),
]

# FSDP2 in Python refuses these.
REFUSED = [{"reshard_after_forward=2", "Shard(1)"}]

# What runs in CI: cheap, and every code path once.
QUICK = [
    ("reshard_after_forward=2", 4),
    ("set_requires_all_reduce", 4),
    ("Shard(1)", 2),
    ("param bf16, reduce bf16", 2),
    ("cast_forward_inputs=False", 2),
    ("output_dtype", 2),
    ("CPU offload", 2),
    ("ignored_params", 2),
    ("set_requires_gradient_sync", 2),
    ("set_reshard_after_backward", 2),
]


def cases(quick):
    if quick:
        yield from ((name, BEHAVIOURS[name][0], world, "peer") for name, world in QUICK)
        return
    for name, (options, worlds) in BEHAVIOURS.items():
        for world in worlds:
            yield name, options, world, "peer"
    for a, b in PAIRS:
        for world in sorted(set(BEHAVIOURS[a][1]) & set(BEHAVIOURS[b][1])):
            truth = "plain model" if {a, b} in REFUSED else "peer"
            yield f"{a}; {b}", {**BEHAVIOURS[a][0], **BEHAVIOURS[b][0]}, world, truth


def compare(binary, options, world, truth):
    """The largest relative differences of losses and gradient norms, and the bound for both."""
    c = {**MODEL, "lr": 1e-3, "seed": 1234, "steps": 10, "clip": 0, **options}
    mine = ours(binary, world, c)
    theirs = reference.run(world, c) if truth == "peer" else ours(binary, world, c, mode="local")
    bound = 1e-2 if options.get("param_dtype") == "bf16" else 1e-5
    return difference(mine["losses"], theirs["losses"]), difference(mine["grad_norms"], theirs["grad_norms"]), bound


PAGE = """# Parity with PyTorch's FSDP2

What `bench/parity.py build/bin/fsdp2 --write docs/parity.md` found: the decoder of `src/train/llama.h` on synthetic tokens, trained
for ten steps by `fsdp2 bench step` and by torch {torch} in Python (`tests/parity/reference.py`), both over gloo on the CPU.
Differences are the largest relative ones over the steps, gradient norms in double precision; both have to stay within the bound. What
FSDP2 in Python refuses is held against the plain model on the batches of all ranks. `ctest -R parity/behaviours` runs a few of them.

| Behaviour | Ranks | Against | Losses | Gradient norms | Bound |
|---|---|---|---|---|---|
{rows}
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--write")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="part of the name of a behaviour")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    binary = str(Path(arguments.binary).resolve())
    rows, failed = [], False
    for name, options, world, truth in cases(arguments.quick):
        if arguments.only not in name:
            continue
        losses, norms, bound = compare(binary, options, world, truth)
        right = losses <= bound and norms <= bound
        failed |= not right
        rows.append(f"| {name} | {world} | {truth} | {losses:.1e} | {norms:.1e} | {bound:.0e} |")
        print(("" if right else "WRONG ") + rows[-1], flush=True)
    if arguments.write:
        Path(arguments.write).write_text(PAGE.format(torch=torch.__version__, rows="\n".join(rows)))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
