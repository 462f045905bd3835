"""Every layout computes the same: the model on one rank against the model on a grid, by `trident selftest`.

The runs are chosen so that each pair of values of the options below occurs in at least one of them;
TRIDENT_LONG=1 runs the whole product. fp64: loss and gradient norm within 1e-11 over 20 steps, gradients of
every tensor within 1e-11, final parameters within 1e-9 (selftest.c derives them)."""
import itertools
import os
import random

import pytest

from trident import BASE, layout, overrides, run, write_config

SIZES = [1, 2, 3, 4, 8]
LAYOUTS = [(d, p, t) for d in SIZES for p in SIZES for t in SIZES if d * p * t <= 8]
OPTIONS = {
    "layout": LAYOUTS,
    "arch": ["gpt", "llama"],
    "depth": [0, 1, 2],            # least, middle, most micro-batches a step at one global batch
    "schedule": ["gpipe", "1f1b"],
    "sequence": ["auto", "no"],
    "tied": ["yes", "no"],
    "masked": ["yes", "no"],
    "kv": ["one", "some", "all"],  # key/value heads: 1 (below tensor), some, as many as heads
    "order": ["tensor, pipeline, data", "tensor, data, pipeline", "data, pipeline, tensor"],
}
GLOBAL_BATCH = 24


def settings_of(case):
    data, pipeline, tensor = case["layout"]
    heads = 6 if tensor == 3 else 8 if tensor == 8 else 4
    kv = {"one": 1, "some": 3 if tensor == 3 else heads // 2, "all": heads}[case["kv"]]
    per_rank = GLOBAL_BATCH // data
    depths = [m for m in range(1, per_rank + 1) if per_rank % m == 0]
    micro_batch = per_rank // depths[[0, len(depths) // 2, -1][case["depth"]]]
    return {
        **BASE, **layout(data, pipeline, tensor),
        "model.arch": case["arch"], "model.layers": pipeline + 1, "model.heads": heads, "model.kv_heads": kv,
        "model.hidden": 16 * heads, "model.ffn": 48, "model.seq_len": 24, "model.tie_embeddings": case["tied"],
        "parallel.schedule": case["schedule"], "parallel.sequence_parallel": case["sequence"],
        "parallel.order": case["order"],
        "train.micro_batch": micro_batch, "train.global_batch": GLOBAL_BATCH, "train.precision": "fp64",
        "data.mask_documents": case["masked"],
    }


def effective(case):
    """The case with options that its layout does not look at set to their first value."""
    data, pipeline, tensor = case["layout"]
    same = dict(case)
    if pipeline == 1:
        same["schedule"] = OPTIONS["schedule"][0]
    if tensor == 1:
        same["sequence"], same["kv"] = "auto", "some"
    if sum(size > 1 for size in case["layout"]) < 2:
        same["order"] = OPTIONS["order"][0]
    return same


def all_cases():
    """The whole product but for the order of ranks, which rotates."""
    names = [name for name in OPTIONS if name != "order"]
    cases = {}
    for i, values in enumerate(itertools.product(*(OPTIONS[name] for name in names))):
        case = effective({**dict(zip(names, values)), "order": OPTIONS["order"][i % 3]})
        cases.setdefault(tuple(v for name, v in case.items() if name != "order"), case)
    return list(cases.values())


def pairs_of(case):
    return {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(OPTIONS, 2)}


def pairwise_cases(seed=20):
    """Greedy: of a few random cases the one that covers most of the pairs still missing."""
    rng = random.Random(seed)
    missing = set().union(*(pairs_of(dict(zip(OPTIONS, values))) for values in random_product(rng, 4000)))
    chosen = []
    while missing:
        (a, b) = min(missing)[0], min(missing)[1]
        best = None
        for _ in range(60):
            case = {name: rng.choice(values) for name, values in OPTIONS.items()}
            case[a[0]], case[b[0]] = a[1], b[1]
            gain = len(pairs_of(case) & missing)
            if best is None or gain > best[0]:
                best = (gain, case)
        chosen.append(best[1])
        missing -= pairs_of(best[1])
    return chosen


def random_product(rng, n):
    return [[rng.choice(values) for values in OPTIONS.values()] for _ in range(n)]


def name_of(case):
    return "-".join(str(v).replace(" ", "") for v in case.values())


CASES = all_cases() if os.environ.get("TRIDENT_LONG") else pairwise_cases()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_layout_equals_one_rank(case, tmp_path):
    config = write_config(tmp_path / "run.ini", settings_of(case))
    done = run(["selftest", config, "--own-model", "--steps", 20], tmp_path, check=0)
    assert "selftest passed" in done.out


@pytest.mark.parametrize("data,pipeline,tensor", [(1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 4, 2), (3, 1, 2)])
@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_sgd(arch, data, pipeline, tensor, tmp_path):
    case = {**dict(zip(OPTIONS, random_product(random.Random(3), 1)[0])), "layout": (data, pipeline, tensor),
            "arch": arch}
    settings = {**settings_of(case), "optimizer.kind": "sgd", "optimizer.lr": 0.1, "optimizer.warmup_steps": 0}
    config = write_config(tmp_path / "run.ini", settings)
    run(["selftest", config, "--own-model", "--steps", 3], tmp_path, check=0)


@pytest.mark.parametrize("data,pipeline,tensor", [(2, 2, 2), (1, 8, 1), (1, 1, 4)])
@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_fp32(arch, data, pipeline, tensor, tmp_path):
    """The default self-test: a small model in fp64 and in the config's own precision."""
    settings = {**BASE, **layout(data, pipeline, tensor), "model.arch": arch, "model.layers": 8,
                "data.train": "unused", "train.global_batch": 16}
    config = write_config(tmp_path / "run.ini", settings)
    done = run(["selftest", config, *overrides({"train.seed": 11})], tmp_path, check=0)
    assert "fp32" in done.out and "fp64" in done.out
