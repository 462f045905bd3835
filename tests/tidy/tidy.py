#!/usr/bin/env python3
"""Keeps the code's form: what a reader of one file may expect of all files.

    tests/tidy/tidy.py [CHECK...]       (default: all checks; make tidy)

Each check yields lines `file:line: what is wrong`. A rule that older code breaks is not given up: the file
long_functions.txt lists the functions that were longer than the limit, with their length then. They may get
shorter, not longer, and none is added.
"""
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINE_COLUMNS_MAX, FUNCTION_LINES_MAX = 120, 70
NOT_OURS = ("build", "runs", "quickstart-data", ".git")
LIST_NAME = "tests/tidy/long_functions.txt"
FOLDERS = ("base", "kernels", "parallel", "data", "train", "tests", "scripts", "configs", "docs")
CODE_FOLDERS = ("base", "kernels", "parallel", "data", "train")
# A folder includes what is named here, and itself. tests/ and scripts/ may include all.
MAY_INCLUDE = {"base": (), "kernels": ("base",), "parallel": ("base",), "data": ("base",),
               "train": ("base", "kernels", "parallel", "data")}
C_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-I.", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
           "-Wno-psabi"]


def tracked(*suffixes):
    """Files of the project with these endings, new ones included, ignored ones not."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:  # a copy without its history
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if path.is_file() and path.relative_to(ROOT).parts[0] not in NOT_OURS]
    return sorted({name for name in names if name.endswith(suffixes) and (ROOT / name).is_file()})


def lines_of(name):
    return (ROOT / name).read_text(encoding="utf-8").split("\n")


# ---- text ----

def check_text():
    """No tabs (but in Makefiles), no blanks at line ends, one newline at the end, lines not too long."""
    for name in tracked(".c", ".h", ".py", ".sh", ".ini"):
        lines = lines_of(name)
        if lines[-1] != "" or (len(lines) > 1 and lines[-2] == ""):
            yield f"{name}:{len(lines)}: should end with one newline"
        for number, line in enumerate(lines, 1):
            if "\t" in line or line != line.rstrip():
                yield f"{name}:{number}: a tab, or blanks at the end of the line"
            if len(line) > LINE_COLUMNS_MAX:
                yield f"{name}:{number}: {len(line)} columns, at most {LINE_COLUMNS_MAX}"


def check_format():
    """`make format` changes nothing."""
    tool = shutil.which("clang-format-14")
    if not tool:
        yield "clang-format-14 is missing: scripts/setup.sh check installs it"
        return
    result = subprocess.run([tool, "--dry-run", "--Werror", *tracked(".c", ".h")], cwd=ROOT, capture_output=True,
                            text=True, check=False)
    wrong = {}
    for name, number in re.findall(r"^(\S+?):(\d+):\d+: error: ", result.stderr, re.MULTILINE):
        wrong.setdefault(name, number)
    for name, number in wrong.items():
        yield f"{name}:{number}: not in the project's format; `make format` mends it"
    if result.returncode != 0 and not wrong:
        yield f"clang-format-14: {result.stderr.strip()}"


# ---- words ----

# One word for one thing: what the field calls it, or the spelling that the code has. Pattern -> what to write.
WORDS = {
    r"\b(TODO|FIXME|XXX|HACK)\b": "a finished thing, or nothing",
    r"\b(dp_rank|tp_rank|pp_rank|dp_size|tp_size|pp_size)\b": "data, tensor, pipeline, as the config has it",
    r"\b(micro_?batches_num|num_micro_?batch(es)?|n_micro_?batch(es)?)\b": "micro_batches",
    r"\bmicrobatch(es)?\b": "micro_batch",
    r"\b(num|n)_layers?\b": "layers",
    r"\bgrad_accum(ulation)?(_steps)?\b": "accumulation",
    r"\b(check_point|chkpt|chkpoint)": "checkpoint",
    r"\b(learn_rate|lrate)\b": "lr, learning_rate",
    r"\bseqlen\b|\bsequence_len\b": "seq_len",
    r"\b(vocab_sz|vocabsize)\b": "vocab",
    r"/home/[a-z]|/root/|/Users/": "a path that other machines have too",
}
WORDS_EXEMPT = ("tests/tidy/tidy.py",)


def check_words():
    """The field's terms, one spelling each; nothing unfinished; no paths of one machine."""
    patterns = [(re.compile(pattern), instead) for pattern, instead in WORDS.items()]
    for name in tracked(".c", ".h", ".py", ".sh", ".ini", ".md", "Makefile"):
        if name in WORDS_EXEMPT:
            continue
        for number, line in enumerate(lines_of(name), 1):
            for pattern, instead in patterns:
                found = pattern.search(line)
                if found:
                    yield f"{name}:{number}: `{found.group()}`; write {instead}"


# ---- C ----

def check_includes():
    """Includes point down only: train -> {parallel, kernels, data} -> base. Platform files stay in their folder."""
    include = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
    for name in tracked(".c", ".h"):
        folder = name.split("/")[0]
        if folder not in CODE_FOLDERS:
            continue
        for number, line in enumerate(lines_of(name), 1):
            found = include.match(line)
            if not found:
                continue
            target = found.group(1)
            to = target.split("/")[0]
            if to != folder and to not in MAY_INCLUDE[folder]:
                allowed = ", ".join((folder, *MAY_INCLUDE[folder]))
                yield f"{name}:{number}: {folder}/ includes {target}; it may include {allowed}"
            elif not (ROOT / target).exists():
                yield f"{name}:{number}: {target}: name it from the project's root"


