"""What broke when somebody tried: the edges of what settings, limits and inputs may be."""
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess

import pytest

from test_resume import wait_for_step
from trident import BASE, TRIDENT, layout, make_corpus, metrics, overrides, run, write_config

CONFIG, DATA, LAUNCH, CHECKPOINT, STOPPED = 2, 3, 4, 7, 75


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("edges"))


def write(directory, name, corpus, **changes):
    return write_config(directory / f"{name}.ini", {
        **BASE, "model.layers": 2, "data.train": corpus, "train.threads": 1, "train.steps": 4,
        "checkpoint.dir": "saved", "log.dir": "log", **changes})


def copy_corpus(corpus, prefix):
    prefix.parent.mkdir(exist_ok=True)
    for end in (".bin", ".idx"):
        shutil.copy(corpus + end, f"{prefix}{end}")


def manifest(directory, step):
    return json.loads((directory / f"saved/step-{step:08d}/manifest.json").read_text())


def test_generate_with_a_context_of_one_token(corpus, tmp_path):
    run(["train", write(tmp_path, "run", corpus, **{"model.seq_len": 1, "model.vocab": 257})], tmp_path, check=0)
    done = run(["generate", "--checkpoint", "saved", "--tokenizer", "bytes", "--prompt", "several", "--tokens", 300],
               tmp_path, check=0)
    assert done.out.startswith("several")


def test_new_corpus_does_not_take_the_place_of_one_with_its_file_name(corpus, tmp_path):
    """en/text goes on where it was, the new de/text begins at its first sample, and a folder that moved is known."""
    for folder in ("en", "de", "moved"):
        copy_corpus(corpus, tmp_path / folder / "text")
    run(["train", write(tmp_path, "run", "en/text:1")], tmp_path, check=0)
    allow = {"checkpoint.allow": "data.train"}
    more = run(["train", write(tmp_path, "run", "en/text:1, de/text:1", **{**allow, "train.steps": 8})], tmp_path,
               check=0)
    assert manifest(tmp_path, 8)["corpus_counters"] == [4 * 8 + 16, 16]
    table = {line.split()[-3]: line.split()[-5] for line in more.err.splitlines() if "(megatron" in line}
    assert table == {"en/text": "48", "de/text": "16"}, "what is used, counted from before the stop"
    run(["train", write(tmp_path, "run", "moved/text:1", **{**allow, "train.steps": 9})], tmp_path, check=0)
    assert manifest(tmp_path, 9)["corpus_counters"] == [8], "en/text or de/text: it cannot be told"


