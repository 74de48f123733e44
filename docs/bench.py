"""Measure what one engine gives to users who wait for it, under a trace made like an agent's.

    python docs/bench.py                                  # docs/tiny, 1, 2, 4 and 8 users
    python docs/bench.py --model DIR --concurrency 1 16 64 --json FILE
    python docs/bench.py --no-speculate --no-replay       # what these two bring

Users work in a closed loop: each sends its next turn when the last is answered. A turn's prompt is
all that its session holds so far and a tool's answer. Texts, sizes and sampling come from --seed; a
user does the same in every row. Only public calls of nanoflash.py are used. What the columns count,
and what they do not, is told in benchmark.md; --json keeps the records that they come from.
"""
import argparse
import json
import lzma
import math
import platform
import random
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch                                                             # noqa: E402

import nanoflash as nf                                                   # noqa: E402

TEXT = nf.DOCS / "tiny" / "text.xz"
SPREAD = 3.3               # standard deviations between the bounds of log-normal sizes: 90 % inside
HEADS = {                  # column -> (heading, how it is printed)
    "users": ("users", "{:d}"),
    "speed_p50": ("tok/s/user P50", "{:.1f}"), "speed_p90": ("P90", "{:.1f}"),
    "ttft_p50": ("first token P50", "{:.2f} s"), "ttft_p90": ("P90", "{:.2f} s"),
    "total": ("total tok/s", "{:.0f}"), "cached": ("cached", "{:.0f}"),
    "input": ("new input", "{:.0f}"), "output": ("output", "{:.0f}"),
    "hit": ("cache hit", "{:.0%}"), "tokens_a_step": ("tok/step", "{:.2f}"),
    "draft": ("draft", "{:.0%}"), "forward": ("forward + sampling", "{:.0%}"),
    "host": ("host", "{:.0%}"), "pages": ("peak pages", "{:d}")}

# -- The trace -----------------------------------------------------------------------------------
class Turn(NamedTuple):
    """What a user sends next, and how long an answer it wants."""
    user: int
    session: int
    turn: int                            # 0 begins a session
    tool: list                           # ids of the tool's answer
    n_new: int
    temperature: float
    seed: int

def held_out(engine):
    """Ids of the chapters of the King James Bible that docs/tiny was not trained on."""
    chapters = lzma.open(TEXT, "rt", encoding="utf-8").read().split("\n\n")
    return engine.prompt.encode("\n\n".join(chapters[12::25]))

def user_turns(args, text, user):
    """The turns of one user, session after session, drawn from args.seed and the user alone."""
    pick, turns = random.Random(f"{args.seed} {user}"), []
    low, high = map(math.log, args.input)
    for session in range(args.sessions):
        temperature = pick.choice((0.0, 0.7))
        for turn in range(args.turns):
            size = round(math.exp(pick.gauss((low + high) / 2, (high - low) / SPREAD)))
            size = min(max(size, args.input[0]), args.input[1])
            start = pick.randrange(len(text) - size)
            turns.append(Turn(user, session, turn, text[start : start + size],
                              pick.randint(*args.output), temperature, pick.randrange(2**32)))
    return turns

def check_fit(args, engine, plans, prefix):
    """Refuse, before anything runs, a session that outgrows the context or the pages."""
    most = min(engine.cfg.max_position_embeddings, engine.cache.n_pages * nf.PAGE)
    for user, turns in enumerate(plans):
        for session in range(args.sessions):
            n = len(prefix) + sum(len(t.tool) + t.n_new for t in turns if t.session == session)
            nf.need(n <= most, f"session {session} of user {user} grows to {n} tokens, this engine "
                    f"holds {most}: take fewer --turns, or a smaller --system, --input or --output")

