"""Whole runs whose saves fail, are killed or find a full disk: the next run goes on from a complete checkpoint and
ends with the bits of one that nothing happened to. And what a resume refuses."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from trident import BASE, build_library, layout, make_corpus, metrics, overrides, run, write_config

ENOSPC = 28
LONG = os.environ.get("TRIDENT_LONG")
GRID = layout(*map(int, os.environ.get("TRIDENT_FAULT_GRID", "2,1,1").split(",")))


def settings(corpus, **extra):
    return {**BASE, "data.train": corpus, "train.steps": 4, "checkpoint.every": 2, "checkpoint.keep": 1,
            "checkpoint.dir": "run/checkpoints", "log.dir": "run/log", "optimizer.warmup_steps": 0,
            "optimizer.decay": "constant", **GRID, **extra}


def files(directory):
    """What the newest checkpoint's shards hold: all but their names."""
    manifest = json.loads((sorted(pathlib.Path(directory).glob("step-*"))[-1] / "manifest.json").read_text())
    return manifest["step"], [{k: v for k, v in f.items() if k != "name"} for f in manifest["files"]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("faults"), "faulty_io")


@pytest.fixture(scope="module")
def half(corpus, tmp_path_factory):
    """Stopped after two of four steps; and what four steps give."""
    directory = tmp_path_factory.mktemp("half")
    config = write_config(directory / "run.ini", settings(corpus))
    run(["train", config, *overrides({"checkpoint.dir": "whole/checkpoints", "log.dir": "whole/log"})], directory,
        check=0)
    run(["train", config, *overrides({"train.steps": 2})], directory, check=0)
    return directory


def faulty(directory, library, at, error):
    """Steps 3 and 4 with a fault at the at-th call on the checkpoint's files, counted over all ranks."""
    counter = directory / "counter"
    counter.unlink(missing_ok=True)
    env = {"LD_PRELOAD": library, "FAULT_AT": str(at), "FAULT_ERRNO": str(error), "FAULT_BELOW": "/checkpoints",
           "FAULT_COUNTER": str(counter)}
    done = run(["train", directory / "run.ini"], directory, env=env)
    return done, int.from_bytes(counter.read_bytes()[:8], "little")


def expect_good_end(directory):
    run(["inspect", "run/checkpoints", "--verify"], directory, check=0)
    run(["train", directory / "run.ini"], directory, check=0)
    assert files(directory / "run/checkpoints") == files(directory / "whole/checkpoints")
    steps = sorted(entry.name for entry in (directory / "run/checkpoints").iterdir())
    # A fault behind the commit may leave the old one, for the next save to remove.
    assert steps in (["step-00000004"], ["step-00000002", "step-00000004"])


@pytest.mark.parametrize("error", [ENOSPC, 0], ids=["full disk", "killed"])
def test_a_fault_at_every_call(error, half, library, tmp_path):
    calls = faulty(shutil.copytree(half, tmp_path / "count"), library, 0, error)[1]
    assert calls >= 15
    for at in range(1, calls + 1, 1 if LONG else 3):
        directory = shutil.copytree(half, tmp_path / str(at))
        done, _ = faulty(directory, library, at, error)
        if error == 0:
            assert done.returncode != 0, f"call {at} of {calls}: {done.err}"
        elif done.returncode != 0:
            assert done.returncode == 7, f"call {at} of {calls}: {done.err}"
            assert "No space left on device" in done.err and "checkpoints" in done.err
        expect_good_end(directory)


def test_a_disk_that_is_really_full(half, tmp_path):
    """A file system that has room for one checkpoint and a half."""
    directory = shutil.copytree(half, tmp_path / "run")
    saved = directory / "run/checkpoints"
    bytes_now = sum(f.stat().st_size for f in saved.rglob("*") if f.is_file())
    script = (f"mount -t tmpfs -o size={bytes_now * 3 // 2} none {tmp_path}/disk && "
              f"cp -r {saved}/. {tmp_path}/disk && mount --bind {tmp_path}/disk {saved} && "
              f'"$TRIDENT" train run.ini; status=$?; "$TRIDENT" inspect run/checkpoints --verify && exit $status')
    (tmp_path / "disk").mkdir()
    from trident import TRIDENT
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path / "disk"],
                      capture_output=True).returncode != 0:
        pytest.skip("this system does not let us mount a small file system")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=directory, capture_output=True, text=True,
                          env=dict(os.environ, TRIDENT=TRIDENT), timeout=120)
    assert done.returncode == 7, done.stderr
    assert "No space left on device" in done.stderr
    expect_good_end(directory)