@pytest.mark.parametrize("own", ["nothing", "checkpoint.dir", "log.dir"])
def test_second_run_in_one_directory_is_refused(own, corpus, tmp_path):
    """It would cut back the first one's metrics and remove its checkpoints."""
    steps = {"train.steps": 100000, "checkpoint.every": 50, "optimizer.decay": "constant"}
    config = write(tmp_path, "run", corpus, **steps)
    first = subprocess.Popen([TRIDENT, "train", str(config)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path / "log", 60)
    settings = {} if own == "nothing" else {own: "other"}
    status, taken = (CONFIG, "log.dir = ") if own == "checkpoint.dir" else (CHECKPOINT, "checkpoint.dir = ")
    second = run(["train", config, *overrides(settings)], tmp_path, check=status)
    assert taken in second.err and "another run is writing there" in second.err
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == STOPPED
    rows = metrics(tmp_path / "log")
    assert sorted(rows) == list(range(1, max(rows) + 1))
    assert (tmp_path / f"saved/step-{max(rows):08d}/manifest.json").exists()
    run(["train", write(tmp_path, "run", corpus, **{**steps, "train.steps": max(rows) + 1})], tmp_path, check=0)


def test_tokenize_does_not_write_over_its_input(tmp_path):
    text = tmp_path / "text.bin"
    text.write_text("words that exist once\n")
    done = run(["tokenize", "--tokenizer", "bytes", "--out", "text", "text.bin"], tmp_path, check=CONFIG)
    assert "both an input and what is written" in done.err
    assert text.read_text() == "words that exist once\n"
    assert [p.name for p in tmp_path.iterdir()] == ["text.bin"]


def test_evaluation_reads_no_window_twice_for_a_corpus_without_weight(corpus, tmp_path):
    config = write(tmp_path, "run", corpus)
    run(["train", config], tmp_path, check=0)
    copy_corpus(corpus, tmp_path / "other/text")
    alone = run(["eval", config, "--data", corpus], tmp_path, check=0)
    beside = run(["eval", config, "--data", f"{corpus}:1, other/text:0"], tmp_path, check=0)
    assert alone.out == beside.out
    weighted = run(["eval", config, "--data", f"{corpus}:1, other/text:9"], tmp_path, check=0)
    assert "other/text is read 1.8 times" in weighted.err


@pytest.mark.parametrize("other", ["text.bin", "./text", "link"])
def test_one_file_under_two_names_is_found(corpus, other, tmp_path):
    copy_corpus(corpus, tmp_path / "text")
    for end in (".bin", ".idx"):
        os.symlink(f"text{end}", tmp_path / f"link{end}")
    done = run(["train", write(tmp_path, "run", f"text, {other}")], tmp_path, check=CONFIG)
    assert "are the same file" in done.err


def limited(limit, bytes_):
    return lambda: resource.setrlimit(limit, (bytes_, bytes_))


def test_limit_on_file_sizes_is_an_error_with_a_name(tmp_path):
    (tmp_path / "text.txt").write_text("x" * 100000)
    done = subprocess.run([TRIDENT, "tokenize", "--tokenizer", "bytes", "--out", "out", "text.txt"], cwd=tmp_path,
                          capture_output=True, timeout=60, preexec_fn=limited(resource.RLIMIT_FSIZE, 20000))
    assert done.returncode == DATA and b"out.bin.tmp: cannot write" in done.stderr


def test_too_little_address_space_for_the_blas_is_said(corpus, tmp_path):
    """OpenBLAS asks for its buffers without end."""
    if {"asan", "tsan"} & set(pathlib.Path(TRIDENT).resolve().parts):
        pytest.skip("sanitizers need address space without a limit")
    config = write(tmp_path, "run", corpus, **{"train.precision": "fp64", "train.threads": 40})
    done = subprocess.run([TRIDENT, "train", str(config)], cwd=tmp_path, capture_output=True, timeout=60,
                          preexec_fn=limited(resource.RLIMIT_AS, 4 << 30))
    assert done.returncode == LAUNCH and b"address space for 40 threads" in done.stderr


def test_closed_standard_output_is_an_error(corpus, tmp_path):
    run(["train", write(tmp_path, "run", corpus, **{"model.vocab": 257})], tmp_path, check=0)
    done = subprocess.run(f"{TRIDENT} generate --checkpoint saved --tokenizer bytes --prompt a --tokens 3 >&-",
                          shell=True, cwd=tmp_path, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == DATA and b"cannot write to standard output" in done.stderr


@pytest.mark.parametrize("ignored", [False, True])
def test_closed_terminal_saves_and_nohup_goes_on(ignored, corpus, tmp_path):
    """SIGHUP stops a run like SIGTERM; where the caller ignores it, the ranks do."""
    config = write(tmp_path, "run", corpus, **{"train.steps": 100000, "optimizer.decay": "constant"}, **layout(2))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        run_ = subprocess.Popen([TRIDENT, "train", str(config)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for_step(tmp_path / "log", 5)
    run_.send_signal(signal.SIGHUP)
    if ignored:
        wait_for_step(tmp_path / "log", max(metrics(tmp_path / "log")) + 20)
        run_.send_signal(signal.SIGTERM)
    assert run_.wait(timeout=60) == STOPPED
    last = max(metrics(tmp_path / "log"))
    assert (tmp_path / f"saved/step-{last:08}/manifest.json").exists()


def test_first_interrupt_is_acknowledged_once(corpus, tmp_path):
    config = write(tmp_path, "run", corpus, **{"train.steps": 100000, "optimizer.decay": "constant"}, **layout(2))
    with open(tmp_path / "err", "wb") as err:
        run_ = subprocess.Popen([TRIDENT, "train", str(config)], cwd=tmp_path, stderr=err)
    wait_for_step(tmp_path / "log", 5)
    run_.send_signal(signal.SIGINT)
    assert run_.wait(timeout=60) == STOPPED
    assert (tmp_path / "err").read_text().count("stopping after this step; Ctrl-C again") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_tokenize_leaves_nothing(number, tmp_path):
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(1 << 33)
    words = [TRIDENT, "tokenize", "--tokenizer", "bytes", "--out", "out", "endless"]
    tokenize = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (tmp_path / "out.bin.tmp").exists() or not (tmp_path / "out.bin.tmp").stat().st_size:
        assert tokenize.poll() is None
    tokenize.send_signal(number)
    assert tokenize.wait(timeout=20) == -number
    assert sorted(os.listdir(tmp_path)) == ["endless"]


def test_separator_that_never_comes_is_said(tmp_path):
    (tmp_path / "text").write_text("a\n<doc>\nb\n")
    words = ["tokenize", "--tokenizer", "bytes", "--out", "out", "--document-line"]
    assert "1 document," in run([*words, "<dog>", "text"], tmp_path, check=0).err
    assert "no line is exactly that" in run([*words, "<dog>", "text"], tmp_path, check=0).err
    good = run([*words, "<doc>", "text"], tmp_path, check=0).err
    assert "2 documents," in good and "no line" not in good


def test_options_before_the_config(corpus, tmp_path):
    config = write(tmp_path, "run", corpus)
    run(["--set", "train.steps=2", config], tmp_path, check=0)
    assert max(metrics(tmp_path / "log")) == 2


def test_address_space_too_small_for_the_libraries(tmp_path):
    """Says so in place of hanging without a word. Where libraries can do with it, there is nothing to see."""
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (250 << 20, 250 << 20))
    done = subprocess.run([TRIDENT, "--version"], cwd=tmp_path, preexec_fn=limit, capture_output=True, timeout=60,
                          check=False)
    assert done.returncode == 0 or (done.returncode == LAUNCH and b"ulimit -v" in done.stderr), done