def first_line_of_title(lines, number):
    """Where the function's title, which ends in line `number`, begins; 0: it is none."""
    for first in range(number - 1, max(number - 6, 0), -1):
        if re.match(r"^[A-Za-z_][^;{}]*[,(]$", lines[first - 1]):
            return first
        if not re.match(r"^\s+[^;{}]*,$", lines[first - 1]):
            return 0
    return 0


def function_lengths(name):
    """(name, first line, lines) of each function. The code is in the project's format: a body ends with the
    first `}` in column 0."""
    lines = lines_of(name)
    start, title = None, None
    for number, line in enumerate(lines, 1):
        if start is None:
            opens = re.match(r"^[A-Za-z_].*\)( \{| __attribute__.*\{)$", line) or (
                re.match(r"^\s+\S.*\) \{$", line) and first_line_of_title(lines, number))
            if opens:
                first = number if re.match(r"^[A-Za-z_]", line) else first_line_of_title(lines, number)
                found = re.search(r"([A-Za-z_0-9]+)\(", lines[first - 1])
                start, title = first, found.group(1) if found else "?"
        elif line.startswith("}"):
            yield title, start, number - start + 1
            start = None


def known_long_functions():
    known = {}
    for line in (ROOT / LIST_NAME).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, function, length = line.split()
            known[name, function] = int(length)
    return known


def check_functions():
    """At most 70 lines a function; those that were longer when the rule came only get shorter."""
    known = known_long_functions()
    for name in tracked(".c", ".h"):
        for function, line, length in function_lengths(name):
            limit = known.pop((name, function), FUNCTION_LINES_MAX)
            if length > limit:
                yield f"{name}:{line}: {function} has {length} lines, at most {limit}"
            elif limit > FUNCTION_LINES_MAX and length < limit:
                yield f"{LIST_NAME}: {function} has {length} lines now, not {limit}: write that down"
    for name, function in known:
        yield f"{LIST_NAME}: {name} {function} is gone: take the line out"


def compile_header(compiler, flags, name):
    with tempfile.NamedTemporaryFile("w", suffix=".cc" if "g++" in compiler else ".c") as file:
        # twice: a header without a guard shows
        file.write(f'#include "{name}"\n#include "{name}"\n')
        file.flush()
        result = subprocess.run([compiler, *flags, file.name], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stderr.strip().split("\n")[0]


def check_headers():
    """Each header compiles alone, and those that say extern "C" as C++ too."""
    work = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in tracked(".h"):
            text = (ROOT / name).read_text(encoding="utf-8")
            if "#ifndef TRIDENT_" not in text:
                if not re.search("REAL|body", text[:400]):
                    yield f"{name}:1: has no guard, and does not say that it is the body of other files"
                continue
            work.append((name, "C", pool.submit(compile_header, "gcc", C_FLAGS, name)))
            if 'extern "C"' in text and shutil.which("g++"):
                flags = ["-std=c++17", "-D_GNU_SOURCE", "-I.", "-fsyntax-only", "-Wall", "-Werror"]
                work.append((name, "C++", pool.submit(compile_header, "g++", flags, name)))
    for name, language, result in work:
        if result.result():
            yield f"{name}:1: does not compile alone as {language}: {result.result()}"


# ---- scripts and documents ----

def check_scripts():
    """Scripts parse, and start as they say."""
    for name in tracked(".sh"):
        result = subprocess.run(["sh", "-n", name], cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            yield f"{name}:1: {result.stderr.strip()}"
    for name in tracked(".sh", ".py"):
        if lines_of(name)[0].startswith("#!") and not os.access(ROOT / name, os.X_OK):
            yield f"{name}:1: begins with #! but is not executable"


def check_links():
    """Links of documents to files, and the paths that they write as `folder/file`, lead somewhere."""
    for name in tracked(".md"):
        for number, line in enumerate(lines_of(name), 1):
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line):
                if "://" not in target and not (ROOT / name).parent.joinpath(target).exists():
                    yield f"{name}:{number}: link to {target}, which is not there"
            for target in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*\w)`", line):
                if not list(ROOT.glob(target)) and not list(ROOT.glob(target + ".*")):
                    yield f"{name}:{number}: `{target}` is not there"


CHECKS = {name[6:]: check for name, check in sorted(globals().items()) if name.startswith("check_")}


def main():
    if sys.argv[1:] == ["--list"]:
        print("\n".join(CHECKS))
        return 0
    wanted = sys.argv[1:] or list(CHECKS)
    unknown = [name for name in wanted if name not in CHECKS]
    if unknown:
        print(f"tidy.py: no check {unknown[0]}; there are: {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    n_wrong = 0
    for name in wanted:
        found = list(CHECKS[name]())
        n_wrong += len(found)
        print(f"{name}: {len(found) or 'good'}")
        for line in found:
            print("  " + line)
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
