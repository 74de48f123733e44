"""Experts on several ranks against one: the same bits, and the bytes that they cost.

    python docs/ranks.py                 # docs/golden on 1, 2 and 4 processes of this machine
    python docs/ranks.py tiny 1 2        # docs/tiny, on 1 and 2

Every process runs `results` below, as it would under torchrun. What rank 0 found is held to what
one process alone found: ids of 1, 3 and 9 requests at once, greedy and sampled, and logits, with
and without drafts and redundant experts, before and after these are placed anew, with all tokens
sent to one rank, with packed tokens (which round) and with shared Engram tables.
"""
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import nanoflash as nf                                                          # noqa: E402
from docs.plan import memory                                                    # noqa: E402

ROUNDED = {"not deterministic": 1e-5, "sent as FP8": 0.1}     # parts of the norm, on fp32 engines

def prompts(c, n):
    """n prompts of random ids, of different lengths."""
    pick = torch.Generator().manual_seed(7)
    ids = [i for i in range(3, c.vocab_size) if i != c.image_token_id]
    return [[ids[j] for j in torch.randint(len(ids), (4 + 5 * i,), generator=pick)]
            for i in range(n)]

class Sent:
    """Counts what this rank sends to others: bytes seen on the wire, and by the formula."""

    def __init__(self, engine):
        self.engine, self.wire, self.formula, self.tokens = engine, 0, 0, 0
        self.exchange, self.moes = dist.all_to_all_single, {}

    def __enter__(self):
        dist.all_to_all_single, rank = self._counted, self.engine.ranks.rank
        self.router, nf.K.router = nf.K.router, self._routed
        self.moes = {id(b.ffn.gate): b.ffn for b in self.engine.model.blocks}
        self.rank = rank
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, nf.K.router = self.exchange, self.router

    def _counted(self, out, rows, got=None, sent=None):
        if sent is not None:                             # not the counts that go ahead
            self.wire += sum(n for r, n in enumerate(sent) if r != self.rank) * (
                rows[:1].nbytes if len(rows) else 0)
        return self.exchange(out, rows, got, sent)

    def _routed(self, x, gate, *args):
        """(D b + 8 k) bytes for each other rank that has an expert of the token, 4 D bytes back for
        each of these experts. b: bytes of an activation. (Counted where the token lives.)"""
        chosen, weight = self.router(x, gate, *args)
        moe, (T, D) = self.moes[id(gate)], x.shape
        b = moe.w.dtype.itemsize
        for t, experts in enumerate(chosen.tolist()):
            owners = [int(moe.replicas[e, (t + self.rank) % moe.copies[e]]) // moe.per_rank
                      for e in experts]
            away = [r for r in owners if r != self.rank]
            self.formula += len(set(away)) * (D * b + 8 * len(experts)) + 4 * D * len(away)
        self.tokens += T
        return chosen, weight

def held(engine):
    """Bytes of the matrices that this rank has dequantized."""
    blocks = engine.model.blocks + engine.draft.stages
    owners = [engine.model, engine.draft, *blocks, *(b.attn for b in blocks),
              *(b.ffn for b in blocks), *(b.engram for b in blocks if b.engram)]
    parts = [x for owner in owners for x in vars(owner).values()]
    parts += [x for b in blocks for x in b.ffn.up + b.ffn.down]
    sizes = {id(x.held): x.held.nbytes for x in parts if isinstance(x, nf.Linear)}     # one head
    return sum(sizes.values())

def results(folder):
    """{what: ids or logits} of one group of ranks."""
    torch.set_num_threads(1)
    out, size = {}, int(os.environ["WORLD_SIZE"])
    for redundant in (0, 4) if size > 1 else (0,):
        for drafts in (True, False):
            engine = nf.Engine.load(folder, "cpu", torch.float32, deterministic=True, max_batch=9,
                                    speculate=drafts, redundant=redundant)
            c, name = engine.cfg, f"{redundant} redundant, drafts {drafts}, "
            asked = prompts(c, 9)
            for n in (1, 3, 9):
                params = [nf.SamplingParams(6, 0.8 * (i % 2), seed=i, ignore_eos=True)
                          for i in range(n)]
                out[f"{name}{n} requests"] = [o.ids for o in engine.generate(asked[:n], params)]
                if redundant and n == 3:
                    engine.rebalance()
            if drafts:
                planned = memory(c, torch.float32, size, redundant)["weights"]
                nf.need(held(engine) == planned, f"{held(engine)} bytes held, {planned} planned")
                continue
            with Sent(engine) as sent:
                out[name + "logits"] = engine.logits(asked[8])
            total = [sum(x) for x in zip(*engine.ranks.gather(
                (sent.wire, sent.formula, sent.tokens)))]
            if size > 1:
                nf.need(total[0] == total[1], f"{total[0]} bytes sent, {total[1]} by the formula")
                out[name + "bytes a token and layer"] = round(total[0] / total[2], 1)
            for block in engine.model.blocks:            # all tokens to the experts of rank 0
                block.ffn.bias[:: 4][: c.num_experts_per_tok] += 100
            out[name + "all to one"] = engine.logits(asked[8])
            again = [o.ids for o in engine.generate(asked[:1], nf.SamplingParams(3))]
            out[name + "all to one, 1 request"] = again
    shared = nf.Engine.load(folder, "cpu", torch.float32, deterministic=True, shard_engram=True)
    out["shared Engram"] = shared.logits(asked[8])
    params = nf.SamplingParams(4, ignore_eos=True)       # with one request, all other ranks idle
    out["shared Engram, 1 request"] = [o.ids for o in shared.generate(asked[:1], params)]
    for how in ({}, {"packed": True}):                   # these round: near, not equal
        engine = nf.Engine.load(folder, "cpu", torch.float32, **how)
        out["sent as FP8" if how else "not deterministic"] = engine.logits(asked[4])
    return out

def spawn(n, command, **kwargs):
    """Start command as n ranks of this machine, as torchrun would; -> the processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                        "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen(command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, **kwargs)
            for r in range(n)]

def compare(one, many, n):
    """Print how the results of n ranks agree with those of one."""
    for name, x in many.items():
        y = one.get(name.replace("4 redundant", "0 redundant"))
        if isinstance(x, float):
            print(f"{n} ranks, {name}: {x}")
        elif name in ROUNDED:
            y, most = one["not deterministic"], ROUNDED[name]
            error = ((x - y).norm() / y.norm()).item()
            nf.need(error < most, f"{n} ranks, {name}: logits are off by {error} of their norm")
            print(f"{n} ranks, {name}: logits within {most:.0e} of their norm")
        else:
            same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
            nf.need(same, f"{n} ranks, {name}: not what one rank gives")
    print(f"{n} ranks: ids and logits of {len(many)} runs are those of one rank, bit by bit")

def main(argv):
    """Run on each number of ranks, one after the other; compare with the first, which is 1."""
    if os.environ.get("RANK"):
        found = results(argv[0])
        if os.environ["RANK"] == "0":
            torch.save(found, argv[1])
        return
    name, *sizes = argv or ["golden"]
    with tempfile.TemporaryDirectory() as folder:
        for n in map(int, sizes or (1, 2, 4)):
            path = f"{folder}/{n}"
            for p in spawn(n, [sys.executable, __file__, str(HERE / name), path]):
                nf.need(p.wait(600) == 0, f"a rank of {n} failed")
            found = torch.load(path)
            one = found if n == 1 else one                                      # noqa: F821
            if n > 1:
                compare(one, found, n)

if __name__ == "__main__":
    main(sys.argv[1:])
