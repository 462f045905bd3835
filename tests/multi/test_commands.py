"""The commands as a user types them: generate, eval, inspect, tokenize, help; and what a run shows: the live line,
metrics.jsonl, TensorBoard's event files."""
import array
import fcntl
import json
import math
import os
import pathlib
import pty
import re
import shutil
import struct
import subprocess
import termios

import pytest

from test_bad_input import byte_letters, write_tokenizer
from trident import BASE, TRIDENT, layout, metrics, overrides, run, write_config

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from all the other foxes".split()
STEPS = 30


def write_text(path, n_documents=40):
    documents = [" ".join(WORDS[(d * 7 + i * (1 + d % 3)) % len(WORDS)] for i in range(30)) for d in range(n_documents)]
    path.write_text("\n==\n".join(documents) + "\n")


def settings(**changes):
    return {**BASE, "model.layers": 2, "model.vocab": 0, "train.steps": STEPS, "data.train": "text",
            "data.valid": "text",
            "data.tokenizer": "bytes", "train.eval_every": 10, "train.eval_batches": 1000, "train.threads": 1,
            "train.micro_batch": 2, "checkpoint.dir": "saved", "log.dir": "log", **changes}


def trained(directory, **changes):
    write_text(directory / "text.txt")
    run(["tokenize", "--tokenizer", "bytes", "--out", "text", "--document-line", "==", "text.txt"], directory, check=0)
    write_config(directory / "run.ini", settings(**changes))
    run(["run.ini"], directory, check=0)
    return directory


@pytest.fixture(scope="module", params=["llama", "gpt"])
def both(request, tmp_path_factory):
    return trained(tmp_path_factory.mktemp(request.param), **{"model.arch": request.param})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


# ---- generate ----

