#!/usr/bin/env python3
"""Draws the loss of a run in the terminal.  Usage: plot_loss.py METRICS_JSONL [WIDTH HEIGHT]"""
import json
import sys


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def columns(rows, key, width):
    """Mean of `key` over each of `width` equal parts of the steps; None where there is none."""
    last = rows[-1]["step"]
    parts = [[] for _ in range(width)]
    for row in rows:
        if row.get(key) is not None:
            parts[min(width - 1, row["step"] * width // (last + 1))].append(row[key])
    return [sum(part) / len(part) if part else None for part in parts]


def draw(rows, width, height):
    train, valid = columns(rows, "loss", width), columns(rows, "valid_loss", width)
    seen = [value for value in train + valid if value is not None]
    low, high = min(seen), max(seen)
    scale = (height - 1) / ((high - low) or 1.0)
    lines = [[" "] * width for _ in range(height)]
    for values, mark in ((train, "."), (valid, "o")):
        for x, value in enumerate(values):
            if value is not None:
                lines[round((high - value) * scale)][x] = mark
    print(f"loss over {rows[-1]['step']} steps (. training, o validation)")
    for y, line in enumerate(lines):
        print(f"{high - y / scale:8.3f} |{''.join(line).rstrip()}")
    print(" " * 9 + "+" + "-" * width)


def main():
    width, height = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else (70, 14)
    rows = read(sys.argv[1])
    if rows:
        draw(rows, width, height)
    return 0


if __name__ == "__main__":
    sys.exit(main())
