"""What a run keeps count of - samples, tokens, the last loss - across resumes, also with another batch size."""
import json
import pathlib

from trident import BASE, layout, make_corpus, metrics, run, write_config

T = 16
# A learning rate of 0 keeps the weights, so that the loss of a step tells which samples it took.
STILL = {**BASE, "model.layers": 2, "model.seq_len": T, "train.precision": "fp64", "train.threads": 1,
         "optimizer.lr": 0, "optimizer.warmup_steps": 0, "data.train": 'a/corpus:3, b/corpus:1',
         "checkpoint.keep": 0, "checkpoint.allow": "train.global_batch"}


def make_corpora(directory):
    for name, seed in (("a", 1), ("b", 2)):
        (directory / name).mkdir()
        make_corpus(directory / name, seed=seed)


def start(directory, name, **changes):
    """Trains, or goes on, in a folder of its own."""
    settings = {**STILL, "checkpoint.dir": f"{name}/checkpoints", "log.dir": f"{name}/log", **changes}
    return run(["train", write_config(directory / f"{name}.ini", settings)], directory, check=0)


def train(directory, name, **changes):
    """The same: (result, rows of metrics.jsonl by step)."""
    done = start(directory, name, **changes)
    return done, metrics(directory / name / "log")


def manifest(directory, name, step):
    path = pathlib.Path(directory) / name / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    return json.loads(path.read_text())


def test_counts_after_a_change_of_the_batch(tmp_path):
    """Steps of 8, of 4 and of 12 samples: each sample of the run once, in the order of a run that never changed, and
    counts of what was seen, not of step times batch."""
    make_corpora(tmp_path)
    _, single = train(tmp_path, "single", **{"train.steps": 68, "train.global_batch": 1, "checkpoint.every": 0})
    losses = [single[step]["loss"] for step in sorted(single)]
    samples = step = 0
    for batch, last_step, grid in ((8, 3, (1, 1, 1)), (4, 5, (2, 1, 1)), (12, 8, (1, 2, 1))):
        done, rows = train(tmp_path, "run", **layout(*grid),
                           **{"train.steps": last_step, "train.global_batch": batch})
        assert step == 0 or f"{samples} samples, {samples * T} tokens" in done.err, done.err
        while step < last_step:
            step += 1
            expected = sum(losses[samples:samples + batch]) / batch
            samples += batch
            # Sums of some thousand logarithms, in fp64.
            assert abs(rows[step]["loss"] / expected - 1) < 1e-11, (step, rows[step]["loss"], expected)
            assert rows[step]["tokens"] == samples * T
        saved = manifest(tmp_path, "run", last_step)
        assert (saved["samples"], saved["tokens"]) == (samples, samples * T)
        assert saved["corpus_counters"] == [samples * 3 // 4, samples // 4]
    assert samples == 68


def test_length_in_tokens_counts_those_of_before(tmp_path):
    make_corpora(tmp_path)
    train(tmp_path, "run", **{"train.steps": 0, "train.tokens": 4 * 8 * T})
    done, rows = train(tmp_path, "run", **{"train.steps": 0, "train.tokens": 6 * 8 * T - 1, "train.global_batch": 4})
    assert f"train.tokens = {6 * 8 * T - 1} is reached after step 8" in done.err
    assert sorted(rows) == list(range(1, 9)) and rows[8]["tokens"] == 6 * 8 * T
    done, rows = train(tmp_path, "run", **{"train.steps": 0, "train.tokens": 6 * 8 * T - 1, "train.global_batch": 8})
    assert "the run is finished: step 8 of 8; raise train.tokens to go on" in done.err and sorted(rows)[-1] == 8


def test_finished_run_saved_elsewhere_keeps_its_last_loss(tmp_path):
    make_corpora(tmp_path)
    _, rows = train(tmp_path, "run", **{"train.steps": 3})
    start(tmp_path, "copy", **layout(1, 2, 1), **{"train.steps": 3, "checkpoint.resume": "run/checkpoints"})
    first, second = manifest(tmp_path, "run", 3), manifest(tmp_path, "copy", 3)
    assert first["last_loss"] == rows[3]["loss"]
    for key in ("step", "samples", "tokens", "skipped", "last_loss", "corpus_counters", "data_fingerprint"):
        assert first[key] == second[key], key
