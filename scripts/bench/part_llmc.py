"""Whole training steps of Trident and of llm.c's program for CPUs, train_gpt2.c, one after the other in each round.

llm.c is not packaged: the user names a checkout of it, which stays as it is. A copy of the program gets the batch and
the length of the case, does nothing but train, and is compiled as llm.c's Makefile does it. It reads its model from a
file, which is written here with random weights, and the same tokens as Trident. It is ended by a signal once it has
made the steps that are measured.
"""
import array
import os
import random
import re
import statistics
import time

from programs import (INIT_STD, MEASURED_S, MEASURED_STEPS, SIZES, WARM_UP_STEPS, BenchError, LeftOut, Program, corpus,
                      run_trident, wrong_first_losses)

TARGET, THREADS = 4.0, 2  # tokens/s over llm.c's
COMPILE = ["cc", "-Ofast", "-Wno-unused-result", "-Wno-ignored-pragmas", "-Wno-unknown-attributes", "-march=native",
           "-fopenmp", "-DOMP"]
LIBRARIES = ["-lm", "-lgomp"]
SLOW_STEP_S = 10.0  # where the first step takes longer, the second alone is measured
LIMIT_S = 1200.0
DRAWN = None  # weights that are not all the same
CASES = [f"llmc gpt {size} {THREADS}" for size in SIZES]


def prepare(options):
    if not options.llmc:
        raise LeftOut("llm.c is not measured: name a checkout of it, make bench LLMC=DIR or scripts/bench/run.py "
                      "--llmc DIR")
    if not os.path.exists(f"{options.llmc}/train_gpt2.c"):
        raise BenchError(f"{options.llmc}/train_gpt2.c is not there: --llmc (LLMC) names a checkout of llm.c")


# ---- what llm.c's program needs: its constants changed, a model, tokens ----

