"""The run that `fsdp2 bench step` does, in Python on PyTorch's own FSDP2.

run(world, args) trains the decoder of src/train/llama.h for a few steps on `world` gloo ranks and returns losses,
gradient norms and parameter checksums. Ranks are forked, so torch is imported once. `args` are the options of
`fsdp2 bench step`, with '_' for '-'; those that are not given have its defaults.
"""

import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

U64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head = c["dim"] // c["heads"]
        self.wq = linear(c["dim"], c["dim"])
        self.wk = linear(c["dim"], c["kv_heads"] * self.head)
        self.wv = linear(c["dim"], c["kv_heads"] * self.head)
        self.wo = linear(c["dim"], c["dim"])

    def forward(self, x, cos, sin):
        def heads(projection):
            return projection(x).unflatten(-1, (-1, self.head))

        q = rotate(heads(self.wq), cos, sin).transpose(1, 2)
        k = rotate(heads(self.wk), cos, sin).transpose(1, 2)
        v = heads(self.wv).transpose(1, 2)
        repeat = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1, self.w2, self.w3 = linear(c["dim"], c["ffn"]), linear(c["ffn"], c["dim"]), linear(c["dim"], c["ffn"])

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention_norm = Norm(c["dim"])
        self.attention = Attention(c)
        self.ffn_norm = Norm(c["dim"])
        self.feed_forward = FeedForward(c)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c["vocab"], c["dim"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.norm = Norm(c["dim"])
        self.output = linear(c["dim"], c["vocab"])
        head = c["dim"] // c["heads"]
        frequency = 10000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        angle = torch.outer(torch.arange(c["seq"], dtype=torch.float64), frequency)[:, None]
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        cos, sin = self.cos.to(h.dtype), self.sin.to(h.dtype)
        for layer in self.layers:
            h = layer(h, cos, sin)
        return self.output(self.norm(h))


def fill(model, seed, layers):
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            continue
        key = 0xCBF29CE484222325
        for byte in name.encode():
            key = ((key ^ byte) * 0x100000001B3) & U64
        key ^= (seed * GOLDEN) & U64
        bound = 0.02 * math.sqrt(3.0)
        if name.endswith(("wo.weight", "w2.weight")):
            bound /= math.sqrt(2.0 * layers)
        with np.errstate(over="ignore"):
            z = np.arange(1, parameter.numel() + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        values = ((z >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-23)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values * np.float32(bound)).view_as(parameter))


def tokens(seed, micro, rank, c):
    state = (seed + 1000003 * micro + 7919 * rank) & U64

    def draw():
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) & U64
        return state >> 33

    for _ in range(3):
        draw()
    out = []
    for i in range(c["batch"] * (c["seq"] + 1)):
        if i % 2:
            out.append((out[-1] * 5 + 17) % c["vocab"])
        else:
            u = draw()
            out.append((((u * u) >> 31) * c["vocab"]) >> 31)
    out = torch.tensor(out).view(c["batch"], -1)
    return out[:, :-1], out[:, 1:]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sharding(model, world, c):
    """The arguments of fully_shard that `c` asks for."""
    replicate = c.get("replicate", 1)
    mesh = (init_device_mesh("cpu", (world,)) if replicate == 1 else
            init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard")))
    options = {"mesh": mesh, "reshard_after_forward": c.get("reshard_to") or c.get("reshard_after_forward", True)}
    if any(name in c for name in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")):
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=None if c.get("param_dtype", "fp32") == "fp32" else DTYPES[c["param_dtype"]],
            reduce_dtype=DTYPES[c.get("reduce_dtype", "fp32")],
            cast_forward_inputs=c.get("cast_forward_inputs", True))
    if dim := c.get("shard_dim", 0):
        shards = world // replicate
        options["shard_placement_fn"] = (
            lambda p: Shard(dim) if p.ndim > dim and p.shape[dim] % shards == 0 else None)
    if c.get("offload", False):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if ignored := c.get("ignore"):
        options["ignored_params"] = {p for name, p in model.named_parameters() if name.endswith(ignored)}
    return options


def train(rank, world, c):
    model = Decoder(c)
    fill(model, c["seed"], c["layers"])
    options = sharding(model, world, c)
    for layer in model.layers:
        fully_shard(layer, **options)
    options["reshard_after_forward"] = False
    if "output_dtype" in c:
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=DTYPES[c["output_dtype"]])
    fully_shard(model, **options)
    # gloo cannot average.
    for module in (model, *model.layers):
        module.set_force_sum_reduction_for_comms(True)
    # The fused CPU kernel rounds otherwise than the plain one, which training amplifies.
    optimizer = torch.optim.AdamW(model.parameters(), lr=c["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                                  foreach=False, fused=False)
    losses, norms = [], []
    accum = c.get("accum", 1)
    for step in range(c["steps"]):
        mean = torch.zeros((), dtype=torch.float64)
        for k in range(accum):
            last = k == accum - 1
            if c.get("sync", "every") == "last":
                model.set_requires_gradient_sync(last)
            if c.get("all_reduce", "every") == "last":
                model.set_requires_all_reduce(last)
            if c.get("is_last_backward", False):
                model.set_is_last_backward(last)
            if not c.get("reshard_after_backward", True):
                model.set_reshard_after_backward(last)
            x, y = tokens(c["seed"], step * accum + k, rank, c)
            loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten()) / accum
            loss.backward()
            mean += loss.detach().double() / world
        # Copies count once.
        square = sum(local(p.grad).double().square().sum() for p in model.parameters()) / c.get("replicate", 1)
        sums = torch.stack([mean, square])
        dist.all_reduce(sums)
        losses.append(sums[0].item())
        norms.append(sums[1].sqrt().item())
        scale = c["clip"] / (norms[-1] + 1e-6) if c["clip"] else 1.0
        if scale < 1:
            for p in model.parameters():
                local(p.grad).mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    checksums = torch.stack([local(p).detach().double().square().sum() for p in model.parameters()])
    dist.all_reduce(checksums)
    return {"losses": losses, "grad_norms": norms, "checksums": dict(zip(names, checksums.tolist()))}


def run(world, c):
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
                    result = train(rank, world, c)
                    if rank == 0:
                        Path(folder, "result").write_text(json.dumps(result))
                    dist.barrier()
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1] != 0]
        if failed:
            raise RuntimeError(f"the reference failed on ranks {failed} of {world}")
        return json.loads(Path(folder, "result").read_text())
