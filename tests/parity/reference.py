#!/usr/bin/python3
"""Trains the models of cases.py with PyTorch in fp64 and writes what came out to fixtures/CASE.json.

    /usr/bin/python3 tests/parity/reference.py [CASE...]

Run by hand when a case is added; the tests read the files. Written from the published definitions, not from
Trident's code: GPT-2 (Radford et al. 2019: learned positions, pre-LayerNorm, tanh form of GELU, biases), LLaMA (Touvron
et al. 2023: RMSNorm, SwiGLU, RoPE on half-split pairs as Hugging Face stores it, grouped-query attention of
Ainslie et al. 2023), AdamW and cosine decay (Loshchilov and Hutter), clipping by norm (Pascanu et al. 2013).
What Trident defines itself is written again here from its documentation: initial weights and the order of samples
are pure functions of seed, name and index (Philox 4x32-10 of Salmon et al. 2011, Box-Muller, a Feistel network).

For each tensor the file holds the norm, some elements, and for each of these its sensitivity: how far its final value
moves, in units of the relative error, when every gradient of every step carries a random error. It is measured, since
an update of AdamW follows the sign of a gradient near zero and later gradients follow the weights. A tolerance is
the sensitivity times the relative error that a gradient may have."""
import ctypes
import json
import math
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

from cases import CASES, corpus, spread

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures"
DISTURBANCE, DISTURBED_RUNS = 1e-9, 6


# ---- random numbers ----