def changed_source(path, s):
    """Text of train_gpt2.c, with the constants of this size, without an end, validation and sampling."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for line, instead in (("int B = 4;", f"int B = {s['batch']};"), ("int T = 64;", f"int T = {s['seq_len']};"),
                          ("step <= 40;", "step <= 1000000;"), ("if (step % 10 == 0)", "if (0)"),
                          ("if (step > 0 && step % 20 == 0)", "if (0)")):
        if text.count(line) != 1:
            raise BenchError(f"{path}: has `{line}` {text.count(line)} times, not once: this llm.c is another one than "
                             "the benchmark knows how to change")
        text = text.replace(line, instead)
    return text


def padded_vocab(s):
    return (s["vocab"] + 127) // 128 * 128


def rows_of_tensors(s):
    """(rows of `hidden` values, their value) of each tensor, in the file's order. All other sizes are multiples of
    `hidden`."""
    hidden, layers = s["hidden"], s["layers"]
    norm = [(layers, 1.0), (layers, 0.0)]
    return [(padded_vocab(s), DRAWN), (s["seq_len"], DRAWN),
            *norm, (layers * 3 * hidden, DRAWN), (layers * 3, 0.0), (layers * hidden, DRAWN), (layers, 0.0),
            *norm, (layers * 4 * hidden, DRAWN), (layers * 4, 0.0), (layers * 4 * hidden, DRAWN), (layers, 0.0),
            (1, 1.0), (1, 0.0)]


def write_model(path, s):
    """A row is a piece, at a random place, of a million draws: to draw each of 124 million weights takes a minute."""
    draw = random.Random(1)
    drawn = memoryview(array.array("f", [draw.gauss(0.0, INIT_STD) for _ in range(1 << 20)]))
    header = [20240326, 3, s["seq_len"], s["vocab"], s["layers"], s["heads"], s["hidden"], padded_vocab(s)]
    with open(path, "wb") as file:
        array.array("i", header + [0] * (256 - len(header))).tofile(file)
        for rows, value in rows_of_tensors(s):
            if value is not DRAWN:
                array.array("f", [value] * rows * s["hidden"]).tofile(file)
                continue
            for _ in range(rows):
                first = draw.randrange(len(drawn) - s["hidden"])
                file.write(drawn[first:first + s["hidden"]])
        file.flush()
        os.fsync(file.fileno())  # not while steps are measured


def set_up(options, size, directory):
    """Fills the directory in which llm.c's program of this size runs; returns the compiler's run."""
    s = SIZES[size]
    data = f"{directory}/dev/data/tinyshakespeare"
    os.makedirs(data)
    source = changed_source(f"{options.llmc}/train_gpt2.c", s)
    with open(f"{directory}/train_gpt2.c", "w", encoding="utf-8") as file:
        file.write(source)
    compiler = Program([*COMPILE, "train_gpt2.c", "-I", options.llmc, *LIBRARIES, "-o", "train_gpt2"],
                       options.new_directory(), where=directory)
    compiler.finish(limit_s=300)
    for part in ("train", "val"):
        os.symlink(corpus(options.work, s["vocab"]), f"{data}/tiny_shakespeare_{part}.bin")
    write_model(f"{directory}/gpt2_124M.bin", s)  # its name whatever its size
    return compiler


# ---- rounds ----

def measured(step_s):
    """The steps that count, once they are enough; nothing until then."""
    slow = step_s and step_s[0] > SLOW_STEP_S
    warm_up_steps, measured_steps = (1, 1) if slow else (WARM_UP_STEPS, MEASURED_STEPS)
    counted = step_s[warm_up_steps:]
    return counted if len(counted) >= measured_steps and sum(counted) >= MEASURED_S else []


def run_llmc(options, size, directory):
    # Line by line, or what it prints is seen at its end only.
    program = Program(["stdbuf", "-oL", f"{directory}/train_gpt2"], options.new_directory(),
                      {"OMP_NUM_THREADS": str(THREADS)}, where=directory)
    while True:
        ended = program.process.poll() is not None
        text = program.text("out")
        steps = re.findall(r"^step \d+: train loss (\S+) \(took (\S+) ms\)$", text, re.MULTILINE)
        step_s = measured([float(took) / 1e3 for _, took in steps])
        if step_s:
            break
        if ended or time.monotonic() - program.start_s > LIMIT_S:
            program.fail(f"{'ended' if ended else f'still running after {LIMIT_S:.0f} s'} with {len(steps)} steps "
                         f"made:\n{text[-1500:]}")
        time.sleep(0.1)
    program.end()
    found = re.search(r"^num_parameters: (\d+)$", text, re.MULTILINE)
    return program, {"step_s": statistics.median(step_s), "first_loss": float(steps[0][0]),
                     "parameters": int(found.group(1)) if found else 0}


def check_same_model(case, size, trident, llmc):
    """As far as llm.c shows it. Its embedding has rows for the padding of the vocabulary."""
    s = SIZES[size]
    wrong = wrong_first_losses(size, {"Trident": trident, "llm.c": llmc})
    padding = (padded_vocab(s) - s["vocab"]) * s["hidden"]
    if llmc["parameters"] - padding != trident["parameters"]:
        wrong.append(f"{trident['parameters']} parameters against {llmc['parameters']}, {padding} of them padding")
    if wrong:
        raise BenchError(f"{case}: not the same model: " + "; ".join(wrong))


def one_round(options, case, number):
    _, arch, size, threads = case.split()
    directory = os.path.join(options.work, f"llmc-{size}")
    programs = [] if os.path.exists(directory) else [set_up(options, size, directory)]
    runs = {"trident": lambda: run_trident(options, arch, size, int(threads)),
            "llmc": lambda: run_llmc(options, size, directory)}
    results = {}
    for name in runs if number % 2 == 0 else reversed(runs):
        program, results[name] = runs[name]()
        programs.append(program)
    trident, llmc = results["trident"], results["llmc"]
    check_same_model(case, size, trident, llmc)
    tokens = SIZES[size]["batch"] * SIZES[size]["seq_len"]
    return {"trident": tokens / trident["step_s"], "llmc": tokens / llmc["step_s"],
            "ratio": llmc["step_s"] / trident["step_s"]}, programs


def result(_case, m):
    return (f"{m['trident']:,.0f} tokens/s", f"llm.c {m['llmc']:,.0f}", f"{m['ratio']:.2f} x", f"{TARGET:.0f} x",
            m["ratio"] >= TARGET)
