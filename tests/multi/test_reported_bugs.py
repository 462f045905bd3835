"""What users of other trainers have reported, and what must be true here. Each case says both in one or two
sentences; what other test files already hold is not repeated."""
import array
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import time

import pytest

from test_bad_input import byte_letters
from test_commands import read_tokens
from test_resume import children_of, losses, shard_bytes, start_separate, wait_for_step
from trident import (BASE, ROOT, TRIDENT, build_library, layout, make_corpus, metrics, overrides, run, write_config,
                     write_tokens)

CONFIG, DATA, LAUNCH, PEER_LOST, HANG, CHECKPOINT, NUMBERS, STOPPED = 2, 3, 4, 5, 6, 7, 8, 75


def settings(corpus="corpus", name="run", **changes):
    return {**BASE, "model.layers": 2, "data.train": corpus, "train.threads": 1,
            "checkpoint.dir": f"{name}/checkpoints", "log.dir": f"{name}/log", **changes}


def trained(directory, name, words=(), check=0, env=None, **changes):
    """A run in its own folder of the directory."""
    config = write_config(directory / f"{name}.ini", settings(name=name, **changes))
    return run(["train", config, *words], directory, check=check, env=env)


def steps_of(directory, name="run"):
    return sorted(int(p.name[5:]) for p in (directory / name / "checkpoints").glob("step-*"))