def generate(directory, prompt, tokens, *options, checkpoint="saved"):
    """The new text."""
    done = subprocess.run([TRIDENT, "generate", "--checkpoint", checkpoint, "--prompt", prompt, "--tokens", str(tokens),
                           *map(str, options)], cwd=directory, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    prompt = prompt if isinstance(prompt, bytes) else prompt.encode()
    assert done.stdout.startswith(prompt) and done.stdout.endswith(b"\n")
    return done.stdout[len(prompt):-1]


GREEDY = ("--temperature", 0)


def test_kept_keys_and_values_equal_recomputation(both):
    """One run against one run a token, which reads the whole context again. 50 tokens: the context of 16 is
    full several times. Greedy, so that the same logits mean the same text."""
    whole = generate(both, "the qui", 50, *GREEDY)
    assert len(whole) == 50
    text = b"the qui"
    for _ in range(50):
        text += generate(both, text, 1, *GREEDY)
    assert text == b"the qui" + whole


def test_greedy_text_does_not_depend_on_the_seed(both):
    texts = {generate(both, "fox ", 30, *GREEDY, "--seed", seed) for seed in (1, 2, 3)}
    texts |= {generate(both, "fox ", 30, "--top-k", 1), generate(both, "fox ", 30, "--top-p", 0)}
    assert len(texts) == 1


def test_the_seed_gives_the_text(llama):
    texts = [generate(llama, "fox ", 40, "--seed", seed, "--temperature", 1) for seed in (1, 2, 3, 1, 2, 3)]
    assert texts[:3] == texts[3:] and len(set(texts)) == 3


def first_tokens(directory, *options, seeds=25):
    return {generate(directory, "the ", 1, "--seed", seed, "--temperature", 100, *options) for seed in range(seeds)}


def test_top_k_and_top_p_leave_the_likeliest(llama):
    """At temperature 100 the 257 tokens are about equally likely: top-k 2 gives both of two (missing one in 25
    draws has a chance of 1e-7, and the seeds are fixed), top-p 0.01 the 3 that make up a hundredth."""
    greedy = generate(llama, "the ", 1, *GREEDY)
    two, three, by_p = (first_tokens(llama, *o) for o in (("--top-k", 2, "--top-p", 1), ("--top-k", 3, "--top-p", 1),
                                                         ("--top-k", 0, "--top-p", 0.01)))
    assert len(two) == 2 and greedy in two and two < three and len(three) == 3
    assert by_p == three
    assert len(first_tokens(llama, "--top-p", 1)) > 20


def test_a_prompt_of_any_bytes(llama):
    assert generate(llama, b"\xff\xfe\x80", 3, *GREEDY) == generate(llama, b"\xff\xfe\x80", 3, *GREEDY)
    assert len(generate(llama, "", 3, *GREEDY)) == 3
    assert generate(llama, "x" * 1000, 0) == b""
    assert len(generate(llama, "the fox " * 500, 5, *GREEDY)) == 5


def test_checkpoints_of_any_layout_give_the_same_text(llama):
    """The same state saved by another layout."""
    expected = generate(llama, "the ", 40, "--seed", 5)
    for d, p, t in [(2, 1, 1), (1, 2, 2), (2, 2, 2)]:
        name = f"saved-{d}{p}{t}"
        run(["run.ini", *overrides({**layout(d, p, t), "checkpoint.resume": "saved", "checkpoint.dir": name,
                                    "log.dir": f"log-{d}{p}{t}"})], llama, check=0)
        assert len(list((llama / name / f"step-{STEPS:08d}").glob("shard-*"))) > 1
        assert generate(llama, "the ", 40, "--seed", 5, checkpoint=name) == expected
        assert generate(llama, "the ", 40, "--seed", 5, checkpoint=f"{name}/step-{STEPS:08d}") == expected


def test_text_that_cannot_be_written_is_an_error(llama):
    with open("/dev/full", "w") as full:
        done = subprocess.run([TRIDENT, "generate", "--checkpoint", "saved", "--prompt", "x", "--tokens", "2"],
                cwd=llama,
                              stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 3 and b"cannot write to standard output: No space left" in done.stderr


# ---- eval ----

def evaluated(directory, **changes):
    out = run(["eval", "run.ini", *overrides(changes)], directory, check=0).out
    found = re.fullmatch(r"step (\d+): (\d+) windows, (\d+) tokens: loss (\S+) nats a token, perplexity (\S+)\n", out)
    assert found, out
    return found


def test_eval_is_the_validation_loss_of_training(both):
    in_training = metrics(both / "log")[STEPS]["valid_loss"]
    found = evaluated(both)
    loss = float(found[4])
    # Printed with nine digits.
    assert abs(loss - in_training) <= 1e-8 * in_training
    assert abs(float(found[5]) - math.exp(loss)) <= 1e-5 * math.exp(loss)
    size = os.path.getsize(both / "text.bin") // 2
    windows = (size - 1) // 16
    assert (int(found[1]), int(found[2]), int(found[3])) == (STEPS, windows, 16 * windows)


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_eval_in_any_layout(grid, llama):
    """Also with a number of windows that the data ranks do not divide. Sums in another order: about sqrt(n) u."""
    alone, split = evaluated(llama), evaluated(llama, **layout(*grid))
    assert alone[3] == split[3]
    assert abs(float(alone[4]) - float(split[4])) <= 1e-6 * float(alone[4])


def test_eval_of_other_data(llama, tmp_path):
    (llama / "other.txt").write_text("zzz qqq " * 50)
    run(["tokenize", "--tokenizer", "bytes", "--out", "other", "other.txt"], llama, check=0)
    out = run(["eval", "run.ini", "--data", "other", "--checkpoint", f"saved/step-{STEPS:08d}"], llama, check=0).out
    assert float(re.search(r"loss (\S+)", out)[1]) > float(evaluated(llama)[4])


def test_what_every_rank_would_find_is_said_once(llama):
    """The first rank looks for the checkpoint: so all use the same one, also while a run writes there."""
    found = run(["eval", "run.ini", "--checkpoint", "none", *overrides(layout(2, 2, 2))], llama, check=7)
    assert found.err.count("none: there is no complete checkpoint") == 1, found.err


# ---- inspect, help ----

def test_inspect_a_checkpoint(llama):
    out = run(["inspect", "saved"], llama, check=0).out
    assert f"step         {STEPS} (0 of them skipped)" in out and "tensor 1 x pipeline 1 x data 1" in out
    assert re.search(r"param/embed.weight\s+f32\s+257 x 64", out) and re.search(r"adam_v\S*/embed.weight", out)
    assert "[model]" in out and "verified" not in out
    assert "verified: every file and every array" in run(["inspect", "saved", "--verify"], llama, check=0).out


def test_inspect_token_files(llama):
    out = run(["inspect", "text"], llama, check=0).out
    n = os.path.getsize(llama / "text.bin") // 2
    assert out.startswith(f"text: megatron, uint16, {n} tokens in 40 documents\nfirst tokens: 116 104 101 32 ")
    assert out == run(["inspect", "text.idx"], llama, check=0).out.replace("text.idx", "text")
    assert "the largest is 256\n" in run(["inspect", "text", "--verify"], llama, check=0).out


def test_inspect_a_directory_without_checkpoints(llama, tmp_path):
    assert run(["inspect", tmp_path], tmp_path, check=7).err == f"error: {tmp_path}: there is no complete checkpoint\n"
    for suffix in (".bin", ".idx"):
        shutil.copy(llama / f"text{suffix}", tmp_path)
    err = run(["inspect", tmp_path], tmp_path, check=7).err
    hint = f"trident inspect {tmp_path}/text.bin"
    assert err == f"error: {tmp_path}: there is no complete checkpoint; for the tokens in it: {hint}\n"
    assert run(hint.split()[1:], tmp_path, check=0).out.startswith(f"{tmp_path}/text")


def test_help_of_every_command(tmp_path):
    page = run(["--help"], tmp_path, check=0).out
    commands = re.findall(r"^  trident (\w+)", page, re.M)
    assert commands == ["train", "eval", "generate", "tokenize", "inspect", "selftest", "help"]
    for command in commands[:-1]:
        one = run([command, "--help"], tmp_path, check=0)
        assert one.out.startswith(f"usage: trident {command} ") and one.err == ""
        # Every option that the page names has a line.
        assert all(f"\n  {option} " in one.out for option in re.findall(r"--[a-z-]+", one.out.splitlines()[0]))
        other = run(["help", command], tmp_path, check=0).out
        if command == "train":  # a section of the config too
            assert other.startswith("train.steps\n") and other.endswith("\n\n" + one.out)
        else:
            assert other == one.out
    assert re.fullmatch(r"trident \d+\.\d+\.\d+ \(cpu\)\n", run(["--version"], tmp_path, check=0).out)
    assert run([], tmp_path, check=2).err == page
    assert not list(tmp_path.iterdir())


# ---- tokenize ----

def read_tokens(prefix):
    """Tokens of each document, read by the format's description alone."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, n, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1 and code in (4, 8)
    lengths = struct.unpack_from(f"<{n}i", index, 34)
    documents = struct.unpack_from(f"<{entries}q", index, 34 + 12 * n)
    tokens = array.array({4: "i", 8: "H"}[code], pathlib.Path(f"{prefix}.bin").read_bytes())
    ends = [sum(lengths[:i]) for i in range(n + 1)]
    assert ends[-1] == len(tokens)
    return [list(tokens[ends[a]:ends[b]]) for a, b in zip(documents, documents[1:])]


TEXTS = ["Plain text,\nof two lines.\n", "Ünïcode: 漢字, 🦊 and \u00a0 spaces \t\t\n\n\n", "", "it's 123456 'quoted' !!??",
         "\u0000 and \u001f are characters too", " ", "no newline at the end"]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@pytest.mark.parametrize("threads", [1, 3])
def test_tokenize_round_trip(name, threads, tmp_path):
    """Each document's tokens, put together again, are its bytes, and the end of the document. An empty document
    has neither."""
    write_tokenizer(tmp_path / "bpe")
    ids = json.loads((tmp_path / "bpe/vocab.json").read_text())
    letters = {letter: byte for byte, letter in byte_letters().items()}
    pieces = {i: bytes(letters[c] for c in word) for word, i in ids.items() if word != "<|endoftext|>"}
    end = ids["<|endoftext|>"] if name == "bpe" else 256
    if name == "bytes":
        pieces = {i: bytes([i]) for i in range(256)}
    texts = TEXTS + ["abcabc ab c" * 5]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    (tmp_path / "whole.txt").write_text(texts[0])
    run(["tokenize", "--tokenizer", name, "--out", "out", "--threads", threads, "lines.jsonl", "whole.txt"], tmp_path,
        check=0)
    documents = read_tokens(tmp_path / "out")
    assert all(d[-1] == end and end not in d[:-1] for d in documents if d)
    assert [b"".join(pieces[i] for i in d[:-1]).decode() for d in documents] == texts + [texts[0]]
    if name == "bpe":
        assert documents[len(texts) - 1][0] == ids["abc"]


# ---- what a run shows ----

def on_a_terminal(directory, words, columns):
    """What the run writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([TRIDENT, *words], cwd=directory, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    return shown.decode()


def in_directory(directory, name, **changes):
    return ["train", "run.ini", *overrides({"checkpoint.dir": f"{name}/saved", "log.dir": f"{name}/log", **changes})]


@pytest.mark.parametrize("columns", [60, 200])
def test_live_line_on_a_terminal(columns, llama):
    shown = on_a_terminal(llama, in_directory(llama, f"live{columns}"), columns)
    assert "\x1b[K" in shown
    live = re.findall(r"(?:^|\r\x1b\[K|\n)(step \d+/30 [^\r\n]*)", shown)
    assert [int(re.match(r"step (\d+)", line)[1]) for line in live] == list(range(1, STEPS + 1))
    lasting = [line for line in live if " valid " in line]
    assert [line.split("/")[0] for line in lasting] == ["step 10", "step 20", "step 30"]
    passing = [line for line in live if line not in lasting]
    assert all(len(line) < columns for line in passing)  # none wraps, and so each can be wiped out
    if columns == 200:
        assert all(re.search(r"loss \d+\.\d+ norm \S+ lr \S+ \d+ tok/s left \S+ mfu \S+% mem \S+ MB$",
                x) for x in passing)
    # What stays on the screen: whole lines only.
    screen = [re.split(r"\r(?=\x1b)", line)[-1].replace("\x1b[K", "") for line in shown.replace("\r\n",
            "\n").split("\n")]
    assert [line for line in screen if line.startswith("step ")] == lasting
    assert screen[-1] == ""


def test_plain_lines_elsewhere(llama):
    done = run(in_directory(llama, "plain", **{"log.every": 7}), llama, check=0)
    assert "\x1b" not in done.err and "\r" not in done.err and done.out == ""
    steps = [int(n) for n in re.findall(r"^step (\d+)/30 ", done.err, re.M)]
    assert steps == [1, 7, 10, 14, 20, 21, 28, 30]


def test_metrics_have_every_step(llama):
    rows = [json.loads(line) for line in (llama / "log/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["tokens"] == row["step"] * 8 * 16 and row["skipped"] == 0 and row["mem_bytes"] > 0
        for key in ("loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "mfu"):
            assert math.isfinite(row[key]) and row[key] >= 0, (key, row)
        assert ("valid_loss" in row) == (row["step"] % 10 == 0)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_resumed_run_continues_the_rows(llama):
    whole = metrics(llama / "log")
    run(in_directory(llama, "cut", **{"checkpoint.every": 10, "checkpoint.keep": 0}), llama, check=0)
    for step in ("step-00000020", "step-00000030"):  # as if the run had been lost behind step 10
        shutil.rmtree(llama / "cut/saved" / step)
    run(in_directory(llama, "cut", **{"checkpoint.every": 10, "checkpoint.keep": 0}), llama, check=0)
    rows = [json.loads(line) for line in (llama / "cut/log/metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in rows] == [
        (s, r["loss"], r["grad_norm"]) for s, r in sorted(whole.items())]


def test_a_new_run_keeps_the_rows_of_an_earlier_one(llama):
    run(in_directory(llama, "twice"), llama, check=0)
    first = (llama / "twice/log/metrics.jsonl").read_bytes()
    done = run(in_directory(llama, "twice", **{"checkpoint.resume": "none", "train.seed": 8}), llama, check=0)
    assert (llama / "twice/log/metrics.1.jsonl").read_bytes() == first and "metrics.1.jsonl" in done.err
    assert sorted(metrics(llama / "twice/log")) == list(range(1, STEPS + 1))


# ---- event files ----

def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    at = 0
    while at < len(data):
        size, size_crc = struct.unpack_from("<QI", data, at)
        assert size_crc == crc32c(data[at:at + 8])
        record = data[at + 12:at + 12 + size]
        assert len(record) == size and struct.unpack_from("<I", data, at + 12 + size)[0] == crc32c(record)
        yield record
        at += 16 + size


def fields(data):
    """(number, value) of a protocol buffer's fields."""
    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    at = 0
    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 1:
            yield key >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif key & 7 == 5:
            yield key >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        else:
            assert key & 7 == 2
            size = varint()
            yield key >> 3, data[at:at + size]
            at += size


def test_event_files_hold_the_metrics(llama):
    """event.proto: wall_time 1, step 2, file_version 3, summary 5; summary.proto: value 1, with tag 1 and
    simple_value 2."""
    files = list((llama / "log").glob("events.out.tfevents.*"))
    assert len(files) == 1
    events = [dict(fields(record)) for record in records(files[0].read_bytes())]
    assert events[0][3] == b"brain.Event:2"
    scalars = {}
    for event in events[1:]:
        for number, value in fields(event[5]):
            assert number == 1
            one = dict(fields(value))
            scalars[event[2], one[1].decode()] = one[2]
        assert 1.6e9 < event[1] < 1e11
    rows = metrics(llama / "log")
    keys = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr",
            "train/tokens_per_s": "tokens_per_s",
            "valid/loss": "valid_loss"}
    expected = {(step, tag): struct.unpack("f", struct.pack("f", row[key]))[0]
                for step, row in rows.items() for tag, key in keys.items() if key in row}
    assert scalars == expected


def test_no_event_files_where_not_wanted(llama):
    run(in_directory(llama, "quiet", **{"log.tensorboard": "no"}), llama, check=0)
    assert sorted(p.name for p in (llama / "quiet/log").iterdir()) == ["config.ini", "metrics.jsonl"]
