"""The benchmarks in C: matrix products beside OpenBLAS, attention, communication between processes.

What they print is shown as it is; the figures that have a target are read from it.
"""
import os
import re

from programs import BenchError, Program

GEMM_SECONDS, GEMM_RATIO, GEMM_SLOWEST = 20, 0.95, 80
# (ranks, bytes): most seconds of an all-reduce in place
ALL_REDUCE = {(2, 64 << 20): 15e-3, (8, 64 << 20): 70e-3, (8, 4096): 50e-6}
CASES = ["gemm 2", "gemm 1", "attention 2", "attention 1", "allreduce 2", "allreduce 8"]


def prepare(options):
    options.gemm_environment = options.openblas()


def run_and_show(options, command, environment=None):
    program = Program(command, options.new_directory(), environment)
    text = program.finish(limit_s=300)
    print(text, end="", flush=True)
    return program, text


def find(pattern, text):
    found = re.search(pattern, text)
    if not found:
        raise BenchError(f"the benchmark printed nothing that matches {pattern}")
    return [float(group) for group in found.groups()]


def one_round(options, case, _number):
    kind, count = case.split()
    bench = os.path.join(options.build, "bench")
    if kind == "gemm":
        program, text = run_and_show(options, [f"{bench}/gemm_bench", count, GEMM_SECONDS], options.gemm_environment)
        ours, peer, ratio = find(r"mean of the medians: ([\d.]+) GFLOP/s; peer ([\d.]+), ratio ([\d.]+)", text)
        slowest, = find(r"slowest: .*?([\d.]+) % of the mean", text)
        return {"gflops": ours, "peer_gflops": peer, "ratio": ratio, "slowest_percent": slowest}, [program]
    if kind == "attention":
        program, text = run_and_show(options, [f"{bench}/attention_bench", count])
        forward, backward = find(r"small:.*\n\s+forward.*median.*?([\d.]+) GFLOP/s\n\s+backward.*median.*?([\d.]+) GF",
                                 text)
        return {"forward_gflops": forward, "backward_gflops": backward}, [program]
    program, text = run_and_show(options, [f"{bench}/comm_bench", count, 1])
    return {f"us_{size}": find(rf"all_reduce in place +{size} B +median +([\d.]+) us", text)[0]
            for size in (4096, 64 << 20)}, [program]


def result(case, m):
    kind, count = case.split()
    if kind == "gemm":
        return (f"{m['gflops']:.1f} GFLOP/s, slowest {m['slowest_percent']:.0f} %", f"OpenBLAS {m['peer_gflops']:.1f}",
                f"{m['ratio']:.3f} x", f"{GEMM_RATIO} x, slowest {GEMM_SLOWEST} %",
                m["ratio"] >= GEMM_RATIO and m["slowest_percent"] >= GEMM_SLOWEST)
    if kind == "attention":
        return (f"{m['forward_gflops']:.1f} GFLOP/s forward", f"{m['backward_gflops']:.1f} backward", "", "", None)
    small, large = ALL_REDUCE.get((int(count), 4096)), ALL_REDUCE[int(count), 64 << 20]
    return (f"4 KB {m['us_4096']:.0f} us, 64 MB {m[f'us_{64 << 20}'] / 1e3:.1f} ms", "", "",
            (f"{small * 1e6:.0f} us, " if small else "") + f"{large * 1e3:.0f} ms",
            m[f"us_{64 << 20}"] <= large * 1e6 and (small is None or m["us_4096"] <= small * 1e6))