# -- The run -------------------------------------------------------------------------------------
def drive(engine, prefix, plans):
    """Run the plans (a list of turns a user) to their end -> the record of one row."""
    todo, running, turns, held = list(map(iter, plans)), {}, [], []
    before, start = dict(engine.seconds), time.perf_counter()

    def send(user, said):
        turn = next(todo[user], None)
        if turn:
            image = engine.cfg.image_token_id            # a random model prints some; no prompt may
            prompt = [i for i in said if i != image] if turn.turn else prefix
            params = nf.SamplingParams(turn.n_new, turn.temperature, seed=turn.seed,
                                       ignore_eos=True)
            running[engine.submit(prompt + turn.tool, params)] = turn

    for user in range(len(plans)):
        send(user, None)
    while running:
        for seq in engine.step():
            if seq.finish_reason:
                turn = running.pop(seq)
                turns.append(turn_record(turn, seq, start))
                send(turn.user, seq.ids)
        held.append(len({page for seq in running for page in seq.pages}))
    wall = time.perf_counter() - start
    spent = {name: engine.seconds[name] - before[name] for name in before}
    return {"users": user_records(turns), "turns": turns, "wall_s": wall, "held_pages": held,
            **{f"{name}_s": spent[name] for name in ("draft", "forward", "step")}}

def turn_record(turn, seq, start):
    """What is kept of a finished turn; seconds are as the engine's clock took them."""
    sent, first, last = seq.times[0], seq.times[1], seq.times[-1]
    return {"user": turn.user, "session": turn.session, "turn": turn.turn,
            "temperature": turn.temperature, "prompt": seq.n_prompt,
            "cached": seq.stats()["cached"], "new": len(seq.new),
            "steps": len(seq.runs) - 1,                  # those behind the one that made the first
            "sent_s": sent - start, "first_token_s": first - sent, "decode_s": last - first}

def user_records(turns):
    """Turns -> for each user the tokens after each turn's first, their time and their speed."""
    users = []
    for user in sorted({t["user"] for t in turns}):
        mine = [t for t in turns if t["user"] == user]
        tokens, seconds = sum(t["new"] - 1 for t in mine), sum(t["decode_s"] for t in mine)
        users.append({"user": user, "tokens": tokens, "seconds": seconds,
                      "tokens_per_s": tokens / seconds})
    return users

# -- The table -----------------------------------------------------------------------------------
def percentile(values, share, higher_is_better):
    """The value that `share` percent of them reach or pass for the better; by nearest rank, so it
    is one of the values, and nothing is interpolated."""
    best_first = sorted(values, reverse=higher_is_better)
    return best_first[-(-share * len(values) // 100) - 1]

def columns(row):
    """The record of a row -> its figures, under the names of HEADS."""
    turns, wall = row["turns"], row["wall_s"]
    speeds = [u["tokens_per_s"] for u in row["users"]]
    waits = [t["first_token_s"] for t in turns]
    prompt, cached, new, steps = (sum(t[name] for t in turns)
                                  for name in ("prompt", "cached", "new", "steps"))
    return {"users": len(row["users"]),
            "speed_p50": percentile(speeds, 50, True), "speed_p90": percentile(speeds, 90, True),
            "ttft_p50": percentile(waits, 50, False), "ttft_p90": percentile(waits, 90, False),
            "total": (prompt + new) / wall, "cached": cached / wall,
            "input": (prompt - cached) / wall, "output": new / wall,
            "hit": cached / prompt, "tokens_a_step": (new - len(turns)) / steps,
            "draft": row["draft_s"] / wall, "forward": row["forward_s"] / wall,
            "host": (wall - row["draft_s"] - row["forward_s"]) / wall,
            "pages": max(row["held_pages"])}

def table(rows):
    """Rows of columns -> a Markdown table. Its total is the sum of the three parts as printed."""
    cells = [[head for head, _ in HEADS.values()], ["---:"] * len(HEADS)]
    for row in rows:
        parts = sum(round(row[name]) for name in ("cached", "input", "output"))
        shown = {**row, "total": parts}
        cells.append([form.format(shown[name]) for name, (_, form) in HEADS.items()])
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)

# -- The command line ----------------------------------------------------------------------------
def arguments(argv):
    """argv -> the parsed options, checked."""
    p = argparse.ArgumentParser("bench", description="An agent-like trace at rising concurrency.")
    p.add_argument("--model", default=nf.DOCS / "tiny", help="a checkpoint's folder (docs/tiny)")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8], metavar="USERS",
                   help="users at once, a row each (1 2 4 8)")
    p.add_argument("--sessions", type=int, default=1, help="of each user, one after the other (1)")
    p.add_argument("--turns", type=int, default=6, help="of a session (6)")
    p.add_argument("--system", type=int, default=300, help="ids that all sessions begin with (300)")
    for name, low, high, what in (("input", 60, 400, "of a tool's answer"),
                                  ("output", 16, 48, "of the model's")):
        p.add_argument(f"--{name}", type=int, nargs=2, default=[low, high],
                       metavar=("LEAST", "MOST"), help=f"ids {what} ({low} {high})")
    p.add_argument("--seed", type=int, default=0, help="of texts, sizes and sampling (0)")
    p.add_argument("--no-speculate", dest="speculate", action="store_false", help="make no drafts")
    p.add_argument("--no-replay", dest="replay", action="store_false", help="exact prefill")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the records there, too")
    args = p.parse_args(argv)
    args.concurrency = sorted(set(args.concurrency))     # a row again would find its own pages
    for name, least in (("concurrency", 1), ("sessions", 1), ("turns", 1), ("system", 0),
                        ("input", 1), ("output", 2)):
        values = getattr(args, name)
        values = values if isinstance(values, list) else [values]
        nf.need(min(values) >= least and values == sorted(values), f"--{name} is "
                f"{' '.join(map(str, values))}, must ascend from {least} at least")
    nf.need(not args.json or args.json.absolute().parent.is_dir(), f"--json {args.json}: there is "
            "no such folder")
    return args

