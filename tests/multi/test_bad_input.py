"""What a user can get wrong, one case a line: each ends with the right exit status and a message that names the thing,
and leaves every file that was there as it was (and nothing new, but for what a case says)."""
import json
import os
import pathlib
import re
import shutil
import struct
import sys

import pytest

from trident import BASE, layout, make_corpus, run, write_config, write_tokens

CONFIG, DATA, LAUNCH, CHECKPOINT, NUMBERS = 2, 3, 4, 7, 8
SETTINGS = {**BASE, "model.layers": 2, "model.hidden": 32, "model.heads": 2, "model.kv_heads": 2, "model.vocab": 257,
            "train.steps": 4, "train.global_batch": 4, "optimizer.warmup_steps": 0, "optimizer.decay": "constant",
            "data.train": "corpus", "data.valid": "corpus", "data.tokenizer": "bytes", "checkpoint.every": 2,
            "checkpoint.dir": "saved", "log.dir": "log", "train.threads": 1}
TINY_VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "<|endoftext|>": 5}
SAVED = "saved/step-00000004"


def byte_letters():
    """The 256 letters that stand for bytes in vocab.json."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def write_tokenizer(directory, vocab=None, merges="#version: 0.2\na b\nab c\n"):
    directory.mkdir(exist_ok=True)
    if vocab is None:
        words = [*byte_letters().values(), "ab", "abc", "<|endoftext|>"]
        vocab = json.dumps({word: i for i, word in enumerate(words)})
    (directory / "vocab.json").write_text(vocab)
    if merges is not None:
        (directory / "merges.txt").write_text(merges)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A directory in which everything is right: a finished run with two checkpoints, a tokenizer, texts."""
    directory = tmp_path_factory.mktemp("template")
    make_corpus(directory)
    write_config(directory / "run.ini", SETTINGS)
    write_tokenizer(directory / "bpe")
    (directory / "text.txt").write_text("abc abc\n")
    (directory / "lines.jsonl").write_text('{"text": "abc"}\n{"text": "ab"}\n')
    (directory / "out.bin").write_bytes(b"old")
    (directory / "out.idx").write_bytes(b"old too")
    run(["run.ini"], directory, check=0)
    write_config(directory / "run.ini", {**SETTINGS, "train.steps": 6})
    return directory


def snapshot(directory):
    return {str(p.relative_to(directory)): (p.read_bytes() if p.is_file() else None,
            p.lstat().st_mtime_ns if p.is_file()
                                            else 0) for p in sorted(directory.rglob("*"))}


def expect(template, tmp_path, status, says, words, damage=None, env=None, new=()):
    directory = shutil.copytree(template, tmp_path / "here")
    if damage:
        damage(directory)
    before = snapshot(directory)
    done = run(words, directory, env=env, timeout=60)
    assert done.returncode == status, f"exit {done.returncode}, expected {status}\n{done.out}\n{done.err}"
    for text in [says] if isinstance(says, str) else says:
        assert text in done.err, f"{text!r} is not said:\n{done.err}"
    assert len(done.err) < 6000 and "internal" not in done.err, done.err
    errors = re.findall(r"error: .*", done.err)
    assert len(errors) == len(set(errors)), f"said more than once:\n{done.err}"
    after = snapshot(directory)
    assert {path: after.get(path) for path in before} == before, "something that was there has changed"
    added = {path for path in after if path not in before and not any(path.startswith(p) for p in new)}
    assert not added, f"left behind: {added}"


def table(cases):
    """Runs the test for each {name: (status, says, words, ...)}."""
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


# ---- damage ----

def file_of(name, data):
    def damage(directory):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return damage


def changed(name, offset, data):
    def damage(directory):
        whole = bytearray((directory / name).read_bytes())
        whole[offset:offset + len(data)] = data
        (directory / name).write_bytes(whole)
    return damage


def cut(name, size):
    """To size bytes; negative: by so many."""
    def damage(directory):
        path = directory / name
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    return damage


def removed(name):
    def damage(directory):
        shutil.rmtree(directory / name) if (directory / name).is_dir() else (directory / name).unlink()
    return damage


def both(*damages):
    def damage(directory):
        for one in damages:
            one(directory)
    return damage


def tokens_of(tokens, documents=None, dtype_code=8):
    return lambda directory: write_tokens(directory / "corpus", tokens, documents or [len(tokens)], dtype_code)


