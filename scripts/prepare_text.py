#!/usr/bin/env python3
"""Makes English text to train on: the King James Bible and Jane Austen's six novels.

    scripts/prepare_text.py [DIRECTORY]          (default: quickstart-data)

Both are in the public domain and lie in Debian packages, which apt downloads without root; nothing is
installed. DIRECTORY then holds train.txt and valid.txt, in which each chapter is a document and the line
`<|document|>` stands between documents, and SOURCES.txt, which says where the text comes from. valid.txt
holds whole books and chapters that train.txt does not have. Running it again does nothing.

Where apt cannot be reached: put the two packages (any version) into DIRECTORY/packages yourself and run
it again, or train on text of your own, for which `trident tokenize` is enough.
"""

import argparse
import glob
import hashlib
import os
import re
import struct
import subprocess
import sys
import zlib

SEPARATOR = "<|document|>"
BIBLE_PACKAGE, AUSTEN_PACKAGE = "bible-kjv-text", "r-cran-janeaustenr"

BIBLE_BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk",
    "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon",
    "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John",
    "3Jn": "3 John", "Jude": "Jude", "Rev": "Revelation",
}
# Held out: history, poetry, prophecy and letters, whole books each; and the end of one novel, in about the
# proportion of the two sources.
VALID_BOOKS = {"Ruth", "Esther", "Ecclesiastes", "Hosea", "Jonah", "Galatians", "James"}
VALID_NOVEL, VALID_FIRST_CHAPTER = "Persuasion", 17


class Refused(Exception):
    """Something the user can do something about."""


# ---- packages ----

def find_package(packages, name):
    """Path of the package file that is there, or None."""
    found = sorted(glob.glob(os.path.join(glob.escape(packages), name + "_*.deb")))
    return found[-1] if found else None


def apt(arguments, directory):
    # apt would otherwise change to a user that may not write into our directory.
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"] + arguments
    try:
        return subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    except FileNotFoundError:
        raise Refused("there is no apt-get on this machine") from None
    except subprocess.TimeoutExpired:
        raise Refused("apt-get did not answer within 5 minutes") from None


def download(packages, names):
    """Fetches the packages that are not there yet."""
    missing = [name for name in names if not find_package(packages, name)]
    if not missing:
        return
    print("downloading with apt-get (4 MB, nothing is installed): " + " ".join(missing), flush=True)
    result = apt(["download"] + missing, packages)
    if result.returncode != 0 and os.geteuid() == 0:
        apt(["update"], packages)  # a fresh image has no package lists
        result = apt(["download"] + missing, packages)
    if result.returncode != 0:
        raise Refused("apt-get could not download them:\n" + result.stdout.strip())