def values_of(step_dir, prefix="param/"):
    """{name: bytes} of the arrays in a checkpoint that one process wrote, read by the format's description."""
    found = {}
    for shard in pathlib.Path(step_dir).glob("shard-*"):
        data = shard.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:8 + size]).items():
            if name.startswith(prefix):
                first, end = entry["data_offsets"]
                found[name] = data[8 + size + first:8 + size + end]
    return found


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ended(processes, limit_s=30):
    """(exit status, standard error) of each; none is left over."""
    try:
        texts = [p.communicate(timeout=limit_s)[1].decode(errors="replace") for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
    return [(p.returncode, text) for p, text in zip(processes, texts)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def slow_io(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("slow"), "slow_io")


@pytest.fixture(scope="module")
def wrong_math(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("wrong"), "wrong_math")


# ---- data ----

def test_ids_beyond_16_bits_are_written_as_they_are(tmp_path):
    """Reported: a converter cast ids to 16 bits, and nearly half of a large vocabulary became other tokens. Here a
    vocabulary of 65536 tokens is written in 16 bits and a larger one in 32, with ids on both sides of the border."""
    letters = list(byte_letters().values())
    others = iter(a + b + c for a in letters[100:] for b in letters[100:] for c in letters[100:])
    for size, pairs in ((65536, {"qz": 65534}), (70002, {"qz": 65535, "zq": 65536, "xx": 70000})):
        words = {**{word: i for i, word in enumerate(letters)}, **pairs, "<|endoftext|>": size - 1}
        taken = set(words.values())
        words |= {next(others): i for i in range(size) if i not in taken}
        directory = tmp_path / str(size)
        directory.mkdir()
        (directory / "vocab.json").write_text(json.dumps(words))
        (directory / "merges.txt").write_text("#version\n" + "".join(f"{w[0]} {w[1]}\n" for w in pairs))
        (directory / "text.txt").write_text("".join(pairs) * 20)
        run(["tokenize", "--tokenizer", ".", "--out", "corpus", "text.txt", "text.txt"], directory, check=0)
        assert read_tokens(directory / "corpus") == [[*pairs.values()] * 20 + [size - 1]] * 2
        assert (directory / "corpus.idx").read_bytes()[17] == (8 if size <= 65536 else 4)
        # The last id is a token like any other to the run, and outside the next smaller vocabulary.
        config = write_config(directory / "run.ini", settings(**{
            "model.vocab": size, "model.hidden": 32, "model.heads": 2, "train.steps": 1, "train.global_batch": 2}))
        run(["train", config], directory, check=0)
        done = run(["train", config, *overrides({"model.vocab": size - 1, "checkpoint.dir": "none",
                                                 "train.global_batch": 8})], directory, check=DATA)
        assert f"is {size - 1}, outside the vocabulary of {size - 1}" in done.err


@pytest.mark.parametrize("masked", ["no", "yes"])
def test_small_data_read_many_times_goes_on_where_it_was(masked, tmp_path):
    """Reported: after a resume in a later epoch, samples came in another order, or the epoch began anew. Here 37
    windows are read five times over, and a run that is resumed around the ends of epochs goes on with equal bits."""
    rng = random.Random(3)
    write_tokens(tmp_path / "corpus", [rng.randrange(101) for _ in range(37 * 16 + 1)], [100, 1, 0, 400, 92])
    common = {"train.global_batch": 4, "train.steps": 46, "checkpoint.every": 1, "checkpoint.keep": 0,
              "data.mask_documents": masked}
    trained(tmp_path, "whole", **common)
    expected = losses(tmp_path / "whole/log")
    for step in (9, 10, 19, 37):
        name = f"from{step}"
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        saved = f"checkpoints/step-{step:08d}"
        shutil.copytree(tmp_path / "whole" / saved, tmp_path / name / saved)
        trained(tmp_path, name, **{**common, "checkpoint.every": 0})
        found = losses(tmp_path / name / "log")
        assert found == {s: expected[s] for s in range(step + 1, 47)}


def test_token_files_are_opened_once(tmp_path):
    """Reported: a reader opened and closed its files for every sample, which loads a shared file system's servers.
    Here a run that has begun does not open them again: it ends well, saves included, when they are gone."""
    make_corpus(tmp_path)
    config = write_config(tmp_path / "run.ini", settings(**{"train.steps": 300, "checkpoint.every": 50}))
    process = subprocess.Popen([TRIDENT, "train", str(config)], cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for_step(tmp_path / "run/log", 2)
    (tmp_path / "corpus.bin").unlink()
    (tmp_path / "corpus.idx").unlink()
    assert sorted(metrics(tmp_path / "run/log"))[-1] < 300, "the run was too short for this test"
    assert ended([process])[0][0] == 0 and sorted(metrics(tmp_path / "run/log"))[-1] == 300


@pytest.mark.parametrize("key", ["data.train", "data.valid"])
def test_ranks_with_other_data_are_refused(key, tmp_path):
    """Reported: a second node read its own copy of the data, or none. Here ranks whose token files differ are
    refused before the first step, with their numbers and the setting."""
    for rank in range(3):
        make_corpus(tmp_path)
        (tmp_path / str(rank)).mkdir()
        make_corpus(tmp_path / str(rank), seed=1)
        make_corpus(tmp_path / str(rank), seed=1)
        for suffix in (".bin", ".idx"):
            shutil.copy(tmp_path / f"corpus{suffix}", tmp_path / str(rank) / f"other{suffix}")
    make_corpus(tmp_path / "2", seed=2, n_tokens=5000)
    for suffix in (".bin", ".idx"):
        (tmp_path / "2" / f"{'corpus' if key == 'data.train' else 'other'}{suffix}").write_bytes(
            (tmp_path / "2" / f"corpus{suffix}").read_bytes())
    if key == "data.valid":
        make_corpus(tmp_path / "2", seed=1)
    config = write_config(tmp_path / "run.ini", settings(**layout(3), **{
        "data.valid": "other", "train.global_batch": 3, "train.steps": 2, "checkpoint.dir": f"{tmp_path}/saved"}))
    found = ended(start_separate(config, [tmp_path / str(r) for r in range(3)], 3, free_port()))
    text = "".join(t for _, t in found)
    assert {status for status, _ in found} <= {DATA, PEER_LOST} and DATA in {s for s, _ in found}, text
    assert f"{key} = " in text and "rank 2" in text, text
    assert not (tmp_path / "saved").exists() and not (tmp_path / "0/run/log/metrics.jsonl").exists()


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_nothing_to_learn_from_is_an_error(grid, tmp_path):
    """Reported: where every target was masked, the loss was divided by zero, and the weights became NaN or the run
    went on. Here such steps change nothing, the run ends after max_skipped of them, and eval says why."""
    write_tokens(tmp_path / "corpus", [i % 101 for i in range(2000)], [1] * 2000)
    masked = {"data.mask_documents": "yes", "optimizer.max_skipped": 3, "data.valid": "corpus", **layout(*grid)}
    done = trained(tmp_path, "run", check=NUMBERS, **masked)
    assert "3 steps in a row were skipped" in done.err and "0 unmasked tokens" in done.err
    assert steps_of(tmp_path) == []
    trained(tmp_path, "good", **{**masked, "data.mask_documents": "no", "train.steps": 2})
    done = run(["eval", tmp_path / "good.ini", *overrides({"data.mask_documents": "yes", "checkpoint.allow":
                                                           "data.mask_documents"})], tmp_path, check=DATA)
    assert "no token" in done.err and "nan" not in done.out


# ---- numbers ----

def test_the_split_into_micro_batches_changes_nothing(tmp_path):
    """Reported: a mean over micro-batches of their means, or only the first micro-batch's gradient, where
    micro-batches have unequal numbers of unmasked tokens. Here one global batch in any split gives one loss, norm and
    update. fp64: sums of 1e3 terms in another order differ by some 1e-14."""
    rng = random.Random(5)
    documents = [1] * 60 + [50] * 8 + [1] * 60 + [400, 1, 1, 1]
    write_tokens(tmp_path / "corpus", [rng.randrange(101) for _ in range(sum(documents))], documents)
    common = {"data.mask_documents": "yes", "train.precision": "fp64", "train.steps": 4, "optimizer.clip": 0.5}
    trained(tmp_path, "one", **common)
    expected = metrics(tmp_path / "one/log")
    for data, micro_batch in [(1, 2), (1, 8), (2, 1), (2, 4), (8, 1)]:
        name = f"d{data}m{micro_batch}"
        trained(tmp_path, name, **common, **layout(data), **{"train.micro_batch": micro_batch})
        for step, row in metrics(tmp_path / name / "log").items():
            for key in ("loss", "grad_norm"):
                assert abs(row[key] - expected[step][key]) <= 1e-11 * expected[step][key], (name, step, key)


@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)])
def test_clipping_uses_the_norm_of_the_whole_model(grid, tmp_path, clipped):
    """Reported: stages clipped by their own norms, or shared tensors counted once a rank. Here every step is clipped
    to a tenth of its norm, and each layout prints the norms and losses of one process (fp64)."""
    trained(tmp_path, "run", **clipped["settings"], **layout(*grid))
    for step, row in metrics(tmp_path / "run/log").items():
        assert row["grad_norm"] > 0.05
        for key in ("loss", "grad_norm"):
            assert abs(row[key] - clipped["rows"][step][key]) <= 1e-11 * clipped["rows"][step][key], (step, key)


