#!/usr/bin/python3
"""Lists all tests for ctest, runs them two at a time, and counts them per kind. `make check` calls it.

    scripts/run_tests.py [--long] [--kind KIND]... [--only REGEX]

A test is a program of tests/unit, a file of tests/multi or tests/parity, a check of tests/tidy/tidy.py, or a
target of tests/fuzz; new files are found by their names. What ctest prints is passed on, with the counts of
cases per kind put before its summary. Exit status: ctest's.
"""
import argparse
import glob
import os
import re
import subprocess
import sys
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON = sys.executable
PARALLEL = 2  # a test of whole runs starts up to eight ranks, but most of its time one waits for another
LIST_DIR = os.path.join(ROOT, "build/tests")
LOGS = os.path.join(LIST_DIR, "cases")
KINDS = {
    "multi": "whole runs of several processes (tests/multi)",
    "parity": "against numbers that PyTorch computed (tests/parity)",
    "unit": "parts, in C (tests/unit)",
    "address": "the same built by clang with AddressSanitizer and UBSan",
    "thread": "threads and processes under ThreadSanitizer",
    "clang": "unit tests as clang optimises them",
    "fuzz": "readers of files against damaged input, with both sanitizers (tests/fuzz)",
    "tidy": "form of the code (tests/tidy)",
}
LONG_ONLY = ("clang",)
# What ThreadSanitizer looks at: all that has threads.
THREAD_TESTS = ("base/*", "kernels/*", "data/test_samples", "data/test_tokenize_files", "parallel/test_launch*",
        "parallel/test_comm*")
# Take a minute each under AddressSanitizer: in check-long only.
ADDRESS_LONG = ("kernels/test_attention", "kernels/test_matmul")
# Take up to two minutes each under ThreadSanitizer: in check-long only.
THREAD_LONG = ("data/test_tokenize_files", "kernels/test_attention", "kernels/test_matmul", "kernels/test_rope",
        "kernels/test_simd_avx2")
# What a fuzzer begins with, and the size of its inputs.
SEEDS = {
    "config": (["configs", "configs/models"], 4096),
    "idx": (["tests/unit/data/fixtures"], 4096),
    "llmc": (["tests/unit/data/fixtures"], 4096),
    "tokenizer": (["tests/unit/data/fixtures/tiny_bpe"], 16384),
}
SANITIZER_OPTIONS = {
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:atexit_sleep_ms=0",  # by itself it sleeps a second in every process
}


def unit_names(patterns=("*/*",)):
    """FOLDER/test_NAME of each program of tests/unit."""
    found = set()
    for pattern in patterns:
        folder, name = pattern.split("/")
        found.update(glob.glob(os.path.join(ROOT, "tests/unit", folder, (name if name != "*" else "test_*") + ".c")))
    return sorted(os.path.relpath(path, os.path.join(ROOT, "tests/unit"))[:-2] for path in found)


def log_of(name, suffix):
    return os.path.join(LOGS, name.replace("/", "-") + suffix)


def programs(kind, build, names, limit_s, environment):
    for name in names:
        full = f"{kind}/{name}"
        yield {"name": full, "kind": kind, "limit_s": limit_s,
               "command": [os.path.join(ROOT, build, "tests", name)],
               "environment": {**environment, "CK_TAP_LOG_FILE_NAME": log_of(full, ".tap")}}


def pytest_files(kind, limit_s, environment):
    for path in sorted(glob.glob(os.path.join(ROOT, "tests", kind, "test_*.py"))):
        name = f"{kind}/{os.path.basename(path)[:-3]}"
        yield {"name": name, "kind": kind, "limit_s": limit_s, "environment": environment,
               "command": [PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                           f"--junitxml={log_of(name, '.xml')}", path]}


def fuzzers(seconds, environment):
    for path in sorted(glob.glob(os.path.join(ROOT, "tests/fuzz/fuzz_*.c"))):
        target = os.path.basename(path)[:-2]
        short = target[len("fuzz_"):]
        seeds, input_bytes = SEEDS.get(short, ([], 4096))
        work = os.path.join(ROOT, "build/fuzz", target)
        os.makedirs(work, exist_ok=True)
        dictionary = os.path.join(ROOT, "tests/fuzz", short + ".dict")
        command = [os.path.join(ROOT, "build/asan/tests", target), f"-max_total_time={seconds}", "-print_final_stats=1",
                   f"-max_len={input_bytes}", f"-artifact_prefix={work}-"]
        command += [f"-dict={dictionary}"] * os.path.exists(dictionary)
        command += [work] + [path for path in (*seeds, f"tests/fuzz/corpus/{short}")
                             if os.path.isdir(os.path.join(ROOT, path))]
        yield {"name": f"fuzz/{target}", "kind": "fuzz", "limit_s": 120 + 4 * seconds, "command": command,
               "environment": environment}