def philox(key, high, low):
    """Philox 4x32-10; key an int, high and low arrays of uint64. Four arrays of 32-bit words."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    low, high = np.asarray(low, np.uint64), np.asarray(high, np.uint64)
    x = [low & mask, low >> shift, high & mask, high >> shift]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [(b >> shift) ^ x[1] ^ np.uint64(k[0]), b & mask, (a >> shift) ^ x[3] ^ np.uint64(k[1]), a & mask]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def check_philox():
    """Known answers that come with the authors' Random123 library."""
    ones = 0xFFFFFFFFFFFFFFFF
    for key, high, low, expected in [
            (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            (ones, ones, ones, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, "d16cfe09 94fdcceb 5001e420 24126ea1")]:
        assert " ".join(f"{int(w):08x}" for w in philox(key, high, low)) == expected


def stream(name):
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_64bits.restype = ctypes.c_uint64
    return library.XXH3_64bits(name.encode(), ctypes.c_size_t(len(name)))


def bits(seed, name, index):
    words = philox(seed, stream(name), index)
    return int(words[1]) << 32 | int(words[0])


def normals(seed, name, count):
    """Standard normals by Box and Muller's cosine, 53 random bits in each of the two uniforms."""
    index = np.arange(count, dtype=np.uint64)
    w = philox(seed, np.full(count, stream(name), np.uint64), index)
    u, v = (((w[i + 1] << np.uint64(32) | w[i]) >> np.uint64(11)).astype(np.float64) * 2.0**-53 for i in (0, 2))
    return np.sqrt(-2.0 * np.log(1.0 - u)) * np.cos(2.0 * math.pi * v)


def permute(key, n, index):
    """Feistel network over the smallest power of two that holds n, 10 rounds, cycle walking."""
    width = max(n - 1, 0).bit_length()
    low_bits = width // 2
    high_bits = width - low_bits
    while True:
        low, high = index % 2**low_bits, index >> low_bits
        for r in range(0, 10, 2):
            high ^= int(philox(key, r, low)[0]) % 2**high_bits
            low ^= int(philox(key, r + 1, high)[0]) % 2**low_bits
        index = high << low_bits | low
        if index < n:
            return index


# ---- data ----

def sample(s, k):
    """Tokens, targets, positions and document numbers of global sample k."""
    tokens, lengths = corpus()
    owner = [d for d, length in enumerate(lengths) for _ in range(length)]
    T = s["model.seq_len"]
    windows = (len(tokens) - 1) // T
    key = bits(s["train.seed"], "data/order/0", k // windows)
    first = T * permute(key, windows, k % windows)
    x, y = tokens[first:first + T], tokens[first + 1:first + T + 1]
    if s["data.mask_documents"] == "no":
        return x, y, list(range(T)), [0] * T
    document = owner[first:first + T + 1]
    positions = [t - document.index(document[t]) for t in range(T)]
    y = [target if document[t + 1] == document[t] else -1 for t, target in enumerate(y)]
    return x, y, positions, document[:T]


def batch(s, step):
    B = s["train.global_batch"]
    return [torch.tensor(part) for part in zip(*(sample(s, step * B + i) for i in range(B)))]


# ---- models ----

def make_weights(s):
    """{name: tensor} of initial weights, matrices (outputs, inputs)."""
    C, ffn, V, L = s["model.hidden"], s["model.ffn"], s["model.vocab"], s["model.layers"]
    gpt = s["model.arch"] == "gpt"
    KV = C // s["model.heads"] * s["model.kv_heads"]
    w, std = {}, s["train.init_std"]

    def matrix(name, rows, columns, factor=1.0):
        values = factor * normals(s["train.seed"], "init/" + name, rows * columns)
        w[name] = torch.tensor(values.reshape(rows, columns))

    def constant(name, size, value):
        w[name] = torch.full((size,), value, dtype=torch.float64)

    def norm(name):
        constant(name + ".weight", C, 1.0)
        if gpt:
            constant(name + ".bias", C, 0.0)

    def linear(name, outputs, inputs, factor):
        matrix(name + ".weight", outputs, inputs, factor)
        if gpt:
            constant(name + ".bias", outputs, 0.0)

    matrix("embed.weight", V, C, std)
    if gpt:
        matrix("positions.weight", s["model.seq_len"], C, std)
    into_residual = std / math.sqrt(2 * L)
    for i in range(L):
        b = f"blocks.{i}."
        norm(b + "norm1")
        for part, outputs in (("q", C), ("k", KV), ("v", KV)):
            linear(b + "attn." + part, outputs, C, std)
        linear(b + "attn.out", C, C, into_residual)
        norm(b + "norm2")
        if not gpt:
            linear(b + "mlp.gate", ffn, C, std)
        linear(b + "mlp.up", ffn, C, std)
        linear(b + "mlp.down", C, ffn, into_residual)
    norm("final_norm")
    if s["model.tie_embeddings"] == "no":
        matrix("head.weight", V, C, std)
    for tensor in w.values():
        tensor.requires_grad_(True)
    return w


def rotate(x, positions, theta):
    """RoPE of x (B, heads, T, D): x cos + rotate_half(x) sin, as in Hugging Face's LLaMA."""
    D = x.shape[-1]
    frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = positions[:, None, :, None].double() * torch.cat((frequency, frequency))
    half = torch.cat((-x[..., D // 2:], x[..., :D // 2]), dim=-1)
    return x * angle.cos() + half * angle.sin()


class Model:
    def __init__(self, s):
        self.s, self.w = s, make_weights(s)
        self.gpt = s["model.arch"] == "gpt"

    def norm(self, x, name):
        C, eps, w = x.shape[-1], self.s["model.norm_eps"], self.w
        if self.gpt:
            return F.layer_norm(x, (C,), w[name + ".weight"], w[name + ".bias"], eps)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w[name + ".weight"]

    def linear(self, x, name):
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def attention(self, x, block, positions, documents):
        H, KV = self.s["model.heads"], self.s["model.kv_heads"]
        B, T, C = x.shape
        q = self.linear(x, block + "attn.q").view(B, T, H, C // H).transpose(1, 2)
        k, v = (self.linear(x, block + "attn." + p).view(B, T, KV, C // H).transpose(1, 2) for p in "kv")
        if not self.gpt:
            q, k = (rotate(t, positions, self.s["model.rope_theta"]) for t in (q, k))
        k, v = (t.repeat_interleave(H // KV, dim=1) for t in (k, v))
        allowed = torch.ones(T, T, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
        scores = (q @ k.transpose(-2, -1) / math.sqrt(C // H)).masked_fill(~allowed[:, None], -math.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
        return self.linear(out, block + "attn.out")

    def mlp(self, x, block):
        if self.gpt:
            inner = self.linear(x, block + "mlp.up")
            inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner ** 3)))
        else:
            inner = F.silu(self.linear(x, block + "mlp.gate")) * self.linear(x, block + "mlp.up")
        return self.linear(inner, block + "mlp.down")

    def loss(self, tokens, targets, positions, documents):
        x = self.w["embed.weight"][tokens]
        if self.gpt:
            x = x + self.w["positions.weight"][positions]
        for i in range(self.s["model.layers"]):
            block = f"blocks.{i}."
            x = x + self.attention(self.norm(x, block + "norm1"), block, positions, documents)
            x = x + self.mlp(self.norm(x, block + "norm2"), block)
        head = self.w["embed.weight" if self.s["model.tie_embeddings"] == "yes" else "head.weight"]
        logits = F.linear(self.norm(x, "final_norm"), head)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


# ---- training ----

def learning_rate(s, update):
    warmup, total = s["optimizer.warmup_steps"], s["train.steps"]
    if update < warmup:
        return s["optimizer.lr"] * (update + 1) / warmup
    low, high = s["optimizer.min_lr"], s["optimizer.lr"]
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * (update - warmup) / (total - warmup)))


def make_optimizer(s, w):
    """Weight decay on matrices only. PyTorch's SGD couples decay with momentum; here it is decoupled, as in AdamW,
    and applied by the caller."""
    decay = s["optimizer.weight_decay"]
    if s["optimizer.kind"] == "sgd":
        return torch.optim.SGD(w.values(), lr=1.0, momentum=s["optimizer.beta1"])
    groups = [{"params": [t for t in w.values() if t.dim() == 2], "weight_decay": decay},
              {"params": [t for t in w.values() if t.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(s["optimizer.beta1"], s["optimizer.beta2"]),
                             eps=s["optimizer.eps"])


def disturb(w, relative, generator):
    """Adds to each gradient a normal error, relative to the tensor's root mean square gradient, but at least to a
    thousandth of that of all (the true gradient of a key's bias is zero). Rows of tokens that did not occur stay
    zero."""
    total = sum(t.numel() for t in w.values())
    least = 1e-3 * math.sqrt(sum(float((t.grad ** 2).sum()) for t in w.values()) / total)
    for t in w.values():
        size = max(math.sqrt(float((t.grad ** 2).mean())), least)
        t.grad += relative * size * torch.randn(t.shape, generator=generator) * (t.grad != 0)


def train(s, error=0.0, seed=0):
    """Final weights, losses and gradient norms; error: relative, of the gradients."""
    model, generator = Model(s), torch.Generator().manual_seed(seed)
    w = model.w
    optimizer = make_optimizer(s, w)
    losses, norms = [], []
    for step in range(s["train.steps"]):
        optimizer.zero_grad()
        loss = model.loss(*batch(s, step))
        loss.backward()
        if error:
            with torch.no_grad():
                disturb(w, error, generator)
        norm = math.sqrt(sum(float((t.grad ** 2).sum()) for t in w.values()))
        losses.append(float(loss))
        norms.append(norm)
        lr = learning_rate(s, step)
        with torch.no_grad():
            for t in w.values():
                t.grad *= min(1.0, s["optimizer.clip"] / norm)
            if s["optimizer.kind"] == "sgd":
                for t in w.values():
                    t *= 1 - lr * s["optimizer.weight_decay"] * (t.dim() == 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: t.detach().flatten() for name, t in w.items()}, losses, norms


def sensitivities(s, w):
    """{name: change of each final weight for a relative error 1 of the gradients}: the largest that was found."""
    changes = {name: torch.zeros_like(t) for name, t in w.items()}
    for seed in range(DISTURBED_RUNS):
        disturbed, _, _ = train(s, DISTURBANCE, seed)
        for name, t in disturbed.items():
            changes[name] = torch.maximum(changes[name], (t - w[name]).abs() / DISTURBANCE)
    return changes


def write(name):
    s = CASES[name]
    w, losses, norms = train(s)
    shapes = {key: list(t.shape) for key, t in make_weights(s).items()}
    tensors = {}
    for key, change in sensitivities(s, w).items():
        index = spread(w[key].numel())
        tensors[key] = {"shape": shapes[key], "norm": float(w[key].norm()),
                        "norm_sensitivity": float(f"{float(change.norm()):.3g}"),
                        "value": [float(w[key][i]) for i in index],
                        "sensitivity": [float(f"{float(change[i]):.3g}") for i in index]}
    result = {"settings": s, "torch": torch.__version__, "losses": losses, "grad_norms": norms, "tensors": tensors}
    FIXTURES.mkdir(exist_ok=True)
    lines = json.dumps(result, separators=(",", ":")).replace('},"', '},\n"').replace('],"', '],\n"')
    (FIXTURES / f"{name}.json").write_text(lines + "\n")
    clipped = sum(n > s["optimizer.clip"] for n in norms)
    print(f"{name}: loss {losses[0]:.6f} to {losses[-1]:.6f}, clipped {clipped} of {len(norms)}, "
          f"{len(tensors)} tensors")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    check_philox()
    for case in sys.argv[1:] or CASES:
        write(case)
