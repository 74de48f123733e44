"""See it: what the model read and chose for every token that it made, a JSON line a token.

    python nanoflash.py --prompt "In the beginning" --trace trace.jsonl
    python docs/trace.py trace.jsonl                # a few lines a token, from that file

`attach` wraps the layers and three operations of an Engine and changes no result. A line has
    slot, token, id, text the request's slot, the number of its new token from 0, its id and text
    position              of the row that made it: the token before it
    step, rows, drafted   the step's number, its rows in all, whether the token was a draft
    layers                of each layer: layer, mode;
      window              first and last position of the window rows read
      source, groups      the layer whose latents are read, the groups selected
      scored              full and reindex layers: how many index keys were scored
      experts, weights    the experts chosen, with the router's weights
      gates               Engram layers: how far each stream's gate opened, 0 to 1
      bytes               what this row alone needs: window, latents, keys, engram (cache and table
                          rows), experts (of the routed ones chosen), other (all other weights)
An end mark, which is no output, has no line; nor do the draft's own stages. The Triton kernels do
not give the gates away.
"""
import argparse
import json
import sys
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels as K                                                             # noqa: E402
import nanoflash as nf                                                          # noqa: E402
from docs.plan import nbytes                                                    # noqa: E402

class Layer:
    """A Block that tells the Trace what passed through it."""
    def __init__(self, block, trace):
        self.block, self.trace = block, trace

    def __getattr__(self, name):
        return getattr(self.block, name)

    def __call__(self, h, y, mix, batch, cache, whole=True):
        """Block.__call__."""
        self.trace.seen, plan = {}, self.block.attn.plan
        out = self.block(h, y, mix, batch, cache, whole)
        if whole:                                        # rows that end here make no token
            self.trace.layers[plan.index] = {
                **self.trace.seen, "slot": batch.slot, "pos": batch.pos, "newest": batch.newest,
                "oldest": batch.oldest, "groups": batch.selection.get(plan.index_source),
                "blocks": batch.candidates if plan.candidates == "reader" else None}
        self.trace.seen = None
        return out

class Trace:
    """The hooks of one Engine, and the file that they write."""
    def __init__(self, engine, file):
        self.engine, self.file, self.c = engine, file, engine.cfg
        self.seen, self.layers, self.step = None, {}, 0
        self.expert, self.other = weight_bytes(self.c)
        engine.model.graphs = None                       # a graph calls no layer
        for i, block in enumerate(engine.model.blocks):
            engine.model.blocks[i] = Layer(block, self)
        K.router = self.watched(K.router, lambda chosen, weight: {
            "experts": chosen, "weights": weight})
        K.engram_gates = self.watched(K.engram_gates, lambda gates: {"gates": gates})
        self.advance, engine._advance = engine._advance, self.advanced

    def watched(self, f, record):
        """f, whose results are also recorded while a layer runs."""
        me = weakref.ref(self)                           # kernels.py outlives the engine
        def call(*args, **kwargs):
            out, trace = f(*args, **kwargs), me()
            if trace and trace.seen is not None:
                trace.seen.update(record(*out) if isinstance(out, tuple) else record(out))
            return out
        return call

    def advanced(self, work):
        """Engine._advance, and then a line for each token that it made."""
        before = [(seq, seq.slot, len(seq.ids), len(seq.runs)) for seq, _ in work]
        self.advance(work)
        self.step += 1
        for seq, slot, n, runs in before:
            for i, token in enumerate(seq.ids[n:]):
                accepted = seq.runs[-1][1] if len(seq.runs) > runs else 0
                line = {"slot": slot, "token": n + i - seq.n_prompt, "id": token,
                        "text": self.engine.prompt.bytes(token).decode(errors="replace"),
                        "position": n + i - 1, "step": self.step, "rows": sum(n for _, n in work),
                        "drafted": i < accepted,
                        "layers": [self.layer(p, slot, n + i - 1) for p in self.c.layers]}
                print(json.dumps(line, ensure_ascii=False), file=self.file, flush=True)

    def layer(self, plan, slot, pos):
        """What layer `plan` did for the row at pos of the sequence in slot."""
        seen, c = self.layers[plan.index], self.c
        row = int(((seen["slot"] == slot) & (seen["pos"] == pos)).nonzero()[0, 0])
        newest, oldest = int(seen["newest"][row]), int(seen["oldest"][row])
        out = {"layer": plan.index, "mode": plan.mode,
               "window": [max(oldest, newest - c.sliding_window + 1), newest]}
        n = {"window": out["window"][1] - out["window"][0] + 1}
        if plan.ratio:
            groups = seen["groups"][row]
            out |= {"source": plan.kv_source, "groups": groups[groups >= 0].tolist()}
            n["latents"] = len(out["groups"])
        if plan.mode in ("full", "reindex"):
            out["scored"] = n["keys"] = self.scored(plan, seen["blocks"], row, pos)
        out |= {"experts": seen["experts"][row].tolist(),
                "weights": [round(w, 4) for w in seen["weights"][row].tolist()]}
        if "gates" in seen:
            out["gates"] = [round(g, 4) for g in seen["gates"][row].tolist()]
        if plan.engram is not None:
            n["engram"] = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        d, di, w = c.head_dim, c.index_head_dim, c.engram_head_dim
        size = {"window": d + d // 32, "latents": d // 2 + d // 16, "keys": di // 2 + di // 32,
                "engram": w + w // 32}
        return out | {"bytes": {k: n[k] * size[k] for k in n} | {
            "experts": len(out["experts"]) * self.expert, "other": self.other[plan.index]}}

    def scored(self, plan, blocks, row, pos):
        """How many index keys the row was held against."""
        visible = (pos + 1) // plan.ratio
        if blocks is None:
            return visible
        size = self.c.candidate_block_size
        return sum(min(size, visible - b * size) for b in blocks[row].tolist() if b >= 0)

def weight_bytes(c):
    """Config -> stored bytes of one routed expert, and {layer: those of all its other weights}."""
    expert, other = 0, dict.fromkeys(range(len(c.layers)), 0)
    for name, spec in nf.inventory(c).items():
        part = name.split(".")
        if part[0] == "layers" and spec.family not in ("experts", "engram_tables"):
            other[int(part[1])] += nbytes(spec)
        elif name.startswith("layers.0.ffn.experts.0."):
            expert += nbytes(spec)
    return expert, other

def attach(engine, path):
    """From now on write a line to path for every token that the engine makes."""
    return Trace(engine, open(path, "w", encoding="utf-8"))

def show(path, tokens=None):
    """Print a few lines a token of such a file, of the first tokens or of all."""
    for line in map(json.loads, open(path, encoding="utf-8").readlines()[:tokens]):
        how = "draft accepted" if line["drafted"] else "drawn"
        print(f"{line['token']}: {line['text']!r} ({how}, step {line['step']} "
              f"of {line['rows']} rows)")
        for x in line["layers"]:
            read = ", ".join(f"{k} {n:,}" for k, n in x["bytes"].items())
            print(f"  {x['layer']:2} {x['mode']:8} experts {x['experts']}  bytes: {read}")

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=show.__doc__)
    p.add_argument("path")
    p.add_argument("--tokens", type=int, help="only so many (all)")
    try:
        show(**vars(p.parse_args()))
    except (OSError, ValueError) as e:
        sys.exit(f"trace.py: {e}")