@pytest.fixture(scope="module")
def clipped(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("clipped")
    common = {"corpus": corpus, "train.precision": "fp64", "train.steps": 5, "optimizer.clip": 0.005,
              "optimizer.warmup_steps": 0, "model.layers": 4, "model.arch": "gpt", "model.kv_heads": 2}
    trained(directory, "one", **common)
    return {"settings": common, "rows": metrics(directory / "one/log")}


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 1)])
def test_a_state_that_is_not_finite_is_never_saved(grid, corpus, tmp_path):
    """Reported: a run that had diverged went on, and its checkpoints of NaN took the place of good ones. Here squared
    gradients pass the largest number while loss and norm are finite still: the run ends with status 8 and names the
    tensor, and what is saved is finite: it can be resumed with a lower rate."""
    good = {"corpus": corpus, **layout(*grid), "model.arch": "gpt", "model.layers": 3, "checkpoint.every": 1,
            "checkpoint.keep": 2, "optimizer.warmup_steps": 0, "optimizer.decay": "constant", "train.steps": 1,
            "optimizer.lr": 1e-3, "optimizer.eps": 1, "train.global_batch": 8}
    trained(tmp_path, "run", **good)
    wild = {**good, "train.steps": 40, "optimizer.lr": 300, "optimizer.clip": 0, "optimizer.weight_decay": 10}
    done = trained(tmp_path, "run", check=NUMBERS, **wild)
    assert re.search(r"adam_v/\S+ is not finite after step \d+", done.err), done.err
    for step in steps_of(tmp_path):
        for shard in (tmp_path / f"run/checkpoints/step-{step:08d}").glob("shard-*"):
            data = shard.read_bytes()
            numbers = array.array("f", data[8 + int.from_bytes(data[:8], "little"):])
            assert all(map(math.isfinite, numbers)), (step, shard)
    newest = steps_of(tmp_path)[-1]
    run(["inspect", "run/checkpoints", "--verify"], tmp_path, check=0)
    trained(tmp_path, "run", **{**good, "train.steps": newest + 1, "optimizer.lr": 0})


@pytest.mark.parametrize("grid, rank, calls", [((2, 1, 1), 1, (150000, 165000)), ((1, 2, 1), 0, (120000, 130000)),
                                               ((1, 1, 2), 1, (150000, 165000))])
def test_a_step_that_fails_on_one_rank_is_skipped_whole(grid, rank, calls, corpus, wrong_math, tmp_path):
    """Reported: gradients that were not finite were dropped, but moments, counters and the schedule went on, or only
    the rank that saw them skipped. Here one exponential on one rank is NaN: no bit of the state changes on any rank,
    the next update has the rate that this one would have had, and a resumed run goes on in the same way."""
    common = {"train.precision": "fp64", "train.steps": 9, "checkpoint.every": 1, "checkpoint.keep": 0, **layout(*grid)}
    trained(tmp_path, "good", corpus=corpus, **{**common, "checkpoint.every": 0})
    rates = {step: row["lr"] for step, row in metrics(tmp_path / "good/log").items()}
    for call in calls:
        name = f"at{call}"
        config = write_config(tmp_path / f"{name}.ini", settings(corpus, name=name, **common))
        bad = {"LD_PRELOAD": wrong_math, "WRONG_CALL": "exp", "WRONG_AT": str(call), "WRONG_VALUE": "nan"}
        found = ended(start_separate(config, tmp_path, 2, free_port(), own={rank: bad}))
        assert [status for status, _ in found] == [0, 0], found
        rows = metrics(tmp_path / name / "log")
        skipped = [step for step in rows if rows[step]["skipped"]][0]
        assert 2 <= skipped <= 7 and all(rows[step]["skipped"] == (step >= skipped) for step in rows)
        assert "skipped on all ranks" in "".join(text for _, text in found)
        before, after = (shard_bytes(tmp_path / f"{name}/checkpoints/step-{s:08d}") for s in (skipped - 1, skipped))
        assert before == after and after != shard_bytes(tmp_path / f"{name}/checkpoints/step-{skipped + 1:08d}")
        assert {s: rows[s]["lr"] for s in rows} == {s: rates[s - (s > skipped)] for s in rows}
        saved = f"checkpoints/step-{skipped:08d}"
        shutil.copytree(tmp_path / name / saved, tmp_path / f"{name}on" / saved)
        trained(tmp_path, f"{name}on", corpus=corpus, **common)
        assert losses(tmp_path / f"{name}on/log") == {s: row for s, row in losses(tmp_path / name / "log").items()
                                                      if s > skipped}


@pytest.mark.parametrize("grid, group", [((2, 1, 1), "data"), ((1, 1, 2), "tensor"), ((1, 2, 1), "tied embedding")])
def test_copies_that_drifted_apart_are_not_saved(grid, group, corpus, wrong_math, tmp_path):
    """Reported: a copy of the embedding drifted from the other during training, and jumped back on resume. Here one
    rank updates its copies by another bias correction: the next save finds it, names a tensor and both ranks, and the
    checkpoint before stays the newest."""
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(*grid), **{
        "model.arch": "gpt", "model.tie_embeddings": "yes", "train.steps": 8, "checkpoint.every": 2}))
    # gpt has no other calls of pow: two for each update, and this is the first one of the fourth.
    bad = {"LD_PRELOAD": wrong_math, "WRONG_CALL": "pow", "WRONG_AT": "7", "WRONG_VALUE": "0.5"}
    found = ended(start_separate(config, tmp_path, 2, free_port(), own={1: bad}))
    text = "".join(t for _, t in found)
    assert NUMBERS in {status for status, _ in found} <= {NUMBERS, PEER_LOST}, found
    assert re.search(rf"\S+ differs between ranks 0 and 1 of the {group} group after step 4", text), text
    assert group != "tied embedding" or "embed.weight differs" in text
    assert steps_of(tmp_path) == [2]
    run(["inspect", "run/checkpoints", "--verify"], tmp_path, check=0)


