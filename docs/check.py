"""Hold README.md and the chapters to the code: the lines that they link to, every command and
snippet, and what these are said to print.

    python docs/check.py                            # all documents, nothing is written
    python docs/check.py --write docs/03_csa2.md    # renew lines and outputs, also of `?`

What a document may hold:
    [`Cache.admit`](../nanoflash.py#L1-L9)   the lines of that function, class or constant
    ```console                               each `$ command` is run, one after the other, what
                                             follows is its output
    ```python                                is run; a block without a language below is its output
    ```diff                                  a change of the sources, for the blocks below it up to
                                             the next heading, which run in a changed copy
Blocks of a document run at the same time, in the repository's folder; names of documents are
relative to it. In an output `...` alone on a line stands for any lines, and times are not compared.
On the line before a block
    <!-- varies -->            no number in the output is compared
    <!-- long -->              runs with --long only (minutes)
    <!-- long, varies -->      both
    <!-- not run: reason -->   never runs
A command in a line of text must also stand in some block, and a `test_name` in the tests.
"""
import argparse
import ast
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
LINES = 150                             # of a chapter
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1",        # as it is now: tests change it
               "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./]*\.py)#L(\d+)-L(\d+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.M | re.S)
NOTE = re.compile(r"<!-- (varies|long|long, varies|not run: [^>]+?) -->\n$")
TIME = r"(?<=_s )[\d.]+|(?<=_share )[\d.]+|\d[\d.,]*(?= m?s\b)"
INLINE = re.compile(r"`((?:\w+=\w+ )*(?:python|torchrun|pytest) ?[^`]*)`")

class Block(NamedTuple):
    """A fenced block: its language, text, note above it, place in the document, and section."""
    kind: str; text: str; note: str; start: int; end: int; section: int

@functools.cache
def spans(file):
    """A Python file -> {dotted name: (first line, last line)}, decorators included."""
    out = {}
    def walk(body, prefix):
        for x in body:
            if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
                first = min([x.lineno, *(d.lineno for d in x.decorator_list)])
                out[prefix + x.name] = first, x.end_lineno
                walk(x.body, f"{prefix}{x.name}.")
            elif isinstance(x, (ast.Assign, ast.AnnAssign)):
                for target in getattr(x, "targets", None) or [x.target]:
                    for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
                        out[prefix + name] = x.lineno, x.end_lineno
    walk(ast.parse(file.read_text()).body, "")
    return out

def blocks(text):
    """A document -> its Blocks, in order."""
    for m in FENCE.finditer(text):
        note = NOTE.search(text[: m.start()])
        yield Block(*m.groups(), note[1] if note else "", m.start(2), m.end(2),
                    len(re.findall(r"^#+ ", FENCE.sub("", text[: m.start()]), re.M)))

