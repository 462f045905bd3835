"""A stopped run goes on with the bits of one that was never stopped; any layout continues any checkpoint."""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest

from trident import BASE, ROOT, TRIDENT, layout, make_corpus, metrics, overrides, run, write_config

STEPS = 20


def settings(corpus, name, **extra):
    return {**BASE, "data.train": corpus, "train.steps": STEPS, "checkpoint.every": 1, "checkpoint.keep": 0,
            "checkpoint.dir": f"{name}/checkpoints", "log.dir": f"{name}/log", **extra}


def losses(directory):
    return {step: (row["loss"], row["grad_norm"], row["lr"]) for step, row in metrics(directory).items()}


def shard_bytes(step_dir):
    """Checksums of the shards as the manifest has them, by what they hold."""
    manifest = json.loads((pathlib.Path(step_dir) / "manifest.json").read_text())
    return sorted(json.dumps({k: v for k, v in f.items() if k not in ("name", "file", "path")}, sort_keys=True)
                  for f in manifest["files"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """One uninterrupted run, in 2 x 2 x 2, that saved every step."""
    directory = tmp_path_factory.mktemp("whole")
    config = write_config(directory / "run.ini", settings(corpus, "whole", **layout(2, 2, 2)))
    run(["train", config], directory, check=0)
    return directory


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resume_at_every_step(step, whole, corpus, tmp_path):
    """The checkpoint of `step` alone, continued to the end: same losses, same final files."""
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    source = whole / "whole" / "checkpoints" / f"step-{step:08d}"
    subprocess.run(["cp", "-r", source, tmp_path / "part" / "checkpoints"], check=True)
    config = write_config(tmp_path / "run.ini",
                          settings(corpus, "part", **layout(2, 2, 2), **{"checkpoint.every": 0}))
    done = run(["train", config], tmp_path, check=0)
    assert "same layout" in done.err
    expected, found = losses(whole / "whole" / "log"), losses(tmp_path / "part" / "log")
    assert sorted(found) == list(range(step + 1, STEPS + 1))
    assert {s: expected[s] for s in found} == found
    last = f"checkpoints/step-{STEPS:08d}"
    assert shard_bytes(whole / "whole" / last) == shard_bytes(tmp_path / "part" / last)


LAYOUTS = [(d, p, t) for d in (1, 2, 4) for p in (1, 2, 4) for t in (1, 2, 4) if d * p * t <= 8]


@pytest.mark.parametrize("pair", range(20))
def test_any_layout_reads_any_other(pair, corpus, tmp_path):
    """Train in one layout, load in another and save at once, load in one process and save at once: the
    logical state that arrives is bit-equal to the one that comes directly."""
    rng = random.Random(100 + pair)
    a, b = rng.choice(LAYOUTS), rng.choice(LAYOUTS)
    model = {"model.arch": rng.choice(["gpt", "llama"]), "model.tie_embeddings": rng.choice(["yes", "no"]),
             "model.kv_heads": rng.choice([1, 2, 4])}
    start = settings(corpus, "a", **layout(*a), **model, **{"train.steps": 3, "checkpoint.every": 0,
                                                                   "optimizer.warmup_steps": 1})
    run(["train", write_config(tmp_path / "run.ini", start)], tmp_path, check=0)
    direct = resave(start, tmp_path, "a", "direct", (1, 1, 1))
    resave(start, tmp_path, "a", "b", b)
    detour = resave(start, tmp_path, "b", "detour", (1, 1, 1))
    assert direct == detour, f"layouts {a} and {b}, {model}"


def resave(base, directory, source, target, grid):
    """A finished run that is resumed from another directory is saved again, in the present layout."""
    settings_of = {**base, **layout(*grid), "checkpoint.dir": f"{target}/checkpoints", "log.dir": f"{target}/log"}
    config = write_config(directory / f"{target}.ini", settings_of)
    run(["train", config, *overrides({"checkpoint.resume": f"{source}/checkpoints"})], directory, check=0)
    return shard_bytes(directory / target / "checkpoints" / "step-00000003")


def start_separate(config, directory, world, port, words=(), own=None, programs=None):
    """The ranks as processes of their own, as another scheduler would start them. directory: one, or a list with
    each rank's; own: {rank: what only its environment has}; programs: {rank: another executable}."""
    processes = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env.update((own or {}).get(rank, {}))
        here = directory[rank] if isinstance(directory, list) else directory
        program = (programs or {}).get(rank, TRIDENT)
        processes.append(subprocess.Popen([program, "train", str(config), *words], cwd=here, env=env,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return processes


def wait_for_step(log_dir, step, deadline_s=60):
    end = time.time() + deadline_s
    while time.time() < end:
        path = pathlib.Path(log_dir) / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def children_of(pid):
    text = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("victim", [0, 3, 7])
@pytest.mark.parametrize("start", ["local", "separate"])
def test_killed_rank_is_named_and_the_run_goes_on(start, victim, corpus, tmp_path):
    steps = 400
    common = settings(corpus, "run", **layout(2, 2, 2), **{"train.steps": steps, "checkpoint.every": 10,
                                                             "checkpoint.keep": 2})
    config = write_config(tmp_path / "run.ini", common)
    if start == "local":
        processes = [subprocess.Popen([TRIDENT, "train", str(config)], cwd=tmp_path, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE)]
        wait_for_step(tmp_path / "run" / "log", 30)
        pid = sorted(children_of(processes[0].pid))[victim]
    else:
        processes = start_separate(config, tmp_path, 8, 20000 + os.getpid() % 20000 + victim)
        wait_for_step(tmp_path / "run" / "log", 30)
        pid = processes[victim].pid
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    outputs = [p.communicate(timeout=30) for p in processes]
    assert time.time() - killed < 2.0 + 0.5  # half a second for this test's own work on busy cores
    text = b"".join(err for _, err in outputs).decode()
    assert re.search(rf"rank {victim}\b", text), text
    statuses = [p.returncode for i, p in enumerate(processes) if not (start == "separate" and i == victim)]
    assert set(statuses) == {5}, f"{statuses}\n{text}"
    run(["train", config], tmp_path, check=0)

    whole = settings(corpus, "whole", **layout(2, 2, 2), **{"train.steps": steps, "checkpoint.every": 0})
    run(["train", write_config(tmp_path / "whole.ini", whole)], tmp_path, check=0)
    assert losses(tmp_path / "run" / "log") == losses(tmp_path / "whole" / "log")
    last = f"checkpoints/step-{steps:08d}"
    assert shard_bytes(tmp_path / "run" / last) == shard_bytes(tmp_path / "whole" / last)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_and_exits_75(number, corpus, tmp_path):
    common = settings(corpus, "run", **layout(2, 2, 1), **{"train.steps": 100000, "checkpoint.every": 0})
    config = write_config(tmp_path / "run.ini", common)
    process = subprocess.Popen([TRIDENT, "train", str(config)], cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for_step(tmp_path / "run" / "log", 5)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err.decode()
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    done = run(["train", config, *overrides({"train.steps": int(saved[0].name[5:]) + 2})], tmp_path, check=0)
    assert "resuming from" in done.err


def test_same_run_twice_and_with_two_threads(corpus, tmp_path):
    runs = {}
    for name, threads in [("one", 1), ("again", 1), ("two", 2), ("three", 3)]:
        for arch in ("gpt", "llama"):
            common = settings(corpus, f"{name}-{arch}", **layout(1, 1, 2),
                              **{"model.arch": arch, "train.threads": threads, "checkpoint.every": 0})
            run(["train", write_config(tmp_path / "run.ini", common)], tmp_path, check=0)
            runs[name, arch] = (losses(tmp_path / f"{name}-{arch}" / "log"),
                                shard_bytes(tmp_path / f"{name}-{arch}" / "checkpoints" / f"step-{STEPS:08d}"))
    for arch in ("gpt", "llama"):
        assert runs["one", arch] == runs["again", arch] == runs["two", arch] == runs["three", arch]
    assert ROOT.exists()
