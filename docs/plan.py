"""What a checkpoint needs, and what bounds its speed, from its config.json alone:
`nanoflash.py --plan` prints this.

    python docs/plan.py docs/golden/config_released.json --ranks 16 --context 100000
"""
import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nanoflash as nf                                                          # noqa: E402

class Card(NamedTuple):
    """A GPU, from its data sheet: memory (its GB taken as GiB, of GB10's 128 those that a system
    sees), TB/s of its bandwidth, dense FP8 TFLOP/s (of GB10 a quarter of its sparse FP4 ones)."""
    memory: int; bandwidth: float; speed: float

CARDS = {"H100": Card(80, 3.35, 1979), "H200": Card(141, 4.8, 1979), "B200": Card(180, 8.0, 4500),
         "MI355X": Card(288, 8.0, 5000), "GB10": Card(121, 0.273, 250)}

def size(n):
    """Bytes -> text."""
    unit = max(i for i in range(5) if i == 0 or n >= 1024**i)
    return f"{n:,.0f} B" if unit == 0 else f"{n / 1024**unit:.1f} {' KMGT'[unit]}iB"

def short(x):
    """A figure with two digits, or all of its whole ones."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"

def nbytes(spec):
    """Bytes of a tensor on disk."""
    return math.prod(spec.shape) * nf.DTYPES[spec.dtypes[0]].itemsize

def memory(c, dtype=torch.float32, ranks=1, redundant=0):
    """Config -> bytes by use, for activations (and dequantized weights) of dtype.

    held: vectors and mHC matrices, fp32. weights: all matrices, dequantized, of the experts a
    rank's share. largest: the largest one while --lazy uses it. Images do not count, nor do
    embeddings and tables, which stay mapped.
    """
    out = {"held": 0, "weights": 0, "largest": 0}
    for name, spec in nf.inventory(c).items():
        if spec.family not in ("vision", "engram_tables") and name != "embed.weight" and (
                not name.endswith((".scale", "bias_vl"))):
            n = math.prod(spec.shape) * (2 if spec.dtypes == ("I8",) else 1)
            if "markov_head.embed" in name:              # bf16, looked up
                out["held"] += 2 * n
            elif len(spec.shape) == 1 or spec.dtypes == ("F32",) or name.endswith("_weight"):
                out["held"] += 4 * n
            else:
                share = nf.rank_share(c, spec.family, ranks, redundant)
                out["weights"] += n * dtype.itemsize * share
                use = nbytes(spec) + n * (dtype.itemsize + 4 * (dtype.itemsize < 4))
                out["largest"] = max(out["largest"], use)
    return {use: round(n) for use, n in out.items()}

def per_sequence(c):
    """Config -> bytes of a running sequence beside its global cache: window pages, open pairs."""
    pages = -(-c.sliding_window // nf.PAGE) + 2
    windows = pages * nf.PAGE * (c.head_dim + c.head_dim // 32) * len(c.layers + c.stages)
    pairs = [i for i in c.kv_source_layer_ids if c.layers[i].ratio == 2]
    return windows + len(pairs) * nf.RING * 2 * c.head_dim * 4

def packed(c, ranks, redundant):
    """Config -> bytes that a rank holds as they are stored: experts, the rest, mapped tables.
    Images do not count."""
    experts = rest = tables = 0
    for spec in nf.inventory(c).values():
        if spec.family.endswith("tables"):
            tables += nbytes(spec)
        elif spec.family.endswith("experts"):
            experts += nbytes(spec) * nf.rank_share(c, spec.family, ranks, redundant)
        elif spec.family != "vision":
            rest += nbytes(spec)
    return round(experts), rest, tables

class Work(NamedTuple):
    """Bytes to read and operations (a multiplication and an addition are two)."""
    bytes: float; ops: float

    def __add__(self, other):
        return Work(self.bytes + other.bytes, self.ops + other.ops)

    def seconds(self, card, n=1):
        """The least time on n cards, all shared evenly: the longer of reading and computing."""
        return max(self.bytes / card.bandwidth, self.ops / card.speed) / n / 1e12

def weights(c):
    """Config -> {"layers.3", "mtp.0" or "head": (Work of its dense matrices for one row, Work of
    all its routed experts)}."""
    out = {}
    for name, spec in nf.inventory(c).items():
        part = name.split(".")
        part = part[0] if part[0] == "head" else ".".join(part[:2])
        n = 0 if name.endswith(".scale") else math.prod(spec.shape) * (1 + (spec.dtypes == ("I8",)))
        if part == "head" or part.startswith(("layers.", "mtp.")) and "embed." not in name:
            both = out.setdefault(part, [Work(0, 0), Work(0, 0)])
            both[".experts." in name] += Work(nbytes(spec), 2 * n)
    return out

def multiply(dense, experts, rows, share=0.0):
    """Work of a part for so many rows, each with that share of its experts. Of E experts, each row
    with k of its own choice, E (1 - (1 - k / E)^rows) are expected to be read."""
    return Work(dense.bytes + experts.bytes * (1 - (1 - share) ** rows),
                rows * (dense.ops + experts.ops * share))

def attention(c, p, context):
    """Work of one row of layer p after so many tokens: window (in a draft stage its block, too),
    selected latents, index keys."""
    d, di = c.head_dim, c.index_head_dim
    seen = min(context, c.sliding_window) + c.dspark_block_size * (p.mode == "draft")
    groups = context // p.ratio if p.ratio else 0
    few = min(groups, c.index_topk)
    scored = groups if p.mode in ("full", "reindex") else 0
    if p.candidates == "reader":
        scored = min(groups, c.candidate_topk_blocks * c.candidate_block_size)
    return Work(seen * (d + d // 32) + few * (d // 2 + d // 16) + scored * (di // 2 + di // 32),
                4 * c.num_attention_heads * d * (seen + few) + 2 * c.index_n_heads * di * scored)

def decode(c, parts, sequences, drafts, context):
    """Work of a step: 1 + drafts rows a sequence, and the draft's block if there are any. Weights
    are read once for all rows, cache rows by every row. parts: of `weights`."""
    rows, block = sequences * (1 + drafts), sequences * c.dspark_block_size
    work = multiply(*parts["head"], rows)
    for p in c.layers:
        one = attention(c, p, context)
        share = c.num_experts_per_tok / c.n_routed_experts
        work += multiply(*parts[f"layers.{p.index}"], rows, share)
        work += Work(one.bytes * rows, one.ops * rows)
    if drafts:
        work += multiply(*parts["head"], block)
        for i, p in enumerate(c.stages):
            one = attention(c, p, context)
            share = c.dspark_num_experts_per_tok / c.dspark_n_routed_experts
            work += multiply(*parts[f"mtp.{i}"], block, share)
            work += Work(one.bytes * block, one.ops * block)
    return work

def prefill(c, parts, context, last):
    """Operations of one prompt token, halfway the context, that ends before layer `last`."""
    share = c.num_experts_per_tok / c.n_routed_experts
    return sum(multiply(*parts[f"layers.{p.index}"], 1, share).ops
               + attention(c, p, context // 2).ops for p in c.layers[:last])

def speed(c, ranks, context):
    """Config -> lines: what bounds a decode step and a prompt on the CARDS."""
    parts, block = weights(c), c.dspark_block_size if c.stages else 0
    yield (f"speed: at best, all shared evenly over {ranks} GPU{'s' * (ranks > 1)}, "
           f"after {context:,} tokens")
    for sequences, drafts in dict.fromkeys(((1, 0), (1, block), (64, block))):
        work = decode(c, parts, sequences, drafts, context)
        times = (f"{name} {short(1e3 * work.seconds(card, ranks))}" for name, card in CARDS.items())
        yield (f"  a step of {sequences} x {1 + drafts} rows: {size(work.bytes)}, "
               f"{short(work.ops / 1e9)} GFLOP; ms: {', '.join(times)}")
    last = next((p for p in c.layers[::-1] if p.mode == "full"), None)      # as Transformer has it
    replay = (("with replay", last.index),) if last and last.ratio == 1 else ()
    for text, last in (*replay, ("exact", None)):
        ops = prefill(c, parts, context, last)
        rates = (f"{name} {short(1e9 * card.speed / ops)}" for name, card in CARDS.items())
        yield (f"  a prompt token, {text}: {short(ops / 1e9)} GFLOP; "
               f"thousand tok/s/GPU: {', '.join(rates)}")

def lines(c, dtype=torch.float32, ranks=1, redundant=0, context=32768):
    """Config -> lines: inventory by family, cache, memory, what each rank holds, room, speed."""
    nf.need(ranks >= 1 and (c.n_routed_experts + redundant) % ranks == 0,
            f"--ranks {ranks} does not divide the {c.n_routed_experts} experts of a layer"
            + f" and {redundant} redundant ones" * (redundant > 0))
    nf.need(0 <= redundant <= c.n_routed_experts * (ranks - 1),
            f"--redundant-experts {redundant} do not fit {ranks} ranks")
    nf.need(context >= 0, f"--context {context} is negative")
    context = min(context, c.max_position_embeddings)
    specs, families, modes = nf.inventory(c), {}, [p.mode for p in c.layers]
    for spec in specs.values():
        families.setdefault(spec.family, []).append(nbytes(spec))
    kinds = ", ".join(f"{modes.count(x)} {x}" for x in dict.fromkeys(modes))
    yield f"{len(modes)} layers ({kinds}) and {c.num_nextn_predict_layers} draft stages"
    yield f"checkpoint: {len(specs):,} tensors, {size(sum(map(sum, families.values())))}"
    for family, n in families.items():
        yield f"  {family:20}{len(n):>8,} tensors {size(sum(n)):>10}"
    m, one, most = memory(c, dtype, ranks, redundant), per_sequence(c), c.max_position_embeddings
    page = nf.page_bytes(c)
    token = page / nf.PAGE
    yield f"cache: {token:g} bytes of global cache a token, {size(page)} a page of {nf.PAGE}"
    yield f"  {size(one)} more a sequence: its window pages, its open pairs"
    yield f"  {size(token * most + one)} for the full context, {most:,} tokens"
    yield (f"memory in {str(dtype)[6:]}{' a rank' * (ranks > 1)}: {size(m['held'] + m['weights'])} "
           "with weights dequantized")
    yield (f"  {size(m['held'] + m['largest'])} with --lazy, which dequantizes them as they run"
           + " (in bf16 through fp32)" * (dtype == torch.bfloat16))
    experts, rest, tables = packed(c, ranks, redundant)
    yield f"ranks: {ranks}, each with {size(experts + rest)} packed, {size(experts)} of it experts,"
    yield f"  and {size(tables)} of Engram tables mapped from disk"
    for name, card in CARDS.items():                     # a tenth is left to activations
        left = 0.9 * card.memory * 2**30 - experts - rest
        tokens = max(0, math.floor((left - 8 * one) / max(token, 1e-9)))
        yield f"  {name}, {card.memory} GiB: " + (
            f"{tokens:,} tokens of 8 sequences" if tokens else "too small")
    yield from speed(c, ranks, context)

def plan(path, dtype=None, ranks=1, redundant=0, context=32768):
    """Print the lines of a config.json or its folder."""
    c = nf.Config.load(path)
    print(*lines(c, dtype or torch.float32, ranks, redundant, context), sep="\n")

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=plan.__doc__)
    p.add_argument("path")
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--redundant-experts", dest="redundant", type=int, default=0)
    p.add_argument("--context", type=int, default=32768, help="tokens before a step (32768)")
    try:
        plan(**vars(p.parse_args()))
    except (OSError, ValueError) as e:
        sys.exit(f"plan.py: {e}")
