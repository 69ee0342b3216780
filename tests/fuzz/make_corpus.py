"""Writes the inputs that fuzzing starts from: make_corpus.py PATH_OF_FSDP2 FOLDER

Small files as Python writes them, and as `fsdp2 ckpt convert` does. Those of the repository are in corpus/; what each
target found beyond them is there too, and stays.
"""

import pickle
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

TENSORS = {
    "rows": torch.arange(6.0).view(2, 3),
    "columns": torch.arange(6.0).view(2, 3).t(),
    "part": torch.arange(8, dtype=torch.int16)[2:7:2],
    "one": torch.tensor(True),
    "none": torch.zeros(0, 3),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
}
OBJECTS = {
    "values": {"lr": 0.1, "betas": (0.9, 0.95), "on": True, "off": None, "raw": b"\x00\xff", "names": ["a", "b"]},
    "numbers": [0, -1, 300, 70000, 2**40, -(2**63)],
    "ordered": OrderedDict(a=1),
    "foreign": {1, 2},
}


def main():
    fsdp2, corpus = sys.argv[1], Path(sys.argv[2])
    for target in ("archive", "metadata", "safetensors"):
        (corpus / target).mkdir(parents=True, exist_ok=True)
    for name, value in {**TENSORS, **OBJECTS, "dict": {"t": TENSORS["rows"], "same": TENSORS["rows"], "n": 1}}.items():
        torch.save(value, corpus / "archive" / f"python_{name}")
    plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(plain, corpus / "safetensors" / "python", metadata={"format": "pt"})
    save_file({}, corpus / "safetensors" / "python_empty")
    for golden in (Path(__file__).parents[1] / "checkpoint" / "golden").glob("torch_*"):
        shutil.copyfile(golden / ".metadata", corpus / "metadata" / golden.name)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        nest = {"h": TENSORS["float8"], "s": torch.tensor(7.0), "e": TENSORS["none"]}
        dcp.save({"w": TENSORS["rows"], "nest": nest, "n": 3, "l": [1, "x"]}, checkpoint_id=theirs, no_dist=True)
        subprocess.run([fsdp2, "ckpt", "convert", theirs, Path(folder, "all.pt")], check=True)
        subprocess.run([fsdp2, "ckpt", "convert", theirs, Path(folder, "all.safetensors")], check=True)
        subprocess.run([fsdp2, "ckpt", "convert", Path(folder, "all.pt"), ours], check=True)
        shutil.move(Path(folder, "all.pt"), corpus / "archive" / "ours_file")
        shutil.move(Path(folder, "all.safetensors"), corpus / "safetensors" / "ours")
        for name, place in (("python", theirs), ("ours", ours)):
            bytes_ = (place / ".metadata").read_bytes()
            (corpus / "metadata" / name).write_bytes(bytes_)
            for index, info in pickle.loads(bytes_).storage_data.items():
                if name == "ours" or index.fqn == "n":
                    item = (place / info.relative_path).read_bytes()[info.offset:info.offset + info.length]
                    (corpus / "archive" / f"{name}_{index.fqn}").write_bytes(item)


if __name__ == "__main__":
    main()
