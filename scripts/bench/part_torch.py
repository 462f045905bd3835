"""Whole training steps of Trident and of plain PyTorch, one after the other in each round.

Both train the same model on the same number of random tokens in fp32; that they do is checked in every round by the
number of parameters, the FLOPs of a token and the loss of the first step.
"""
import json
import os
import statistics
import subprocess

from programs import (ARCHS, MEASURED_S, MEASURED_STEPS, SIZES, WARM_UP_STEPS, BenchError, Program, run_trident,
                      wrong_first_losses)

# Tokens/s over PyTorch's.
TARGETS = {2: {"tiny": 1.45, "small": 1.3, "124m": 1.15}, 1: {"tiny": 1.35, "small": 1.2, "124m": 1.08}}


def prepare(options):
    options.torch_environment = options.openblas()
    command = [options.python, "-c", "import torch; print(torch.__version__)"]
    try:
        found = subprocess.run(command, env={**os.environ, **options.torch_environment}, capture_output=True, text=True,
                               check=False)
    except OSError as error:
        raise BenchError(f"{options.python}: {error.strerror}") from error
    if found.returncode != 0:
        raise BenchError(f"PyTorch is not there for {options.python}; on Debian 12:\n"
                         "    apt-get install python3-torch libopenblas0-openmp\n"
                         "or name an interpreter that has it: scripts/bench/run.py --python PROGRAM")
    print(f"PyTorch {found.stdout.strip()}", flush=True)


def run_torch(options, arch, size, threads):
    command = [options.python, os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_model.py"),
               "--arch", arch, "--threads", threads, "--warm_up_steps", WARM_UP_STEPS, "--steps", MEASURED_STEPS,
               "--seconds", MEASURED_S]
    command += [word for key, value in SIZES[size].items() for word in ("--" + key, value)]
    peer = Program(command, options.new_directory(), {**options.torch_environment, "OMP_NUM_THREADS": str(threads),
                                                      "OPENBLAS_NUM_THREADS": str(threads)})
    result = json.loads(peer.finish(limit_s=300))
    return peer, {**result, "step_s": statistics.median(result["step_s"])}


def check_same_model(case, size, trident, torch):
    wrong = wrong_first_losses(size, {"Trident": trident, "PyTorch": torch})
    if trident["parameters"] != torch["parameters"]:
        wrong.append(f"{trident['parameters']} parameters against {torch['parameters']}")
    # Trident's are worked out from the peak, which it prints with four digits.
    if not abs(trident["flops_per_token"] / torch["flops_per_token"] - 1) < 2e-3:
        wrong.append(f"{trident['flops_per_token']:.6g} FLOPs a token against {torch['flops_per_token']:.6g}")
    if wrong:
        raise BenchError(f"{case}: not the same model: " + "; ".join(wrong))


def one_round(options, case, number):
    arch, size, threads = case.split()[1:]
    results, programs = {}, []
    for run in (run_trident, run_torch) if number % 2 == 0 else (run_torch, run_trident):
        program, results[run] = run(options, arch, size, int(threads))
        programs.append(program)
    trident, torch = results[run_trident], results[run_torch]
    check_same_model(case, size, trident, torch)
    tokens = SIZES[size]["batch"] * SIZES[size]["seq_len"]
    return {"trident": tokens / trident["step_s"], "torch": tokens / torch["step_s"],
            "ratio": torch["step_s"] / trident["step_s"],
            "gflops": tokens * torch["flops_per_token"] / trident["step_s"] / 1e9}, programs


CASES = [f"torch {arch} {size} {threads}" for size in SIZES for arch in ARCHS for threads in (2, 1)]


def result(case, m):
    _, _, size, threads = case.split()
    target = TARGETS[int(threads)][size]
    return (f"{m['trident']:,.0f} tokens/s", f"PyTorch {m['torch']:,.0f}", f"{m['ratio']:.2f} x", f"{target:.2f} x",
            m["ratio"] >= target)
