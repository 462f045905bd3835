#!/usr/bin/env python3
"""Measures Trident's speed beside its peers and its targets; prints one table (make bench).

    scripts/bench/run.py                          all: about 20 minutes
    scripts/bench/run.py torch gpt tiny           the cases with all these words in their names
    scripts/bench/run.py --list                   their names
    scripts/bench/run.py --llmc DIR               also beside llm.c, of which DIR is a checkout: some minutes more

With --keep FILE the rounds are kept, and those of earlier calls count too, so that a long measurement can be made in
short pieces; --rounds 0 then prints the table of what is there. What cannot be measured here is named, and the rest
goes on. Exit status: 0 all was measured, whether or not it met its target; 1 something could not be.
"""
import argparse
import os
import shutil
import sys
import tempfile

import part_kernels
import part_llmc
import part_quickstart
import part_scaling
import part_torch
from programs import ROOT, BenchError, LeftOut, openblas_environment
from rounds import Book, print_table

PARTS = (part_kernels, part_torch, part_llmc, part_scaling, part_quickstart)
HEAD = ("case", "Trident", "beside", "result", "target", "met", "rounds")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/cpu"), help="directory of the programs")
    parser.add_argument("--rounds", type=int, default=5, help="quiet rounds of a case, if a minute allows them")
    parser.add_argument("--keep", metavar="FILE", help="where rounds are kept")
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter that has PyTorch")
    parser.add_argument("--llmc", metavar="DIR", help="checkout of llm.c")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    options.llmc = options.llmc and os.path.abspath(options.llmc)
    options.trident = os.path.join(options.build, "trident")
    if not os.access(options.trident, os.X_OK):
        parser.error(f"{options.trident} is not there: run make, or say --build DIRECTORY")
    options.wanted = {part: [case for case in part.CASES if set(options.words) <= set(case.split())] for part in PARTS}
    if not any(options.wanted.values()):
        parser.error(f"no case has the words {' '.join(options.words)}: see --list")
    return options


def give_work_space(options):
    options.work, count = tempfile.mkdtemp(prefix="trident-bench-"), [0]

    def new_directory():
        count[0] += 1
        return os.path.join(options.work, f"run-{count[0]}")

    options.new_directory = new_directory
    known = []

    def openblas():
        if not known:
            known.append(openblas_environment())
        return known[0]

    options.openblas = openblas


def measure(options, book):
    """Returns whether all could be measured."""
    good = True
    for part, cases in options.wanted.items():
        try:
            if cases and options.rounds > 0:
                part.prepare(options)
                for case in cases:
                    book.measure(case, options.rounds, lambda n, part=part, case=case: part.one_round(options, case, n))
        except LeftOut as why:
            print(f"bench: {why}", flush=True)
        except BenchError as error:
            good = False
            print(f"bench: {', '.join(sorted({case.split()[0] for case in cases}))} not measured: {error}",
                  file=sys.stderr, flush=True)
    return good


def table(book):
    lines = []
    for part in PARTS:
        for case in [case for case in part.CASES if book.of(case)]:
            medians, rounds, quiet = book.medians(case)
            *cells, met = part.result(case, medians)
            word = {True: "yes", False: "no", None: ""}[met] + ("" if quiet else ", disturbed")
            lines.append((case, *cells, word, rounds))
    return lines


def main():
    options = parse_options()
    if options.list:
        print("\n".join(case for cases in options.wanted.values() for case in cases))
        return 0
    give_work_space(options)
    book = Book(options.keep)
    try:
        good = measure(options, book)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    print()
    print_table(HEAD, table(book))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