def commands(block):
    """A console block -> (command, output) pairs."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)[0]
        yield command.strip(), part[len(command) :]

def change(folder, diffs):
    """Fill a folder with a copy of the sources, and apply the diffs there."""
    for name in ("nanoflash.py", "kernels.py", "test_nanoflash.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "docs").mkdir()
    for path in (ROOT / "docs").iterdir():
        if path.suffix == ".py":
            shutil.copy(path, folder / "docs")
        else:
            (folder / "docs" / path.name).symlink_to(path)
    for diff in diffs:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder,
                       check=True, capture_output=True)

def execute(command, folder, code=None):
    """Run a command, or Python code, in a folder -> what it printed; raises if it failed."""
    args = [sys.executable, "-"] if code else ["bash", "-eo", "pipefail", "-c", command]
    run = subprocess.run(args, input=code, cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, timeout=900)
    if run.returncode:
        raise RuntimeError(f"ended with {run.returncode}:\n{run.stdout}")
    return run.stdout

def same(shown, printed, varies):
    """Is that what was printed, but for times and what `...` leaves out?"""
    def plain(text):
        text = re.sub(r"\d[\d.,]*" if varies else TIME, "*", text)
        return [" ".join(line.split()) for line in text.strip().split("\n")]
    want, got = plain(shown), plain(printed)
    pattern = "".join("(?:.*\n)*" if w == "..." else re.escape(w) + "\n" for w in want)
    return re.fullmatch(pattern, "\n".join(got) + "\n") is not None

def output_of(text):
    """A document -> a function: a Block -> the Block of its output, if it is Python and has one."""
    following = dict(itertools.pairwise(blocks(text)))
    def find(b):
        out = following.get(b)
        return out if b.kind == "python" and out and not out.kind and not text[
            b.end + 4 : out.start - 4].strip() else None
    return find

class Job(NamedTuple):
    """What to run, its code or None, what is shown as its output and where, note, diffs."""
    command: str; code: str; shown: str; place: tuple; note: str; diffs: list

def jobs(text, long):
    """A document -> a list of Jobs for each block that is run."""
    all_blocks, find = list(blocks(text)), output_of(text)
    for i, b in enumerate(all_blocks):
        if b.note.startswith("not run") or b.note.startswith("long") != long:
            continue
        diffs = [d.text for d in all_blocks[:i] if d.kind == "diff" and d.section == b.section]
        if b.kind == "console":
            at, out = b.start, []
            for command, shown in commands(b):
                at = text.index(shown, text.index(command, at) + len(command))
                out.append(Job(command, None, shown, (at, at + len(shown)), b.note, diffs))
            yield out
        elif b.kind == "python":
            out = find(b)
            yield [Job(b.text.strip().split("\n")[-1], b.text, out and out.text,
                       out and (out.start, out.end), b.note, diffs)]

def check_lines(name, text):
    """-> the document with the right line numbers, and what was wrong."""
    wrong = []
    def renew(m):
        target = (ROOT / name).parent / m[2]
        there = spans(target.resolve()) if target.exists() else {}
        key = m[1]
        if key not in there:
            wrong.append(f"{m[2]} has no {m[1]}")
            return m[0]
        if there[key] != (int(m[3]), int(m[4])):
            wrong.append(f"{m[1]} stands in lines %d to %d of {m[2]}, not {m[3]} to {m[4]}"
                         % there[key])
        return f"[`{m[1]}`]({m[2]}#L{there[key][0]}-L{there[key][1]})"
    return LINK.sub(renew, text), wrong

@functools.cache
def known_commands():
    """All commands that stand in blocks of any document."""
    return {" ".join(c.split()).split(" #")[0] for name in DOCUMENTS
            for b in blocks((ROOT / name).read_text()) if b.kind == "console"
            for c, _ in commands(b)}

def check_form(name, text):
    """-> what is wrong with a document's form: hidden commands, dead links, length, pictures."""
    bare = FENCE.sub("", text)
    for command in map(" ".join, map(str.split, INLINE.findall(bare))):
        if " " in command and "..." not in command and command not in known_commands():
            yield f"`{command}` stands in no console block"
    for line in re.findall(r"^[ >]*(?:```|~~~).*|<pre.*", bare, re.M):
        yield f"a block that is not seen: {line!r}"
    every, below = [*blocks(text)], {out.start for out in map(output_of(text), blocks(text)) if out}
    for b in every:
        head = b.text[:60]
        if b.kind not in ("console", "python", "diff", ""):
            yield f"a block of {b.kind} is not run: {head!r}"
        elif not b.kind and b.start not in below:
            yield f"a block is not run, and no output of Python right above: {head!r}"
        elif b.kind == "console" and not b.text.startswith("$ "):
            yield f"a console block begins without a command: {head!r}"
        elif b.kind == "diff" and not any(x.start > b.start and x.section == b.section and
                                          x.kind in ("console", "python") for x in every):
            yield f"nothing runs with this diff: {head!r}"
    for test in {*re.findall(r"`(test_(?!nanoflash\b)\w+)", bare)} - spans(ROOT / "test_nanoflash.py").keys():
        yield f"there is no {test}"
    for link in re.findall(r"\[[^][]*\]\([^)]*#L\d[^)]*\)", LINK.sub("", bare)):
        yield f"{link} is not [`name`](file.py#L1-L2): its lines are not checked"
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", bare):
        path = (ROOT / name).parent / target
        if not path.exists():
            yield f"{target} is not there"
        elif path.suffix == ".svg":
            yield from check_picture(path)
    if re.match(r"docs/\d\d_", name) and text.count("\n") > LINES:
        yield f"{text.count(chr(10))} lines, at most {LINES}"

