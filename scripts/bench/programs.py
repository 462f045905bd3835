"""Programs under measurement: what Trident and its peers are given, how long their steps take, what CPU time they used.

In: settings. Out: rows of metrics.jsonl, printed text, seconds, bytes. A run of Trident is ended by a signal once it
has made the steps that are measured, as saving is no part of them. Looking at a run takes CPU time from it, so rates
are measured with few looks.
"""
import array
import ctypes
import glob
import json
import math
import os
import random
import signal
import statistics
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIZES = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 4, "seq_len": 128, "batch": 8, "vocab": 512},
    "small": {"hidden": 256, "layers": 6, "heads": 8, "seq_len": 256, "batch": 8, "vocab": 8192},
    "124m": {"hidden": 768, "layers": 12, "heads": 12, "seq_len": 256, "batch": 4, "vocab": 50257},
}
ARCHS = ("gpt", "llama")
CORPUS_TOKENS = 1 << 19
INIT_STD = 0.02
WARM_UP_STEPS = 2    # memory is touched for the first time, the clock settles
MEASURED_STEPS = 2   # at least, and for at least so long:
MEASURED_S = 4.0
TICKS = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """Says why nothing was measured."""


class LeftOut(Exception):
    """Says what is not measured, as what it needs was not named, and how to name it. No failure."""


# ---- processes of a session: one program and all that it started ----

