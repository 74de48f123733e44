"""Measure what drafts bring to one user, and what bounds it: the cost of a step and its tokens.

    python docs/drafts.py                         # docs/tiny, 20 held-out prompts: two minutes
    python docs/drafts.py --model DIR --prompts 5 --temperature 0.7

Each prompt is bos and 63 ids of the text that docs/tiny was not trained on. It is continued by
80 tokens without drafts and with them, by turns, twice; the faster run counts. One thread, since on
small tensors a second one only costs.
"""
import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch                                                             # noqa: E402

import nanoflash as nf                                                   # noqa: E402
from docs.bench import held_out                                          # noqa: E402

def timed(engine, prompt, params):
    """-> seconds of the faster of two runs, then of its forwards and drafts; its steps."""
    runs = []
    for _ in range(2):
        engine.seconds, first = dict.fromkeys(engine.seconds, 0.0), engine.n_steps
        start = time.perf_counter()
        engine.generate([prompt], params)
        parts = engine.seconds["forward"], engine.seconds["draft"]
        runs.append((time.perf_counter() - start, *parts, engine.n_steps - first))
    return min(runs)

def main():
    """Parse the command line, measure, print."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", default=nf.DOCS / "tiny")
    p.add_argument("--prompts", type=int, default=20)
    p.add_argument("--temperature", type=float, default=0.0)
    args, n = p.parse_args(), 80
    engine = nf.Engine.load(args.model, max_batch=1)
    nf.need(engine.draft, f"{args.model} has no draft stages")
    torch.set_num_threads(1)
    text, draft, sums = held_out(engine), engine.draft, {}
    for i in range(args.prompts):
        at = len(text) * i // args.prompts
        for engine.draft in (None, draft):
            params = nf.SamplingParams(n, args.temperature, seed=i, ignore_eos=True)
            one = timed(engine, [engine.cfg.bos_token_id, *text[at : at + 63]], params)
            sums[engine.draft] = [a + b for a, b in zip(sums.get(engine.draft, [0] * 4), one)]
    (plain, forward, _, steps), (fast, verify, drafted, fewer) = sums[None], sums[draft]
    total, row = args.prompts * n, forward / steps
    print(f"{total / plain:.1f} tok/s without drafts, {total / fast:.1f} with them: "
          f"{plain / fast:.2f} times as fast")
    print(f"{total / fewer:.2f} tokens a step. A step of one row takes {row * 1000:.1f} ms; one with "
          f"its drafts to judge {verify / fewer / row:.2f} of that, to make them "
          f"{drafted / fewer / row:.2f}")

if __name__ == "__main__":
    main()
