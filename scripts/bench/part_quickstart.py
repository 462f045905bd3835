"""Start-up and memory.

startup: from the call of `trident train` to the end of the first step of configs/quickstart.ini, on 8 processes.
memory: the largest sum of what all processes of a run have in memory (PSS: a page that n processes share counts as
1/n for each; cached files left out) beside what its memory plan says. The program's own heap and stacks, which no plan
has, are part of the difference.
"""
import os
import time

from programs import ARCHS, ROOT, SIZES, Training, corpus, model_settings, session_pss_bytes

QUICKSTART = os.path.join(ROOT, "configs", "quickstart.ini")
START_TARGET_S, MEMORY_TARGET, RANKS = 1.5, 0.02, 8
CASES = [f"startup quickstart {RANKS}"] + [f"memory {arch} {size}" for size in SIZES for arch in ARCHS]


def prepare(_options):
    pass


def one_start(options):
    tokens = corpus(options.work, 256)
    run = Training(options, {"data.train": tokens, "data.valid": tokens, "parallel.ranks": RANKS}, QUICKSTART)
    run.wait(1, pause_s=0.002)
    seconds = time.monotonic() - run.start_s
    run.end()
    return {"seconds": seconds}, [run]


def peak_and_plan(options, settings):
    peak = [0]

    def look(run):
        peak[0] = max(peak[0], session_pss_bytes(run.process.pid))

    run = Training(options, settings)
    rows = run.wait(3, pause_s=0.005, watch=look)
    look(run)
    run.end()
    return run, peak[0], rows[0]["mem_bytes"]


def one_memory(options, arch, size):
    run, peak, plan = peak_and_plan(options, model_settings(options, arch, size))
    return {"peak_mb": peak / 1e6, "plan_mb": plan / 1e6, "off": abs(peak - plan) / plan}, [run]


def one_round(options, case, _number):
    return one_start(options) if case.startswith("startup") else one_memory(options, *case.split()[1:])


def result(case, m):
    if case.startswith("startup"):
        return (f"{m['seconds']:.2f} s to the first step", "", "", f"{START_TARGET_S} s",
                m["seconds"] <= START_TARGET_S)
    return (f"{m['peak_mb']:,.1f} MB", f"planned {m['plan_mb']:,.1f}",
            f"{100 * m['off']:.2f} % off", f"{100 * MEMORY_TARGET:.0f} %", m["off"] <= MEMORY_TARGET)
