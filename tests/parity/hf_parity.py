"""Hugging Face folders both ways with transformers: hf_parity.py PATH_OF_FSDP2 PATH_OF_HF_WORKER

Folders that save_pretrained wrote give the same logits and losses here, sharded over 1, 2 and 3 ranks; what is written
after a step is loaded by from_pretrained and is the model that the same step makes in Python. Then the commands:
`fsdp2 train --from`, `fsdp2 generate --ids`, and a model that began here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

# Sizes that 2 and 3 do not divide, and frequencies on both sides of and within the band that llama3 blends.
SIZES = dict(vocab_size=301, hidden_size=40, intermediate_size=37, num_hidden_layers=2, num_attention_heads=5,
             max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
CASES = {
    "grouped": dict(num_key_value_heads=1, rms_norm_eps=1e-3, rope_theta=500.0, eos_token_id=7),
    "tied": dict(num_key_value_heads=5, tie_word_embeddings=True),
    "llama3": dict(num_key_value_heads=5, rope_theta=100.0, rope_scaling=LLAMA3),
}
BOUND = 1e-5  # of the largest
ONE_FILE = 5_000_000_000


def make(folder, dtype=torch.float32, shard="5GB", **options):
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **options))
    for name, parameter in model.named_parameters():  # large enough that every part shows in the logits
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.15)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


def load(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    problems = {what: names for what, names in info.items() if names}
    assert not problems, f"{folder}: {problems}"
    return model


def loss_of(model, x, y):
    return F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())


def train(model, x, y, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def call(*command):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=120)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def near(what, a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    gap = ((a - b).abs().max() / b.abs().max()).item()
    print(f"{what}: {gap:.1e}")
    assert gap <= BOUND, f"{what}: {a} and {b}"


class Ours:
    def __init__(self, binary, worker, folder):
        self.binary, self.worker, self.folder = binary, worker, folder

    def work(self, ranks, source, out, dtype="fp32", most=ONE_FILE, steps=2):
        """Logits before and losses of the steps."""
        logits = self.folder / "logits"
        said = call(self.binary, "run", "-n", ranks, "--", self.worker, source, self.folder / "batch", logits, out,
                    dtype, most, steps)
        return load_file(logits)["logits"], json.loads(re.search(r"\[[-0-9.e,]*\]$", said, re.MULTILINE)[0])

    def train(self, ranks, *options):
        return call(self.binary, "run", "-n", ranks, "--", self.binary, "train", "--threads", "1", "--sample", "0",
                    "--batch", "3", "--val-batches", "2", "--metrics", self.folder / "metrics", *options)

    def validation_loss(self):
        return json.loads((self.folder / "metrics").read_text().splitlines()[-1])["validation_loss"]


def check_weights(ours, folder, x, y):
    for name, options in CASES.items():
        source = folder / name
        shard = "20KB" if name == "tied" else "5GB"
        make(source, shard=shard, **options)
        assert (source / "model.safetensors.index.json").exists() == (name == "tied")
        model = load(source)
        logits = model(x).logits.detach()
        losses = train(model, x, y, 2)
        for ranks in (1, 2, 3):
            out = folder / f"{name}_{ranks}"
            mine = ours.work(ranks, source, out, most=20_000 if ranks == 2 else ONE_FILE)
            near(f"{name}, {ranks} ranks, logits", mine[0], logits)
            near(f"{name}, {ranks} ranks, losses", mine[1], losses)
            assert (out / "model.safetensors.index.json").exists() == (ranks == 2)
            back = load(out)
            near(f"{name}, {ranks} ranks, logits after", back(x).logits.detach(), model(x).logits.detach())
            assert back.config.eos_token_id == model.config.eos_token_id


def check_bfloat16(ours, folder, x):
    source, out = folder / "low", folder / "low_out"
    make(source, torch.bfloat16, **CASES["grouped"])
    model = load(source)
    logits, _ = ours.work(2, source, out, dtype="bf16", most=20_000, steps=0)
    near("bfloat16, logits", logits, model(x).logits.detach())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = load(out, "auto")
    assert back.dtype == torch.bfloat16
    wanted = load(source, "auto").state_dict()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def held_out(tokens, seq, count, end=()):
    """The windows of a validation over `count` of them, of one document and what ends it."""
    part = torch.tensor([*tokens[int(len(tokens) * (1 - 0.05)):], *end])
    last = len(part) - 1 - seq
    rows = torch.stack([part[i * last // max(1, count - 1):][:seq + 1] for i in range(count)])
    return rows[:, :-1], rows[:, 1:]


def check_train(ours, folder):
    """The trained model's loss is what transformers makes of the folder."""
    text = "".join(f"line {i} of the text\n" for i in range(600)).encode()
    (folder / "text").write_bytes(text)
    ids = np.random.default_rng(5).integers(0, 301, 6000)
    for dtype, tokens, end in (("text", text, [0]), ("uint16", ids, []), ("uint32", ids, [])):
        data, out = folder / dtype, folder / f"trained_{dtype}"
        if dtype != "text":
            tokens.astype(dtype).tofile(data)
        ours.train(2, "--from", folder / "grouped", "--out", out, "--data", data, "--data-dtype", dtype, "--seq", "16",
                   "--steps", "2", "--lr", "1e-2")
        x, y = held_out(tokens, 16, 12, end)
        loss = loss_of(load(out), x, y).item()
        near(f"train on {dtype}, validation loss", ours.validation_loss(), loss)
        assert abs(loss_of(load(folder / "grouped"), x, y).item() - loss) > 1e-3  # it has learnt


def check_new_model(ours, folder):
    out = folder / "new"
    ours.train(3, "--out", out, "--data", folder / "text", "--dim", "12", "--heads", "2", "--layers", "1", "--seq", "16",
               "--steps", "1", "--tied", "--kv-heads", "1")
    x, y = held_out((folder / "text").read_bytes(), 16, 18, [0])
    near("a model that began here, validation loss", ours.validation_loss(), loss_of(load(out), x, y).item())


def check_generate(ours, folder):
    model = load(folder / "llama3")
    said = call(ours.binary, "generate", "--from", folder / "llama3", "--ids", "--prompt", "5 300 17", "--tokens", "20",
                "--temperature", "0")
    model.generation_config.eos_token_id = None
    wanted = model.generate(torch.tensor([[5, 300, 17]]), max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    assert [int(word) for word in said.split()] == wanted, (said, wanted)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ours = Ours(sys.argv[1], sys.argv[2], folder)
        rows = torch.randint(0, 301, (6, 33))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        save_file({"x": x, "y": y}, folder / "batch")
        check_weights(ours, folder, x, y)
        check_bfloat16(ours, folder, x)
        check_train(ours, folder)
        check_new_model(ours, folder)
        check_generate(ours, folder)


if __name__ == "__main__":
    main()