def unpack(package, directory):
    os.makedirs(directory, exist_ok=True)
    try:
        subprocess.run(["dpkg", "-x", package, directory], check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise Refused(f"{package}: dpkg cannot unpack it ({problem})") from None


# ---- the Bible: bible.data, LZW in windows ----

def lzw_window(data):
    """One window of Unix compress output: codes of 9 to 16 bits, low bits first, in groups of eight codes;
    a group is left unfinished where the width changes. Code 256 clears the table."""
    first = [bytes([i]) for i in range(256)] + [b""]
    table, bits, previous, out, at = list(first), 9, None, [], 0
    while at < len(data):
        group = data[at:at + bits]
        at += bits
        value = int.from_bytes(group, "little")
        for i in range(len(group) * 8 // bits):
            code = value >> (i * bits) & ((1 << bits) - 1)
            if code == 256:
                table, bits, previous = list(first), 9, None
                break
            if code > len(table) or (code == len(table) and previous is None):
                raise Refused("bible.data is damaged: a code without meaning")
            text = table[code] if code < len(table) else previous + previous[:1]
            if previous is not None and len(table) < 1 << 16:
                table.append(previous + text[:1])
            out.append(text)
            previous = text
            if len(table) >= 1 << bits and bits < 16:
                bits += 1
                break
    return b"".join(out)


def read_bible(path):
    """The text of bible.data: one line of title, then lines such as `Ge1:1 In the beginning ...`."""
    with open(path, "rb") as file:
        data = file.read()
    if data[:4] != b"EC02" or len(data) < 0x5C:
        raise Refused(f"{path}: should begin with EC02")
    windows, = struct.unpack(">I", data[0x58:0x5C])
    table_end = 0x5C + 4 * (windows + 1)
    if table_end > len(data):
        raise Refused(f"{path}: has {windows} windows, for which it is too short")
    offsets = struct.unpack(f">{windows + 1}I", data[0x5C:table_end])
    if list(offsets) != sorted(offsets) or offsets[-1] > len(data):
        raise Refused(f"{path}: its table of windows is damaged")
    return b"".join(lzw_window(data[a:b]) for a, b in zip(offsets, offsets[1:])).decode("ascii")


def bible_documents(text):
    """[(book, chapter, text)]: a heading, then a verse a line."""
    verse = re.compile(r"((?:[123])?[A-Za-z]+)(\d+):\d+ (.*)")
    documents = []
    for line in text.split("\n")[1:]:
        if not line:
            continue
        found = verse.fullmatch(line)
        if not found or found[1] not in BIBLE_BOOKS:
            raise Refused(f"bible.data: a line is no verse: {line[:60]}")
        book, chapter = BIBLE_BOOKS[found[1]], int(found[2])
        if not documents or documents[-1][:2] != (book, chapter):
            documents.append((book, chapter, [f"{book}, chapter {chapter}", ""]))
        documents[-1][2].append(found[3].strip())
    return [(book, chapter, "\n".join(lines) + "\n") for book, chapter, lines in documents]


# ---- Jane Austen: Rdata.rdb, R's serialisation ----

def read_strings(raw):
    """The character vector in one R object (XDR)."""
    if raw[:2] != b"X\n":
        raise Refused("Rdata.rdb: an object is not in R's binary format")
    version, = struct.unpack(">i", raw[2:6])
    at = 14
    if version == 3:  # names its encoding
        at += 4 + struct.unpack(">i", raw[14:18])[0]
    flags, count = struct.unpack(">Ii", raw[at:at + 8])
    if flags & 255 != 16:
        raise Refused(f"Rdata.rdb: an object has type {flags & 255}, a character vector is 16")
    at += 8
    lines = []
    for _ in range(count):
        flags, length = struct.unpack(">Ii", raw[at:at + 8])
        if flags & 255 != 9 or at + 8 + length > len(raw):
            raise Refused("Rdata.rdb: a line is damaged")
        at += 8
        lines.append(raw[at:at + max(length, 0)].decode("utf-8"))
        at += max(length, 0)
    return lines


def read_novels(path):
    """The lines of each novel. The file is a row of: u32 big-endian raw length, zlib stream."""
    with open(path, "rb") as file:
        data = file.read()
    novels, at = [], 0
    while at < len(data):
        stream = zlib.decompressobj()
        try:
            raw = stream.decompress(data[at + 4:])
        except zlib.error as problem:
            raise Refused(f"{path}: byte {at}: {problem}") from None
        length, = struct.unpack(">I", data[at:at + 4])
        if length != len(raw) or not stream.eof:
            raise Refused(f"{path}: byte {at}: {len(raw)} bytes were unpacked, {length} are expected")
        novels.append(read_strings(raw))
        at = len(data) - len(stream.unused_data)
    return novels


def unwrap(lines):
    """Paragraphs, each on one line, with an empty line between."""
    paragraphs, words = [], []
    for line in lines + [""]:
        if line.strip():
            words += line.split()
        elif words:
            paragraphs.append(" ".join(words))
            words = []
    return re.sub(r"_([^_]+)_", r"\1", "\n\n".join(paragraphs)) + "\n"


def novel_documents(lines):
    """[(title, number of the chapter, text)]."""
    title = lines[0].strip().title().replace(" And ", " and ")
    heading = re.compile(r"chapter (\d+|[ivxlc]+)\.?", re.IGNORECASE)
    part = re.compile(r"volume [ivx]+\.?|finis\.?|the end\.?|a note on the text", re.IGNORECASE)
    chapters = []
    open_chapter = False
    for line in lines:
        if heading.fullmatch(line.strip()):
            chapters.append([])
            open_chapter = True
        elif part.fullmatch(line.strip()):
            open_chapter = False  # what follows, up to the next chapter, is no prose of hers
        elif open_chapter:
            chapters[-1].append(line)
    return [(title, number, f"{title}, chapter {number}\n\n{unwrap(body)}")
            for number, body in enumerate(chapters, 1)]


# ---- output ----

def is_valid(title, chapter):
    return title in VALID_BOOKS or (title == VALID_NOVEL and chapter >= VALID_FIRST_CHAPTER)


def write_atomically(path, text):
    with open(path + ".tmp", "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def is_done(directory):
    """SOURCES.txt is written last and holds the sums of the others."""
    try:
        with open(os.path.join(directory, "SOURCES.txt"), encoding="utf-8") as file:
            sources = file.read()
        return all(digest(os.path.join(directory, name)) in sources for name in ("train.txt", "valid.txt"))
    except FileNotFoundError:
        return False


def prepare(directory):
    packages, unpacked = os.path.join(directory, "packages"), os.path.join(directory, "unpacked")
    os.makedirs(packages, exist_ok=True)
    download(packages, [BIBLE_PACKAGE, AUSTEN_PACKAGE])
    files = [find_package(packages, name) for name in (BIBLE_PACKAGE, AUSTEN_PACKAGE)]
    for package in files:
        unpack(package, unpacked)
    documents = bible_documents(read_bible(os.path.join(unpacked, "usr/lib/bible.data")))
    for lines in read_novels(os.path.join(unpacked, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")):
        documents += novel_documents(lines)
    sources = ("King James Version of the Bible: public domain, from Debian's bible-kjv-text.\n"
               "Novels of Jane Austen: public domain, from Debian's r-cran-janeaustenr.\n"
               + "".join(os.path.basename(name) + "\n" for name in files))
    for name, wanted in (("train.txt", False), ("valid.txt", True)):
        texts = [text for title, chapter, text in documents if is_valid(title, chapter) == wanted]
        path = os.path.join(directory, name)
        write_atomically(path, f"{SEPARATOR}\n".join(texts))
        sources += f"{digest(path)}  {name}\n"
        print(f"{path}: {os.path.getsize(path):,} bytes, {len(texts)} documents")
    write_atomically(os.path.join(directory, "SOURCES.txt"), sources)
    print(f"documents are separated by the line {SEPARATOR}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default="quickstart-data")
    directory = parser.parse_args().directory
    if is_done(directory):
        print(f"{directory}: text is there already")
        return 0
    try:
        prepare(directory)
    except Refused as problem:
        print(f"error: {problem}\n\nNo text was made. Either make apt work (`sudo apt-get update` on a machine with a "
              f"network), or put\nthe Debian packages {BIBLE_PACKAGE} and {AUSTEN_PACKAGE} (.deb files, any version) "
              f"into\n"
              f"{os.path.join(directory, 'packages')}/ and run this again, or use text of your own.", file=sys.stderr)
        return 3
    except OSError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\nstopped; run it again to go on: nothing half-made is left in {directory}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
