"""Safetensors files both ways with the Python package: safetensors_parity.py PATH_OF_FSDP2"""

import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import torch
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SIZES = ["--dim", "8", "--layers", "1", "--heads", "2", "--vocab", "11", "--seq", "4", "--batch", "1"]


def bench(binary, *options):
    subprocess.run([binary, "bench", "step", "--mode", "local", "--steps", "1", "--warmup", "0", *SIZES, *options],
                   check=True, stdout=subprocess.DEVNULL)


def main():
    binary = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        written, given, back = (Path(folder, name) for name in ("written", "given", "back"))
        bench(binary, "--dump-init", written)
        tensors = load_file(written)
        assert tensors["output.weight"].shape == (11, 8) and tensors["output.weight"].dtype == torch.float32
        assert (tensors["norm.weight"] == 1).all() and tensors["output.weight"].abs().max() > 0.01

        changed = {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}
        save_file(changed, given, metadata={"made by": "Python"})
        bench(binary, "--load-init", given, "--dump-init", back)
        read = load_file(back)
        assert list(read) and set(read) == set(changed)
        for name, tensor in changed.items():
            assert torch.equal(read[name], tensor), name


if __name__ == "__main__":
    main()