def bench(args, command):
    """Run all rows, print the table, write the records."""
    began = time.perf_counter()
    engine = nf.Engine.load(args.model, max_batch=args.concurrency[-1], speculate=args.speculate,
                            replay=args.replay, progress=nf.progress)
    if nf.weight_bytes(engine.cfg, torch.float32) < 2**28:
        torch.set_num_threads(1)                 # on small tensors a second thread only costs
    text, records = held_out(engine), []
    nf.need(args.input[1] < len(text), f"--input {args.input[1]}: the text has {len(text)} ids")
    plans = [user_turns(args, text, user) for user in range(args.concurrency[-1])]
    prefixes = [engine.prompt.raw(f"{users} users") + text[: args.system]
                for users in args.concurrency]           # no row finds the pages of another
    check_fit(args, engine, plans, max(prefixes, key=len))
    engine.generate([text[:9]], nf.SamplingParams(9, ignore_eos=True))      # warm up
    for done, (users, prefix) in enumerate(zip(args.concurrency, prefixes), 1):
        row = drive(engine, prefix, plans[:users])
        records.append({"columns": columns(row), **row})
        nf.progress("rows", done, len(prefixes))
    config = {k: v for k, v in vars(args).items() if k not in ("json", "seed")}
    config |= {"model": Path(args.model).resolve().name, "device": engine.device,
               "dtype": str(engine.model.w.dtype)[6:], "threads": torch.get_num_threads()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    print(table(r["columns"] for r in records))
    print("\n{model}, {dtype} on {device}, threads: {threads}".format(**config),
          "Python {python}, torch {torch}".format(**versions), f"seed {args.seed}",
          f"{time.perf_counter() - began:.0f} s in all", sep="; ")
    if args.json:
        args.json.write_text(json.dumps({"command": command, "seed": args.seed, "config": config,
                                         "versions": versions, "rows": records}, indent=1) + "\n")

def main(argv=None):
    """Run the command line; -> exit status. A user's mistake ends in one line and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        bench(arguments(argv), shlex.join(["python", "docs/bench.py", *argv]))
        return 0
    except (ValueError, OSError, ImportError) as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    sys.exit(main())
