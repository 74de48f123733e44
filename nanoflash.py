"""nanoflash: DeepSeek-V4.1-Flash and its published checkpoint in two files, read in an evening.

    python nanoflash.py --prompt "In the beginning"          # docs/tiny, on any CPU
    python nanoflash.py --model DIR --prompt TEXT --chat     # a downloaded checkpoint, unchanged
    python nanoflash.py --model DIR --plan                   # what it needs, no weight is opened

What is unusual about this model, and the section that shows it:
    Config       layers that see a window only, encoder (1 latent per 2 tokens), decoder (1 per 1)
    Checkpoint   FP8 and FP4 weights with power-of-two scales; 189 GiB of Engram tables stay on disk
    Prompt       chat marks are ids between pieces of text, so that no text can forge one
    Cache        890 bytes of packed FP4 a token for all layers, FP8 window rows in pages
    Model        mHC (4 residual streams), CSA2 (a few layers make keys and selections for all),
                 CED (the decoder's one KV is projected once, at its first layer), Engram, MoE
    Draft        DSpark: three stages guess five tokens at once, the model judges them in one step
    Engine       requests join and leave between steps; one forward for prefill, decode, judging
    Main         the command line

Four ideas keep it small and right. One forward: a batch is ragged (ids, pos, slot [T]), whatever
mix of prompts and decode rows it holds. State is addressed by position; lengths decide what is
visible. Every operation stands in kernels.py, once. A row's result depends on that row alone,
which `deterministic` makes true to the last bit.

Dimension letters: T tokens (rows of a batch), D hidden, H heads, d head dim, r rotated channels,
S streams, W window, K selected groups (K.name is kernels.name), E experts, k experts a token,
Hi index heads, di index head dim, G output groups, N n-gram length, V vocabulary.
A *group* is the `ratio` tokens that share a latent, a *slot* a sequence's row in the page tables.
"""
from __future__ import annotations

import argparse, codecs, itertools, json, math, mmap, operator, os, sys, time, warnings
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, normalizers

import kernels as K

DEFAULT_MODEL = Path(__file__).resolve().parent / "docs" / "tiny"

# ================================================================================================
# Config: config.json, checked, and one LayerPlan per layer
# ================================================================================================
# keys that change the arithmetic, with the one value that is computed here (if absent, too)
REQUIRED = {
    "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "attention_bias": False, "n_shared_experts": 1,
    "num_key_value_heads": 1, "tie_word_embeddings": False, "expert_dtype": "fp4",
    "quantization_config.quant_method": "fp8", "quantization_config.fmt": "e4m3",
    "quantization_config.weight_block_size": (32, 32), "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.activation_scheme": "dynamic", "rope_scaling.rope_type": "yarn",
}
# keys that say nothing about the arithmetic of text
INERT = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "initializer_range", "attention_dropout", "pad_token_id", "auto_map",
}
RENAMED = {"rope_scaling.type": "rope_scaling.rope_type", "engram_pad_id": "engram_pad_token_id"}
# a mechanism's keys stand together: all of this prefix, and the one that turns it on
SWITCHES = {"candidate_": "candidate_source_layer_id", "engram_": "engram_layer_ids",
            "dspark_": "num_nextn_predict_layers"}
VISION = ("hidden_size", "intermediate_size", "patch_size", "downsample_ratio", "num_hidden_layers")
KINDS = {              # annotation -> what it stands for, and whether a value is that
    "int": ("a whole number from 0 below 2^31", lambda x: type(x) is int and 0 <= x < 2**31),
    "float": ("a number from 0 below 2^31", lambda x: type(x) in (int, float) and 0 <= x < 2**31),
    "tuple": ("a list of whole numbers from 0 below 2^31",
              lambda x: type(x) is tuple and all(map(KINDS["int"][1], x))),
    "dict": ("an object with whole numbers as sizes",
             lambda x: type(x) is dict and all(KINDS["int"][1](x.get(n, 0)) for n in VISION)),
}

def need(condition, message):
    """Raise ValueError(message) unless the condition holds: the one way bad input is refused."""
    if not condition:
        raise ValueError(message)

@dataclass(frozen=True)
class LayerPlan:
    """What one layer does with the compressed KV (CSA2), from the schedule in config.json."""
    index: int
    ratio: int                        # 0 window only, 2 encoder, 1 decoder
    mode: str                         # "window": no compressed KV; "full": makes latents, keys and
                                      # a selection; "reindex": a selection only; "reuse": nothing;
                                      # "draft": a draft stage, numbered on from the layers
    kv_source: int | None = None      # the layer whose latents and index keys this one reads
    index_source: int | None = None   # the layer whose selection this one attends to
    candidates: str | None = None     # "source" publishes blocks, "reader" scores in them only
    engram: int | None = None         # number of its Engram table

@dataclass(frozen=True)
class Config:
    """config.json under its own names (rope_scaling.x is rope_scaling_x); `layers` is derived."""
    vocab_size: int; hidden_size: int; rms_norm_eps: float                      # width
    hc_mult: int; hc_sinkhorn_iters: int; hc_eps: float                         # residual streams
    num_attention_heads: int; head_dim: int; sliding_window: int                # attention
    q_lora_rank: int; o_groups: int; o_lora_rank: int; max_position_embeddings: int
    qk_rope_head_dim: int; rope_theta: float; compress_rope_theta: float        # rotation
    rope_scaling_factor: float; rope_scaling_beta_fast: float; rope_scaling_beta_slow: float
    rope_scaling_original_max_position_embeddings: int
    num_hidden_layers: int; compress_ratios: tuple                              # compressed KV
    kv_source_layer_ids: tuple; index_source_layer_ids: tuple
    index_n_heads: int; index_head_dim: int; index_topk: int
    n_routed_experts: int; num_experts_per_tok: int; moe_intermediate_size: int        # experts
    routed_scaling_factor: float; swiglu_limit: float
    bos_token_id: int; eos_token_id: int; image_token_id: int | None = None     # ids
    candidate_source_layer_id: int | None = None                                # two-level top-k
    candidate_topk_blocks: int = 0; candidate_block_size: int = 0
    engram_layer_ids: tuple = (); engram_num_embeddings: tuple = ()             # n-gram memory
    engram_max_ngram_size: int = 0; engram_n_heads: int = 0; engram_head_dim: int = 0
    engram_vocab_size: int = 0; engram_pad_token_id: int = 0; engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0; dspark_target_layer_ids: tuple = ()      # draft stages
    dspark_block_size: int = 0; dspark_noise_token_id: int = 0; dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0; dspark_num_experts_per_tok: int = 0
    vision_config: dict = field(default_factory=dict)            # sizes only: images are never read
    layers: tuple = field(init=False, default=())
    stages: tuple = field(init=False, default=())

    @classmethod
    def load(cls, path):
        """Read config.json, composite with `text_config` or flat; path: the file or its folder."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"no config.json at {path}: a checkpoint is a local folder")
        raw = _json(path)
        try:
            return cls.read(raw)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None

    @classmethod
    def read(cls, raw):
        """A config.json's dict -> Config; unknown keys and values not honoured are refused."""
        known = {f.name.replace("rope_scaling_", "rope_scaling."): f for f in fields(cls) if f.init}
        values = {}
        for key, value in _flatten(raw):
            key, value = RENAMED.get(key, key), tuple(value) if isinstance(value, list) else value
            if key in REQUIRED:
                need(value == REQUIRED[key], f"{key} is {value!r}; this engine computes "
                     f"{REQUIRED[key]!r} only")
            elif key in known:
                need(values.setdefault(key, value) == value, f"{key} is both {values[key]!r} and "
                     f"{value!r}")
            else:
                need(key in INERT, f"unknown key {key!r}")
        lost = [k for k, f in known.items() if k not in values
                and f.default is f.default_factory is MISSING]
        for prefix, switch in SWITCHES.items():
            group = {switch, *(k for k in known if k.startswith(prefix))}
            if any(values.get(k) for k in group):
                lost += sorted(group - values.keys())
        need(not lost, f"it lacks {', '.join(lost)}")
        return cls(**{known[k].name: v for k, v in values.items()})

    def __post_init__(self):
        for f in fields(self):
            value, kind = getattr(self, f.name), f.type.split()[0]
            if f.init and not (value is None and "None" in f.type):
                what, is_one = KINDS[kind]
                need(is_one(value), f"{f.name} is {value!r:.60}, not {what}")
                need(value != 0 or f.default == 0 or f.name.endswith("_id"), f"{f.name} is 0, it "
                     "must be positive")
        self._check_sizes()
        object.__setattr__(self, "layers", _schedule(self))
        stages = range(len(self.layers), len(self.compress_ratios))
        object.__setattr__(self, "stages", tuple(LayerPlan(i, 0, "draft") for i in stages))

    def _check_sizes(self):
        for name, unit in (("head_dim", 32), ("index_head_dim", 32), ("hidden_size", 32),
                           ("moe_intermediate_size", 32), ("engram_head_dim", 32),
                           ("qk_rope_head_dim", 2), ("num_attention_heads", self.o_groups)):
            need(getattr(self, name) % unit == 0, f"{name} {getattr(self, name)} is not a multiple "
                 f"of {unit} (its quantizer's block, its pairs or its groups)")
        for large, *smalls in (
                ("head_dim", "qk_rope_head_dim"), ("index_head_dim", "qk_rope_head_dim"),
                ("max_position_embeddings", "sliding_window", "index_topk"),
                ("n_routed_experts", "num_experts_per_tok"),
                ("dspark_n_routed_experts", "dspark_num_experts_per_tok"),
                ("vocab_size", "engram_compressed_vocab_size", "bos_token_id", "eos_token_id",
                 "engram_pad_token_id", "dspark_noise_token_id", "image_token_id")):
            for small in smalls:
                a, b = getattr(self, small) or 0, getattr(self, large)
                need(a + small.endswith("_id") <= b, f"{small} {a} is beyond {large} {b}")
        n, tables = len(self.engram_layer_ids), len(self.engram_num_embeddings)
        need(n == tables, f"{n} engram layers but {tables} engram_num_embeddings")
        need(not n or self.engram_max_ngram_size >= 2, "engram_max_ngram_size is below 2")
        need(min(self.rope_theta, self.compress_rope_theta) > 1, "a rope theta is not above 1")

def _json(path):
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from None

def _flatten(raw):
    """(key, value) pairs: text_config's like the top level's, inner ones as outer.inner."""
    need(isinstance(raw, dict), f"it holds {raw!r:.40} where an object should be")
    for key, value in raw.items():
        if key == "text_config":
            yield from _flatten(value)
        elif key in ("rope_scaling", "quantization_config") and isinstance(value, dict):
            yield from ((f"{key}.{inner}", v) for inner, v in value.items())
        elif value is not None or key == "candidate_source_layer_id":      # null: one-level top-k
            yield key, value