def damage_flip(step):
    shard = sorted(step.glob("shard-*"))[0]
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 4  # of a parameter: they come first
    shard.write_bytes(data)
    return shard.name


def damage_cut(step):
    shard = sorted(step.glob("shard-*"))[-1]
    os.truncate(shard, shard.stat().st_size - 1)
    return shard.name


def damage_missing(step):
    shard = sorted(step.glob("shard-*"))[0]
    shard.unlink()
    return shard.name


def damage_manifest(step):
    path = step / "manifest.json"
    path.write_text(path.read_text().replace('"tokens": ', '"tokens": 1', 1))
    return "manifest.json"


def damage_step(step):
    step.rename(step.parent / "step-00000003")
    return "step 2, but its directory says step 3"


@pytest.mark.parametrize("damage", [damage_flip, damage_cut, damage_missing, damage_manifest, damage_step])
def test_a_damaged_checkpoint_is_refused_and_left_alone(damage, half, tmp_path):
    directory = shutil.copytree(half, tmp_path / "run")
    saved = directory / "run/checkpoints"
    named = damage(saved / "step-00000002")
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    done = run(["train", "run.ini"], directory, check=7)
    assert named in done.err
    run(["generate", "--checkpoint", "run/checkpoints", "--prompt", "x"], directory, check=7)
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def test_an_older_one_takes_the_place_of_an_incomplete_one(half, corpus, tmp_path):
    directory = shutil.copytree(half, tmp_path / "run")
    run(["train", "run.ini", *overrides({"checkpoint.keep": 0})], directory, check=0)
    named = damage_cut(directory / "run/checkpoints/step-00000004")
    done = run(["train", "run.ini"], directory, check=0)
    assert "passing over" in done.err and named in done.err and "step-00000002: step 2" in done.err
    assert files(directory / "run/checkpoints") == files(directory / "whole/checkpoints")


@pytest.mark.parametrize("key, value, old", [("model.heads", 2, 4), ("model.rope_theta", 12345, "10000"),
                                             ("train.global_batch", 4, 8), ("train.seed", 8, 7),
                                             ("optimizer.kind", "sgd", "adamw")])
def test_what_a_resume_refuses(key, value, old, half, tmp_path):
    directory = shutil.copytree(half, tmp_path / "run")
    done = run(["train", "run.ini", *overrides({key: value})], directory, check=7)
    assert f"{key} = {value}" in done.err and str(old) in done.err and "checkpoint.allow" in done.err
    assert files(directory / "run/checkpoints")[0] == 2


@pytest.mark.parametrize("batch", [4, 16])
def test_a_batch_size_that_may_change(batch, half, tmp_path):
    """Smaller or larger, the data goes on behind what was drawn: 2 x 8 samples, then 2 steps of the new size."""
    directory = shutil.copytree(half, tmp_path / "run")
    done = run(["train", "run.ini", *overrides({"train.global_batch": batch,
                                                "checkpoint.allow": "train.global_batch"})], directory, check=0)
    assert "bits of one that was never stopped" not in done.err
    manifest = json.loads((directory / "run/checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["corpus_counters"] == [16 + 2 * batch]


def test_other_weights_of_the_mix_repeat_nothing(half, corpus, tmp_path):
    other = make_corpus(tmp_path, seed=2)
    directory = tmp_path / "run"
    directory.mkdir()
    config = write_config(directory / "run.ini", settings(f'"{corpus}:1, {other}:3"', **{"train.steps": 2}))
    run(["train", config], directory, check=0)
    done = run(["train", config, *overrides({"train.steps": 4, "data.train": f"{corpus}:3, {other}:1"})], directory,
               check=0)
    assert "data.train" in done.err and "bits of one that was never stopped" not in done.err
    manifest = json.loads((directory / "run/checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["corpus_counters"] == [4 + 12, 12 + 4]


def test_weights_alone(half, tmp_path):
    directory = shutil.copytree(half, tmp_path / "run")
    new = {"checkpoint.resume": "weights:run/checkpoints", "checkpoint.dir": "new/checkpoints", "log.dir": "new/log",
           "train.steps": 1, "train.global_batch": 4, "train.seed": 99}
    done = run(["train", "run.ini", *overrides(new)], directory, check=0)
    assert "a new run with the weights of" in done.err and sorted(metrics(directory / "new/log")) == [1]
    done = run(["train", "run.ini", *overrides({**new, "model.heads": 2})], directory, check=7)
    assert "model.heads = 2" in done.err and "another model" in done.err
