"""Two ranks of one thread each, as a share of what two independent single-rank runs, side by side on the same two
cores, do together. So what the cores take from one another (memory, caches, clock) is on both sides.

A pipeline of p stages and m micro-batches can reach m / (m + p - 1) of it where nothing else is lost: its target is a
share of that.
"""
import statistics

from programs import ARCHS, Training, model_settings

SIZE, RANKS = "small", 2


def pipeline(micro_batches):
    one_rank = {"train.micro_batch": 1, "train.global_batch": micro_batches}
    return one_rank, {**one_rank, "parallel.pipeline": RANKS}, 0.95 * micro_batches / (micro_batches + RANKS - 1)


# layout: (settings of each single rank, settings of the two ranks, target)
LAYOUTS = {
    "data": ({"train.global_batch": 8}, {"train.global_batch": 16, "parallel.data": RANKS}, 0.95),
    "pipeline-8": pipeline(8),
    "pipeline-32": pipeline(32),
    "tensor": ({}, {"parallel.tensor": RANKS}, 0.90),
}
CASES = [f"scaling {layout} {arch} {SIZE}" for layout in LAYOUTS for arch in ARCHS]


def prepare(_options):
    pass


def tokens_per_s(options, arch, settings, copies):
    """(runs, the sum of what so many runs at the same time make)."""
    runs = [Training(options, {**model_settings(options, arch, SIZE), **settings, "train.threads": 1})
            for _ in range(copies)]
    rows = [run.measured_rows() for run in runs[::-1]]  # all go on until the last has made its steps
    for run in runs:
        run.end()
    return runs, sum(statistics.median(row["tokens_per_s"] for row in of_run) for of_run in rows)


def one_round(options, case, number):
    layout, arch = case.split()[1:3]
    single, joined, _ = LAYOUTS[layout]
    ways = [("two_single", single, RANKS), ("two_ranks", joined, 1)]
    rates, programs = {}, []
    for way, settings, copies in ways if number % 2 == 0 else reversed(ways):
        runs, rates[way] = tokens_per_s(options, arch, settings, copies)
        programs += runs
    return {**rates, "share": rates["two_ranks"] / rates["two_single"]}, programs


def result(case, m):
    target = LAYOUTS[case.split()[1]][2]
    return (f"{m['two_ranks']:,.0f} tokens/s", f"two single {m['two_single']:,.0f}", f"{100 * m['share']:.1f} %",
            f"{100 * target:.1f} %", m["share"] >= target)
