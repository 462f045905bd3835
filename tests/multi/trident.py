"""What the program-level tests share: running the executable, reading metrics, making small data."""
import json
import os
import pathlib
import random
import struct
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRIDENT = os.environ.get("TRIDENT", str(ROOT / "trident"))

BASE = {
    "model.arch": "llama", "model.layers": 4, "model.hidden": 64, "model.heads": 4, "model.kv_heads": 2,
    "model.ffn": 96, "model.vocab": 101, "model.seq_len": 16,
    "train.steps": 20, "train.micro_batch": 1, "train.global_batch": 8, "train.seed": 7,
    "optimizer.lr": 3e-3, "optimizer.warmup_steps": 4, "optimizer.decay": "cosine",
}


def build_library(directory, name):
    """A library to load before libc (LD_PRELOAD), from tests/faults/NAME.c."""
    path = str(pathlib.Path(directory) / f"{name}.so")
    subprocess.run(["gcc", "-O1", "-std=gnu11", "-shared", "-fPIC", "-I.", "-o", path, f"tests/faults/{name}.c"],
                   cwd=ROOT, check=True)
    return path


def write_config(path, settings):
    """An INI file from {"section.key": value}."""
    sections = {}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"{name} = {value}")
    text = "".join(f"[{s}]\n" + "\n".join(lines) + "\n\n" for s, lines in sections.items())
    pathlib.Path(path).write_text(text)
    return path


def write_tokens(prefix, tokens, documents, dtype_code=8):
    """A Megatron .bin/.idx pair; documents: lengths that add up to len(tokens)."""
    width = {8: "H", 4: "i"}[dtype_code]
    size = struct.calcsize(width)
    pathlib.Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{width}", *tokens))
    pointers, at = [], 0
    for n in documents:
        pointers.append(at)
        at += n * size
    n = len(documents)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype_code, n, n + 1)
    index += struct.pack(f"<{n}i", *documents) + struct.pack(f"<{n}q", *pointers)
    index += struct.pack(f"<{n + 1}q", *range(n + 1))
    pathlib.Path(f"{prefix}.idx").write_bytes(index)


def make_corpus(directory, vocab=101, n_tokens=4000, seed=1):
    """A small token file with documents of many lengths and some structure to learn."""
    rng = random.Random(seed)
    documents, tokens = [], []
    while len(tokens) < n_tokens:
        n = min(rng.choice([1, 2, 3, 7, 16, 40, 100]), n_tokens - len(tokens))
        start, stride = rng.randrange(vocab), rng.randrange(1, 5)
        tokens += [(start + i * stride) % vocab for i in range(n)]
        documents.append(n)
    prefix = pathlib.Path(directory) / "corpus"
    write_tokens(prefix, tokens, documents)
    return str(prefix)


def run(arguments, cwd, timeout=120, env=None, check=None):
    """Runs the executable; check: the exit status that must come."""
    full = dict(os.environ, **(env or {}))
    done = subprocess.run([TRIDENT, *map(str, arguments)], cwd=cwd, env=full, capture_output=True, timeout=timeout)
    done.out, done.err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if check is not None:
        assert done.returncode == check, f"exit {done.returncode}, expected {check}\n{done.out}\n{done.err}"
    return done


def overrides(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def metrics(log_dir):
    """Rows of metrics.jsonl by step."""
    lines = (pathlib.Path(log_dir) / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def layout(data=1, pipeline=1, tensor=1):
    return {"parallel.data": data, "parallel.pipeline": pipeline, "parallel.tensor": tensor,
            "parallel.ranks": data * pipeline * tensor}