@pytest.mark.parametrize("model", [
    {"model.arch": "gpt", "model.kv_heads": 4, "model.ffn": 1024, "model.tie_embeddings": "yes"},
    {"model.arch": "gpt", "model.kv_heads": 1, "model.ffn": 320, "model.tie_embeddings": "no"},
    {"model.arch": "llama", "model.kv_heads": 4, "model.ffn": 704, "model.tie_embeddings": "no"},
    {"model.arch": "llama", "model.kv_heads": 2, "model.ffn": 1600, "model.tie_embeddings": "yes"},
    {"model.arch": "llama", "model.kv_heads": 1, "model.ffn": 96, "model.vocab": 3000},
    {"model.arch": "llama", "model.kv_heads": 1, "model.ffn": 96, "model.seq_len": 512, "model.layers": 1}])
def test_operations_a_token_are_those_that_are_done(model, tmp_path):
    """Reported: throughput took it that the MLP is four times as wide as the model, or that all heads have keys and
    values of their own. Here what the run reckons with is what its products multiply, and the lower half of attention,
    counted query by query."""
    make_corpus(tmp_path)
    library, count = build_library(tmp_path, "count_products"), tmp_path / "count"
    wanted = settings(**{"model.hidden": 256, "model.seq_len": 64, "train.precision": "fp64", "train.global_batch": 2,
                         "checkpoint.every": 0, **model})
    write_config(tmp_path / "run.ini", wanted)
    counted = []
    for steps in (1, 3):
        done = run(["run.ini", *overrides({"train.steps": steps, "checkpoint.resume": "none"})], tmp_path, check=0,
                   env={"LD_PRELOAD": library, "COUNT_PRODUCTS": str(count)})
        counted.append(int(count.read_text()))
    T, C, L = (wanted[f"model.{key}"] for key in ("seq_len", "hidden", "layers"))
    pairs = sum(t + 1 for t in range(T))  # of query and key: two products forward, for scores and values, four backward
    expected = (counted[1] - counted[0]) / (2 * 2 * T) + 3 * 2 * 2 * C * L * pairs / T
    row = metrics(tmp_path / "run/log")[3]
    peak = 1e9 * float(re.search(r"peak (\S+) GFLOP/s", done.err)[1])
    # The peak is printed with a tenth of a GFLOP/s, and a query sees half a key more than half of them.
    assert abs(row["mfu"] * peak / row["tokens_per_s"] / expected - 1) < 0.01


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_key_value_heads_over_tensor_ranks(tensor, tmp_path):
    """Reported: groups of heads were taken from a default, or reductions of shared heads left out the biases. Here
    each number of key/value heads with each tensor size is equal to one process, or refused with both numbers."""
    for kv_heads in (1, 2, 4, 6, 12):
        wanted = {**BASE, **layout(tensor=tensor), "model.arch": "gpt", "model.layers": 1, "model.heads": 24,
                  "model.kv_heads": kv_heads, "model.hidden": 24 * 16, "model.ffn": 96, "train.precision": "fp64",
                  "train.global_batch": 2, "data.train": "unused", "parallel.sequence_parallel": "no"}
        config = write_config(tmp_path / "run.ini", wanted)
        fits = kv_heads % tensor == 0 or tensor % kv_heads == 0
        done = run(["selftest", config, "--own-model", "--steps", 2], tmp_path, check=0 if fits else CONFIG)
        if not fits:
            assert f"kv_heads = {kv_heads} and tensor = {tensor}" in done.err


# ---- checkpoints ----

def test_weights_alone_are_the_weights(corpus, tmp_path):
    """Reported: after loading weights without the optimizer's state, copies that were not loaded overwrote them at
    the first update, and the second loss was that of a new model. Here a step of rate zero changes no bit of them,
    and with a small rate the losses go on from where they were."""
    trained(tmp_path, "old", corpus=corpus, **{"train.steps": 60, "optimizer.warmup_steps": 4})
    last = metrics(tmp_path / "old/log")[60]["loss"]
    assert last < 3.0  # a new model has log(101) = 4.6
    new = {"corpus": corpus, "checkpoint.resume": "weights:old/checkpoints", "optimizer.warmup_steps": 0,
           "optimizer.decay": "constant", "train.seed": 99}
    trained(tmp_path, "still", **new, **{"train.steps": 1, "optimizer.lr": 0})
    old = values_of(tmp_path / "old/checkpoints/step-00000060")
    assert len(old) > 10 and values_of(tmp_path / "still/checkpoints/step-00000001") == old
    trained(tmp_path, "on", **new, **{"train.steps": 5, "optimizer.lr": 1e-6}, **layout(1, 2, 2))
    # Other samples: their losses differ by tenths, not by the 1.6 of a new model.
    assert all(row["loss"] < last + 0.8 for row in metrics(tmp_path / "on/log").values())


def test_saving_at_every_step_by_ranks_of_unequal_speed(corpus, slow_io, tmp_path):
    """Reported: ranks whose writing was done skipped a collective operation that the others waited in. Here eight
    ranks whose file calls take a random time save after every step, and the last state is the undisturbed one's."""
    common = {"corpus": corpus, "train.steps": 12, **layout(2, 2, 2)}
    trained(tmp_path, "whole", **common)
    trained(tmp_path, "slow", env={"LD_PRELOAD": slow_io, "SLOW_BELOW": "/checkpoints/", "SLOW_MS": "12"},
            **common, **{"checkpoint.every": 1, "checkpoint.keep": 2})
    last = "checkpoints/step-00000012"
    assert steps_of(tmp_path, "slow") == [11, 12]
    assert shard_bytes(tmp_path / "slow" / last) == shard_bytes(tmp_path / "whole" / last)