def llmc(magic=20240520, version=1, count=400, n=400, value=1, width="H"):
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    return both(removed("corpus.idx"), file_of("corpus.bin", header + struct.pack(f"<{n}{width}", *[value] * n)))


def tokenizer(vocab=None, merges="#version: 0.2\na b\nab c\n"):
    return lambda directory: write_tokenizer(directory / "bpe", vocab, merges)


def vocab_with(**changes):
    words = [*byte_letters().values(), "ab", "abc", "<|endoftext|>"]
    vocab = {word: i for i, word in enumerate(words)}
    for word, value in changes.items():
        vocab[word] = value
    return json.dumps({w: i for w, i in vocab.items() if i is not None})


def shard(step=SAVED, which=0):
    return lambda directory: sorted((directory / step).glob("shard-*"))[which]


def of_shard(change, step=SAVED):
    """The damage done to the step's shard, whatever its name."""
    def damage(directory):
        change(str(shard(step)(directory).relative_to(directory)))(directory)
    return damage


def manifest(edit, step=SAVED):
    def damage(directory):
        path = directory / step / "manifest.json"
        path.write_text(edit(path.read_text()))
    return damage


def no_older(damage):
    """Only the damaged checkpoint is there."""
    return both(removed("saved/step-00000002"), damage)


# ---- config and command line ----

