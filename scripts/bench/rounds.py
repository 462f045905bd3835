"""Rounds of measurement: which were disturbed by other programs, medians over the quiet ones, the table.

A round measures what is compared one after the other, so that a slow minute of the machine hits both. It is disturbed
where programs other than ours (or, on a virtual machine, other guests) took more than FOREIGN_MAX of the CPU time of
all cores meanwhile; then it is repeated, as long as there is time. What such a round gave is kept with its mark, and
left out of the medians.
Rounds can be kept in a file, a line of JSON each, and are then counted together with those of later calls.
"""
import json
import os
import statistics
import time

from programs import TICKS

FOREIGN_MAX = 0.05
CASE_S = 60.0  # no further round of a case begins after this


def machine_busy_s():
    """CPU time of all cores since the start of the machine: user, nice, system, interrupts, and what other guests
    of the host took."""
    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


class Load:
    """Measures from its creation on."""

    def __init__(self):
        self.start_s, self.busy_s, self.mine_s = time.monotonic(), machine_busy_s(), time.process_time()

    def foreign_share(self, programs):
        """Share of the machine's CPU time that was taken by others than this script and the ended programs."""
        elapsed_s = time.monotonic() - self.start_s
        mine_s = time.process_time() - self.mine_s + sum(program.cpu_s for program in programs)
        return max(0.0, machine_busy_s() - self.busy_s - mine_s) / (elapsed_s * os.cpu_count())


class Book:
    """Rounds of all cases: dictionaries of values, with "case" and "foreign"."""

    def __init__(self, path=None):
        self.path, self.rounds = path, []
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self.rounds = [json.loads(line) for line in file]

    def of(self, case):
        return [r for r in self.rounds if r["case"] == case]

    def quiet(self, case):
        return [r for r in self.of(case) if r["foreign"] <= FOREIGN_MAX]

    def add(self, case, foreign, values):
        self.rounds.append({"case": case, "foreign": round(foreign, 4), **values})
        mark = f"  disturbed: others took {100 * foreign:.0f} % of the CPUs" if foreign > FOREIGN_MAX else ""
        numbers = "  ".join(f"{key} {value:.5g}" for key, value in values.items())
        print(f"  {case}: {numbers}{mark}", flush=True)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.rounds[-1]) + "\n")

    def measure(self, case, rounds, one_round):
        """one_round(number) returns (values, programs that ran)."""
        quiet_before, tries, start_s = len(self.quiet(case)), 0, time.monotonic()
        while len(self.quiet(case)) - quiet_before < rounds and (tries == 0 or time.monotonic() - start_s < CASE_S):
            load = Load()
            values, programs = one_round(len(self.of(case)))
            self.add(case, load.foreign_share(programs), values)
            tries += 1

    def medians(self, case):
        """(medians of each number, how many rounds they are over, whether those were quiet)."""
        quiet = self.quiet(case)
        over = quiet or self.of(case)
        return {key: statistics.median(r[key] for r in over) for key in over[0]
                if key != "case"}, len(over), bool(quiet)


def print_table(head, lines):
    """lines: of cells, as many as head has; columns are aligned, the first to the left."""
    widths = [max(len(str(line[i])) for line in (head, *lines)) for i in range(len(head))]
    for line in (head, *lines):
        cells = [str(cell).rjust(width) for cell, width in zip(line, widths)]
        print("  ".join([str(line[0]).ljust(widths[0]), *cells[1:]]).rstrip())
    print(flush=True)