def session_processes(session):
    """(process, its CPU seconds with those of children that it waited for) of each member."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it ended just now
            continue
        if int(fields[3]) == session:
            yield int(name), sum(map(int, fields[11:15])) / TICKS


def session_pss_bytes(session):
    """Memory of all members, a page that n processes map counted as 1/n for each of them. Pages of files (programs,
    libraries, token files) are left out: they are the system's cache, and it takes them back when it needs to."""
    total = 0
    for process, _ in session_processes(session):
        try:
            with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
                total += sum(int(line.split()[1]) for line in file
                             if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024
        except OSError:
            continue
    return total


class Program:
    """A program in a session of its own; what it prints goes to DIRECTORY/out and DIRECTORY/err. where: the directory
    in which it runs, or None: ours."""

    def __init__(self, command, directory, environment=None, where=None):
        os.makedirs(directory)
        self.directory, self.cpu_s = directory, 0.0
        self.start_s = time.monotonic()
        with open(f"{directory}/out", "wb") as out, open(f"{directory}/err", "wb") as err:
            self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                            start_new_session=True, env={**os.environ, **(environment or {})},
                                            cwd=where)

    def text(self, name):
        with open(f"{self.directory}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()

    def fail(self, why):
        self.end()
        raise BenchError(f"{' '.join(self.process.args)}: {why}\n{self.text('err')[-1500:]}")

    def end(self):
        """The local launcher's ranks die with it."""
        if self.process.returncode is None:
            self.cpu_s = sum(cpu_s for _, cpu_s in session_processes(self.process.pid))
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        while any(True for _ in session_processes(self.process.pid)):
            time.sleep(0.01)

    def finish(self, limit_s):
        """Waits until it has ended by itself; returns what it printed."""
        while True:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - self.start_s > limit_s:
                self.fail(f"still running after {limit_s} s")
            time.sleep(0.05)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode != 0:
            self.fail(f"exit status {self.process.returncode}")
        return self.text("out")


# ---- the peer's OpenBLAS ----

def openblas_environment():
    """Settings with which programs that use OpenBLAS are fast. Its openmp build shares PyTorch's own threads; with
    another one two pools fight over the cores, at up to three times the cost. Debian's OpenBLAS takes a CPU newer than
    itself for one without AVX, and is then four times slower than it can be: it is told the newest kernels for whose
    instructions the CPU has. PyTorch's own loops are used with AVX-512 where the CPU has it."""
    found = glob.glob("/usr/lib/*/openblas-openmp/libopenblas.so.0")
    if not found:
        raise BenchError("OpenBLAS's openmp build is not there: apt-get install libopenblas0-openmp")
    path = ":".join(filter(None, (os.path.dirname(found[0]), os.environ.get("LD_LIBRARY_PATH"))))
    settings = {"LD_LIBRARY_PATH": path}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        settings["ATEN_CPU_CAPABILITY"] = "avx512"
        kernels = "SkylakeX"
    else:
        kernels = "Haswell"
    library = ctypes.CDLL(found[0])
    library.openblas_get_corename.restype = ctypes.c_char_p
    own_choice = library.openblas_get_corename().decode()
    if "avx2" in flags and own_choice not in ("Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids"):
        settings["OPENBLAS_CORETYPE"] = kernels
    settings = {**settings, **{key: os.environ[key] for key in settings if key != "LD_LIBRARY_PATH" and
                               key in os.environ}}
    print(f"OpenBLAS: {found[0]}, kernels {settings.get('OPENBLAS_CORETYPE', own_choice)}"
          f" (its own choice: {own_choice})", flush=True)
    return settings


# ---- Trident ----

def corpus(directory, vocab):
    """Tokens drawn evenly, as one llm.c shard: 256 integers of header, then 16-bit tokens."""
    path = f"{directory}/tokens-{vocab}.bin"
    if not os.path.exists(path):
        draw = random.Random(1).random
        with open(path, "wb") as file:
            array.array("i", [20240520, 1, CORPUS_TOKENS] + [0] * 253).tofile(file)
            array.array("H", [int(draw() * vocab) for _ in range(CORPUS_TOKENS)]).tofile(file)
    return path


def model_settings(options, arch, size):
    s = SIZES[size]
    return {"model.arch": arch, "model.hidden": s["hidden"], "model.layers": s["layers"], "model.heads": s["heads"],
            "model.seq_len": s["seq_len"], "model.vocab": s["vocab"], "model.tie_embeddings": "yes",
            "train.micro_batch": s["batch"], "train.global_batch": s["batch"], "train.steps": 1000000,
            "optimizer.lr": 3e-4, "optimizer.decay": "constant", "optimizer.clip": 0,
            "data.train": corpus(options.work, s["vocab"])}


class Training(Program):
    """trident train; config: a file to begin with, or None."""

    def __init__(self, options, settings, config=None):
        directory = options.new_directory()
        empty = f"{directory}.ini"
        with open(empty, "w", encoding="utf-8") as file:
            file.write("# all settings come from the command line\n")
        settings = {**settings, "log.dir": f"{directory}/log", "checkpoint.dir": f"{directory}/checkpoints"}
        command = [options.trident, "train", config or empty]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        super().__init__(command, directory)

    def rows(self):
        """Of the steps made so far, as metrics.jsonl has them."""
        try:
            with open(f"{self.directory}/log/metrics.jsonl", encoding="utf-8") as file:
                return [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def wait(self, steps, pause_s, limit_s=300, watch=None):
        """Returns the rows when so many steps are made. watch: called between looks."""
        while len(rows := self.rows()) < steps:
            if self.process.poll() is not None:
                self.fail(f"ended with status {self.process.returncode} before step {steps}")
            if time.monotonic() - self.start_s > limit_s:
                self.fail(f"step {steps} was not made within {limit_s} s")
            if watch:
                watch(self)
            time.sleep(pause_s)
        return rows

    def measured_rows(self):
        """Rows after the warm-up; the run goes on."""
        self.wait(WARM_UP_STEPS, 0.1)
        time.sleep(MEASURED_S)
        return self.wait(WARM_UP_STEPS + MEASURED_STEPS, 0.1)[WARM_UP_STEPS:]


def run_trident(options, arch, size, threads):
    """(the ended run, what its steps were)."""
    training = Training(options, {**model_settings(options, arch, size), "train.threads": threads})
    rows = training.measured_rows()
    training.end()
    first_loss = training.rows()[0]["loss"]
    head = training.text("err")
    last = rows[-1]
    peak_flops = 1e9 * float(head.split("; peak ")[1].split()[0])
    return training, {"step_s": statistics.median(row["step_ms"] for row in rows) / 1e3,
                      "parameters": int(head.split(" parameters,")[0].split()[-1]), "first_loss": first_loss,
                      "flops_per_token": last["mfu"] * peak_flops / last["tokens_per_s"]}


def wrong_first_losses(size, results):
    """Says which of results (name: values) do not begin at the loss of an untrained model. Logits are sums of `hidden`
    products of a normed activation and a weight of variance std^2, so about normal with variance hidden std^2, and the
    mean log-sum-exp is ln(vocab) + half of it. The mean over N tokens scatters by sqrt(variance / N), of which five are
    allowed, and 0.01 for the rest."""
    s = SIZES[size]
    variance = s["hidden"] * INIT_STD ** 2
    expected = math.log(s["vocab"]) + variance / 2
    allowed = 5 * math.sqrt(variance / (s["batch"] * s["seq_len"])) + 0.01
    return [f"{name} begins at loss {result['first_loss']:.4f}, expected {expected:.4f} +- {allowed:.4f}"
            for name, result in results.items() if not abs(result["first_loss"] - expected) <= allowed]