def check_picture(path):
    """-> what is wrong with an SVG: size, form, colours that a white or dark page would hide."""
    text = path.read_text()
    if len(text) >= 60_000:
        yield f"{path.name} has {len(text):,} bytes, at most 60,000"
    xml.etree.ElementTree.fromstring(text)
    for color in re.findall(r'(?:fill|stroke)="(black|white|#[\da-f]{3})"', text, re.I):
        yield f"{path.name}: {color} is hard to see, or not of the form #rrggbb"
    if " fill=" not in text and "fill:" not in text:
        yield f"{path.name} has no fill: its text is black"
    for r, g, b in re.findall(r"#([\da-f]{2})([\da-f]{2})([\da-f]{2})\b", text, re.I):
        light = (0.299 * int(r, 16) + 0.587 * int(g, 16) + 0.114 * int(b, 16)) / 255
        if not 0.3 <= light <= 0.7 and "<!-- own ground -->" not in text:
            yield f"{path.name}: #{r}{g}{b} is hard to see on a white or on a dark page"

def run(job):
    """-> what a Job printed, or the error that it ended in."""
    try:
        if not job.diffs:
            return execute(job.command, ROOT, job.code)
        with tempfile.TemporaryDirectory() as folder:
            change(Path(folder), job.diffs)
            return execute(job.command, folder, job.code)
    except (RuntimeError, subprocess.SubprocessError) as e:
        return e

def check(name, write=False, long=False):
    """A document's name -> a list of what is wrong with it; write: renew lines and outputs."""
    path = ROOT / name
    text, wrong = check_lines(name, path.read_text())
    wrong += check_form(name, text)
    todo = list(jobs(text, long))
    with ThreadPoolExecutor(2) as pool:
        printed = sum(pool.map(lambda block: [*map(run, block)], todo), [])
    for job, out in [*zip(sum(todo, []), printed)][::-1]:
        shown = job.shown
        if isinstance(out, Exception):
            wrong.append(f"{job.command}: {out}{getattr(out, 'stderr', '')}")
        elif shown is not None and (job.code or shown.strip()) and not same(
                shown, out, "varies" in job.note):
            wrong.append(f"{job.command} prints\n{out}\nnot\n{shown}")
            if "..." not in shown.split("\n"):
                text = text[: job.place[0]] + out.rstrip("\n") + "\n" + text[job.place[1] :]
    if write:
        path.write_text(text)
    return wrong

def main():
    """Check the documents named, or all; exit with 1 if one is wrong."""
    p = argparse.ArgumentParser(description=main.__doc__)
    p.add_argument("names", nargs="*")
    p.add_argument("--write", action="store_true", help="renew line numbers and outputs")
    p.add_argument("--long", action="store_true", help="run what takes minutes, and only that")
    args = p.parse_args()
    bad = 0
    for name in args.names or DOCUMENTS:
        try:
            wrong = check(name, args.write, args.long)
        except (OSError, xml.etree.ElementTree.ParseError) as e:
            wrong = [str(e)]
        bad += bool(wrong)
        print(f"{name}: {'right' if not wrong else ''}")
        for line in wrong:
            print("  " + line.replace("\n", "\n    "))
    sys.exit(bad > 0)

if __name__ == "__main__":
    main()
