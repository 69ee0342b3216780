"""Checkpoints in a bucket: s3_parity.py PATH_OF_FSDP2 PATH_OF_CHECKPOINT_WORKER

What two ranks save to a bucket, PyTorch reads once its objects are in a folder; `fsdp2 ckpt` says of it what it says of
the same save in a folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import boto3
    import torch
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

FSDP2, WORKER = sys.argv[1:3]
SERVER = Path(__file__).parents[1] / "support" / "s3_server.py"


def load(folder):
    state = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(variables, scratch):
    os.environ.update(variables)

    def run(*arguments, code=0):
        done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True)
        assert done.returncode == code, f"{arguments} ended with {done.returncode}"
        return done.stdout

    def ckpt(*arguments, code=0):
        return run(FSDP2, "ckpt", *arguments, code=code)

    local, remote = str(scratch / "local" / "step_2"), "s3://runs/parity/step_2"
    for folder in (local, remote):
        run(FSDP2, "run", "-n", "2", "--", WORKER, "shard", "-", folder, "1")

    downloaded = scratch / "downloaded"
    downloaded.mkdir()
    s3 = boto3.client("s3", endpoint_url=variables["AWS_ENDPOINT_URL"])
    for item in s3.list_objects_v2(Bucket="runs", Prefix="parity/step_2/")["Contents"]:
        s3.download_file("runs", item["Key"], str(downloaded / Path(item["Key"]).name))
    assert len(load(str(downloaded))) > 0 and same(load(str(downloaded)), load(local)), "Python reads something else"

    # What is loaded from there trains as if it had stayed.
    losses = [run(FSDP2, "run", "-n", "3", "--", WORKER, "shard", folder, "-", "2") for folder in (local, remote)]
    assert losses[0] == losses[1], losses

    assert ckpt("ls", remote) == ckpt("ls", local)
    info = json.loads(ckpt("info", "--json", remote))
    assert info["tensors"] == json.loads(ckpt("info", "--json", local))["tensors"] > 0
    key = "train.model.fc1.weight"
    assert ckpt("cat", remote, key) == ckpt("cat", local, key)
    assert "sound" in ckpt("verify", remote)
    assert ckpt("diff", local, remote) == "no difference\n"
    ckpt("convert", remote, str(scratch / "m.safetensors"), "--prefix", "train.model.")
    assert (scratch / "m.safetensors").stat().st_size > 0
    ckpt("convert", local, "s3://runs/parity/step_1")
    assert ckpt("diff", remote, "s3://runs/parity/step_1") == "no difference\n"
    ckpt("convert", local, "s3://runs/parity/m.safetensors", code=1)
    assert "removed s3://runs/parity/step_1" in ckpt("prune", "s3://runs/parity", "--keep", "1")
    ckpt("info", "s3://runs/parity/step_1", code=1)
    ckpt("info", remote)

    largest = max(s3.list_objects_v2(Bucket="runs", Prefix="parity/")["Contents"], key=lambda item: item["Size"])
    body = bytearray(s3.get_object(Bucket="runs", Key=largest["Key"])["Body"].read())
    body[len(body) // 2] ^= 1
    s3.put_object(Bucket="runs", Key=largest["Key"], Body=bytes(body))
    assert "DAMAGED" in ckpt("verify", remote, code=1)
    print("equal")


if __name__ == "__main__":
    server = subprocess.Popen([sys.executable, str(SERVER), "--session"], stdout=subprocess.PIPE, text=True)
    try:
        said = json.loads(server.stdout.readline())
        if "skipped" in said:
            print(f"skipped: {said['skipped']}")
            sys.exit(77)
        with tempfile.TemporaryDirectory() as folder:
            main(said, Path(folder))
    finally:
        server.kill()
        server.wait()