def setting(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


CONFIGS = {
    "not text": (CONFIG, "run.ini", ["run.ini"], file_of("run.ini", bytes(range(256)))),
    "empty": (CONFIG, ["steps = 0 and tokens = 0"], ["run.ini"], file_of("run.ini", "")),
    "unknown section": (CONFIG, ["[modell]", "model"], ["run.ini"], file_of("run.ini", "[modell]\nlayers = 2\n")),
    "key before a section": (CONFIG, "run.ini:1:", ["run.ini"], file_of("run.ini", "layers = 2\n[model]\n")),
    "key in another section": (CONFIG, ["layers", "[model]"], ["run.ini"], file_of("run.ini", "[train]\nlayers = 2\n")),
    "key twice": (CONFIG, ["run.ini:3:", "layers"], ["run.ini"], file_of("run.ini",
            "[model]\nlayers = 2\nlayers = 3\n")),
    "unfinished section": (CONFIG, "run.ini:1:", ["run.ini"], file_of("run.ini", "[model\nlayers = 2\n")),
    "missing include": (CONFIG, ["run.ini:1:", "none.ini"], ["run.ini"], file_of("run.ini", "include = none.ini\n")),
    "includes itself": (CONFIG, ["run.ini:1:"], ["run.ini"], file_of("run.ini", "include = run.ini\n")),
    "too large a number": (CONFIG, ["layers", "99999999999999999999"], ["run.ini",
            *setting("model.layers=" + "9" * 20)]),
    "not a number": (CONFIG, ["optimizer.lr", "nan"], ["run.ini", *setting("optimizer.lr=nan")]),
    "negative": (CONFIG, ["micro_batch", "-1"], ["run.ini", *setting("train.micro_batch=-1")]),
    "unit of another kind": (CONFIG, ["timeout", "5 parsecs"], ["run.ini", *setting("train.timeout=5 parsecs")]),
    "heads and kv_heads": (CONFIG, ["kv_heads = 3", "heads = 4"],
                           ["run.ini", *setting("model.heads=4", "model.hidden=64", "model.kv_heads=3")]),
    "more stages than layers": (CONFIG, ["pipeline = 3", "layers = 2"], ["run.ini", *setting("parallel.pipeline=3")]),
    "tensor and heads": (CONFIG, ["tensor = 4", "heads = 2"], ["run.ini", *setting("parallel.tensor=4")]),
    "batch and data": (CONFIG, ["global_batch = 4", "3"], ["run.ini", *setting("parallel.data=3")]),
    "ranks and grid": (CONFIG, ["ranks = 5", "2 x 2 x 1 = 4"],
                       ["run.ini", *setting("parallel.ranks=5", "parallel.data=2", "parallel.pipeline=2")]),
    "steps and tokens": (CONFIG, ["steps = 6 and tokens = 100"], ["run.ini", *setting("train.tokens=100")]),
    "order with a twice": (CONFIG, ["order", "tensor"], ["run.ini", *setting("parallel.order=tensor, tensor, data")]),
    "bigger than any memory": (CONFIG, ["are more than any memory holds"],
                               ["run.ini", *setting("model.hidden=1048576", "model.heads=4096", "model.kv_heads=4096",
                                                    "model.layers=10000", "model.ffn=16777216", "model.seq_len=1000000",
                                                    "train.micro_batch=1000000", "train.global_batch=1000000")]),
    "bigger than this memory": (LAUNCH, ["needs", "but it has", "train.micro_batch"],
                                ["run.ini", *setting("model.hidden=1048576", "model.heads=4096", "model.kv_heads=4096",
                                                     "checkpoint.dir=new")]),
    "evaluation of nothing": (CONFIG, ["eval_every = 2 needs data.valid"],
                              ["run.ini", *setting("train.eval_every=2", "data.valid=")]),
    "a variable in a path": (CONFIG, ["$HOME"], ["run.ini", *setting("data.train=$HOME/x")]),
    "allow of nothing": (CONFIG, ["model.layer", "did you mean model.layers"],
                         ["run.ini", *setting("checkpoint.allow=model.layer")]),
    "empty path": (CONFIG, [""], [""]),
    "not a config": (CONFIG, ["corpus.bin"], ["train", "corpus.bin"]),
    "eval without data": (CONFIG, ["no data to evaluate on", "--data"], ["eval", "run.ini", *setting("data.valid=")]),
    "eval without a config": (CONFIG, ["config file is missing"], ["eval"]),
    "option twice": (CONFIG, ["--data is given twice"], ["eval", "run.ini", "--data", "a", "--data", "b"]),
    "generate without a checkpoint": (CONFIG, ["--checkpoint is missing"], ["generate", "--prompt", "x"]),
    "generate without a prompt": (CONFIG, ["--prompt is missing"], ["generate", "--checkpoint", "saved"]),
    "generate with a word": (CONFIG, ["saved is no option"], ["generate", "saved"]),
    "temperature below zero": (CONFIG, ["--temperature -1", "0 to 100"],
                               ["generate", "--checkpoint", "saved", "--prompt", "x", "--temperature", "-1"]),
    "temperature nan": (CONFIG, ["--temperature nan"],
                        ["generate", "--checkpoint", "saved", "--prompt", "x", "--temperature", "nan"]),
    "top-p above one": (CONFIG, ["--top-p 1.5", "0 to 1"],
                        ["generate", "--checkpoint", "saved", "--prompt", "x", "--top-p", "1.5"]),
    "tokens no number": (CONFIG, ["--tokens ten"], ["generate", "--checkpoint", "saved", "--prompt", "x",
            "--tokens=ten"]),
    "tokens with a unit": (CONFIG, ["--tokens 10k"],
                           ["generate", "--checkpoint", "saved", "--prompt", "x", "--tokens", "10k"]),
    "misspelt option": (CONFIG, ["--checkpiont", "did you mean --checkpoint"], ["generate", "--checkpiont", "saved"]),
    "inspect nothing": (CONFIG, ["a checkpoint directory or a token file is missing"], ["inspect"]),
    "inspect two": (CONFIG, ["2 words", "corpus", "saved"], ["inspect", "corpus", "saved"]),
    "switch with a value": (CONFIG, ["--verify takes no value"], ["inspect", "saved", "--verify=yes"]),
    "tokenize to nowhere": (CONFIG, ["--out is missing"], ["tokenize", "--tokenizer", "bytes", "text.txt"]),
    "tokenize by nothing": (CONFIG, ["--tokenizer is missing"], ["tokenize", "--out", "out", "text.txt"]),
    "tokenize nothing": (CONFIG, ["no text file is given"], ["tokenize", "--tokenizer", "bytes", "--out", "out"]),
    "no threads": (CONFIG, ["--threads 0", "from 1 to"],
                   ["tokenize", "--tokenizer", "bytes", "--out", "out", "text.txt", "--threads", "0"]),
    "self-test of no steps": (CONFIG, ["--steps 0", "from 1 to"], ["selftest", "run.ini", "--steps", "0"]),
    "self-test of nothing": (CONFIG, ["config file"], ["selftest"]),
}


@table(CONFIGS)
def test_config_and_command_line(case, template, tmp_path):
    expect(template, tmp_path, *case)


# ---- token files ----

TRAIN = ["run.ini"]
TOKEN_FILES = {
    "no file": (DATA, ["none: there is no such token file", "none.bin"], [*TRAIN, *setting("data.train=none")]),
    "no file for validation": (DATA, ["none: there is no such token file"], [*TRAIN, *setting("data.valid=none")]),
    "no .bin": (DATA, ["corpus.bin: cannot open: No such file"], TRAIN, removed("corpus.bin")),
    "no .idx": (DATA, ["corpus.bin: is not a token file", "needs its .idx"], TRAIN, removed("corpus.idx")),
    "no permission": (DATA, ["corpus.idx"], TRAIN, both(removed("corpus.idx"), lambda d: (d / "corpus.idx").mkdir())),
    "empty .idx": (DATA, ["corpus.idx: has 0 bytes, an index has at least 34"], TRAIN, cut("corpus.idx", 0)),
    "cut .idx": (DATA, ["corpus.idx: has", "cut off"], TRAIN, cut("corpus.idx", -1)),
    "empty .bin": (DATA, ["corpus.bin: has 0 bytes", "cut off"], TRAIN, cut("corpus.bin", 0)),
    "cut .bin": (DATA, ["corpus.bin: has 7999 bytes", "ends at byte 8000"], TRAIN, cut("corpus.bin", -1)),
    ".bin of another": (DATA, ["corpus.bin: has 8002 bytes", "describes 8000", "do not belong together"], TRAIN,
                        lambda d: (d / "corpus.bin").write_bytes((d / "corpus.bin").read_bytes() + b"\0\0")),
    "magic": (DATA, ["corpus.idx: is not a Megatron index"], TRAIN, changed("corpus.idx", 0, b"X")),
    "version": (DATA, ["corpus.idx: has version 2 (byte 9), version 1"], TRAIN, changed("corpus.idx", 9, b"\2")),
    "unknown type": (DATA, ["corpus.idx: has token type 99"], TRAIN, changed("corpus.idx", 17, b"\x63")),
    "floating type": (DATA, ["token type 7 (float32"], TRAIN, changed("corpus.idx", 17, b"\7")),
    "wider type": (DATA, ["corpus.idx: sequence", "begins at byte"], TRAIN, changed("corpus.idx", 17, b"\4")),
    "too many sequences": (DATA, ["corpus.idx", "18446744073709551615 sequences"], TRAIN,
                           changed("corpus.idx", 18, b"\xff" * 8)),
    "negative length": (DATA, ["corpus.idx: sequence 0 has length -1"], TRAIN, changed("corpus.idx", 34, b"\xff" * 4)),
    "token past the vocabulary": (DATA, ["corpus.bin: token 30 of the file (in document 1, token 10 of it) is 300",
                                         "vocabulary of 257"], TRAIN,
                                  tokens_of([1] * 30 + [300] + [1] * 4, [20, 15]), None, ["new"]),
    "negative token": (DATA, ["corpus.bin: token 30 of the file", "is -4"], TRAIN,
                       tokens_of([1] * 30 + [-4] + [1] * 4, None, 4), None, ["new"]),
    "no tokens": (DATA, ["corpus: has 0 tokens", "at least 17"], TRAIN, tokens_of([], [0])),
    "too short": (DATA, ["corpus: has 16 tokens; with model.seq_len = 16 it needs at least 17"], TRAIN,
                  tokens_of([1] * 16)),
    "bad weight": (CONFIG, ["data.train", "corpus:heavy", "a weight is expected at character 8"],
                   [*TRAIN, *setting("data.train=corpus:heavy")]),
    "zero weight": (CONFIG, ["data.train", "weights of the data are zero"], [*TRAIN, *setting("data.train=corpus:0")]),
    "weight for some": (CONFIG, ["data.valid", "other has none"], [*TRAIN, *setting("data.valid=corpus:1, other")]),
    "corpus twice": (CONFIG, ["data.train", "corpus is given twice"], [*TRAIN,
            *setting("data.train=corpus:1, corpus:2")]),
    "no path": (CONFIG, ["data.train", "a path is missing at character 8"], [*TRAIN, *setting("data.train=corpus,")]),
    "empty shard": (DATA, ["corpus.bin: has 0 bytes"], TRAIN, both(llmc(), cut("corpus.bin", 0))),
    "shard without a whole header": (DATA, ["corpus.bin: has 1023 bytes"], TRAIN, both(llmc(), cut("corpus.bin",
            1023))),
    "cut shard": (DATA, ["corpus.bin: has 1823 bytes; with 400 tokens (byte 8) it should have 1824"], TRAIN,
                  both(llmc(), cut("corpus.bin", -1))),
    "shard version": (DATA, ["corpus.bin: has version 3 (byte 4)", "version 1"], TRAIN, llmc(version=3)),
    "model weights": (DATA, ["corpus.bin: is not a token file", "llm.c model weights"], TRAIN, llmc(magic=20240326)),
    "shard of negative length": (DATA, ["corpus.bin: has -1 tokens"], TRAIN, llmc(count=-1)),
    "shard past the vocabulary": (DATA, ["corpus.bin: token ", "begins at token 0 of the stream", "is 300"], TRAIN,
                                  llmc(value=300), None, ["new"]),
    "no shard matches": (DATA, ["shard*.bin: no file matches"], [*TRAIN, *setting("data.train=shard*.bin")]),
    "inspect nothing there": (DATA, ["none: there is no such token file"], ["inspect", "none"]),
    "inspect text": (DATA, ["text.txt"], ["inspect", "text.txt"]),
    "inspect a cut one": (DATA, ["corpus.bin: has 7999 bytes"], ["inspect", "corpus"], cut("corpus.bin", -1)),
    "eval of nothing there": (DATA, ["none: there is no such token file"], ["eval", "run.ini", "--data", "none"]),
    "eval past the vocabulary": (DATA, ["token 0 of the file", "is 300"], ["eval", "run.ini"], tokens_of([300] * 100)),
}


@table(TOKEN_FILES)
def test_token_files(case, template, tmp_path):
    # The present checkpoints belong to other data; a new run does not look at them.
    status, says, words, *rest = case
    fresh = setting("checkpoint.dir=new/saved", "log.dir=new/log") if words[0] == "run.ini" else []
    expect(template, tmp_path, status, says, [*words, *fresh], *rest)


# ---- tokenizers and text ----

BPE = ["tokenize", "--tokenizer", "bpe", "--out", "out", "text.txt"]
BYTES = ["tokenize", "--tokenizer", "bytes", "--out", "out"]
TEXTS = {
    "no tokenizer": (DATA, ["none"], ["tokenize", "--tokenizer", "none", "--out", "out", "text.txt"]),
    "no vocabulary": (DATA, ["bpe", "vocab.json"], BPE, removed("bpe/vocab.json")),
    "no merges": (DATA, ["bpe/merges.txt", "No such file"], BPE, removed("bpe/merges.txt")),
    "vocabulary is cut": (DATA, ["bpe/vocab.json:1:", "not valid JSON"], BPE, cut("bpe/vocab.json", -1)),
    "vocabulary is a list": (DATA, ["bpe/vocab.json"], BPE, tokenizer("[1, 2]")),
    "vocabulary is empty": (DATA, ["bpe/vocab.json"], BPE, tokenizer("{}")),
    "token twice": (DATA, ["bpe/vocab.json", "duplicate"], BPE, tokenizer('{"a": 0, "a": 1}')),
    "id twice": (DATA, ["bpe/vocab.json", "256"], BPE, tokenizer(vocab_with(abc=256))),
    "id missing": (DATA, ["bpe/vocab.json", "has id 900", "0 to 258"], BPE, tokenizer(vocab_with(abc=900))),
    "negative id": (DATA, ["bpe/vocab.json", "-1"], BPE, tokenizer(vocab_with(abc=-1))),
    "id is text": (DATA, ["bpe/vocab.json", "abc"], BPE, tokenizer(vocab_with(abc="x"))),
    "a byte is missing": (DATA, ["bpe/vocab.json"], BPE, tokenizer(vocab_with(a=None, abc=64, z=257))),
    "no end of text": (DATA, ["bpe/vocab.json", "<|endoftext|>"], BPE,
                       tokenizer(vocab_with(**{"<|endoftext|>": None}))),
    "merges of another": (DATA, ["bpe/merges.txt:3", "do not belong together"], BPE, tokenizer(None,
            "#version\na b\nx y\n")),
    "merge twice": (DATA, ["bpe/merges.txt:3", "the same merge"], BPE, tokenizer(None, "#version\na b\na b\n")),
    "merge of three": (DATA, ["bpe/merges.txt:2", "two tokens"], BPE, tokenizer(None, "#version\na b c\n")),
    "merges are empty": (DATA, ["bpe/merges.txt: has no merges"], BPE, tokenizer(None, "#version\n")),
    "tokenizer of another size": (CONFIG, ["bpe", "259", "257"],
                                  ["generate", "--checkpoint", "saved", "--prompt", "x", "--tokenizer", "bpe"]),
    "generate with no tokenizer": (DATA, ["none"],
                                   ["generate", "--checkpoint", "saved", "--prompt", "x", "--tokenizer", "none"]),
    "vocabulary below the tokenizer's": (CONFIG, ["vocab = 256 is below the 257 tokens of tokenizer = bytes"],
                                         ["run.ini", *setting("model.vocab=256")]),
    "vocabulary of no tokenizer": (DATA, ["none"], ["run.ini", *setting("model.vocab=0", "data.tokenizer=none")]),
    "vocabulary of nothing": (CONFIG, ["vocab", "tokenizer"],
                              ["run.ini", *setting("model.vocab=0", "data.tokenizer=")]),
    "no text": (DATA, ["none.txt: cannot open: No such file"], [*BYTES, "none.txt"]),
    "second text is missing": (DATA, ["none.txt: cannot open"], [*BYTES, "text.txt", "none.txt"]),
    "text is a directory": (DATA, ["bpe: is a directory"], [*BYTES, "bpe"]),
    "invalid UTF-8 in JSON": (DATA, ["lines.jsonl:2: column 10", "byte 0xff"], [*BYTES, "lines.jsonl"],
                              file_of("lines.jsonl", b'{"text": "good"}\n{"text": "\xff\xfe"}\n')),
    "no text field": (DATA, ["lines.jsonl:2:", "text"], [*BYTES, "lines.jsonl"],
                      file_of("lines.jsonl", '{"text": "good"}\n{"body": "x"}\n')),
    "text field is a number": (DATA, ["lines.jsonl:1:", "text"], [*BYTES, "lines.jsonl"],
                               file_of("lines.jsonl", '{"text": 5}\n')),
    "bad JSON": (DATA, ["lines.jsonl:2:"], [*BYTES, "lines.jsonl"],
                 file_of("lines.jsonl", '{"text": "good"}\n{"text": "x\n')),
    "output below a file": (DATA, ["text.txt"], ["tokenize", "--tokenizer", "bytes", "--out", "text.txt/out",
            "text.txt"]),
    "output is a directory": (CONFIG, ["--out bpe/", "name"],
                              ["tokenize", "--tokenizer", "bytes", "--out", "bpe/", "text.txt"]),
    "output without a name": (CONFIG, ["--out"], ["tokenize", "--tokenizer", "bytes", "--out", "", "text.txt"]),
    "compressed text": (DATA, ["text.gz: is a gzip file", "zcat"], [*BYTES, "text.gz"],
                        file_of("text.gz", b"\x1f\x8b\x08\x00\x00")),
    "empty text": (DATA, ["empty.txt"], [*BYTES, "empty.txt"], file_of("empty.txt", "")),
}


@table(TEXTS)
def test_tokenizers_and_text(case, template, tmp_path):
    expect(template, tmp_path, *case)


# ---- checkpoints ----

def swapped(directory):
    """The shards of the two steps exchanged: both whole, both in the wrong place."""
    a, b = shard("saved/step-00000002")(directory), shard(SAVED)(directory)
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)


