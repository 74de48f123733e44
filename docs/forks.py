"""Runs for chapter 12: what the changes of docs/12_fork.md do. All but hook run without, too.

    python docs/forks.py sampler        # or schedule, quantizer, lengths, hook
"""
import argparse
import lzma
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nanoflash import Engine, SamplingParams                                    # noqa: E402

def load(**kwargs):
    """docs/tiny, in fp32 on a CPU."""
    return Engine.load(HERE / "tiny", "cpu", torch.float32, **kwargs)

def sampler():
    """One seed, both rules, with and without drafts."""
    for drafts in (True, False):
        engine = load(speculate=drafts)
        for rule in ("coupled", "rejection"):
            params = SamplingParams(16, temperature=1.5, top_p=0.8, seed=3, verify=rule)
            text = engine.generate(["And God said"], params)[0].text
            print(f"{'drafts' if drafts else 'none':6} {rule:9} {text}")

def schedule():
    """The step that gives each of three prompts its first token, at 64 rows a step."""
    engine = load(chunk=64)
    prompts = [[7 + i % 900 for i in range(n)] for n in (300, 10, 10)]
    seqs, first = [engine.submit(p, SamplingParams(4, ignore_eos=True)) for p in prompts], {}
    for step in range(1, 20):
        first |= {s: step for s in engine.step() if s.new and s not in first}
    print("first tokens at steps", [first[s] for s in seqs])

def quantizer():
    """Loss on the beginnings of 8 held-out chapters."""
    chapters = lzma.open(HERE / "tiny" / "text.xz", "rt").read().split("\n\n")[12::25]
    engine, loss, n = load(speculate=False), 0.0, 0
    for chapter in chapters[:8]:
        ids = torch.tensor(engine.prompt.raw(chapter)[:512])
        loss += cross_entropy(engine.logits(ids.tolist())[:-1], ids[1:], reduction="sum").item()
        n += len(ids) - 1
    print(f"{loss / n:.4f} nats a token")

def lengths():
    """(drafts, accepted) of every step, and whether the text is that without drafts."""
    prompt, params = "And the king said unto", SamplingParams(40, temperature=0.7, seed=5)
    engine = load(deterministic=True)
    seq = engine.submit(prompt, params)
    while not seq.finish_reason:
        engine.step()
    plain = load(deterministic=True, speculate=False).generate([prompt], params)[0]
    print(*seq.runs[1:])
    print("the text without drafts:", seq.text == plain.text)

def hook():
    """What the head would make of the streams after every layer."""
    engine = load(speculate=False)
    model, ids = engine.model, engine.prompt.raw("And God said, Let there be light: and there was")

    def lens(plan, streams, batch):
        p = model.head(streams[-1:].mean(1))[0].softmax(-1).topk(3)
        best = (f"{engine.prompt.bytes(i).decode()!r} {x:.2f}" for x, i in zip(*map(list, p)))
        print(f"{plan.index} {plan.mode:8}", *best)
    model.hook = lens
    engine.logits(ids)

if __name__ == "__main__":
    runs = {f.__name__: f for f in (sampler, schedule, quantizer, lengths, hook)}
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("run", choices=runs)
    runs[p.parse_args().run]()
