"""What a checkpoint needs, from its config.json alone: `nanoflash.py --plan` prints this.

    python docs/plan.py docs/golden/config_released.json --ranks 16
"""
import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nanoflash as nf                                                          # noqa: E402

CARDS = 80, 141, 180, 288           # GiB of memory of a GPU

def size(n):
    """Bytes -> text."""
    unit = max(i for i in range(5) if i == 0 or n >= 1024**i)
    return f"{n:,.0f} B" if unit == 0 else f"{n / 1024**unit:.1f} {' KMGT'[unit]}iB"

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
        if spec.family != "vision" and not name.endswith((".scale", "embed.weight", "bias_vl")):
            n = math.prod(spec.shape) * (2 if spec.dtypes == ("I8",) else 1)
            if len(spec.shape) == 1 or spec.dtypes == ("F32",) or name.endswith("_weight"):
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
    """Config -> bytes that a rank holds as they are stored: experts, the rest, mapped tables."""
    experts = rest = tables = 0
    for spec in nf.inventory(c).values():
        if spec.family.endswith("tables"):
            tables += nbytes(spec)
        elif spec.family.endswith("experts"):
            experts += nbytes(spec) * nf.rank_share(c, spec.family, ranks, redundant)
        else:
            rest += nbytes(spec)
    return round(experts), rest, tables

def lines(c, dtype=torch.float32, ranks=1, redundant=0):
    """Config -> lines: inventory by family, cache, memory, what each rank holds and has room for."""
    nf.need(ranks >= 1 and (c.n_routed_experts + redundant) % ranks == 0,
            f"--ranks {ranks} does not divide the {c.n_routed_experts} experts of a layer"
            + f" and {redundant} redundant ones" * (redundant > 0))
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
    for card in CARDS:                                   # a tenth is left to activations
        left = 0.9 * card * 2**30 - experts - rest
        tokens = max(0, math.floor((left - 8 * one) / token))
        yield f"  {card} GiB a rank: " + (f"{tokens:,} tokens of 8 sequences" if tokens else "too small")

def plan(path, dtype=None, ranks=1, redundant=0):
    """Print the lines of a config.json or its folder."""
    print(*lines(nf.Config.load(path), dtype or torch.float32, ranks, redundant), sep="\n")

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=plan.__doc__)
    p.add_argument("path")
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--redundant-experts", dest="redundant", type=int, default=0)
    plan(**vars(p.parse_args()))