def flip(name):
    """A bit of a parameter."""
    def damage(directory):
        data = bytearray((directory / name).read_bytes())
        data[8 + int.from_bytes(data[:8], "little") + 5] ^= 1
        (directory / name).write_bytes(data)
    return damage


def another_model(directory):
    write_config(directory / "run.ini", {**SETTINGS, "train.steps": 6, "model.hidden": 64})


GENERATE = ["generate", "--checkpoint", SAVED, "--prompt", "x", "--tokens", "1"]
ALONE = ["--set", f"checkpoint.resume={SAVED}"]
CHECKPOINTS = {
    "cut shard": (CHECKPOINT, ["damaged", "shard-"], TRAIN, no_older(of_shard(lambda n: cut(n, -1)))),
    "empty shard": (CHECKPOINT, ["damaged", "shard-"], TRAIN, no_older(of_shard(lambda n: cut(n, 0)))),
    "missing shard": (CHECKPOINT, ["damaged", "shard-"], TRAIN, no_older(of_shard(removed))),
    "flipped bit": (CHECKPOINT, ["shard-"], [*TRAIN, *ALONE], of_shard(flip)),
    "flipped bit of a header": (CHECKPOINT, ["shard-"], [*TRAIN, *ALONE], of_shard(lambda n: changed(n, 12, b"\x7f"))),
    "swapped shards": (CHECKPOINT, ["shard-"], [*TRAIN, *ALONE], swapped),
    "wrong step": (CHECKPOINT, ["step-00000009", "4"], [*TRAIN, "--set", "checkpoint.resume=saved/step-00000009"],
                   lambda d: (d / SAVED).rename(d / "saved/step-00000009")),
    "no manifest": (CHECKPOINT, ["step-00000004", "manifest.json"], [*TRAIN, *ALONE],
            removed(f"{SAVED}/manifest.json")),
    "empty manifest": (CHECKPOINT, ["manifest.json"], [*TRAIN, *ALONE], cut(f"{SAVED}/manifest.json", 0)),
    "cut manifest": (CHECKPOINT, ["manifest.json"], [*TRAIN, *ALONE], cut(f"{SAVED}/manifest.json", -2)),
    "changed manifest": (CHECKPOINT, ["manifest.json"], [*TRAIN, *ALONE],
                         manifest(lambda text: text.replace('"step": 4', '"step": 5'))),
    "manifest of another format": (CHECKPOINT, ["manifest.json"], [*TRAIN, *ALONE], manifest(lambda text: '{"a": 1}')),
    "no such checkpoint": (CHECKPOINT, ["checkpoint.resume = none-here"], [*TRAIN, "--set",
            "checkpoint.resume=none-here"]),
    "weights of nothing": (CHECKPOINT, ["none-here"], [*TRAIN, "--set", "checkpoint.resume=weights:none-here"]),
    "another model": (CHECKPOINT, ["model.hidden = 64", "32", "checkpoint.allow"], TRAIN, another_model),
    "another model's weights": (CHECKPOINT, ["model.hidden = 64", "another model"],
                                [*TRAIN, "--set", "checkpoint.resume=weights:saved"], another_model),
    "another model evaluated": (CHECKPOINT, ["model.hidden = 64", "another model"], ["eval", "run.ini"], another_model),
    "other data": (CHECKPOINT, ["data.train", "fingerprint"], TRAIN, lambda d: make_corpus(d, seed=9, n_tokens=3000)),
    "generate from nothing": (CHECKPOINT, ["none: "], ["generate", "--checkpoint", "none", "--prompt", "x"]),
    "generate from a file": (CHECKPOINT, ["run.ini"], ["generate", "--checkpoint", "run.ini", "--prompt", "x"]),
    "generate from a flipped bit": (CHECKPOINT, ["shard-"], GENERATE, of_shard(flip)),
    "eval of nothing": (CHECKPOINT, ["none", "no complete checkpoint"], ["eval", "run.ini", "--checkpoint", "none"]),
    "eval of a flipped bit": (CHECKPOINT, ["shard-"], ["eval", "run.ini"], of_shard(flip)),
    "inspect of a shard": (DATA, ["file of a checkpoint", f"trident inspect {SAVED}"],
                           ["inspect", f"{SAVED}/manifest.json"]),
    "inspect of no checkpoint": (CHECKPOINT, ["bpe", "no complete checkpoint"], ["inspect", "bpe"]),
    "verify of a flipped bit": (CHECKPOINT, ["shard-"], ["inspect", SAVED, "--verify"], of_shard(flip)),
    "verify of swapped shards": (CHECKPOINT, ["shard-"], ["inspect", SAVED, "--verify"], swapped),
    "log.dir is a file": (CONFIG, ["log.dir = text.txt"], [*TRAIN, "--set", "log.dir=text.txt"]),
    "checkpoint.dir is a file": (CHECKPOINT, ["text.txt"], [*TRAIN, "--set", "checkpoint.dir=text.txt"]),
    "checkpoint.dir below a file": (CHECKPOINT, ["text.txt"], [*TRAIN, "--set", "checkpoint.dir=text.txt/here"]),
}