def _schedule(c):
    """compress_ratios and the source lists -> one LayerPlan per backbone layer, checked."""
    L, ratios, cand = c.num_hidden_layers, c.compress_ratios, c.candidate_source_layer_id
    stages = c.num_nextn_predict_layers
    need(len(ratios) == L + stages, f"compress_ratios has {len(ratios)} entries for {L} layers and "
         f"{stages} draft stages")
    need(set(ratios[L:]) <= {0}, "a draft stage must have compress ratio 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids",
                 "dspark_target_layer_ids"):
        ids = getattr(c, name)
        need(all(i < L for i in ids) and list(ids) == sorted(set(ids)), f"{name} {list(ids)} must "
             f"ascend within 0..{L - 1}")
    need(cand is None or cand in c.index_source_layer_ids and c.candidate_topk_blocks
         and c.candidate_block_size, f"candidate source {cand} is no index source, or the number "
         "or size of its blocks is 0")
    kv, index, plans = None, None, []
    for i, ratio in enumerate(ratios[:L]):
        is_kv, is_index = i in c.kv_source_layer_ids, i in c.index_source_layer_ids
        kv, index = (i if is_kv else kv), (i if is_index else index)
        reader = is_index and cand is not None and i > cand
        for good, why in (           # all are evaluated before the first is judged
                (ratio in (0, 1, 2), f"has compress ratio {ratio}, not 0, 1 or 2"),
                (ratio or not (is_kv or is_index), "is listed as a source but has ratio 0"),
                (not ratio or kv is not None, "is an index source without keys: no KV source is "
                 "at or before it" if is_index else "reads compressed KV before any KV source"),
                (is_index or not is_kv, "is a KV source but no index source"),
                (not ratio or ratio == ratios[kv or 0], f"has ratio {ratio}, not that of its KV "
                 f"source {kv}"),
                (not reader or plans[cand].kv_source == kv, f"scores the keys of layer {kv}, the "
                 f"candidate source {cand} others")):
            need(good, f"layer {i} {why}")
        mode = ("full" if is_kv else "reindex" if is_index else "reuse") if ratio else "window"
        plans.append(LayerPlan(i, ratio, mode, kv if ratio else None, index if ratio else None,
                               "source" if i == cand else "reader" if reader else None,
                               c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None))
    return tuple(plans)

# ================================================================================================
# Checkpoint: the expected inventory, the mapped files, the memory plan
# ================================================================================================
# Every tensor of the published layout. A line: part, family, format, then
# `name shape` items; the letters of shapes are those of `inventory`.
LAYOUT = """
top            head           bf16  embed.weight V D; head.weight V D; norm.weight D
block          norms          bf16  attn_norm.weight D; ffn_norm.weight D
block          norms          bf16  attn.q_norm.weight Q; attn.kv_norm.weight d
block          mHC            f32   hc_attn_fn M SD; hc_attn_base M; hc_attn_scale 3
block          mHC            f32   hc_ffn_fn M SD; hc_ffn_base M; hc_ffn_scale 3
block          attention      fp8   attn.wq_a Q D; attn.wq_b Hd Q; attn.wkv d D
block          attention      fp8   attn.wo_a GO Hd/G; attn.wo_b D GO
block          attention      f32   attn.attn_sink H
block          router         bf16  ffn.gate.weight E D
block          router         f32   ffn.gate.bias E; ffn.gate.bias_vl E
block          shared_expert  fp8   ffn.shared_experts.w1 F D; ffn.shared_experts.w2 D F
block          shared_expert  fp8   ffn.shared_experts.w3 F D
expert         experts        fp4   w1 F D; w2 D F; w3 F D
index          indexer        fp8   attn.indexer.wq_b HI Q
index          indexer        bf16  attn.indexer.weights_proj.weight Hi D
full           indexer        bf16  attn.indexer.wk.weight di d; attn.indexer.k_norm.weight di
full           compressor     bf16  attn.compressor.wkv.weight d D; attn.compressor.norm.weight d
pair           compressor     bf16  attn.compressor.wgate.weight d D
engram         engram_tables  rows  engram.embed R w
engram         engram         fp8   engram.wkv S1D Cw
engram         engram         bf16  engram.q_weight S D; engram.k_weight S D
first_draft    draft_heads    fp8   main_proj D nD
first_draft    draft_heads    bf16  main_norm.weight D
last_draft     draft_heads    bf16  norm.weight D; markov_head.embed.weight V m
last_draft     draft_heads    bf16  markov_head.head.weight V m
last_draft     draft_heads    any   confidence_head.proj.weight 1 D+m
vision         vision         bf16  vision.patch_embed.proj.weight v 3pp; vision.norm.weight v
vision         vision         bf16  vision.patch_embed.proj.bias v; aligner.w1.weight D av
vision         vision         bf16  aligner.w1.bias D; aligner.w2.weight D D; aligner.w2.bias D
vision         vision         bf16  image_start D; image_end D; image_newline D
vision_block   vision         bf16  norm1.weight v; norm2.weight v; attn.wqkv.weight 3v v
vision_block   vision         bf16  attn.wqkv.bias 3v; attn.wo.weight v v; attn.wo.bias v
vision_block   vision         bf16  mlp.w1.weight 2i v; mlp.w2.weight v i
"""
PLAIN = {"bf16": ("BF16",), "f32": ("F32",), "any": ("F32", "BF16")}         # accepted types
# a .weight of that type with that many columns a byte; a .scale for so many rows x 32 columns
PACKED = {"fp8": ("F8_E4M3", 1, 32), "fp4": ("I8", 2, 1), "rows": ("F8_E4M3", 1, 1)}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8,
          "F8_E4M3": K.E4M3, "F8_E8M0": K.E8M0}

class Spec(NamedTuple):
    """One tensor as it must stand in the file; `dtypes` are the accepted ones, the usual first."""
    dtypes: tuple
    shape: tuple
    family: str

    @property
    def nbytes(self):
        """Bytes on disk."""
        return math.prod(self.shape) * DTYPES[self.dtypes[0]].itemsize

