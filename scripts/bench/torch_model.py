#!/usr/bin/python3
"""The peer of Trident's benchmark: the same GPT or LLaMA in plain PyTorch, whole training steps in fp32 on the CPU.

In: sizes and counts as options (torch_model.py --help). Out: one line of JSON with the version, the number of
parameters, FLOPs of a token (6 a parameter of a matrix product, causal attention counted by its lower half), the loss
of the first step and the seconds of every step after the warm-up: draw a batch, forward, backward, AdamW.
The model is what Trident trains with model.tie_embeddings = yes: pre-norm blocks, one product for query, key and value,
no dropout, embedding and head one table. It is written as users write it, with the modules of torch.nn, and with the
choices that measured fastest with PyTorch 1.13 on CPUs: masked_fill and softmax for attention (this version has no
fused one for CPUs in its public interface), cross_entropy over all logits at once, gradients freed between steps.
"""
import argparse
import json
import math
import time

import torch
from torch import nn
from torch.nn import functional


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class GeluMlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class SwigluMlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        ffn = math.ceil(8 * hidden / 3 / 64) * 64
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, o):
        super().__init__()
        bias = o.arch == "gpt"
        self.heads = o.heads
        self.qkv = nn.Linear(o.hidden, 3 * o.hidden, bias=bias)
        self.out = nn.Linear(o.hidden, o.hidden, bias=bias)
        future = torch.ones(o.seq_len, o.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)
        self.rotation = None if bias else rotation_table(o.seq_len, o.hidden // o.heads)

    def forward(self, x):
        batch, tokens, hidden = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        if self.rotation:
            q, k = rotate(q, *self.rotation), rotate(k, *self.rotation)
        scores = q @ k.transpose(-2, -1) * (hidden // self.heads) ** -0.5
        weights = scores.masked_fill(self.future, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, hidden))


def rotation_table(positions, width):
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(positions)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Block(nn.Module):
    def __init__(self, o):
        super().__init__()
        norm = nn.LayerNorm if o.arch == "gpt" else RmsNorm
        self.norm1, self.attention = norm(o.hidden), Attention(o)
        self.norm2, self.mlp = norm(o.hidden), (GeluMlp if o.arch == "gpt" else SwigluMlp)(o.hidden)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.embedding = nn.Embedding(o.vocab, o.hidden)
        self.positions = nn.Embedding(o.seq_len, o.hidden) if o.arch == "gpt" else None
        self.blocks = nn.Sequential(*(Block(o) for _ in range(o.layers)))
        self.norm = (nn.LayerNorm if o.arch == "gpt" else RmsNorm)(o.hidden)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * o.layers) if into_residual else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        logits = functional.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flops_per_token(model, o):
    """As Trident counts: weights that multiply (the head among them), and the lower half of attention."""
    in_blocks = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    return 6 * (in_blocks + o.vocab * o.hidden) + 6 * o.hidden * o.seq_len * o.layers


def train(o):
    torch.manual_seed(1234)
    model = Model(o)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, seconds = [], []
    while len(seconds) < o.warm_up_steps + o.steps or sum(seconds[o.warm_up_steps:]) < o.seconds:
        start_s = time.perf_counter()
        batch = torch.randint(o.vocab, (o.batch, o.seq_len + 1))
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start_s)
    return {"version": torch.__version__, "parameters": sum(p.numel() for p in model.parameters()),
            "flops_per_token": flops_per_token(model, o), "first_loss": losses[0],
            "step_s": seconds[o.warm_up_steps:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("gpt", "llama"), required=True)
    for name in ("hidden", "layers", "heads", "seq_len", "batch", "vocab", "threads", "warm_up_steps", "steps"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="that are measured at least")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    print(json.dumps(train(o)), flush=True)


if __name__ == "__main__":
    main()