@table(CHECKPOINTS)
def test_checkpoints(case, template, tmp_path):
    expect(template, tmp_path, *case)


@table({name: case for name, case in CHECKPOINTS.items() if case[2][0] in (TRAIN[0], "eval")})
def test_checkpoints_on_four_ranks(case, template, tmp_path):
    """All ranks find the same fault at the same point: it is said once."""
    status, says, words, *damage = case
    expect(template, tmp_path, status, says, [*words, *two(data=2, tensor=2)], *damage)


# ---- launch and placement ----

def two(**changes):
    """Settings of a grid, all given: so that no launcher's number is taken for one of them."""
    return setting(*(f"parallel.{key}={value}" for key, value in {"data": 1, "pipeline": 1, "tensor": 1,
            **changes}.items()))


def hosts(*names):
    return {"TRIDENT_TEST_HOSTNAME": ",".join(names)}


LAUNCHES = {
    "tensor across hosts": (LAUNCH, ["tensor", "h0", "h1", "allow_cross_node_tensor"], [*TRAIN, *two(tensor=2)], None,
                            hosts("h0", "h1")),
    "uneven hosts": (LAUNCH, ["tensor", "h0", "h1"], [*TRAIN, *two(tensor=2, pipeline=2)], None,
                     hosts("h0", "h0", "h0", "h1")),
    "RANK alone": (LAUNCH, ["RANK is set, but WORLD_SIZE is not"], TRAIN, None, {"RANK": "0"}),
    "WORLD_SIZE alone": (LAUNCH, ["WORLD_SIZE is set, but RANK is not"], TRAIN, None, {"WORLD_SIZE": "2"}),
    "RANK past the world": (LAUNCH, ['RANK="2"', "from 0 to 1"], [*TRAIN, *two(data=2)], None,
                            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}),
    "RANK is text": (LAUNCH, ['RANK="one"'], [*TRAIN, *two(data=2)], None,
                     {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}),
    "WORLD_SIZE is zero": (LAUNCH, ['WORLD_SIZE="0"'], TRAIN, None, {"RANK": "0", "WORLD_SIZE": "0"}),
    "no MASTER_ADDR": (LAUNCH, ["MASTER_ADDR is not"], [*TRAIN, *two(data=2)], None, {"RANK": "0", "WORLD_SIZE": "2"}),
    "bad MASTER_PORT": (LAUNCH, ['MASTER_PORT="99999"', "65535"], [*TRAIN, *two(data=2)], None,
                        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}),
    "no rank 0": (LAUNCH, ["no connection to rank 0 at 127.0.0.1:9", "within 1 s"],
                  [*TRAIN, *two(data=2), *setting("train.timeout=1s")], None,
                  {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}),
    "world of another size": (CONFIG, ["2 x 1 x 1 = 2", "3 processes"], [*TRAIN, *two(data=2)], None,
                              {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}),
    "world that the model does not divide": (CONFIG, ["3", "pipeline x tensor = 2 x 1 = 2"],
                                             [*TRAIN, *setting("parallel.pipeline=2")], None,
                                             {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}),
    "Slurm without PMI2": (LAUNCH, ["Slurm step of 4 tasks", "srun --mpi=pmi2"], [*TRAIN, *two(data=4)], None,
                           {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}),
    "Slurm without a step": (LAUNCH, ["SLURM_NTASKS=4", "srun --mpi=pmi2"], TRAIN, None,
                             {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}),
    "mpirun": (LAUNCH, ["mpirun with 4 processes"], TRAIN, None, {"OMPI_COMM_WORLD_SIZE": "4"}),
    "half a PMI": (LAUNCH, ["PMI"], TRAIN, None, {"PMI_FD": "99", "PMI_RANK": "0", "PMI_SIZE": "2"}),
}
NO_LAUNCHER = {name: "" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_FD", "PMI_SIZE",
        "PMI_RANK",
                                     "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID")}