def inventory(c):
    """Config -> {name: Spec} of every tensor, text, draft and image, that a checkpoint holds."""
    D, S, H, d, m, w = (c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim,
                        c.dspark_markov_rank, c.engram_head_dim)
    Hi, di, stages = c.index_n_heads, c.index_head_dim, c.num_nextn_predict_layers
    v, i, patch, down, vision_depth = (c.vision_config.get(x, 0) for x in VISION)
    letters = {
        "V": c.vocab_size, "D": D, "S": S, "H": H, "d": d, "Q": c.q_lora_rank, "M": (2 + S) * S,
        "SD": S * D, "S1D": (S + 1) * D, "Hd": H * d, "Hd/G": H * d // c.o_groups, "w": w, "m": m,
        "GO": c.o_groups * c.o_lora_rank, "F": c.moe_intermediate_size, "Hi": Hi, "di": di,
        "HI": Hi * di, "Cw": (c.engram_max_ngram_size - 1) * c.engram_n_heads * w, "D+m": D + m,
        "nD": len(c.dspark_target_layer_ids) * D, "v": v, "3v": 3 * v, "i": i, "2i": 2 * i,
        "av": down**2 * v, "3pp": 3 * patch**2, "1": 1, "3": 3}
    parts, specs = {}, {}
    for part, family, form, items in (x.split(None, 3) for x in LAYOUT.strip().split("\n")):
        parts.setdefault(part, []).append((family, form, [x.split() for x in items.split(";")]))

    def add(at, part, draft=""):
        for family, form, items in parts[part]:
            for name, *shape in items:
                shape = tuple(letters[x] for x in shape)
                if form in PLAIN:
                    specs[at + name] = Spec(PLAIN[form], shape, draft + family)
                    continue
                (dtype, per_byte, rows), (n_out, n_in) = PACKED[form], shape
                for end, kind, size in ((".weight", dtype, (n_out, n_in // per_byte)),
                                        (".scale", "F8_E8M0", (-(-n_out // rows), -(-n_in // 32)))):
                    specs[at + name + end] = Spec((kind,), size, draft + family)
    add("", "top")
    for s, p in enumerate([*c.layers, *[None] * stages]):               # None: a draft stage
        at, draft = (f"layers.{s}.", "") if p else (f"mtp.{s - len(c.layers)}.", "draft_")
        letters["E"] = c.n_routed_experts if p else c.dspark_n_routed_experts
        letters["R"] = c.engram_num_embeddings[p.engram] if p and p.engram is not None else 0
        add(at, "block", draft)
        for e in range(letters["E"]):
            add(f"{at}ffn.experts.{e}.", "expert", draft)
        for part, there in (("index", p and p.mode in ("full", "reindex")),
                            ("full", p and p.mode == "full"),
                            ("pair", p and p.mode == "full" and p.ratio == 2),
                            ("engram", letters["R"]),
                            ("first_draft", at == "mtp.0."),
                            ("last_draft", at == f"mtp.{stages - 1}.")):
            if there:
                add(at, part)
    for n in range(vision_depth):
        add(f"vision.blocks.{n}.", "vision_block")
    if vision_depth:
        add("", "vision")
    return specs

class Checkpoint:
    """The safetensors files of a folder, mapped read-only and held to the inventory.

    Mapped by ourselves, since the safetensors package maps a file writable. Linux refuses that for
    a file larger than memory, and one Engram table is a single 94 GiB tensor.
    """

    def __init__(self, folder, cfg):
        self.folder, self.specs, self.at = Path(folder), inventory(cfg), {}
        for shard, names in self._shards().items():
            here = self._open(self.folder / shard)
            wrong = here.keys() ^ names if names else ()
            need(not wrong, f"{shard} and model.safetensors.index.json disagree on {_some(wrong)}")
            self.at |= here
        missing, extra = self.specs.keys() - self.at.keys(), self.at.keys() - self.specs.keys()
        need(not missing, f"{folder}: missing {_some(missing)}")
        need(not extra, f"{folder}: unexpected {_some(extra)}")
        for name, spec in self.specs.items():
            _, dtype, shape, _ = self.at[name]
            need(dtype in spec.dtypes and shape == spec.shape, f"{name}: {dtype} {list(shape)} in "
                 f"the file, expected {' or '.join(spec.dtypes)} {list(spec.shape)}")

    def _shards(self):
        """{file name: the names that the index puts there, or None for one file without index}."""
        index, shards = self.folder / "model.safetensors.index.json", {}
        if not index.is_file():
            return {"model.safetensors": None}
        listed = _json(index)
        listed = listed.get("weight_map") if isinstance(listed, dict) else None
        need(isinstance(listed, dict), f"{index} has no weight_map")
        for name, x in listed.items():
            need(isinstance(x, str) and Path(x).name == x != "..", f"{index.name}: {name} lies in "
                 f"{x!r}, which is no file of this folder")
            shards.setdefault(x, set()).add(name)
        return shards

    def _open(self, path):
        """Map one file; -> {name: (map, dtype, shape, first byte)}."""
        if not path.is_file():
            raise FileNotFoundError(f"no {path.name} in {path.parent}")
        size, out, ends = path.stat().st_size, {}, []
        try:
            with open(path, "rb") as f:
                n = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(min(n, size)))
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            for name in header.keys() - {"__metadata__"}:
                dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
                begin, end = (operator.index(x) + 8 + n for x in header[name]["data_offsets"])
                out[name] = mapped, dtype, shape, begin
                ends.append((begin, end))
                need(dtype not in DTYPES or end - begin == DTYPES[dtype].itemsize * math.prod(
                     map(operator.index, shape)), f"the bytes of {name} do not fit its shape")
            # each tensor begins where the one before it ends
            ends = [8 + n, *itertools.chain(*sorted(ends)), size]
            need(ends[::2] == ends[1::2], "its tensors do not fill it one after the other")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{path} is damaged or no safetensors file: {e}") from None
        return out

    def packed(self, name):
        """The tensor as it lies in the file: a read-only view of the mapping, nothing is copied."""
        mapped, dtype, shape, begin = self.at[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapped, dtype=DTYPES[dtype], count=math.prod(shape),
                                    offset=begin).view(shape)

    def dequantized(self, name, dtype, device="cpu"):
        """`name` or `name`.weight -> its exact values in dtype; its file's pages are let go."""
        names = [n for n in (name, name + ".weight", name + ".scale") if n in self.at]
        weight, scale = [self.packed(n).to(device) for n in names] + [None] * (2 - len(names))
        check_scale(name, scale)
        out = K.dequantize_weight(weight, scale, dtype)
        out = out.clone() if out.data_ptr() == weight.data_ptr() else out   # no view of the map
        need(out.sum(dtype=torch.float32).isfinite(), f"{name} holds NaN or infinity")
        for n in names:
            self.at[n][0].madvise(mmap.MADV_DONTNEED)
        return out

    def read_at_random(self, name):
        """Tell the system not to read ahead in this table: tokens want single rows."""
        for n in (name + ".weight", name + ".scale"):
            mapped, _, _, begin = self.at[n]
            into = begin % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_RANDOM, begin - into, into + self.specs[n].nbytes)

def check_scale(name, scale):
    """Refuse e8m0 byte 0xFF, which is NaN: a damaged file would otherwise spread silently."""
    bad = scale is not None and (scale.view(torch.uint8) == 255).any()
    need(not bad, f"{name}: its scale holds byte 0xFF, which is NaN in e8m0")

def _some(names):
    return ", ".join(sorted(names)[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)

def _loaded(name):
    """Is it in the sums of `memory`? Not images, nor what stays mapped on a CPU."""
    return not (name.startswith(("vision.", "aligner.", "image_", "embed."))
                or name.endswith(("markov_head.embed.weight", ".scale", "bias_vl"))
                or ".engram.embed." in name)

def memory(c, dtype=torch.float32, specs=None):
    """Config -> bytes by use, for activations (and dequantized weights) of dtype.

    held: vectors and mHC matrices in fp32. weights: all matrices, dequantized. largest: the largest
    one while --lazy uses it. token, page: global cache. sequence: window pages and open pairs.
    """
    out = {"held": 0, "weights": 0, "largest": 0}
    for name, spec in (specs or inventory(c)).items():
        if _loaded(name):
            n = math.prod(spec.shape) * (2 if spec.dtypes == ("I8",) else 1)
            if len(spec.shape) == 1 or spec.dtypes == ("F32",) or name.endswith("_weight"):
                out["held"] += 4 * n
            else:
                out["weights"] += n * dtype.itemsize
                use = spec.nbytes + n * (dtype.itemsize + 4 * (dtype.itemsize < 4))
                out["largest"] = max(out["largest"], use)
    d, di = c.head_dim, c.index_head_dim
    ratios = [c.layers[i].ratio for i in c.kv_source_layer_ids]
    out["page"] = sum((d // 2 + d // 16 + di // 2 + di // 32) * PAGE // r for r in ratios)
    out["token"] = out["page"] / PAGE
    out["sequence"] = ((-(-c.sliding_window // PAGE) + 2) * PAGE
                       * (len(c.layers) + len(c.stages)) * (d + d // 32)
                       + ratios.count(2) * RING * 2 * d * 4)
    return out

def fits(m, device):
    """Do the dequantized weights of memory() `m` fit on the device, with a fifth to spare?"""
    there = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device == "cpu" else
             torch.cuda.mem_get_info()[1])
    return m["held"] + m["weights"] <= 0.8 * there

def plan(c, dtype=torch.float32, ranks=1):
    """The text of --plan: inventory by family, cache, memory, bytes a rank. Opens no weights."""
    counts = [n for n in (c.n_routed_experts, c.dspark_n_routed_experts) if n]
    need(ranks >= 1 and not any(n % ranks for n in counts), f"--ranks {ranks} does not divide the "
         f"experts of a layer, {' and '.join(map(str, counts))} with the draft's")
    specs = inventory(c)
    families, m, modes = {}, memory(c, dtype, specs), [p.mode for p in c.layers]
    for spec in specs.values():
        count, total = families.get(spec.family, (0, 0))
        families[spec.family] = count + 1, total + spec.nbytes
    total = sum(b for _, b in families.values())
    experts = sum(b for f, (_, b) in families.items() if f.endswith("experts"))
    tables = families.get("engram_tables", (0, 0))[1]
    kinds = ", ".join(f"{modes.count(x)} {x}" for x in dict.fromkeys(modes))
    each = total - tables - experts + experts // ranks
    return "\n".join([
        f"{len(modes)} layers ({kinds}) and {c.num_nextn_predict_layers} draft stages",
        f"checkpoint: {len(specs):,} tensors, {_size(total)}",
        *(f"  {f:20}{n:>8,} tensors {_size(b):>10}" for f, (n, b) in families.items()),
        f"cache: {m['token']:g} bytes of global cache a token, {_size(m['page'])} a page of {PAGE}",
        f"  {_size(m['sequence'])} more a sequence: its window pages, its open pairs",
        f"  {_size(m['token'] * c.max_position_embeddings + m['sequence'])} for the full context, "
        f"{c.max_position_embeddings:,} tokens",
        f"memory in {str(dtype)[6:]}: {_size(m['held'] + m['weights'])} with weights dequantized, "
        + ("which fit here" if fits(m, "cpu") else "too much for this machine"),
        f"  {_size(m['held'] + m['largest'])} with --lazy, which dequantizes them as they run"
        + " (in bf16 through fp32)" * (dtype == torch.bfloat16),
        f"ranks: {ranks}, each with {_size(each)} packed, {_size(experts // ranks)} of it experts,",
        f"  and {_size(tables)} of Engram tables mapped from disk"])

def _size(n):
    unit = max(i for i in range(5) if i == 0 or n >= 1024**i)
    return f"{n:,.0f} B" if unit == 0 else f"{n / 1024**unit:.1f} {' KMGT'[unit]}iB"

# ================================================================================================
# Prompt: text to ids and back
# ================================================================================================
class Mark(str):
    """A template mark, told from text by its type: user text is never scanned for marks."""

BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK = MARKS = tuple(map(Mark, (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>", "<｜User｜>",
    "<｜Assistant｜>", "<｜latest_reminder｜>", "<think>", "</think>")))
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "latest_reminder": REMINDER}
EFFORT = {"low": 50, "high": 75, "max": 100}
EFFORT_TEXT = ("Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
               "reasoning)\n\n")
FORMAT_TEXT = ("\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to "
               "reply:\n{}")

# byte-level BPE writes each byte as a printable character: {character: byte}
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE = {chr(c): bytes([b]) for c, b in zip(
    [*_SHOWN, *range(256, 512)], [*_SHOWN, *(b for b in range(256) if b not in _SHOWN)])}

def chat_pieces(messages, thinking=True, effort="high", response_format=None):
    """The V4.1 chat encoding: messages -> list of Mark and text pieces.

    messages: dicts of role ("system", "user", "assistant", "latest_reminder") and content; a last
    assistant message with prefix=True is left open for the model to go on. effort: low, high, max
    or 1..100. response_format: a JSON schema as a string, or "json_object". Past reasoning is
    dropped.
    """
    need(messages and isinstance(messages, (list, tuple)), "a chat needs a list with at least one "
         "message")
    effort = EFFORT.get(effort, effort) if isinstance(effort, str) else effort
    need(type(effort) is int and 1 <= effort <= 100, f"effort is {effort!r}, not 1..100, low, high "
         "or max")
    for i, m in enumerate(messages):
        good = isinstance(m, dict) and isinstance(m.get("content"), str) and not m.get("tool_calls")
        need(good and m.get("role") in ROLES, f"message {i}: only {', '.join(ROLES)} with a text "
             "as content are supported")
    first = messages[0]["role"] == "system"
    head = EFFORT_TEXT.format(effort) * bool(thinking) + (messages[0]["content"] if first else "")
    if response_format:
        head += FORMAT_TEXT.format('{"type": "json_object"}' if response_format == "json_object"
                                   else response_format)
    pieces = [BOS, SYSTEM, head] if thinking or first or head else [BOS]
    role = None
    for i, m in enumerate(messages[int(first) :], int(first)):
        before, role = role, m["role"]
        if role == before == "user":
            pieces[-1] += "\n\n" + m["content"]
            continue
        pieces.append(ROLES[role])
        if role == "assistant":
            is_open = bool(m.get("prefix")) and i == len(messages) - 1
            reasoning = [THINK, m.get("reasoning_content") or ""] if is_open and thinking else []
            pieces += [*reasoning, END_THINK]
        pieces.append(m["content"])
        if role == "assistant":
            if is_open:
                return pieces
            pieces.append(EOS)
    return pieces + [ASSISTANT, THINK if thinking else END_THINK]

class Prompt:
    """The checkpoint's tokenizer.json, once whole (to decode) and once without its added tokens."""

    def __init__(self, folder, bos):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}")
        spec, self.bos = _json(path), bos
        try:
            self.whole = Tokenizer.from_str(json.dumps(spec))
            self.plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
        except Exception as e:                           # the package raises nothing narrower
            raise ValueError(f"{path} is no tokenizer: {e}") from None
        self.added = {t["content"]: t["id"] for t in spec.get("added_tokens", ())}

    def encode(self, text):
        """Text -> ids. Marks in it stay plain text."""
        try:
            return self.plain.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError):
            raise ValueError(f"the prompt {ascii(text[:40])} is not valid Unicode text") from None

    def raw(self, text):
        """bos + text -> ids."""
        return [self.bos, *self.encode(text)]

    def chat(self, messages, thinking=True, effort="high", response_format=None):
        """`chat_pieces` -> ids. Refused, with their names, where the tokenizer lacks the marks."""
        pieces = chat_pieces(messages, thinking, effort, response_format)
        lost = sorted({p for p in pieces if isinstance(p, Mark)} - self.added.keys())
        need(not lost, f"this checkpoint's tokenizer has no chat marks: {', '.join(lost)}")
        return sum(([self.added[p]] if isinstance(p, Mark) else self.encode(p) for p in pieces), [])

    def bytes(self, token):
        """The bytes of one id; b"" for an id that the tokenizer does not know."""
        shown = self.whole.id_to_token(token) or ""
        if shown in self.added:
            return shown.encode()
        return b"".join(BYTE.get(ch, ch.encode()) for ch in shown)

    def decoder(self):
        """A function ids -> text that holds back an unfinished character; the last call ends it."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids, last=False: utf8.decode(b"".join(map(self.bytes, ids)), last)

# ================================================================================================
# Cache: all that changes between tokens
# ================================================================================================
PAGE = 128          # tokens a page, of global cache and of window rows alike
RING = 8            # open-pair rows a sequence keeps, by position % 8: a step may take 7 back

class Sequence:
    """One request: what it asked for, its tokens, and the cache that it owns while it runs."""

    def __init__(self, ids, params, decoder=None):
        self.ids = ids                   # [n] prompt, then generated tokens; written by Engine.step
        self.n_prompt = len(ids)
        self.n_cached = 0                # tokens that went through the model: what is visible
        self.params = params
        self.slot = None                 # row of the page tables and rings while it runs
        self.pages = []                  # global pages, in order of position; written by Cache
        self.window = {}                 # position // PAGE -> window page; written by Cache
        self.drafts = []                 # proposed ids behind `ids`, until the step has judged them
        self.proposals = None            # the draft's logits [n, V] of them, for verify="rejection"
        self.runs = []                   # (proposed, accepted) of every step that made a token
        self.decoder = decoder           # ids -> text (Prompt.decoder)
        self.text = ""                   # what may be shown so far
        self.finish_reason = None        # "stop", "length", "cancelled" or "error"
        self.times = [time.perf_counter()]       # creation, then every token

    @property
    def new(self):
        """Generated ids."""
        return self.ids[self.n_prompt :]

    @property
    def decoding(self):
        """Is its last id alone what the model has not seen?"""
        return len(self.ids) - self.n_cached == 1 and self.n_cached >= self.n_prompt

    def stats(self):
        """Counts and speed of a finished request, for --stats."""
        first, last = self.times[:2][-1], self.times[-1]
        rate = (len(self.times) - 2) / (last - first) if last > first else 0.0
        out = {"prompt": self.n_prompt, "cached": 0, "new": len(self.new),
               "first_token_s": round(first - self.times[0], 3), "tokens_per_s": round(rate, 1),
               "pages": -(-self.n_cached // PAGE)}
        if any(n for n, _ in self.runs):                 # the first token comes without drafts
            made = [1 + accepted for _, accepted in self.runs[1:]]
            out["tokens_a_step"] = round(sum(made) / len(made), 2)
            out["accepted"] = [                          # share, by place in the block
                round(sum(a > i for _, a in self.runs) / sum(n > i for n, _ in self.runs), 2)
                for i in range(max(n for n, _ in self.runs))]
        return out

class Pool:
    """Packed rows uint8 [page, rows a page, bytes]; table int64 [slot, nth page] -> page, or -1."""

    def __init__(self, table, n_pages, per_page, n_bytes):
        self.table, self.per_page = table, per_page
        self.rows = torch.empty(n_pages, per_page, n_bytes, dtype=torch.uint8, device=table.device)

    def _at(self, slot, i):
        """Flat row of the i-th; -1 (no row, no page) gives some row, which the caller masks."""
        i, n = i.clamp(min=0), self.per_page
        return (self.table[slot, i // n] * n + i % n).clamp(min=0)

    def write(self, slot, i, rows):
        """rows [n, bytes] to the rows i [n] (positions or groups) of the sequences in slot [n]."""
        self.rows.flatten(0, 1)[self._at(slot, i)] = rows

    def read(self, slot, i):
        """slot and i broadcast to [...] -> [..., bytes]; anything where no row i is held."""
        return self.rows.flatten(0, 1)[self._at(slot, i)]

class Cache:
    """All that changes between tokens. A write goes to the row of a position; lengths decide what
    is read, so nothing is ever undone.

    window   per layer: d + d/32 bytes a token               written by every attention layer, and
             for draft stages by Draft.commit
    latents  per KV source: d/2 + d/16 bytes a group         written by its compressor
    keys     per KV source: di/2 + di/32 bytes a group       likewise
    ring     per ratio-2 source: fp32 [slot, position % 8, 2, d], kv and gate of the last tokens
    """

    def __init__(self, c, max_batch, max_pages, chunk, device):
        d, di, self.W = c.head_dim, c.index_head_dim, c.sliding_window
        # room for every running sequence's window and for one step's rows: never runs out
        n_window = max_batch * (-(-self.W // PAGE) + 2) + -(-chunk // PAGE)
        width = min(max_pages, -(-c.max_position_embeddings // PAGE))
        self.global_table, self.window_table = torch.full((2, max_batch, width), -1, device=device)
        self.window = [Pool(self.window_table, n_window, PAGE, d + d // 32)
                       for _ in [*c.layers, *c.stages]]
        ratio = {i: c.layers[i].ratio for i in c.kv_source_layer_ids}
        self.latents, self.keys = (
            {i: Pool(self.global_table, max_pages, PAGE // r, n) for i, r in ratio.items()}
            for n in (d // 2 + d // 16, di // 2 + di // 32))
        self.ring = {i: torch.empty(max_batch, RING, 2, d, device=device)
                     for i, r in ratio.items() if r == 2}
        self.n_pages, self.free_slots = max_pages, list(range(max_batch))[::-1]
        self.free_pages, self.free_window = (list(range(n))[::-1] for n in (max_pages, n_window))

    def lacks(self, seq, n):
        """Global pages that seq needs for its next n positions and does not have."""
        return max(0, -(-(seq.n_cached + n) // PAGE) - len(seq.pages))

    def admit(self, seq):
        """Take a slot, and global pages for the ids of seq; False if they are not free."""
        if not self.free_slots or self.lacks(seq, len(seq.ids)) > len(self.free_pages):
            return False
        seq.slot = self.free_slots.pop()
        self._take(seq, len(seq.ids))
        return True

    def _take(self, seq, n):
        for _ in range(self.lacks(seq, n)):
            self.global_table[seq.slot, len(seq.pages)] = self.free_pages[-1]
            seq.pages.append(self.free_pages.pop())

    def extend(self, seq, n):
        """Give seq the pages of its next n positions; enough must be free."""
        self._take(seq, n)
        for i in range(seq.n_cached // PAGE, (seq.n_cached + n - 1) // PAGE + 1):
            if i not in seq.window:
                seq.window[i] = self.window_table[seq.slot, i] = self.free_window.pop()

    def trim(self, seq):
        """Take back the window pages that no later query sees, the draft's one row further back."""
        for i in [i for i in seq.window if (i + 1) * PAGE <= seq.n_cached - self.W]:
            self.window_table[seq.slot, i] = -1
            self.free_window.append(seq.window.pop(i))

    def release(self, seq):
        """Take back everything; harmless when seq holds nothing."""
        if seq.slot is not None:
            self.global_table[seq.slot] = self.window_table[seq.slot] = -1
            self.free_slots.append(seq.slot)
            self.free_pages += seq.pages
            self.free_window += seq.window.values()
            seq.slot, seq.pages, seq.window = None, [], {}

class Batch:
    """The rows of one forward, sequence after sequence, and what layers publish to later layers."""

    def __init__(self, work, device, ngram=None):
        """work: (sequence, n) pairs, the next n uncached tokens of each, its drafts at the end.

        ngram: (class of each token id [V], class of the pad, N) where the model has Engram layers.
        """
        def tensor(x):
            return torch.tensor(x, dtype=torch.int64, device=device)
        self.spans, ids, pos, slot, classes = [], [], [], [], []
        for seq, n in work:
            a = seq.n_cached
            self.spans.append((seq.slot, len(ids), len(ids) + n, a))   # slot, rows, position
            tokens = seq.ids + seq.drafts
            ids += tokens[a : a + n]
            pos += range(a, a + n)
            slot += [seq.slot] * n
            if ngram:                    # windows of N classes; before position 0 stands the pad
                token_class, pad, N = ngram
                past = token_class[tensor(tokens[max(0, a - N + 1) : a + n])]
                past = F.pad(past, (N - 1 + n - len(past), 0), value=pad)
                classes.append(past.unfold(0, N, 1).flip(1))
        self.ids, self.pos, self.slot = tensor(ids), tensor(pos), tensor(slot)      # [T] each
        self.classes = torch.cat(classes) if ngram else None     # [T, N], a token's own class first
        self.follows = F.pad(self.slot[1:] == self.slot[:-1], (1, 0))     # row t - 1 is pos - 1
        # the rows that a ring keeps: more would meet in one place, and such a scatter is undefined
        self.tail = tensor([i for _, a, b, _ in self.spans for i in range(max(a, b - RING), b)])
        self.selection = {}              # index source -> int64 [T, K] groups, ascending, -1 padded
        self.candidates = None           # bool [T, blocks], from the candidate source
        self.rope = {}                   # compressed layer? -> (cos, sin) [T, r/2], by Transformer
        self.features = []               # [T, D] of each target layer, for the draft

# ================================================================================================
# Model: one forward for prefill, chunks, decode and verification
# ================================================================================================
ROWS = 32           # rows whose keys are gathered or scored at once: bounds memory, changes nothing

@dataclass(frozen=True)
class Weights:
    """The checkpoint's tensors on their way into the model, and how to compute with them."""
    checkpoint: Checkpoint
    device: str
    dtype: torch.dtype                           # of activations and dequantized weights
    block: int | None                            # 16 in deterministic mode, see kernels.linear
    lazy: bool                                   # dequantize at every use

    def vector(self, name):
        """A norm, bias, sink or mHC parameter: fp32, always held."""
        return self.checkpoint.dequantized(name, torch.float32, self.device)

class Linear:
    """x [T, in] -> fp32 [T, out]. Its matrix is dequantized once, or with --lazy at every use."""

    def __init__(self, name, weights):
        self.name, self.w, self.held = name, weights, None
        self.held = None if weights.lazy else self.weight()

    def weight(self):
        """[out, in] in the activations' dtype."""
        return (self.w.checkpoint.dequantized(self.name, self.w.dtype, self.w.device)
                if self.held is None else self.held)

    def __call__(self, x):
        return K.linear(x, self.weight(), self.w.block)

class HyperConnection:
    """One mHC site: reads the streams, runs its sublayer, writes the streams."""

    def __init__(self, c, weights, prefix, site):
        self.fn, self.scale, self.base = (weights.vector(f"{prefix}hc_{site}_{n}")
                                          for n in ("fn", "scale", "base"))
        self.norm, self.c, self.w = weights.vector(f"{prefix}{site}_norm.weight"), c, weights

    def __call__(self, h, pre, sublayer):
        """h [T, S, D], pre [T, S] from the PREVIOUS site -> h', and pre for the next."""
        c = self.c
        pre_next, post, comb = K.hc_mix(h, self.fn, self.scale, self.base, c.rms_norm_eps, c.hc_eps,
                                        c.hc_sinkhorn_iters, self.w.block)
        x = K.rms_norm(K.hc_collapse(h, pre), self.norm, c.rms_norm_eps).to(self.w.dtype)
        return K.hc_expand(h, sublayer(x).to(self.w.dtype), post, comb), pre_next

class Compressor:
    """Full layers only: one latent and one index key per group, for every layer that reads them."""

    def __init__(self, c, plan, weights, prefix):
        self.c, self.plan, self.dtype = c, plan, weights.dtype
        self.wkv = Linear(prefix + "compressor.wkv", weights)
        self.wgate = Linear(prefix + "compressor.wgate", weights) if plan.ratio == 2 else None
        self.norm = weights.vector(prefix + "compressor.norm.weight")
        self.wk = Linear(prefix + "indexer.wk", weights)
        self.k_norm = weights.vector(prefix + "indexer.k_norm.weight")
        self.frequencies = K.rope_frequencies(c, True).to(weights.device)

    def __call__(self, x, batch, cache):
        """x [T, D], normed -> nothing; writes the groups that these tokens complete."""
        latent, done = self.wkv(x), slice(None)
        if self.plan.ratio == 2:
            latent, done = self._pair(latent, self.wgate(x), batch, cache.ring[self.plan.index])
        pos, slot = batch.pos[done], batch.slot[done]
        group = pos // self.plan.ratio
        eps, rotate = self.c.rms_norm_eps, K.rotation(group * self.plan.ratio, self.frequencies)
        latent = K.rms_norm(latent, self.norm, eps).to(self.dtype)
        key = K.rms_norm(self.wk(latent), self.k_norm, eps).to(self.dtype)   # before its rotation
        i, latent, key = self.plan.index, K.rope(latent, *rotate), K.rope(key, *rotate)
        cache.latents[i].write(slot, group, K.quantize_latent(latent))
        cache.keys[i].write(slot, group, K.quantize_index(key))

    def _pair(self, kv, gate, batch, ring):
        """kv, gate fp32 [T, d] -> latents [n, d] and the n rows that complete a pair.

        A pair's first token is the row before, or, at the seam of a chunk, in the ring.
        """
        now = torch.stack([kv, gate], 1)                                    # [T, 2, d]
        before = ring[batch.slot, (batch.pos - 1) % RING]                   # read, then written
        before = torch.where(batch.follows[:, None, None], now.roll(1, 0), before)
        ring[batch.slot[batch.tail], batch.pos[batch.tail] % RING] = now[batch.tail]
        done = (batch.pos % 2 == 1).nonzero()[:, 0]
        return K.pool_pair(before[done], now[done]), done

class Indexer:
    """Full and reindex layers: the K groups that a token may attend to."""

    def __init__(self, c, plan, weights, prefix):
        self.c, self.plan, self.block = c, plan, weights.block
        self.wq_b = Linear(prefix + "indexer.wq_b", weights)
        self.weights_proj = Linear(prefix + "indexer.weights_proj", weights)

    def __call__(self, x, qr, batch, cache):
        """x [T, D], qr [T, q_lora_rank] (the query before wq_b) -> int64 [T, K], -1 padded."""
        c, ratio = self.c, self.plan.ratio
        q = K.rope(self.wq_b(qr).unflatten(1, (c.index_n_heads, -1)), *batch.rope[True])
        q = K.dequantize_index(K.quantize_index(q))                         # [T, Hi, di]
        w = self.weights_proj(x) * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        n_visible = (batch.pos + 1) // ratio
        if self.plan.candidates == "source":
            n_blocks = -(-int(n_visible.max()) // c.candidate_block_size)
            batch.candidates = torch.zeros(len(q), n_blocks, dtype=torch.bool, device=q.device)
        selected = torch.full((len(q), c.index_topk), -1, device=q.device)
        for slot, first, end, start in batch.spans:
            group = torch.arange((start + end - first) // ratio, device=q.device)
            keys = K.dequantize_index(cache.keys[self.plan.kv_source].read(slot, group))
            for a in range(first, end if len(keys) else first, ROWS):     # no keys: none selected
                rows = slice(a, min(a + ROWS, end))
                scores = self.scores(q[rows], w[rows], keys, n_visible[rows], batch, rows)
                selected[rows] = K.mask_to_index(K.topk_mask(scores, c.index_topk), c.index_topk)
        return selected

    def scores(self, q, w, keys, n_visible, batch, rows):
        """Rows of one sequence -> fp32 [rows, n], -inf where invisible or no candidate."""
        size, n = self.c.candidate_block_size, len(keys)
        scores = K.index_scores(q, w, keys, self.block)
        hidden = torch.arange(n, device=q.device) >= n_visible[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.plan.candidates == "source":
            blocks = K.candidate_blocks(scores, n_visible, size, self.c.candidate_topk_blocks)
            batch.candidates[rows, : blocks.shape[1]] = blocks
        if self.plan.candidates == "reader":
            allowed = batch.candidates[rows].repeat_interleave(size, 1)[:, :n]
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores

class Attention:
    """Window rows and selected latents under one softmax; K = V, one head of them."""

    def __init__(self, c, plan, weights, prefix):
        self.c, self.plan, self.w = c, plan, weights
        self.wq_a, self.wq_b, self.wkv, self.wo_a, self.wo_b = (
            Linear(prefix + n, weights) for n in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
        self.q_norm, self.kv_norm, self.sink = (
            weights.vector(prefix + n) for n in ("q_norm.weight", "kv_norm.weight", "attn_sink"))
        self.compressor = Compressor(c, plan, weights, prefix) if plan.mode == "full" else None
        self.indexer = (Indexer(c, plan, weights, prefix) if plan.mode in ("full", "reindex")
                        else None)

    def __call__(self, x, batch, cache):
        """x [T, D] normed -> fp32 [T, D]; writes its window rows, and its groups if it is full."""
        plan, rotate = self.plan, batch.rope[self.plan.ratio > 0]
        qr, q = self.queries(x, *rotate)
        cache.window[plan.index].write(batch.slot, batch.pos, self.window_rows(x, *rotate))
        if self.compressor:
            self.compressor(x, batch, cache)     # first: a token sees the group that it completes
        if self.indexer:
            batch.selection[plan.index] = self.indexer(x, qr, batch, cache)
        o = torch.cat([self.attend(q[a : a + ROWS], batch, cache, slice(a, a + ROWS))
                       for a in range(0, len(q), ROWS)])
        return self.output(o, *rotate)

    def queries(self, x, cos, sin):
        """x [T, D] -> qr [T, q_lora_rank], which the indexer shares, and q fp32 [T, H, d]."""
        qr = K.rms_norm(self.wq_a(x), self.q_norm, self.c.rms_norm_eps).to(self.w.dtype)
        return qr, K.rope(self.wq_b(qr).unflatten(1, (self.c.num_attention_heads, -1)), cos, sin)

    def window_rows(self, x, cos, sin):
        """x [T, D] -> packed rows [T, d + d/32]: K and V alike."""
        kv = K.rms_norm(self.wkv(x), self.kv_norm, self.c.rms_norm_eps).to(self.w.dtype)
        return K.quantize_fp8(K.rope(kv, cos, sin))

    def output(self, o, cos, sin):
        """o [T, H, d] -> fp32 [T, D]."""
        groups = self.c.o_groups
        o = K.rope(o, cos, -sin).to(self.w.dtype).flatten(1).chunk(groups, 1)        # K = V: undo
        wo_a = self.wo_a.weight().chunk(groups)         # block-diagonal, [o_lora_rank, H*d/G] each
        o = [K.linear(x, block, self.w.block) for x, block in zip(o, wo_a)]
        return self.wo_b(torch.cat(o, 1).to(self.w.dtype))

    def attend(self, q, batch, cache, rows):
        """q [n, H, d] of these rows -> fp32 [n, H, d]. Always W + K keys, so that bits depend on
        the row alone."""
        plan, slot, pos = self.plan, batch.slot[rows, None], batch.pos[rows, None]
        at = pos + torch.arange(1 - self.c.sliding_window, 1, device=pos.device)   # [n, W]
        kv = K.dequantize_fp8(cache.window[plan.index].read(slot, at))                # [n, W, d]
        if plan.ratio:
            group = batch.selection[plan.index_source][rows]                            # [n, K]
            latents = K.dequantize_latent(cache.latents[plan.kv_source].read(slot, group))
            kv, at = torch.cat([kv, latents], 1), torch.cat([at, group], 1)
        return K.attend(q, kv, at >= 0, self.sink)

class MoE:
    """Routed experts and one shared expert."""

    def __init__(self, c, weights, prefix, n_experts, k):
        self.c, self.w, self.k = c, weights, k
        self.gate = Linear(prefix + "gate", weights)
        self.bias = weights.vector(prefix + "gate.bias")

        def expert(p):
            return [Linear(f"{prefix}{p}.{n}", weights) for n in ("w1", "w3", "w2")]
        self.experts = [expert(f"experts.{e}") for e in range(n_experts)]
        self.shared = expert("shared_experts")

    def __call__(self, x):
        """x [T, D] normed -> fp32 [T, D], added in the router's order, highest score first."""
        chosen, weight = K.route(self.gate(x), self.bias, self.k, self.c.routed_scaling_factor)
        out = torch.zeros(len(x), self.k, x.shape[1], device=x.device)
        for e in chosen.unique().tolist():
            row, choice = (chosen == e).nonzero(as_tuple=True)
            out[row, choice] = self.expert(self.experts[e], x[row], weight[row, choice, None])
        return sum(out.unbind(1), self.expert(self.shared, x, 1.0))

    def expert(self, expert, x, weight):
        """w2 @ (weight * swiglu(w1 @ x, w3 @ x)): x [n, D] -> fp32 [n, D]."""
        w1, w3, w2 = expert
        return w2((weight * K.swiglu(w1(x), w3(x), self.c.swiglu_limit)).to(self.w.dtype))

def token_classes(prompt, c):
    """Token id -> class int64 [V]: ids whose text is equal once normalized share a class."""
    n = normalizers
    normalize = n.Sequence([n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase(),
                            n.Replace(Regex(r"[ \t\r\n]+"), " "), n.Replace(Regex("^ $"), "\ue000"),
                            n.Strip(), n.Replace("\ue000", " ")]).normalize_str
    classes, out = {}, []
    for i in range(c.vocab_size):
        text = prompt.whole.decode([i], skip_special_tokens=False)
        key = prompt.whole.id_to_token(i) if "\ufffd" in text else normalize(text) or text
        out.append(classes.setdefault(key, len(classes)))
    need(len(classes) == c.engram_compressed_vocab_size, f"the tokenizer has {len(classes)} token "
         f"classes, config.json says {c.engram_compressed_vocab_size}: Engram rows would be wrong")
    return torch.tensor(out)

class Engram:
    """n-gram memory: hashed rows of a mapped table, gated into every stream."""

    def __init__(self, c, plan, weights, prefix):
        self.c, self.w, self.name = c, weights, prefix + "embed"
        weights.checkpoint.read_at_random(self.name)
        self.wkv = Linear(prefix + "wkv", weights)
        self.q_weight, self.k_weight = (weights.vector(f"{prefix}{n}_weight") for n in "qk")
        self.primes = torch.tensor(K.engram_primes(c)[plan.engram], device=self.w.device)
        last, flat = int(self.primes.sum()), self.primes.flatten()          # [N - 1, heads]
        need(last == c.engram_num_embeddings[plan.engram], f"the primes of layer {plan.index}'s "
             f"Engram table sum to {last}, not to its rows")
        self.offsets = (flat.cumsum(0) - flat).view_as(self.primes)         # each head its own rows
        self.multipliers = torch.tensor(K.engram_multipliers(c, plan.index), device=self.w.device)

    def __call__(self, h, batch):
        """h [T, S, D] -> like h."""
        rows = K.ngram_rows(batch.classes, self.multipliers, self.primes, self.offsets)
        kv = self.wkv(self.rows(rows).flatten(1).to(self.w.dtype))         # [T, (S + 1) * D]
        key, value = kv.split([kv.shape[1] - h.shape[2], h.shape[2]], 1)
        return K.engram_write(h, key.unflatten(1, h.shape[1:]), value, self.q_weight, self.k_weight,
                              self.c.rms_norm_eps)

    def rows(self, index):
        """Table rows index [T, C] -> fp32 [T, C, width], read from the mapped file."""
        index = index.cpu()
        weight, scale = (self.w.checkpoint.packed(f"{self.name}.{n}").view(torch.uint8)[index]
                         for n in ("weight", "scale"))
        check_scale(self.name, scale.view(K.E8M0))
        return K.dequantize_fp8(torch.cat([weight, scale], -1)).to(self.w.device)

class Block:
    """(Engram,) attention and experts, each inside its mHC site: a layer, or a draft stage."""

    def __init__(self, c, plan, weights):
        stage = plan.index - len(c.layers)
        p, attention, n, k = (
            (f"mtp.{stage}.", DraftAttention, c.dspark_n_routed_experts,
             c.dspark_num_experts_per_tok) if plan.mode == "draft" else
            (f"layers.{plan.index}.", Attention, c.n_routed_experts, c.num_experts_per_tok))
        self.engram = Engram(c, plan, weights, p + "engram.") if plan.engram is not None else None
        self.hc_attn = HyperConnection(c, weights, p, "attn")
        self.attn = attention(c, plan, weights, p + "attn.")
        self.hc_ffn = HyperConnection(c, weights, p, "ffn")
        self.ffn = MoE(c, weights, p + "ffn.", n, k)

    def __call__(self, h, pre, batch, cache):
        """h [T, S, D], pre [T, S] -> the same, one layer on."""
        if self.engram:
            h = self.engram(h, batch)
        h, pre = self.hc_attn(h, pre, lambda x: self.attn(x, batch, cache))
        return self.hc_ffn(h, pre, self.ffn)

class Transformer:
    """The backbone: embedding, blocks, norm, head."""

    def __init__(self, c, weights, progress=None):
        self.c, self.w, self.blocks = c, weights, []
        self.embed = weights.checkpoint.packed("embed.weight").to(self.w.device)       # [V, D]
        for plan in c.layers:
            self.blocks.append(Block(c, plan, weights))
            if progress:
                progress("loading layer", plan.index + 1, len(c.layers))
        self.norm, self.head = weights.vector("norm.weight"), Linear("head", weights)
        self.frequencies = {x: K.rope_frequencies(c, x).to(self.w.device) for x in (False, True)}

    def enter(self, batch):
        """-> streams [T, S, D], all the embedding, and the first pre [T, S], one-hot."""
        batch.rope = {x: K.rotation(batch.pos, f) for x, f in self.frequencies.items()}
        h = F.embedding(batch.ids, self.embed).to(self.w.dtype)
        pre = F.one_hot(torch.zeros_like(batch.ids), self.c.hc_mult).float()
        return h[:, None].expand(-1, self.c.hc_mult, -1), pre

    def __call__(self, batch, cache, rows):
        """All rows of the batch go through; -> logits fp32 [len(rows), V] of the rows asked for."""
        h, pre = self.enter(batch)
        for i, block in enumerate(self.blocks):
            if i in self.c.dspark_target_layer_ids:
                batch.features.append(h.float().mean(1).to(h.dtype))
            h, pre = block(h, pre, batch, cache)
        x = K.rms_norm(K.hc_collapse(h[rows], pre[rows]), self.norm, self.c.rms_norm_eps)
        return self.head(x.to(self.w.dtype))

# ================================================================================================
# Draft: DSpark proposes tokens, the model judges them
# ================================================================================================
class DraftAttention(Attention):
    """Every row of a draft block sees the block, both ways, and the W committed tokens before."""

    def __call__(self, x, batch, cache):
        """x [T, D] normed, blocks of n rows -> fp32 [T, D]; the block's own rows are not kept."""
        n, W, rotate = self.c.dspark_block_size, self.c.sliding_window, batch.rope[False]
        _, q = self.queries(x, *rotate)
        at = batch.pos[::n, None] - torch.arange(W, 0, -1, device=x.device)           # [T/n, W]
        rows = cache.window[self.plan.index].read(batch.slot[::n, None], at)
        rows = torch.cat([rows, self.window_rows(x, *rotate).unflatten(0, (-1, n))], 1)
        seen = F.pad(at >= 0, (0, n), value=True)
        kv, seen = (t.repeat_interleave(n, 0) for t in (K.dequantize_fp8(rows), seen))
        return self.output(K.attend(q, kv, seen, self.sink), *rotate)

class Draft:
    """DSpark: three stages guess a block of n tokens at once, a Markov head makes them agree."""

    def __init__(self, c, weights, target):
        last = f"mtp.{len(c.stages) - 1}."
        self.c, self.w, self.target = c, weights, target
        self.stages = [Block(c, plan, weights) for plan in c.stages]
        self.main_proj = Linear("mtp.0.main_proj", weights)
        self.main_norm = weights.vector("mtp.0.main_norm.weight")
        self.norm = weights.vector(last + "norm.weight")
        self.markov_embed = weights.checkpoint.dequantized(
            last + "markov_head.embed", torch.bfloat16, weights.device)
        self.markov_head = Linear(last + "markov_head.head", weights)
        self.confidence = Linear(last + "confidence_head.proj", weights)

    def commit(self, batch, stand, cache):
        """Write the context rows of the first stand[i] tokens of the i-th sequence: its last W."""
        W, spans = self.c.sliding_window, zip(batch.spans, stand)
        rows = [range(max(a, a + n - W), a + n) for (_, a, _, _), n in spans]
        rows = torch.tensor([*itertools.chain(*rows)], dtype=torch.int64, device=self.w.device)
        features = torch.cat([x[rows] for x in batch.features], 1)             # [n, 3D], no norm
        x = K.rms_norm(self.main_proj(features), self.main_norm, self.c.rms_norm_eps)
        rotate = [t[rows] for t in batch.rope[False]]
        for stage in self.stages:
            kv = stage.attn.window_rows(x.to(self.w.dtype), *rotate)
            cache.window[stage.attn.plan.index].write(batch.slot[rows], batch.pos[rows], kv)

    def propose(self, seqs, cache, choose):
        """-> per sequence: drafts (n ids), their logits [n, V], survival (n floats).

        A block is the anchor, the last id of a sequence, which has not been through the model, and
        n - 1 noise ids, which stay in seq.drafts. choose(seq, logits [V], position) -> id.
        Survival: the estimated chance that a draft and all before it are accepted.
        """
        n = self.c.dspark_block_size
        for seq in seqs:
            seq.drafts = [self.c.dspark_noise_token_id] * (n - 1)
        batch = Batch([(seq, n) for seq in seqs], self.w.device)
        h, pre = self.target.enter(batch)
        for stage in self.stages:
            h, pre = stage(h, pre, batch, cache)
        raw = K.hc_collapse(h, pre)
        x = K.rms_norm(raw, self.norm, self.c.rms_norm_eps).to(self.w.dtype)
        base, raw = (t.unflatten(0, (-1, n)) for t in (self.target.head(x), raw))   # [seqs, n, ..]
        drafts, logits, sure = [[seq.ids[-1]] for seq in seqs], [], []
        for j in range(n):                               # the only part that is sequential
            m = self.markov_embed[[d[-1] for d in drafts]]
            logits.append(base[:, j] + self.markov_head(m.to(self.w.dtype)))
            sure.append(K.sigmoid(self.confidence(torch.cat([raw[:, j], m.float()], 1)))[:, 0])
            for seq, d, row in zip(seqs, drafts, logits[-1]):
                d.append(choose(seq, row, len(seq.ids) + j))
        survival = torch.stack(sure, 1).cumprod(1).tolist()
        return [d[1:] for d in drafts], torch.stack(logits, 1), survival

# ================================================================================================
# Engine: requests in, tokens out
# ================================================================================================
@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. temperature 0 is greedy; top_p keeps the token that crosses it.

    verify: the rule for drafts at temperature > 0, both exact in distribution. "coupled": draft and
    target draw with the same noise, so the text is the same as without drafts. "rejection": accepts
    a little more often; the text for a seed depends on how many drafts its steps had.
    """
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    verify: str = "coupled"

    def __post_init__(self):
        need(self.verify in ("coupled", "rejection"), f"verify is {self.verify!r}, must be "
             "'coupled' or 'rejection'")
        t, p = (x if type(x) in (int, float) else math.nan for x in (self.temperature, self.top_p))
        need(type(self.max_tokens) is int and self.max_tokens >= 1, f"max_tokens is "
             f"{self.max_tokens!r}, must be a whole number from 1")
        need(t == 0 or 1e-3 <= t < math.inf, f"temperature is {self.temperature!r}, must be 0 (the "
             "most likely token) or at least 0.001")
        need(0 < p <= 1, f"top_p is {self.top_p!r}, must be above 0 and at most 1")
        need(type(self.seed) is int and 0 <= self.seed < 2**64, f"seed is {self.seed!r}, must be a "
             "whole number from 0 to 2^64 - 1")

@dataclass(frozen=True)
class Output:
    """A finished request; ids without the prompt and without the eos that stopped it."""
    ids: list
    text: str
    finish_reason: str                   # "stop" (eos) or "length"
    stats: dict

class Engine:
    """The model, its cache, and the requests that share them."""

    def __init__(self, cfg, model, draft, n_drafts, prompt, max_batch, max_pages, chunk):
        self.cfg, self.model, self.prompt, self.device = cfg, model, prompt, model.w.device
        self.cache, self.chunk = Cache(cfg, max_batch, max_pages, chunk, self.device), chunk
        self.draft, self.n_drafts = draft, n_drafts      # n_drafts: a number, or "confidence"
        self.seconds = {"draft": 0.0, "forward": 0.0, "step": 0.0}          # where the time went
        self.cost = {}                   # rows of a decode step -> its mean seconds, for confidence
        self.waiting, self.running, self.ngram = [], [], None
        if cfg.engram_layer_ids:
            classes = token_classes(prompt, cfg).to(self.device)
            self.ngram = classes, int(classes[cfg.engram_pad_token_id]), cfg.engram_max_ngram_size

    @classmethod
    def load(cls, folder, device=None, dtype=None, deterministic=False, lazy=None, max_batch=8,
             max_pages=None, chunk=512, speculate=True, replay=True, progress=None):
        """An Engine for the checkpoint in `folder` (a local path, the published layout).

        dtype: of activations, default bf16 on a GPU, fp32 on a CPU. deterministic: a row's bits do
        not depend on the other rows (at one number of threads). lazy: dequantize and check weights
        as they are used; default where they do not fit into memory. max_batch: requests that run
        at once. max_pages: global pages of 128 tokens, default as many as the batch can use, within
        2 GiB. chunk: most rows of one step.
        speculate: True verifies all drafts of a checkpoint that has draft stages, a number at most
        so many, "confidence" as many as pay, False none. replay is accepted and changes nothing.
        """
        for name, x in (("max_batch", max_batch), ("chunk", chunk),
                        ("max_pages", 1 if max_pages is None else max_pages)):
            need(type(x) is int and x >= 1, f"{name} is {x!r}, not a whole number from 1")
        need(speculate == "confidence" or type(speculate) in (bool, int) and speculate >= 0,
             f"speculate is {speculate!r}, not True, False, a number of drafts or 'confidence'")
        need(chunk >= max_batch, f"chunk {chunk} is below max_batch {max_batch}: a step could not "
             "decode every request")
        device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        need(device == "cpu" or torch.cuda.is_available(), f"device is {device!r}: no GPU is here")
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        need(dtype in (torch.float32, torch.bfloat16), f"dtype is {dtype!r}, not torch.float32 or "
             "torch.bfloat16")
        if Path(folder).is_file():
            raise FileNotFoundError(f"{folder} is a file: a checkpoint is a local folder")
        cfg = Config.load(folder)
        n = cfg.dspark_block_size if speculate is True or not cfg.stages else speculate
        need(n == "confidence" or n <= cfg.dspark_block_size < RING, f"speculate is {n}: a block "
             f"holds {cfg.dspark_block_size} drafts here, and a step at most {RING - 1}")
        m, most = memory(cfg, dtype), max_batch * -(-cfg.max_position_embeddings // PAGE)
        max_pages = max_pages or max(1, min(most, 2**31 // max(1, m["page"])))
        prompt = Prompt(folder, cfg.bos_token_id)
        weights = Weights(Checkpoint(folder, cfg), device, dtype, 16 if deterministic else None,
                          not fits(m, device) if lazy is None else lazy)
        model = Transformer(cfg, weights, progress)
        draft = Draft(cfg, weights, model) if n and cfg.stages else None
        return cls(cfg, model, draft, n, prompt, max_batch, max_pages, chunk)

    # -- requests ---------------------------------------------------------------------------------
    def _sequence(self, prompt, params=None):
        """A checked, not yet admitted Sequence; without params it will not be sampled from."""
        need(isinstance(prompt, (str, list, tuple)), f"the prompt {prompt!r:.40} is no string and "
             "no list of ids")
        need(isinstance(params, SamplingParams | None), f"{params!r:.40} is no SamplingParams")
        ids = self.prompt.raw(prompt) if isinstance(prompt, str) else list(prompt)
        V, image = self.cfg.vocab_size, self.cfg.image_token_id
        need(ids, "the prompt is empty: give at least one id")
        for i in ids:
            need(type(i) is int and 0 <= i < V, f"token id {i!r} is not one of 0..{V - 1}")
            need(i != image or params is None, f"token id {i} is an image: this engine reads text")
        n_new, most = params.max_tokens if params else 0, self.cfg.max_position_embeddings
        limit, size = len(ids) + n_new, f"{len(ids)} prompt and {n_new} new tokens"
        need(limit <= most, f"{size} exceed the context of {most}")
        need(limit <= self.cache.n_pages * PAGE, f"{size} need {-(-limit // PAGE)} pages of {PAGE} "
             f"tokens, the pool has {self.cache.n_pages}")
        return Sequence(ids, params, self.prompt.decoder())

    def submit(self, prompt, params=SamplingParams()):
        """Queue one prompt (a string or ids); -> its Sequence, which `step` moves on."""
        seq = self._sequence(prompt, params or SamplingParams())
        self.waiting.append(seq)
        return seq

    def cancel(self, seq, reason="cancelled"):
        """Take seq out, finished or not, and its pages back; harmless when it is out already."""
        seq.finish_reason = seq.finish_reason or reason
        self.cache.release(seq)
        for queue in (self.waiting, self.running):
            queue[:] = [s for s in queue if s is not seq]

    def step(self):
        """Draft, one forward for every running request, judge; -> the sequences that it moved."""
        start, work, budget = time.perf_counter(), [], self.chunk
        try:
            while self.waiting and self.cache.admit(self.waiting[0]):
                self.running.append(self.waiting.pop(0))
            self._draft()
            for seq in sorted(self.running, key=lambda s: not s.decoding):          # decode first
                n = min(len(seq.ids) + len(seq.drafts) - seq.n_cached, budget)
                work += [(seq, n)] * (n > 0)
                budget -= n
            work = self._make_room(work)
            if not work and self.waiting:                # a leak must not become a hang
                raise RuntimeError("no page is free for the next request, and nothing runs")
            decoding = all(seq.decoding for seq, _ in work)
            if work:
                self._advance(work)
        except BaseException:
            for seq, _ in work or [(seq, 0) for seq in self.running]:
                self.cancel(seq, "error")
            raise
        seconds = time.perf_counter() - start
        self.seconds["step"] += seconds
        if work and decoding:
            rows = sum(n for _, n in work)
            count, mean = self.cost.get(rows, (0, 0.0))
            self.cost[rows] = count + 1, mean + (seconds - mean) / min(count + 1, 50)
        return [seq for seq, _ in work]

    def _make_room(self, work):
        """Where pages lack, do without drafts, then without the youngest requests, which give their
        pages back and start again later."""
        def lacking():
            return sum(self.cache.lacks(*each) for each in work) > len(self.cache.free_pages)
        if lacking():
            work = [(seq, n - len(seq.drafts)) for seq, n in work]
            for seq, _ in work:
                seq.drafts = []
        while lacking():
            seq = self.running.pop()
            self.cache.release(seq)
            seq.n_cached = 0
            self.waiting.insert(0, seq)
            work = [(s, n) for s, n in work if s is not seq]
        return work

    def _advance(self, work):
        """Forward and judge the (sequence, n) of work; append what was made."""
        ends = itertools.accumulate(n for _, n in work)
        rows = [range(end - 1 - len(seq.drafts), end)
                if seq.n_cached + n == len(seq.ids) + len(seq.drafts) else range(0)
                for (seq, n), end in zip(work, ends)]
        start = time.perf_counter()
        batch, logits = self._run(work, list(itertools.chain(*rows)))
        self.seconds["forward"] += time.perf_counter() - start
        made = [self._judge(seq, x) for (seq, _), x in zip(work, logits.split([*map(len, rows)]))]
        self._commit(batch, work, [n - len(x) + len(new)         # rejected drafts do not stand
                                   for (_, n), x, new in zip(work, rows, made)])
        for (seq, _), new in zip(work, made):
            if new:
                n_drafts, seq.drafts = len(seq.drafts), []
                seq.runs.append((n_drafts, self._emit(seq, new) - 1))

    @torch.inference_mode()
    def _draft(self):
        """Give every decoding sequence the drafts that this step will judge."""
        seqs = [s for s in self.running if s.decoding] if self.draft else []
        most = self.chunk // max(1, len(seqs)) - 1
        room = {s: min(most, s.params.max_tokens - len(s.new) - 1) for s in seqs}   # and one token
        seqs = [s for s in seqs if room[s]]
        if not seqs:
            return

        def choose(seq, logits, pos):
            p = seq.params                               # the draft's own noise, or the target's
            stream = 1 if p.verify == "rejection" else 0
            return K.sample(logits, p.temperature, 1.0, p.seed, pos, stream)
        start = time.perf_counter()
        drafts, logits, survival = self.draft.propose(seqs, self.cache, choose)
        for seq, ids, x, s in zip(seqs, drafts, logits, survival):
            n = self._worth(s, len(seqs)) if self.n_drafts == "confidence" else self.n_drafts
            seq.drafts, seq.proposals = ids[: min(n, room[seq])], x
        self.seconds["draft"] += time.perf_counter() - start

    def _worth(self, survival, n_seqs):
        """How many drafts pay: up to the first whose estimated survival is below the price of a row
        in tokens. It never looks at a later draft, which would bias what is accepted."""
        costs = sorted((rows, mean) for rows, (_, mean) in self.cost.items())
        if len(costs) < 3:                               # learn the price first
            return len(costs)
        (a, least), (b, most) = costs[0], costs[-1]
        made = [x for seq in self.running for x in seq.runs[-8:]]
        rows, tokens = (sum(1 + x[i] for x in made) / len(made) * n_seqs for i in (0, 1))
        row = max(0.0, (most - least) / (b - a))         # seconds; a step: least + (rows - a) * row
        price = row * tokens / (least + max(0.0, rows - a) * row)
        return next((i for i, s in enumerate(survival) if s < price), len(survival))

    @torch.inference_mode()
    def _run(self, work, rows):
        """The forward: next n tokens of each (sequence, n) -> batch, logits of the given rows."""
        for seq, n in work:
            self.cache.extend(seq, n)
        batch = Batch(work, self.device, self.ngram)
        return batch, self.model(batch, self.cache, rows)

    @torch.inference_mode()
    def _commit(self, batch, work, stand):
        """The first stand[i] tokens of the i-th sequence are there to be seen from now on."""
        if self.draft:
            self.draft.commit(batch, stand, self.cache)
        for (seq, _), n in zip(work, stand):
            seq.n_cached += n
            self.cache.trim(seq)

    def _forward(self, work, rows):
        """Run and commit all tokens of work -> logits of the given rows."""
        batch, logits = self._run(work, rows)
        self._commit(batch, work, [n for _, n in work])
        return logits

    def _judge(self, seq, logits):
        """logits [1 + drafts, V] (or [0, V]) -> the accepted drafts and one token of the model."""
        p, new = seq.params, []
        need(logits.isfinite().all(), "the logits are not finite: the checkpoint is damaged")
        for i, (row, draft) in enumerate(zip(logits, [*seq.drafts, None])):
            draw = (p.temperature, p.top_p, p.seed, len(seq.ids) + i)
            by_rule = draft is not None and p.temperature and p.verify == "rejection"
            new.append(K.accept(row, seq.proposals[i], draft, *draw) if by_rule else
                       K.sample(row, *draw))
            if new[-1] != draft:
                break
        return new

    def _emit(self, seq, new):
        """Append new ids up to the one that ends seq; -> how many of them."""
        p = seq.params
        for i, token in enumerate(new):
            stop = token == self.cfg.eos_token_id and not p.ignore_eos
            seq.times.append(time.perf_counter())
            seq.ids += [] if stop else [token]
            end = "stop" if stop else "length" if len(seq.new) == p.max_tokens else None
            seq.text += seq.decoder([] if stop else [token], last=end is not None)
            if end:
                self.cancel(seq, end)
                break
        return i + 1

    # -- the public calls -------------------------------------------------------------------------
    def logits(self, ids, chunks=None):
        """Exact prefill of a fresh sequence: ids [n] -> logits fp32 [n, V] of every position.

        chunks: sizes that sum to n, to cut the prompt there (it is also cut at the engine's chunk).
        Image ids are taken as the text tokens of their embedding. All pages come back.
        """
        seq = self._sequence(ids)
        chunks = [len(seq.ids)] if chunks is None else list(chunks)
        good = all(type(n) is int and n > 0 for n in chunks) and sum(chunks) == seq.n_prompt
        need(good, f"chunks {chunks} do not cut {seq.n_prompt} tokens")
        sizes = [min(self.chunk, n - i) for n in chunks for i in range(0, n, self.chunk)]
        need(self.cache.admit(seq), f"{-(-seq.n_prompt // PAGE)} pages and a slot are needed, "
             f"{len(self.cache.free_pages)} and {len(self.cache.free_slots)} are free")
        try:
            return torch.cat([self._forward([(seq, n)], slice(None)) for n in sizes])
        finally:
            self.cache.release(seq)

    def generate(self, prompts, params=SamplingParams()):
        """prompts: list of strings or id lists; params: one for all or a list -> list of Output."""
        need(isinstance(prompts, (list, tuple)), "generate takes a list of prompts")
        params = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        need(len(params) == len(prompts), f"{len(prompts)} prompts but {len(params)} params")
        seqs = [self._sequence(p, q or SamplingParams()) for p, q in zip(prompts, params)]
        self.waiting.extend(seqs)                        # only once all of them were accepted
        try:
            while self._unfinished(seqs):
                self.step()
        finally:
            for seq in seqs:
                self.cancel(seq)
        return [Output(s.new, s.text, s.finish_reason, s.stats()) for s in seqs]

    def stream(self, prompt, params=SamplingParams()):
        """-> iterator of the text of one prompt, as it is made; closing it cancels the request."""
        return self._pieces(self._sequence(prompt, params or SamplingParams()))

    def _pieces(self, seq):
        self.waiting.append(seq)
        shown = 0
        try:                                             # another caller's step may move it, end it
            while self._unfinished([seq]) or len(seq.text) > shown:
                if len(seq.text) == shown:
                    self.step()
                new, shown = seq.text[shown:], len(seq.text)
                if new:
                    yield new
        finally:
            self.cancel(seq)

    def _unfinished(self, seqs):
        """Does any of them still run? Raises where another caller's step has failed for them."""
        if any(s.finish_reason == "error" for s in seqs):
            raise RuntimeError("a step that another call made has failed and ended this request")
        return not all(s.finish_reason for s in seqs)

# ================================================================================================
# Main: the command line
# ================================================================================================
def progress(what, done, of):
    """A line on stderr that overwrites itself, if a person is watching."""
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{of}", end="\n" * (done == of), file=sys.stderr, flush=True)

def arguments(argv):
    """argv -> the parsed options."""
    def drafts(text):
        return text if text == "confidence" else int(text)
    p = argparse.ArgumentParser("nanoflash", description="DeepSeek-V4.1-Flash in two files.")
    p.add_argument("--prompt", help="text to continue (with --chat: what the user says)")
    p.add_argument("--model", default=DEFAULT_MODEL, help="a checkpoint's folder (docs/tiny)")
    p.add_argument("--max-tokens", type=int, default=128, help="most new tokens (128)")
    p.add_argument("--temperature", type=float, help="0 is greedy (generation_config.json, or 0)")
    p.add_argument("--top-p", type=float, help="mass of tokens kept (generation_config.json, or 1)")
    p.add_argument("--seed", type=int, default=0, help="the same seed, the same text (0)")
    p.add_argument("--chat", action="store_true", help="wrap the prompt in the chat encoding")
    p.add_argument("--think", action="store_true", help="with --chat: reason first")
    p.add_argument("--effort", type=int, help="with --think: 1 to 100 (75)")
    p.add_argument("--no-speculate", action="store_true", help="decode without drafts")
    p.add_argument("--drafts", type=drafts, default=True,
                   help="most drafts a step, or `confidence`: as many as pay (all)")
    p.add_argument("--verify", choices=("coupled", "rejection"), default="coupled",
                   help="how sampling judges drafts (coupled: the text is that without drafts)")
    p.add_argument("--no-replay", action="store_true", help="accepted; prefill is exact so far")
    p.add_argument("--deterministic", action="store_true", help="the same bits in any company")
    p.add_argument("--lazy", action="store_true", help="dequantize weights as they are used")
    p.add_argument("--dtype", choices=("fp32", "bf16"), help="(bf16 on a GPU, else fp32)")
    p.add_argument("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU)")
    p.add_argument("--plan", action="store_true", help="print sizes, without opening any weight")
    p.add_argument("--ranks", type=int, help="with --plan: number of ranks (1)")
    p.add_argument("--stats", action="store_true", help="print counts and speed on stderr")
    args = p.parse_args(argv)
    if args.prompt is None and not args.plan:
        p.error("--prompt (or --plan) is needed")
    for flag, wants in (("think", "chat"), ("effort", "chat"), ("ranks", "plan")):
        if getattr(args, flag) not in (None, False) and not getattr(args, wants):
            p.error(f"--{flag} goes with --{wants}")
    return args

def run(args):
    """Print the plan, or the continuation of one prompt as it is made."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}[args.dtype]
    if args.plan:
        ranks = 1 if args.ranks is None else args.ranks
        return print(plan(Config.load(args.model), dtype or torch.float32, ranks))
    ranks = os.environ.get("WORLD_SIZE") or "1"                      # set by torchrun
    need(ranks == "1", f"this version runs on one rank, not on {ranks}")
    path = Path(args.model) / "generation_config.json"
    defaults = _json(path) if path.is_file() else {}
    need(isinstance(defaults, dict), f"{path} holds no object")
    t = defaults.get("temperature", 0) if args.temperature is None else args.temperature
    top_p = defaults.get("top_p", 1) if args.top_p is None else args.top_p
    params = SamplingParams(args.max_tokens, t, top_p, args.seed, verify=args.verify)
    engine = Engine.load(args.model, args.device, dtype, args.deterministic, args.lazy or None,
                         max_batch=1, speculate=not args.no_speculate and args.drafts,
                         progress=progress)
    if memory(engine.cfg)["weights"] < 2**28:
        torch.set_num_threads(1)                 # on small tensors a second thread only costs
    prompt, effort = args.prompt, 75 if args.effort is None else args.effort
    if args.chat:
        prompt = engine.prompt.chat([{"role": "user", "content": prompt}], args.think, effort)
    seq, shown = engine.submit(prompt, params), 0
    while not seq.finish_reason:
        before = seq.n_cached
        engine.step()
        if before < seq.n_prompt > engine.chunk:
            progress("prefill", seq.n_cached, seq.n_prompt)
        print(seq.text[shown:], end="", flush=True)
        shown = len(seq.text)
    print()
    if args.stats:
        t = engine.seconds
        stats = seq.stats() | {"draft_s": round(t["draft"], 2), "forward_s": round(t["forward"], 2),
                               "host_share": round(1 - (t["draft"] + t["forward"]) / t["step"], 2)}
        print(", ".join(f"{k} {v}" for k, v in stats.items()), file=sys.stderr)

def main(argv=None):
    """Run the command line; -> exit status. A user's mistake ends in one line and status 2."""
    sys.stdout.reconfigure(errors="replace")             # a terminal that lacks a character
    try:
        run(arguments(argv))
        return 0
    except BrokenPipeError:                              # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as e:
        print(f"nanoflash: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    sys.exit(main())