@pytest.mark.parametrize("where", ["saving", "loading"])
def test_a_rank_that_gets_stuck_with_its_files_is_named(where, corpus, slow_io, tmp_path):
    """Reported: one rank did not come back from a save or a load, and all others waited for hours without a word.
    Here the others end within train.timeout and some seconds, and say who is missing."""
    common = settings(corpus, **layout(3), **{"train.global_batch": 3, "train.steps": 4, "checkpoint.every": 2,
                                              "train.timeout": "2s"})
    config = write_config(tmp_path / "run.ini", common)
    if where == "loading":
        run(["train", config, *overrides({"train.steps": 2})], tmp_path, check=0)
    stuck = {"LD_PRELOAD": slow_io, "SLOW_BELOW": "/shard-", "SLOW_AT": "1", "SLOW_STOP": "1"}
    processes = start_separate(config, tmp_path, 3, free_port(), own={1: stuck})
    start = time.time()
    for rank in (0, 2):
        processes[rank].wait(timeout=20)
    assert time.time() - start < 12
    processes[1].kill()
    found = ended(processes)
    for rank in (0, 2):
        assert found[rank][0] in (PEER_LOST, HANG) and re.search(r"rank 1\b", found[rank][1]), found
    before = [2] if where == "loading" else []
    assert steps_of(tmp_path) in (before, [2]) and not list(tmp_path.glob("run/checkpoints/*/manifest.json.*"))
    run(["train", config, *overrides({"train.timeout": "1m"})], tmp_path, check=0)


def test_a_directory_that_another_client_has_just_made(corpus, slow_io, tmp_path):
    """Reported: on file systems whose clients cache names, making a directory failed as it existed, and looking at
    it failed as it did not, which ended the run. Here such a look is repeated."""
    env = {"LD_PRELOAD": slow_io, "SLOW_BELOW": "new", "SLOW_BEHIND": "1"}
    trained(tmp_path, "new", env=env, corpus=corpus, **layout(2), **{"train.steps": 2})
    assert steps_of(tmp_path, "new") == [2]
    text = tmp_path / "text.txt"
    text.write_text("abc")
    run(["tokenize", "--tokenizer", "bytes", "--out", f"{tmp_path}/new/deep", text], tmp_path, env=env, check=0)


def test_a_directory_that_the_first_rank_makes_late(corpus, slow_io, tmp_path):
    """Reported: ranks raced to make the directory of a step, or wrote into it before it was there. Here the first
    rank takes its time for every directory, and the others wait."""
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(4), **{"train.steps": 2,
                                                                                 "checkpoint.every": 1}))
    slow = {"LD_PRELOAD": slow_io, "SLOW_BELOW": "run/checkpoints", "SLOW_AT": "1", "SLOW_MS": "1500"}
    late = {**slow, "SLOW_BELOW": "step-00000002"}
    for own in (slow, late):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        start = time.time()
        found = ended(start_separate(config, tmp_path, 4, free_port(), own={0: own}))
        assert [status for status, _ in found] == [0] * 4, found
        assert time.time() - start > 1.4, "nothing was slow"
        assert steps_of(tmp_path)[-1] == 2
        run(["inspect", "run/checkpoints", "--verify"], tmp_path, check=0)


@pytest.mark.parametrize("limit", [1000, 4096])
def test_reads_that_give_a_part(limit, corpus, slow_io, tmp_path):
    """Reported: a request larger than the system serves at once was taken for done, and data was lost in silence. Here
    reads of tokens and checkpoints that give a part, or are interrupted, change no bit."""
    common = {"data.valid": corpus, "train.eval_every": 4, "train.steps": 8, **layout(2)}
    trained(tmp_path, "whole", corpus=corpus, **common)
    env = {"LD_PRELOAD": slow_io, "SLOW_BELOW": "/", "SLOW_SHORT": str(limit)}
    trained(tmp_path, "short", corpus=corpus, env=env, **{**common, "train.steps": 4})
    trained(tmp_path, "short", corpus=corpus, env=env, **common)
    assert losses(tmp_path / "short/log") == losses(tmp_path / "whole/log")
    last = "checkpoints/step-00000008"
    assert shard_bytes(tmp_path / "short" / last) == shard_bytes(tmp_path / "whole" / last)
    run(["inspect", "short/checkpoints", "--verify"], tmp_path, env=env, check=0)


def small_disk(directory, size, script):
    """The script where directory/disk is a file system of that size, or None where the system does not allow it."""
    (directory / "disk").mkdir()
    mount = f"mount -t tmpfs -o size={size} none {directory}/disk"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        return None
    return subprocess.run(["unshare", "-rm", "sh", "-c", f"{mount} && {script}"], cwd=directory, capture_output=True,
                          text=True, env=dict(os.environ, TRIDENT=TRIDENT), timeout=60)


@pytest.mark.parametrize("room, keep, warns", [(0.8, 1, True), (1.6, 1, True), (2.6, 1, False), (2.6, 2, True),
                                               (3.6, 2, False), (6, 0, True)])
