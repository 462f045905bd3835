"""What a wrong config or command line does to the program: exit 2, every error named, nothing touched or started."""
import os

import pytest

from trident import BASE, make_corpus, overrides, run, write_config

GOOD = {**BASE, "data.train": "corpus"}


def listing(directory):
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("command", [["train"], ["eval"], ["selftest"], []])
@pytest.mark.parametrize("change, says", [
    ({"model.layer": 3}, "[model] layer = 3: unknown key; did you mean layers?"),
    ({"model.hidden": 65}, "hidden = 65 is no multiple of heads = 4; nearest: 64 or 68"),
    ({"train.precision": "fp8"}, "train.precision = fp8: one of fp32, fp64"),
    ({"train.global_batch": 7, "parallel.data": 2},
            "global_batch = 7 is no multiple of micro_batch x data = 1 x 2 = 2"),
    ({"parallel.ranks": 3, "parallel.tensor": 2}, "ranks = 3 is no multiple of pipeline x tensor = 1 x 2 = 2"),
])
def test_refused(tmp_path, command, change, says):
    make_corpus(tmp_path)
    write_config(tmp_path / "run.ini", {**GOOD, **change})
    before = listing(tmp_path)
    done = run([*command, "run.ini"], tmp_path, check=2)
    assert says in done.err and "run.ini:" in done.err
    assert "1 error in the configuration; nothing was started" in done.err
    assert listing(tmp_path) == before


def test_all_errors_at_once(tmp_path):
    (tmp_path / "run.ini").write_text("[model]\nlayer = 3\nhidden = wide\n[train]\nsteps 10\n[log]\ndir = #x\n")
    done = run(["train", "run.ini", "--set", "model.heads=0"], tmp_path, check=2)
    for place in ("run.ini:2:", "run.ini:3:", "run.ini:5:", "run.ini:7:", "--set: model.heads = 0:"):
        assert place in done.err, done.err
    assert "5 errors in the configuration" in done.err
    assert listing(tmp_path) == ["run.ini"]


@pytest.mark.parametrize("words, says", [
    ([], "trident train CONFIG"),
    (["train"], "the config file is missing"),
    (["train", "a.ini", "b.ini"], "2 words"),
    (["train", "none.ini"], "none.ini: cannot open: No such file or directory"),
    (["none.ini"], "none.ini: cannot open: No such file or directory"),
    (["train", "."], "is a directory"),
    (["trian", "run.ini"], "did you mean `trident train`?"),
    (["train", "run.ini", "--sett", "a.b=1"], "unknown option --sett; did you mean --set?"),
    (["train", "run.ini", "--set"], "--set needs a value"),
    (["train", "run.ini", "--set", "steps=3"], "--set steps=3: section.key=value is expected"),
    (["train", "run.ini", "--set", "train.stesp=3"], "did you mean steps?"),
    (["help", "parallel.tenser"], "did you mean parallel.tensor?"),
    (["help", "a", "b"], "help takes one topic"),
])
def test_command_lines(tmp_path, words, says):
    write_config(tmp_path / "run.ini", GOOD)
    done = run(words, tmp_path, check=2)
    assert says in done.err, done.err
    assert listing(tmp_path) == ["run.ini"]


def test_train_needs_data(tmp_path):
    write_config(tmp_path / "run.ini", {**GOOD, "data.train": ""})
    assert "data.train is not set" in run(["run.ini"], tmp_path, check=2).err
    assert listing(tmp_path) == ["run.ini"]


def test_launched_world_must_fit(tmp_path):
    make_corpus(tmp_path)
    write_config(tmp_path / "run.ini", {**GOOD, "parallel.data": 2, "parallel.tensor": 2})
    before = listing(tmp_path)
    done = run(["run.ini"], tmp_path, check=2, env={"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost",
                                                    "MASTER_PORT": "1"})
    assert "data x pipeline x tensor = 2 x 1 x 2 = 4, but the launcher started 3 processes" in done.err
    assert listing(tmp_path) == before


def test_printed_config_is_a_config(tmp_path):
    make_corpus(tmp_path)
    write_config(tmp_path / "run.ini", GOOD)
    text = run(["run.ini", "--print-config", *overrides({"parallel.tensor": 2})], tmp_path, check=0).out
    assert "tensor                   = 2                            # --set\n" in text
    (tmp_path / "run2.ini").write_text(text)
    again = run(["run2.ini", "--print-config"], tmp_path, check=0).out
    strip = [[line.split("#")[0].rstrip() for line in t.splitlines()] for t in (text, again)]
    assert strip[0] == strip[1]
    assert listing(tmp_path) == ["corpus.bin", "corpus.idx", "run.ini", "run2.ini"]


def test_help(tmp_path):
    text = run(["help"], tmp_path, check=0).out
    assert "[parallel]" in text and "tensor" in text
    one = run(["help", "parallel.tensor"], tmp_path, check=0).out
    assert one.startswith("parallel.tensor\n") and "from 1 to 4096" in one and "unit: ranks" in one


def test_run_that_ends_within_its_warm_up(tmp_path):
    make_corpus(tmp_path)
    write_config(tmp_path / "run.ini", {**GOOD, "train.steps": 2, "optimizer.warmup_steps": 8, "optimizer.lr": 1e-3})
    done = run(["run.ini"], tmp_path, check=0)
    assert "warmup_steps = 8 goes on after the last of 2 steps: the rate ends at 0.00025 of lr = 0.001" in done.err
