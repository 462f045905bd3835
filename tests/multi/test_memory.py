"""Memory is a promise: what a run holds is what its plan says, and after the first step it takes no more."""
import os
import re
import signal
import struct
import subprocess
import time

import pytest

from trident import BASE, TRIDENT, build_library, make_corpus, metrics, run, write_config

# Beside the plan each process has its stacks, libc's heap with the tensor table, names and paths, and the private
# pages of its libraries' data: up to 1.7 MB were measured.
OWN_BYTES = 2.5e6
SHARE = 0.02


@pytest.fixture(scope="module")
def count_allocations(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("count"), "count_allocations")


LAYOUTS = {
    "one process": {},
    "two threads": {"train.threads": 2},
    "2 x 2 x 2": {"parallel.data": 2, "parallel.pipeline": 2, "parallel.tensor": 2},
    "gpipe": {"parallel.pipeline": 4, "parallel.schedule": "gpipe"},
    "fp64": {"parallel.tensor": 2, "train.precision": "fp64"},
    "gpt with masks": {"parallel.pipeline": 2, "parallel.tensor": 2, "model.arch": "gpt", "data.mask_documents": "yes"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_allocated_after_the_first_step(layout, count_allocations, tmp_path):
    corpus = make_corpus(tmp_path)
    settings = {**BASE, "train.steps": 9, "train.threads": 1, "data.train": corpus, "log.tensorboard": "yes",
                **LAYOUTS[layout], "data.valid": corpus, "train.eval_every": 3, "train.eval_batches": 2}
    # Up to the last step but one: behind the last, ranks save before the first of them has written its row.
    config = write_config(tmp_path / "run.ini", settings)
    found = run([config], tmp_path, check=0, env={
        "LD_PRELOAD": count_allocations, "COUNT_FILE": str(tmp_path / "counts"), "COUNT_FROM": "1", "COUNT_TO": "8"})
    state, mallocs, mallocs_bytes, maps = struct.unpack("4q", (tmp_path / "counts").read_bytes())
    assert state == 2, "the rows of metrics.jsonl were not seen"
    assert (mallocs, maps) == (0, 0), f"{mallocs_bytes} bytes\n{found.err}"


def test_the_count_sees_what_is_allocated(count_allocations, tmp_path):
    """Saving takes memory: counted over a save, there is some."""
    settings = {**BASE, "train.steps": 8, "data.train": make_corpus(tmp_path), "checkpoint.every": 4}
    run([write_config(tmp_path / "run.ini", settings)], tmp_path, check=0, env={
        "LD_PRELOAD": count_allocations, "COUNT_FILE": str(tmp_path / "counts"), "COUNT_FROM": "1", "COUNT_TO": "8"})
    assert struct.unpack("4q", (tmp_path / "counts").read_bytes())[1] > 0


def anonymous_bytes(session):
    """Proportional set size of all processes of a session, without pages of files; how many processes."""
    total, processes = 0, 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) != session:
                continue
            text = open(f"/proc/{name}/smaps_rollup", encoding="utf-8").read()
        except OSError:
            continue
        total += 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.M)))
        processes += 1
    return total, processes


@pytest.mark.parametrize("layout", ["one process", "2 x 2 x 2"])
def test_a_run_holds_what_its_plan_says(layout, tmp_path):
    """The sum over ranks of planned bytes against the memory of the whole run, after some steps."""
    settings = {**BASE, "model.hidden": 512, "model.heads": 8, "model.ffn": 2048, "model.vocab": 4096,
                "model.seq_len": 64, "train.steps": 1000000, "train.micro_batch": 2, "train.threads": 1,
                "data.train": make_corpus(tmp_path), **LAYOUTS[layout]}
    config = write_config(tmp_path / "run.ini", settings)
    with open(tmp_path / "err", "wb") as err:
        process = subprocess.Popen([TRIDENT, config], cwd=tmp_path, stderr=err, start_new_session=True)
    try:
        start = time.time()
        while not (tmp_path / "runs/run/log/metrics.jsonl").exists() or len(metrics(tmp_path / "runs/run/log")) < 3:
            assert process.poll() is None and time.time() - start < 60, (tmp_path / "err").read_text()
            time.sleep(0.05)
        held, processes = anonymous_bytes(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = (tmp_path / "err").read_text()
    planned = int(re.search(r"memory: all ranks together hold (\d+) bytes", text)[1])
    assert abs(held - planned) <= SHARE * planned + OWN_BYTES * processes, f"holds {held}, planned {planned}\n{text}"