def test_too_small_a_disk_is_said_at_the_start(room, keep, warns, corpus, tmp_path):
    """Reported: a run trained for a day, and then had no room to save. Here it says at its start how much its
    checkpoints will take: those that stay, and one more while it is written."""
    common = settings(corpus, **{"train.steps": 8, "checkpoint.every": 1, "checkpoint.keep": keep})
    write_config(tmp_path / "run.ini", {**common, "checkpoint.dir": "whole"})
    run(["run.ini", *overrides({"train.steps": 1, "checkpoint.every": 0})], tmp_path, check=0)
    size = sum(f.stat().st_size for f in (tmp_path / "whole").rglob("*") if f.is_file())
    size = -(-size // 4096) * 4096 + 8192
    done = small_disk(tmp_path, int(room * size), '"$TRIDENT" run.ini --set checkpoint.dir=disk/saved '
                                                   '--set log.dir=new')
    if done is None:
        pytest.skip("this system does not let us mount a small file system")
    assert ("MB are free there" in done.stderr) == warns, done.stderr
    assert done.returncode == (CHECKPOINT if warns else 0), done.stderr


def test_a_checkpoint_directory_that_hosts_do_not_share(corpus, tmp_path):
    """Reported: the second node waited for, or did not find, files that the first had written to a disk of its own.
    Here ranks of another host that do not see rank 0's checkpoint.dir say so before the first step."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("this system does not let us mount a file system")
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(2), **{"train.steps": 2}))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    env = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
               TRIDENT_TEST_HOSTNAME="h0,h1")
    apart = f'mount -t tmpfs none "{tmp_path}/run" && mkdir "{tmp_path}/run/checkpoints" && exec "{TRIDENT}" "{config}"'
    commands = [[TRIDENT, config], ["unshare", "-rm", "sh", "-c", apart]]
    found = ended([subprocess.Popen(command, cwd=tmp_path, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE)
                   for rank, command in enumerate(commands)])
    text = "".join(t for _, t in found)
    assert found[1][0] == CHECKPOINT and "checkpoint.dir" in text and "h1" in text, text
    assert found[0][0] in (CHECKPOINT, PEER_LOST)
    assert list((tmp_path / "run/checkpoints").iterdir()) == [] and not (tmp_path / "run/log/metrics.jsonl").exists()


def test_a_checkpoint_is_loaded_in_large_reads(slow_io, tmp_path):
    """Reported: loading read tensor by tensor in small pieces, at a tenth of what the file system gives. Here a read
    of a shard is a tensor's part or a buffer of megabytes, also in another layout."""
    make_corpus(tmp_path, vocab=2048)
    big = {"model.vocab": 8192, "model.hidden": 256, "model.ffn": 1024, "model.layers": 1, "model.heads": 4}
    trained(tmp_path, "run", **big, **{"train.steps": 1})
    shard = next((tmp_path / "run/checkpoints/step-00000001").glob("shard-*"))
    for grid in [(1, 1, 1), (1, 1, 2)]:
        name = "reads-" + "".join(map(str, grid))
        env = {"LD_PRELOAD": slow_io, "SLOW_BELOW": "/shard-", "SLOW_READS": f"{tmp_path}/{name}.sizes"}
        trained(tmp_path, name, env=env, **big, **layout(*grid), **{"train.steps": 1,
                                                                    "checkpoint.resume": "run/checkpoints"})
        sizes = [int(line) for line in (tmp_path / f"{name}.sizes").read_text().split()]
        ranks = math.prod(grid)
        # Verified and then copied: each byte twice a rank at most (a rank of two needs half of it, but verifies all).
        assert sum(sizes) <= 2.1 * ranks * shard.stat().st_size
        large = sum(n for n in sizes if n >= 1 << 19)  # half of the smallest matrix but the attention's
        assert large >= 0.9 * sum(sizes), sizes


# ---- launch and placement ----

def test_one_rank_number_given_twice(corpus, tmp_path):
    """Reported: two job steps counted their processes from 0, and two of them took the same place. Here the second
    process with a number is refused, by that number, and nobody trains."""
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(3), **{"train.global_batch": 3,
                                                                                 "train.timeout": "4s"}))
    found = ended(start_separate(config, tmp_path, 3, free_port(), own={2: {"RANK": "1"}}))
    assert all(status == LAUNCH for status, _ in found), found
    assert all("two processes were started with RANK=1: host " in text for _, text in found), found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["optimizer.lr=0.5", "data.train=other", "program=other"])
def test_a_rank_with_another_config_is_refused(change, corpus, tmp_path):
    """Reported: one rank had other settings or another program than the rest, and the run hung. Here it is named and
    refused before anything is written."""
    good = settings(corpus, **layout(3), **{"train.global_batch": 3})
    write_config(tmp_path / "run.ini", good)
    port, other = free_port(), tmp_path / "other"
    other.mkdir()
    section_key, value = change.split("=")
    if section_key == "data.train":
        value = make_corpus(other)
    own = {**good, section_key: value} if section_key != "program" else good
    write_config(other / "run.ini", own)
    if section_key == "program":
        shutil.copy(TRIDENT, tmp_path / "trident")
        with open(tmp_path / "trident", "ab") as file:
            file.write(b"other")
    found = ended(start_separate("run.ini", [tmp_path, other, tmp_path], 3, port,
                                 programs={1: tmp_path / "trident"} if section_key == "program" else {}))
    assert all(status == LAUNCH for status, _ in found), found
    what = "executable" if section_key == "program" else "config"
    assert all(re.search(rf"rank 1 \(host .*: another {what} than rank 0", text) for _, text in found), found
    if what == "config":
        section, key = section_key.split(".")
        assert re.search(rf"; \[{section}\] here: {key} += .*; on rank 0: {key} += ", found[1][1]), found