@table(LAUNCHES)
def test_launch(case, template, tmp_path):
    status, says, words, damage, env = case
    expect(template, tmp_path, status, says, [*words, *setting("checkpoint.dir=new")], damage, {**NO_LAUNCHER, **env})


def test_there_are_enough_cases():
    tables = [CONFIGS, TOKEN_FILES, TEXTS, CHECKPOINTS, LAUNCHES]
    assert all(tables) and sum(map(len, tables)) >= 60


def test_the_template_is_good(template, tmp_path):
    """Without damage every command works: no case of the tables fails for another reason."""
    directory = shutil.copytree(template, tmp_path / "here")
    run(["run.ini"], directory, check=0)
    run(["eval", "run.ini"], directory, check=0)
    run(["generate", "--checkpoint", "saved", "--prompt", "x", "--tokens", "3"], directory, check=0)
    run(["inspect", "saved", "--verify"], directory, check=0)
    run(["inspect", "corpus"], directory, check=0)
    for tokenizer_name in ("bytes", "bpe"):
        run(["tokenize", "--tokenizer", tokenizer_name, "--out", "out", "text.txt", "lines.jsonl"], directory, check=0)
    run(["run.ini", *two(tensor=2)], directory, env={**NO_LAUNCHER, **hosts("h0", "h0")}, check=0)
    llmc()(directory)
    run(["run.ini", *setting("checkpoint.dir=new")], directory, check=0)
    assert pathlib.Path(directory / "new").is_dir() and sys.version_info >= (3, 8)