def tidy_checks():
    tool = os.path.join(ROOT, "tests/tidy/tidy.py")
    for name in subprocess.run([PYTHON, tool, "--list"], capture_output=True, text=True, check=True).stdout.split():
        yield {"name": f"tidy/{name}", "kind": "tidy", "limit_s": 120, "command": [PYTHON, tool, name],
               "environment": {}}


def all_tests(long):
    trident = {"TRIDENT": os.path.join(ROOT, "build/cpu/trident")}
    if long:
        trident["TRIDENT_LONG"] = "1"
    run_limit_s = 36000 if long else 1200
    yield from pytest_files("multi", run_limit_s, trident)
    yield from pytest_files("parity", run_limit_s, trident)
    yield from programs("unit", "build/cpu", unit_names(), run_limit_s, trident)
    sanitized = {**SANITIZER_OPTIONS, "TRIDENT": os.path.join(ROOT, "build/asan/trident")}
    names = [name for name in unit_names() if long or name not in ADDRESS_LONG]
    yield from programs("address", "build/asan", names, 1200, sanitized)
    names = [name for name in unit_names(THREAD_TESTS) if long or name not in THREAD_LONG]
    yield from programs("thread", "build/tsan", names, 1200, SANITIZER_OPTIONS)
    yield from programs("clang", "build/clang", unit_names(), 1200,
                        {"TRIDENT": os.path.join(ROOT, "build/clang/trident")})
    yield from fuzzers(60 if long else 3, SANITIZER_OPTIONS)
    yield from tidy_checks()


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def write_list(tests):
    """build/tests/CTestTestfile.cmake. COST: what takes long begins first."""
    os.makedirs(LOGS, exist_ok=True)
    for old in glob.glob(os.path.join(LOGS, "*")):
        os.unlink(old)
    order = {kind: len(KINDS) - i for i, kind in enumerate(KINDS)}
    with open(os.path.join(LIST_DIR, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
        for test in tests:
            environment = ";".join(f"{key}={value}" for key, value in test["environment"].items())
            file.write(f"add_test({test['name']} {' '.join(map(quoted, test['command']))})\n"
                       f"set_tests_properties({test['name']} PROPERTIES LABELS {test['kind']} "
                       f"TIMEOUT {test['limit_s']} "
                       f"COST {order[test['kind']]} SKIP_RETURN_CODE 77 WORKING_DIRECTORY {quoted(ROOT)} "
                       f"ENVIRONMENT {quoted(environment)})\n")


def cases(test):
    """How many cases the test's log has; 1 where it writes none."""
    tap, xml_log = log_of(test["name"], ".tap"), log_of(test["name"], ".xml")
    if os.path.exists(tap):
        with open(tap, encoding="utf-8", errors="replace") as file:
            return len(re.findall(r"^(?:not )?ok ", file.read(), re.MULTILINE))
    if os.path.exists(xml_log):
        return sum(int(suite.get("tests", 0)) for suite in xml.etree.ElementTree.parse(xml_log).iter("testsuite"))
    return 1


def print_counts(tests):
    print(f"\n{'kind':<9}{'tests':>6}{'cases':>8}", flush=True)
    for kind, text in KINDS.items():
        of_kind = [test for test in tests if test["kind"] == kind]
        if of_kind:
            print(f"{kind:<9}{len(of_kind):>6}{sum(map(cases, of_kind)):>8}  {text}")
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="the full matrices, and a minute for each fuzzer")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; may be repeated")
    parser.add_argument("--only", default="", metavar="REGEX", help="only tests whose name matches")
    options = parser.parse_args()
    kinds = options.kind or [kind for kind in KINDS if options.long or kind not in LONG_ONLY]
    tests = [test for test in all_tests(options.long)
             if test["kind"] in kinds and re.search(options.only, test["name"])]
    if not tests:
        print("run_tests.py: no test has such a kind and name", file=sys.stderr)
        return 2
    write_list(tests)
    command = ["ctest", "--output-on-failure", "--no-label-summary", "-j", str(PARALLEL)]
    with subprocess.Popen(command, cwd=LIST_DIR, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace") as ctest:
        for line in ctest.stdout:
            if re.match(r"\d+% tests passed", line):
                print_counts(tests)
            print(line, end="", flush=True)
    return ctest.returncode


if __name__ == "__main__":
    sys.exit(main())