@pytest.mark.parametrize("hosts", ["h0,h1,h0,h1,h0,h1,h0,h1", "h0,h1,h1,h0,h0,h0,h1,h1"])
def test_ranks_dealt_to_hosts_in_turn(hosts, corpus, tmp_path):
    """Reported: code took it that the first ranks live on the first node; dealt in turn, tensor groups crossed nodes.
    Here they stay inside a host, and the run has the bits of one in block order."""
    common = {"corpus": corpus, "train.steps": 5, **layout(2, 2, 2)}
    trained(tmp_path, "block", env={"TRIDENT_TEST_HOSTNAME": "h0,h0,h0,h0,h1,h1,h1,h1"}, **common)
    done = trained(tmp_path, "turn", env={"TRIDENT_TEST_HOSTNAME": hosts}, **common)
    assert re.search(r"tensor +4 groups of 2: inside a node", done.err), done.err
    assert losses(tmp_path / "turn/log") == losses(tmp_path / "block/log")
    # The same shards, by other ranks.
    sums = [sorted(f["xxh3"] for f in json.loads((tmp_path / name / "checkpoints/step-00000005/manifest.json")
                                                 .read_text())["files"]) for name in ("block", "turn")]
    assert sums[0] == sums[1]


def test_a_late_first_rank_is_waited_for_by_name(corpus, tmp_path):
    """Reported: ranks waited for rank 0 in silence until a time-out. Here they say after some seconds where they look
    for it and for how long they have, and go on when it comes."""
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(2), **{"train.steps": 2}))
    env = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    second = subprocess.Popen([TRIDENT, config], cwd=tmp_path, env={**env, "RANK": "1"}, stderr=subprocess.PIPE)
    assert b"waiting for rank 0 at 127.0.0.1:" in second.stderr.readline()
    first = subprocess.Popen([TRIDENT, config], cwd=tmp_path, env={**env, "RANK": "0"}, stderr=subprocess.PIPE)
    assert [status for status, _ in ended([first, second])] == [0, 0]


# ---- waiting ----

def test_slow_preparation_of_one_rank_is_no_time_out(corpus, slow_io, tmp_path):
    """Reported: one rank prepared data for longer than the others' limit for a collective operation. Here no rank
    waits in one before all have opened their data, and a rank that is slower than train.timeout is named."""
    common = settings(corpus, **layout(2), **{"train.steps": 2})
    config = write_config(tmp_path / "run.ini", common)
    slow = {0: {"LD_PRELOAD": slow_io, "SLOW_BELOW": "corpus.bin", "SLOW_AT": "1", "SLOW_MS": "2500"}}
    found = ended(start_separate(config, tmp_path, 2, free_port(), own=slow))
    assert [status for status, _ in found] == [0, 0], found
    found = ended(start_separate(config, tmp_path, 2, free_port(), ["--set", "train.timeout=1s"], own=slow))
    assert found[1][0] == LAUNCH and "rank 0" in found[1][1] and "1 s" in found[1][1], found


@pytest.mark.parametrize("grid", [(2, 1, 2), (1, 4, 1)])
def test_a_suspended_rank_is_found_and_named(grid, corpus, tmp_path):
    """Reported: a run stood still with all processes alive, until a person looked. Here the ranks end by themselves
    within train.timeout and some seconds, and name the one that does not answer and what each was doing."""
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(*grid), **{
        "model.layers": 4, "train.steps": 100000, "train.timeout": "1s"}))
    processes = start_separate(config, tmp_path, 4, free_port())
    wait_for_step(tmp_path / "run/log", 5)
    os.kill(processes[2].pid, signal.SIGSTOP)
    start = time.time()
    for rank in (0, 1, 3):
        processes[rank].wait(timeout=20)
    assert time.time() - start < 8
    processes[2].kill()
    found = ended(processes)
    assert all(found[rank][0] in (PEER_LOST, HANG) for rank in (0, 1, 3)), found
    # Who waits for one that waits for rank 2 names that one; those that wait for rank 2 itself name it.
    assert re.search(r"rank 2\b", "".join(text for _, text in found)), found


def test_a_long_evaluation_is_no_hang(corpus, tmp_path):
    """Reported: work between steps that took longer than the limit of a step ended the run. Here an evaluation that
    as a whole is longer than train.timeout is none, as long as its parts go on."""
    make_corpus(tmp_path, n_tokens=60000)
    done = trained(tmp_path, "run", corpus=corpus, **{
        "data.valid": "corpus", "train.eval_every": 1, "train.eval_batches": 100000, "train.steps": 1,
        "train.timeout": "1s", "model.hidden": 128, "model.layers": 4, "model.ffn": 512})
    assert "valid" in done.err


# ---- signals ----

def test_a_signal_to_one_rank_stops_all_at_one_step(corpus, tmp_path):
    """Reported: a rank that was told to end left alone, and the others hung. Here a signal to any one rank makes all
    of them save the same step and end with status 75."""
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(2, 2, 2), **{"train.steps": 100000}))
    processes = start_separate(config, tmp_path, 8, free_port())
    wait_for_step(tmp_path / "run/log", 5)
    processes[6].send_signal(signal.SIGTERM)
    found = ended(processes)
    assert [status for status, _ in found] == [STOPPED] * 8, found
    assert len(steps_of(tmp_path)) == 1


def test_a_signal_during_evaluation(corpus, tmp_path):
    """Reported: the loops of warm-up and evaluation never looked whether they were to stop, so that a signal before
    the end of the job's time saved nothing. Here an evaluation of minutes is left within a second."""
    make_corpus(tmp_path, n_tokens=3000000)
    config = write_config(tmp_path / "run.ini", settings(corpus, **layout(2), **{
        "data.valid": "corpus", "train.eval_every": 1, "train.eval_batches": 1 << 20, "model.hidden": 128,
        "model.layers": 4, "model.ffn": 512}))
    process = subprocess.Popen([TRIDENT, config], cwd=tmp_path, stderr=subprocess.PIPE)
    for _ in range(600):
        if len(children_of(process.pid)) == 2 and (tmp_path / "run/log/config.ini").exists():
            break
        time.sleep(0.02)
    time.sleep(1.5)
    assert not metrics(tmp_path / "run/log"), "the evaluation was too short for this test"
    process.send_signal(signal.SIGTERM)
    start = time.time()
    status, text = ended([process])[0]
    assert status == STOPPED and time.time() - start < 5, text
    assert steps_of(tmp_path) == [1] and "valid_loss" not in metrics(tmp_path / "run/log")[1]


@pytest.mark.parametrize("pause_ms", [0, 3, 10, 30])
def test_killed_while_it_saves_upon_a_signal(pause_ms, tmp_path):
    """Reported: killed a moment after the signal, a run left a half-written newest checkpoint that the next start
    took. Here the next start takes a complete one, whenever the kill comes."""
    make_corpus(tmp_path)
    wanted = settings(**layout(2), **{"train.steps": 100000, "checkpoint.every": 4, "model.hidden": 256,
                                      "model.ffn": 1024})
    config = write_config(tmp_path / "run.ini", wanted)
    process = subprocess.Popen([TRIDENT, "train", config], cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for_step(tmp_path / "run/log", 9)
    process.send_signal(signal.SIGTERM)
    time.sleep(pause_ms * 1e-3)
    process.kill()
    ended([process])
    for _ in range(200):  # the ranks die with their parent
        if not subprocess.run(["pgrep", "-f", str(config)], capture_output=True).stdout:
            break
        time.sleep(0.02)
    run(["inspect", "run/checkpoints", "--verify"], tmp_path, check=0)
    newest = steps_of(tmp_path)[-1]
    assert newest >= 8
    done = run(["train", config, *overrides({"train.steps": newest + 2})], tmp_path, check=0)
    assert "resuming from" in done.err


@pytest.mark.parametrize("resume, goes_on", [("auto", True), ("none", False), ("weights:old/checkpoints", False)])
def test_what_a_stopped_run_promises(resume, goes_on, corpus, tmp_path):
    """Reported: a job that was put into the queue again began from its start, since a setting told it to. Here a run
    that stops says whether the same command goes on, or what to set so that it does."""
    trained(tmp_path, "old", corpus=corpus, **{"train.steps": 1})
    config = write_config(tmp_path / "run.ini", settings(corpus, **{"train.steps": 100000,
                                                                    "checkpoint.resume": resume}))
    process = subprocess.Popen([TRIDENT, config], cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for_step(tmp_path / "run/log", 3)
    process.send_signal(signal.SIGUSR1)
    status, text = ended([process])[0]
    assert status == STOPPED and ("after saving; the same command goes on from here" in text) == goes_on, text
    assert ("with checkpoint.resume = auto the same command" in text) != goes_on, text


# ---- large numbers ----

@pytest.mark.parametrize("model, parameters", [
    ("llama3.1-405b", 405853388800), ("gpt3-175b", 174604259328),
    # One table of 3.6e9 elements, past 2^31 and past 2^32 bytes.
    ({"model.vocab": 250880, "model.hidden": 14336, "model.heads": 112, "model.layers": 1, "model.seq_len": 16}, None)])
def test_the_plan_of_a_model_larger_than_32_bits(model, parameters, tmp_path):
    """Reported: sizes kept in 32 bits wrapped for large tensors. Here the plan of a model that no test machine can
    hold names the bytes that its published number of parameters takes."""
    tokens = array.array("H", [i % 101 for i in range(9000)])
    write_tokens(tmp_path / "corpus", tokens, [len(tokens)])
    text = ""
    if isinstance(model, str):
        text = f"include = {ROOT}/configs/models/{model}.ini\n"
        extra = {}
    else:
        extra = {**model, "model.ffn": 32, "model.tie_embeddings": "yes"}
        C = model["model.hidden"]
        parameters = model["model.vocab"] * C + 4 * C * C + 3 * C * 32 + 3 * C
    write_config(tmp_path / "run.ini", {"data.train": "corpus", "train.steps": 1, "train.global_batch": 1, **extra})
    (tmp_path / "run.ini").write_text(text + (tmp_path / "run.ini").read_text())
    done = run(["run.ini"], tmp_path)
    if done.returncode == 0:
        pytest.skip("this machine holds it")
    assert done.returncode == LAUNCH, done.err
    gib = [float(x) for x in re.search(r"parameters (\S+) GiB, gradients (\S+), optimizer (\S+),", done.err).groups()]
    for found, copies in zip(gib, (1, 1, 2)):
        expected = 4 * copies * parameters / 2**30
        assert abs(found - expected) <= 0.006 * expected, (gib, expected)  # three digits


def test_lengths_that_cannot_be_counted(tmp_path):
    """Reported: products of steps, batch and length wrapped to negative numbers. Here a length whose tokens do not
    fit 64 bits is refused, and the longest one that fits is counted right."""
    make_corpus(tmp_path)
    for steps, status in ((2**63 // (8 * 16), CONFIG), (2**63 // (8 * 16) - 1, 0)):
        write_config(tmp_path / "run.ini", settings(**{"train.steps": steps, "checkpoint.every": 0}))
        process = subprocess.Popen([TRIDENT, "run.ini"], cwd=tmp_path, stderr=subprocess.PIPE)
        if status == 0:
            wait_for_step(tmp_path / "run/log", 2)
            process.send_signal(signal.SIGTERM)
        found, text = ended([process])[0]
        assert found == (CONFIG if status else STOPPED), text
        assert not re.search(r"(?<![\w.e])-\d", text.split("step 1/")[-1].split("\n")[0]), text
