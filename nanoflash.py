"""nanoflash: DeepSeek-V4.1-Flash and its published checkpoint in two files, read in an evening.

    python nanoflash.py --prompt "In the beginning"          # docs/tiny, on any CPU
    python nanoflash.py --model DIR --prompt TEXT --chat     # a downloaded checkpoint, unchanged
    python nanoflash.py --model DIR --plan                   # what it needs, no weight is opened

What is unusual about this model, and the section that shows it:
    Config       layers that see a window only, encoder (1 latent per 2 tokens), decoder (1 per 1)
    Checkpoint   FP8 and FP4 weights with power-of-two scales; 189 GiB of Engram tables stay on disk
    Prompt       chat marks are ids between pieces of text, so that no text can forge one
    Cache        890 bytes of packed FP4 a token for all layers; pages that later prompts find again
    Ranks        experts shared out over processes, tokens sent to them and back
    Model        mHC (4 residual streams), CSA2 (a few layers make keys and selections for all),
                 CED (the decoder's one KV is projected once, at its first layer), Engram, MoE
    Draft        DSpark: three stages guess five tokens at once, the model judges them in one step
    Engine       requests join and leave between steps; one forward for prefill, decode, judging
    Main         the command line

Four ideas keep it small and right. One forward: a batch is ragged, whatever mix of prompts and
decode rows it holds. State is addressed by position; lengths decide what is visible. Every
operation stands in kernels.py, once. A row's result depends on that row alone.

Dimension letters: T tokens (rows of a batch), D hidden, H heads, d head dim, r rotated channels,
S streams, W window, K selected groups (K.name is kernels.name), E experts, k experts a token,
Hi index heads, di index head dim, G output groups, N n-gram length, V vocabulary, C candidate
blocks or, in Engram, look-ups a token, Q query latent.
A *group* is the `ratio` tokens that share a latent, a *slot* a sequence's row in the page tables.
Past the *handover*, the last full layer, go only the last tokens of a long prompt (*replay*).
"""
from __future__ import annotations

import argparse, atexit, codecs, collections, copy, datetime, functools, hashlib, itertools, json
import math, mmap, operator, os, runpy, sys, time, warnings
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, normalizers as norms

import kernels as K

DOCS = Path(__file__).resolve().parent / "docs"

# == Config: config.json, checked, and one LayerPlan per layer =====================================
# keys that change the arithmetic, with the one value that is computed here (if absent, too)
REQUIRED = {
    "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "attention_bias": False, "n_shared_experts": 1,
    "num_key_value_heads": 1, "tie_word_embeddings": False, "expert_dtype": "fp4",
    "quantization_config.quant_method": "fp8", "quantization_config.fmt": "e4m3",
    "quantization_config.weight_block_size": (32, 32), "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.activation_scheme": "dynamic", "rope_scaling.rope_type": "yarn"}
INERT = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map",
         "initializer_range", "attention_dropout", "pad_token_id", "use_cache"}     # not arithmetic
RENAMED = {"rope_scaling.type": "rope_scaling.rope_type", "engram_pad_id": "engram_pad_token_id"}
OPTIONAL = ("candidate_", "engram_", ("dspark_", "num_nextn_"))      # of one mechanism, all or none
VISION = ("hidden_size", "intermediate_size", "patch_size", "downsample_ratio", "num_hidden_layers")
KINDS = {      # annotation -> its words in an error, and is x one? numbers are from 0 below 2^31
    "int": ("an integer", lambda x: type(x) is int and 0 <= x < 2**31),
    "float": ("a number", lambda x: type(x) in (int, float) and 0 <= x < 2**31),
    "tuple": ("a list of integers", lambda x: type(x) is tuple and all(map(KINDS["int"][1], x))),
    "dict": ("an object of integers",
             lambda x: type(x) is dict and all(KINDS["int"][1](x.get(n, 0)) for n in VISION))}

def need(condition, message, error=ValueError):
    """Raise error(message) unless the condition holds: the one way bad input is refused."""
    if not condition:
        raise error(message)

class LayerPlan(NamedTuple):
    """What one layer does with the compressed KV (CSA2), from the schedule in config.json."""
    index: int
    ratio: int                        # 0 window only, 2 encoder, 1 decoder
    mode: str                         # "window"; "full" makes latents, keys and a selection,
                                      # "reindex" a selection only, "reuse" nothing; "draft" stage
    kv_source: int | None = None      # the layer whose latents and index keys this one reads
    index_source: int | None = None   # the layer whose selection this one attends to
    candidates: str | None = None     # "source" publishes blocks, "reader" scores in them only
    engram: int | None = None         # number of its Engram table

@dataclass(frozen=True)
class Config:
    """config.json under its own names (rope_scaling.x is rope_scaling_x); `layers` is derived."""
    vocab_size: int; hidden_size: int; num_hidden_layers: int; rms_norm_eps: float    # size
    hc_mult: int; hc_sinkhorn_iters: int; hc_eps: float                         # residual streams
    num_attention_heads: int; head_dim: int; sliding_window: int                # attention
    q_lora_rank: int; o_groups: int; o_lora_rank: int; max_position_embeddings: int
    qk_rope_head_dim: int; rope_theta: float; compress_rope_theta: float        # rotation
    rope_scaling_factor: float; rope_scaling_beta_fast: float; rope_scaling_beta_slow: float
    rope_scaling_original_max_position_embeddings: int
    compress_ratios: tuple; kv_source_layer_ids: tuple; index_source_layer_ids: tuple  # compressed
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
    layers: tuple = field(init=False, default=()); stages: tuple = field(init=False, default=())

    @classmethod
    def load(cls, path):
        """Read config.json, composite with `text_config` or flat; path: the file or its folder."""
        path = Path(path) if Path(path).is_file() else Path(path) / "config.json"
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
            if key in known:
                first = values.setdefault(key, value)
                need(value == first, f"{key} is both {first!r} and {value!r}")
            elif key not in INERT:
                need(key in REQUIRED, f"unknown key {key!r}")
                only = REQUIRED[key]
                need(value == only, f"{key} is {value!r}; this engine computes {only!r} only")
        groups = [[k for k in known if k.startswith(prefix)] for prefix in OPTIONAL]
        needed = [k for k, f in known.items() if f.default is f.default_factory is MISSING]
        needed += [k for group in groups if any(map(values.get, group)) for k in group]
        lost = [k for k in needed if k not in values]
        need(not lost, f"it lacks {', '.join(lost)}")
        return cls(**{known[k].name: v for k, v in values.items()})

    def __post_init__(self):
        for f in fields(self):
            name, value = f.name, getattr(self, f.name)
            what, is_one = KINDS[f.type.split()[0]]
            need(value is None and "None" in f.type or is_one(value),
                 f"{name} is {value!r:.60}, not {what} from 0 below 2^31")
            need(value != 0 or f.default == 0 or name.endswith("_id"), f"{name} is 0, not positive")
        for name, unit in (("head_dim", 32), ("index_head_dim", 32), ("hidden_size", 32),
                           ("moe_intermediate_size", 32), ("engram_head_dim", 32),
                           ("qk_rope_head_dim", 2), ("num_attention_heads", self.o_groups)):
            value = getattr(self, name)
            need(value % unit == 0, f"{name} {value} is not a multiple of {unit}")
        ids = [(f.name, "vocab_size") for f in fields(self) if f.name.endswith("_token_id")]
        for small, large in (
                ("qk_rope_head_dim", "head_dim"), ("qk_rope_head_dim", "index_head_dim"),
                ("sliding_window", "max_position_embeddings"),
                ("index_topk", "max_position_embeddings"),
                ("num_experts_per_tok", "n_routed_experts"),
                ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
                ("engram_compressed_vocab_size", "vocab_size"), *ids):
            a, b = getattr(self, small) or 0, getattr(self, large)
            need(a + small.endswith("_id") <= b, f"{small} {a} is beyond {large} {b}")
        n, tables = len(self.engram_layer_ids), len(self.engram_num_embeddings)
        need(n == tables, f"{n} engram layers but {tables} engram_num_embeddings")
        need(not n or self.engram_max_ngram_size >= 2, "engram_max_ngram_size is below 2")
        need(min(self.rope_theta, self.compress_rope_theta) > 1, "a rope theta is not above 1")
        vars(self).update(zip(("layers", "stages"), _schedule(self)))          # else it is frozen

def _json(path):
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} at {path.parent}: a checkpoint is a local folder")
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
    """compress_ratios and the source lists -> LayerPlans of the layers, of the stages; checked."""
    L, ratios, cand = c.num_hidden_layers, c.compress_ratios, c.candidate_source_layer_id
    n = L + c.num_nextn_predict_layers
    need(len(ratios) == n, f"compress_ratios has {len(ratios)} entries, layers and drafts are {n}")
    need(set(ratios[L:]) <= {0}, "a draft stage must have compress ratio 0")
    for name in (f.name for f in fields(c) if f.name.endswith("_layer_ids")):
        ids = list(getattr(c, name))
        need(ids == sorted({*ids} & {*range(L)}), f"{name} {ids} must ascend within 0..{L - 1}")
    need(cand in (None, *c.index_source_layer_ids), f"candidate source {cand} is no index source")
    blocks = c.candidate_topk_blocks * c.candidate_block_size
    need(cand is None or blocks, "candidate_topk_blocks or candidate_block_size is 0")
    kv, index, plans = None, None, []
    for i, ratio in enumerate(ratios[:L]):
        is_kv, is_index = i in c.kv_source_layer_ids, i in c.index_source_layer_ids
        kv, index = (i if is_kv else kv), (i if is_index else index)
        reader = is_index and cand is not None and i > cand
        need(ratio in (0, 1, 2), f"layer {i} has compress ratio {ratio}, not 0, 1 or 2")
        need(ratio or not (is_kv or is_index), f"layer {i} is listed as a source but has ratio 0")
        need(not ratio or kv is not None, f"layer {i} reads compressed KV before any KV source")
        need(is_index or not is_kv, f"layer {i} is a KV source but no index source")
        need(not ratio or ratio == ratios[kv], f"layer {i} has ratio {ratio}, not layer {kv}'s")
        need(not reader or plans[cand].kv_source == kv,
             f"layer {i} scores the keys of layer {kv}, the candidate source {cand} others")
        mode = ("full" if is_kv else "reindex" if is_index else "reuse") if ratio else "window"
        plans.append(LayerPlan(i, ratio, mode, kv if ratio else None, index if ratio else None,
                               "source" if i == cand else "reader" if reader else None,
                               c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None))
    return tuple(plans), tuple(LayerPlan(i, 0, "draft") for i in range(L, len(ratios)))

# == Checkpoint: the expected inventory, the mapped files, the memory plan =========================
# Every tensor of the published layout. A line: part, family, format, `name shape` items; their
# letters are those of `inventory`. Vision and bias_vl, for image tokens, must be there, unread.
LAYOUT = """
top    head          bf16 embed.weight V D; head.weight V D; norm.weight D
block  norms         bf16 attn_norm.weight D; ffn_norm.weight D
block  norms         bf16 attn.q_norm.weight Q; attn.kv_norm.weight d
block  mHC           f32  hc_attn_fn M SD; hc_attn_base M; hc_attn_scale 3
block  mHC           f32  hc_ffn_fn M SD; hc_ffn_base M; hc_ffn_scale 3
block  attention     fp8  attn.wq_a Q D; attn.wq_b h Q; attn.wkv d D; attn.wo_a O g; attn.wo_b D O
block  attention     f32  attn.attn_sink H
block  router        bf16 ffn.gate.weight E D
block  router        f32  ffn.gate.bias E; ffn.gate.bias_vl E
block  shared_expert fp8  ffn.shared_experts.w1 F D; ffn.shared_experts.w2 D F
block  shared_expert fp8  ffn.shared_experts.w3 F D
expert experts       fp4  w1 F D; w2 D F; w3 F D
index  indexer       fp8  attn.indexer.wq_b HI Q
index  indexer       bf16 attn.indexer.weights_proj.weight Hi D
full   indexer       bf16 attn.indexer.wk.weight di d; attn.indexer.k_norm.weight di
full   compressor    bf16 attn.compressor.wkv.weight d D; attn.compressor.norm.weight d
pair   compressor    bf16 attn.compressor.wgate.weight d D
engram engram_tables rows engram.embed R w
engram engram        fp8  engram.wkv S1D Cw
engram engram        bf16 engram.q_weight S D; engram.k_weight S D
first  draft_heads   fp8  main_proj D nD
first  draft_heads   bf16 main_norm.weight D
last   draft_heads   bf16 norm.weight D; markov_head.embed.weight V m; markov_head.head.weight V m
last   draft_heads   any  confidence_head.proj.weight 1 D+m
vision vision        bf16 vision.patch_embed.proj.weight v 3pp; vision.patch_embed.proj.bias v
vision vision        bf16 vision.norm.weight v; aligner.w1.weight D av; aligner.w1.bias D
vision vision        bf16 aligner.w2.weight D D; aligner.w2.bias D
vision vision        bf16 image_start D; image_end D; image_newline D
vlayer vision        bf16 norm1.weight v; norm2.weight v; attn.wqkv.weight 3v v; attn.wqkv.bias 3v
vlayer vision        bf16 attn.wo.weight v v; attn.wo.bias v; mlp.w1.weight 2i v; mlp.w2.weight v i
"""
PLAIN = {"bf16": ("BF16",), "f32": ("F32",), "any": ("F32", "BF16")}         # accepted types
# a .weight of that type with that many columns a byte; a .scale for so many rows x 32 columns
PACKED = {"fp8": ("F8_E4M3", 1, 32), "fp4": ("I8", 2, 1), "rows": ("F8_E4M3", 1, 1)}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8,
          "F8_E4M3": K.E4M3, "F8_E8M0": K.E8M0}

class Spec(NamedTuple):
    """One tensor as it must stand in the file; `dtypes` are the accepted ones, the usual first."""
    dtypes: tuple; shape: tuple; family: str

def inventory(c):
    """Config -> {name: Spec} of every tensor, text, draft and image, that a checkpoint holds."""
    D, S, H, d, m, w = (c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim,
                        c.dspark_markov_rank, c.engram_head_dim)
    v, i, patch, down, vision_depth = (c.vision_config.get(x, 0) for x in VISION)
    letters = {
        "V": c.vocab_size, "D": D, "S": S, "H": H, "d": d, "Q": c.q_lora_rank, "M": (2 + S) * S,
        "SD": S * D, "S1D": (S + 1) * D, "h": H * d, "g": H * d // c.o_groups, "w": w, "m": m,
        "O": c.o_groups * c.o_lora_rank, "F": c.moe_intermediate_size, "Hi": c.index_n_heads,
        "di": c.index_head_dim, "HI": c.index_n_heads * c.index_head_dim, "D+m": D + m,
        "Cw": (c.engram_max_ngram_size - 1) * c.engram_n_heads * w, "v": v, "3v": 3 * v, "i": i,
        "nD": len(c.dspark_target_layer_ids) * D, "2i": 2 * i, "av": down**2 * v,
        "3pp": 3 * patch**2, "1": 1, "3": 3}
    parts, specs = {}, {}
    for part, family, form, items in (x.split(None, 3) for x in LAYOUT.strip().split("\n")):
        parts.setdefault(part, []).extend((family, form, *x.split()) for x in items.split(";"))
    def add(at, part, draft=""):
        for family, form, name, *shape in parts[part]:
            shape, family = tuple(letters[x] for x in shape), draft + family
            if form in PLAIN:
                specs[at + name] = Spec(PLAIN[form], shape, family)
            else:
                (dtype, per_byte, rows), (n_out, n_in) = PACKED[form], shape
                scale = -(-n_out // rows), -(-n_in // 32)
                specs[at + name + ".weight"] = Spec((dtype,), (n_out, n_in // per_byte), family)
                specs[at + name + ".scale"] = Spec(("F8_E8M0",), scale, family)
    add("", "top")
    for p in (*c.layers, *c.stages):
        stage, draft = p.index - len(c.layers), "draft_" * (p.mode == "draft")
        at = f"mtp.{stage}." if draft else f"layers.{p.index}."
        letters["E"] = c.dspark_n_routed_experts if draft else c.n_routed_experts
        letters["R"] = 0 if p.engram is None else c.engram_num_embeddings[p.engram]
        add(at, "block", draft)
        for e in range(letters["E"]):
            add(f"{at}ffn.experts.{e}.", "expert", draft)
        for part, there in (("index", p.mode in ("full", "reindex")), ("full", p.mode == "full"),
                            ("pair", p.mode == "full" and p.ratio == 2), ("engram", letters["R"]),
                            ("first", stage == 0), ("last", p in c.stages[-1:])):
            if there:
                add(at, part)
    for n in range(vision_depth):
        add(f"vision.blocks.{n}.", "vlayer")
    if vision_depth:
        add("", "vision")
    return specs

class Checkpoint:
    """The safetensors files of a folder, mapped read-only and held to the inventory.
    Mapped here, since the safetensors package maps a file writable, which Linux refuses for one
    larger than memory: an Engram table is a single tensor of 92 GiB."""
    def __init__(self, folder, cfg):
        self.specs, self.at = inventory(cfg), {}
        shards = sorted(Path(folder).glob("model*.safetensors"))         # the index adds nothing
        for shard in shards or [Path(folder) / "model.safetensors"]:
            here = self._open(shard)
            twice = here.keys() & self.at.keys()
            need(not twice, f"{shard} holds {_some(twice)}, which another file holds too")
            self.at |= here
        missing, extra = self.specs.keys() - self.at.keys(), self.at.keys() - self.specs.keys()
        need(not missing, f"{folder}: missing {_some(missing)}")
        need(not extra, f"{folder}: unexpected {_some(extra)}")
        for name, spec in self.specs.items():
            _, dtype, shape, _ = self.at[name]
            need(dtype in spec.dtypes and shape == spec.shape, f"{name} is {dtype} {list(shape)}, "
                 f"expected {' or '.join(spec.dtypes)} {list(spec.shape)}")

    def _open(self, path):
        """Map one file; -> {name: (map, dtype, shape, first byte)}."""
        need(path.is_file(), f"no {path.name} in {path.parent}", FileNotFoundError)
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

    def stored(self, name):
        """`name` or `name`.weight as it lies in the file, and its scale or None; no NaN in them."""
        w = self.packed(name if name in self.at else name + ".weight")
        bad = (w.view(torch.uint8) & 127) == 127 if w.dtype == K.E4M3 else ~w.isfinite()
        need(not bad.any(), f"{name} holds NaN or infinity")
        scale = self.packed(name + ".scale") if name + ".scale" in self.at else None
        check_scale(name, scale)
        return w, scale

    def dequantized(self, name, dtype, device="cpu"):
        """`name` or `name`.weight -> its exact values in dtype; its file's pages are let go."""
        weight, scale = (t if t is None else t.to(device) for t in self.stored(name))
        out = K.dequantize_weight(weight, scale, dtype)
        self.at[name if name in self.at else name + ".weight"][0].madvise(mmap.MADV_DONTNEED)
        return out

def check_scale(name, scale):
    """Refuse e8m0 byte 0xFF, which is NaN: a damaged file would otherwise spread silently."""
    bad = scale is not None and (scale.view(torch.uint8) == 255).any()
    need(not bad, f"{name}: its scale holds byte 0xFF, which is NaN in e8m0")

def _some(names):
    return ", ".join(sorted(names)[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)

def rank_share(c, family, ranks, redundant):
    """What part of the tensors of a family one of the ranks holds; as `balance` has it."""
    E = c.dspark_n_routed_experts if family == "draft_experts" else c.n_routed_experts
    return min(E, -(-(E + redundant) // ranks)) / E if family.endswith("experts") else 1

def weight_bytes(c, dtype, ranks=1, redundant=0):
    """Config -> bytes of a rank's weights in dtype; embeddings and tables stay mapped."""
    return sum(math.prod(s.shape) * (1 + (s.dtypes == ("I8",))) * dtype.itemsize
               * rank_share(c, s.family, ranks, redundant) for name, s in inventory(c).items()
               if s.family not in ("vision", "engram_tables") and name != "embed.weight"
               and not name.endswith((".scale", "bias_vl")))

def page_bytes(c):
    """Config -> bytes of a page of global cache: PAGE tokens of all KV sources."""
    row = c.head_dim // 2 + c.head_dim // 16 + c.index_head_dim // 2 + c.index_head_dim // 32
    return sum(row * PAGE // c.layers[i].ratio for i in c.kv_source_layer_ids)

# == Prompt: text to ids and back ==================================================================
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
BYTE = {chr(b): bytes([b]) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
BYTE |= zip(map(chr, range(256, 324)), [bytes([b]) for b in range(256) if chr(b) not in BYTE])

def chat_pieces(messages, thinking=True, effort="high", response_format=None):
    """The V4.1 chat encoding: messages -> list of Mark and text pieces.
    messages: dicts of role ("system", "user", "assistant", "latest_reminder") and content; a last
    assistant message with prefix=True is left open for the model to go on. effort: low, high, max
    or 1..100. response_format: a JSON schema's text or "json_object". Past reasoning is dropped."""
    need(messages and isinstance(messages, list | tuple), "a chat is a list, at least one message")
    effort = EFFORT.get(effort, effort) if isinstance(effort, str) else effort
    need(type(effort) is int and 1 <= effort <= 100, f"effort is {effort!r}, not 1..100 or a level")
    for i, m in enumerate(messages):
        good = isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") in ROLES
        need(good and not m.get("tool_calls"), f"message {i} is no text of {', '.join(ROLES)}")
    first = messages[0]["role"] == "system"
    head = EFFORT_TEXT.format(effort) * bool(thinking) + (messages[0]["content"] if first else "")
    schema = '{"type": "json_object"}' if response_format == "json_object" else response_format
    head += FORMAT_TEXT.format(schema) * bool(schema)
    pieces, role = [BOS, SYSTEM, head] if first or head else [BOS], None
    for m in messages[int(first) :]:
        before, role, content = role, m["role"], m["content"]
        if role == before == "user":
            pieces[-1] += "\n\n" + content
        else:
            pieces += ([ASSISTANT, END_THINK, content, EOS] if role == "assistant" else
                       [ROLES[role], content])
    if role == "assistant" and m.get("prefix"):          # open: its reasoning stays, no EOS yet
        reasoning = [THINK, m.get("reasoning_content") or ""] if thinking else []
        return pieces[:-3] + [*reasoning, END_THINK, content]
    return pieces + [ASSISTANT, THINK if thinking else END_THINK]

class Prompt:
    """The checkpoint's tokenizer.json, once whole (to decode) and once without its added tokens."""
    def __init__(self, folder, bos):
        path = Path(folder) / "tokenizer.json"
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
        table = {} if shown in self.added else BYTE
        return b"".join(table.get(ch, ch.encode()) for ch in shown)

    def decoder(self):
        """A function ids -> text that holds back an unfinished character; the last call ends it."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids, last=False: utf8.decode(b"".join(map(self.bytes, ids)), last)

# == Cache: all that changes between tokens ========================================================
PAGE = 128          # tokens a page, of global cache and of window rows alike
REBALANCE = 1000    # steps after which redundant experts are placed anew
TIMEOUT = 600       # seconds that a rank waits for another
RING = 8            # open-pair rows a sequence keeps, by position % 8: 7 of a step may be refused

class Sequence:
    """One request: what it asked for, its tokens, and the cache that it owns while it runs."""
    def __init__(self, ids, params, decoder=None, replay=0):
        self.ids, self.n_prompt = ids, len(ids)      # prompt, then generated ones, by Engine.step
        self.first_kept = max(0, len(ids) - (replay or len(ids)))   # from here on past the handover
        self.n_cached = 0                # tokens that went through the model: what is visible
        self.n_reused = 0                # those of them that known pages gave, when last admitted
        self.most_reused = max(0, len(ids) - max(1, replay)) if params else 0      # one must be run
        self.params, self.keys = params, []      # keys of its first full pages, see `key`
        self.slot = None                 # row of the page tables and rings while it runs
        self.pages = []                  # global pages, in order of position; written by Cache
        self.window = {}                 # position // PAGE -> window page; written by Cache
        self.drafts = []                 # proposed ids behind `ids`, until the step has judged them
        self.proposals = None            # the draft's logits [n, V] of them, for verify="rejection"
        self.runs = []                   # (proposed, accepted) of every step that made a token
        self.decoder, self.text = decoder, ""    # Prompt.decoder; what may be shown so far
        self.finish_reason = None        # "stop", "length", "cancelled" or "error"
        self.times = [time.perf_counter()]       # creation, then every token

    @property
    def new(self):
        """Generated ids."""
        return self.ids[self.n_prompt :]

    def key(self, i):
        """A hash of all ids up to the end of page i, accepted drafts included."""
        while len(self.keys) <= i:
            a = len(self.keys) * PAGE
            page = repr((self.keys[-1:], (self.ids[a : a + PAGE] + self.drafts)[:PAGE]))
            self.keys.append(hashlib.sha256(page.encode()).digest())
        return self.keys[i]

    @property
    def decoding(self):
        """Is its last id alone what the model has not seen?"""
        return len(self.ids) - self.n_cached == 1 and self.n_cached >= self.n_prompt

    def stats(self):
        """Counts and speed of a finished request, for --stats."""
        first, last = self.times[:2][-1], self.times[-1]         # of the first token, if any
        rate = (len(self.times) - 2) / (last - first) if last > first else 0.0
        out = {"prompt": self.n_prompt, "cached": self.n_reused, "new": len(self.new),
               "first_token_s": round(first - self.times[0], 3), "tokens_per_s": round(rate, 1),
               "pages": -(-self.n_cached // PAGE)}
        if any(n for n, _ in self.runs):                 # the first token comes without drafts
            tried, accepted = zip(*self.runs[1:])
            out["tokens_a_step"] = round(1 + sum(accepted) / len(accepted), 2)
            out["accepted"] = [round(sum(a > i for a in accepted) / sum(n > i for n in tried), 2)
                               for i in range(max(tried))]           # share, by place in the block
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

class Pages:
    """Who uses which page. A full one can be found by its key, until it is taken for other rows."""
    def __init__(self, n):
        self.users, self.key, self.page = [0] * n, {}, {}            # page -> key, key -> page
        self.idle = collections.OrderedDict.fromkeys(range(n))       # no user; the next to be taken

    def take(self, key=None):
        """One more user for the page of this key, or without a key for one that has none yet."""
        page = self.page[key] if key else next(iter(self.idle))
        if not key:
            self.page.pop(self.key.pop(page, None), None)        # its old rows are found no more
        self.idle.pop(page, None)
        self.users[page] += 1
        return page

    def drop(self, pages):
        """One user less for each; one that nobody can find is the next to be taken."""
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.idle[page] = None
                self.idle.move_to_end(page, last=page in self.key)

    def register(self, page, key):
        """Page is full: let it be found, if no other one has these rows."""
        if self.page.setdefault(key, page) == page:
            self.key[page] = key

class Cache:
    """All that changes between tokens. A write goes to the row of a position; lengths decide what
    is read, so nothing is ever undone.

    window   per layer and stage: d + d/32 bytes a token     written by its attention; Draft.commit
    latents  per KV source: d/2 + d/16 bytes a group         written by its compressor
    keys     per KV source: di/2 + di/32 bytes a group       likewise
    ring     per ratio-2 source: fp32 [slot, position % 8, 2, d], kv and gate of the last tokens"""
    def __init__(self, c, max_batch, max_pages, chunk, device):
        d, di, self.W, layers = c.head_dim, c.index_head_dim, c.sliding_window, c.layers + c.stages
        # room for every running sequence's window and a step's rows; 256 MiB, at most, for reuse
        n_window = max_batch * (-(-self.W // PAGE) + 2) + -(-chunk // PAGE) + min(
            max_pages, 2**28 // (PAGE * (d + d // 32) * len(layers)))
        width = min(max_pages, -(-c.max_position_embeddings // PAGE)) + 1   # drafts may end beyond
        self.global_table, self.window_table = torch.full((2, max_batch, width), -1, device=device)
        self.window = [Pool(self.window_table, n_window, PAGE, d + d // 32) for _ in layers]
        ratio = {i: c.layers[i].ratio for i in c.kv_source_layer_ids}
        self.latents, self.keys = (
            {i: Pool(self.global_table, max_pages, PAGE // r, n) for i, r in ratio.items()}
            for n in (d // 2 + d // 16, di // 2 + di // 32))
        self.ring = {i: torch.empty(max_batch, RING, 2, d, device=device)
                     for i, r in ratio.items() if r == 2}
        self.n_pages, self.free_slots = max_pages, list(range(max_batch))[::-1]
        self.global_pages, self.window_pages = Pages(max_pages), Pages(n_window)

    def lacks(self, seq, n):
        """Global pages that seq needs for its next n positions and does not have."""
        return max(0, -(-(seq.n_cached + n) // PAGE) - len(seq.pages))

    def admit(self, seq):
        """Take a slot, the known pages of its first tokens, as far as the window there is known
        too, and new pages for its other ids; False if there is no room."""
        known, idle, most = self.global_pages.page, self.global_pages.idle, seq.most_reused // PAGE
        n_known = next((i for i in range(most) if seq.key(i) not in known), most)
        while any(seq.key(i) not in self.window_pages.page
                  for i in range(max(0, n_known * PAGE - self.W) // PAGE, n_known)):
            n_known -= 1
        room = len(idle) - sum(known[key] in idle for key in seq.keys[:n_known])
        if not self.free_slots or -(-len(seq.ids) // PAGE) - n_known > room:
            return False
        seq.slot, seq.n_cached = self.free_slots.pop(), n_known * PAGE
        seq.n_reused = seq.n_cached
        self.extend(seq, len(seq.ids) - seq.n_cached)
        self.open(seq, 0, self.W)
        return True

    def extend(self, seq, n):
        """Give seq the global pages of its next n positions; enough must be free."""
        for i in range(len(seq.pages), len(seq.pages) + self.lacks(seq, n)):
            page = self.global_pages.take(seq.keys[i] if i * PAGE < seq.n_reused else None)
            self.global_table[seq.slot, i] = page
            seq.pages.append(page)

    def open(self, seq, n, back=0):
        """Give seq the window pages of its next n, last `back` positions; they never run out."""
        for i in range(max(0, seq.n_cached - back) // PAGE, (seq.n_cached + n - 1) // PAGE + 1):
            if i not in seq.window:
                page = self.window_pages.take(seq.keys[i] if i * PAGE < seq.n_reused else None)
                seq.window[i] = self.window_table[seq.slot, i] = page

    def commit(self, seq, n):
        """The next n tokens of seq stand. Pages that they fill can be found from now on; take back
        the window pages that no later query sees; a draft block sees back to n_cached - W."""
        for i in range(seq.n_cached // PAGE, (seq.n_cached + n) // PAGE if seq.params else 0):
            self.global_pages.register(seq.pages[i], seq.key(i))
            self.window_pages.register(seq.window[i], seq.key(i))
        seq.n_cached += n
        for i in [i for i in seq.window if (i + 1) * PAGE <= seq.n_cached - self.W]:
            self.window_table[seq.slot, i] = -1
            self.window_pages.drop([seq.window.pop(i)])

    def release(self, seq):
        """Take back everything; harmless when seq holds nothing."""
        if seq.slot is not None:
            self.global_table[seq.slot] = self.window_table[seq.slot] = -1
            self.free_slots.append(seq.slot)
            self.global_pages.drop(seq.pages[::-1])      # the first ones can be found longest
            self.window_pages.drop(seq.window.values())
            seq.slot, seq.pages, seq.window = None, [], {}

class Batch:
    """The rows of one forward, sequence after sequence, and what layers publish to later layers."""
    def __init__(self, work, device, ngram=None):
        """work: (sequence, n) pairs, the next n uncached tokens of each, its drafts at the end.
        ngram: with Engram layers, (class of each token id [V], class of the pad, N)."""
        tensor = self.tensor = functools.partial(torch.tensor, dtype=torch.int64, device=device)
        token_class, pad, N = ngram or (None, 0, 0)
        self.spans, rows, classes = [], [], [tensor([]).view(0, N)]
        for seq, n in work:
            a, end, slot, tokens = seq.n_cached, len(rows) + n, seq.slot, seq.ids + seq.drafts
            self.spans.append((slot, len(rows), end, a))               # slot, rows, position
            rows += [(tokens[i], i, slot, end - 1, seq.first_kept, i, 0) for i in range(a, a + n)]
            if ngram:                    # windows of N classes; before position 0 stands the pad
                past = token_class[tensor(tokens[max(0, a - N + 1) : a + n])]
                past = F.pad(past, (N - 1 + n - len(past), 0), value=pad)
                classes.append(past.unfold(0, N, 1).flip(1))
        # one copy to a GPU, of an even width: rows are aligned alike. [T] each; `last` row of its
        # sequence; first position past the handover; newest (see Draft) and oldest that it sees
        self.inputs = tensor([*zip(*rows, *rows[: len(rows) % 2])] or [[]] * 7)
        self.ids, self.pos, self.slot, self.last, self.first_kept, self.newest, self.oldest = (
            self.inputs[:, : len(rows)])
        self.reach = max((start + b - a for _, a, b, start in self.spans), default=0)    # positions
        self.classes = torch.cat(classes)            # [T, N], own class first; else [0, 0]
        self.selection = {}              # index source -> int64 [T, K] groups, ascending, -1 padded
        self.candidates = None           # int64 [T, C] blocks, likewise, of the candidate source
        self.rope = []                   # (cos, sin) [T, r/2]: ratio 0, ratio > 0, a pair's first
        # how many rows of each sequence end at the handover, its first ones
        self.dropped = [max(0, min(n, seq.first_kept - seq.n_cached)) for seq, n in work]
        self.memory = {}                 # Engram layer -> its table's rows, by Transformer
        self.features = []               # [T, D] of each target layer, for the draft

    def split(self, h, y, mix):
        """At the handover, which selects anew: keep only the rows that go past it -> a Batch of the
        dropped rows, which still write there, and of both the state of kernels.hc_boundary."""
        kept, dropped, states = self.pos >= self.first_kept, copy.copy(self), []
        for batch, rows in ((dropped, ~kept), (self, kept)):
            for name in ("pos", "slot", "newest", "oldest", "first_kept"):
                setattr(batch, name, getattr(self, name)[rows])
            batch.rope = [[t[rows] for t in turn] for turn in self.rope]
            batch.memory = {layer: t[rows] for layer, t in self.memory.items()}
            batch.features = [t[rows] for t in self.features]
            states.append((h[rows], y if y is None else y[rows],             # scale, base: 1-D
                           mix and tuple(t[rows] if t.dim() > 1 else t for t in mix)))
        ends = itertools.accumulate(self.dropped)
        self.spans = [(slot, a + n - end, b - end, (start + n) * (n < b - a))   # no row: 0, no keys
                      for (slot, a, b, start), n, end in zip(self.spans, self.dropped, ends)]
        return dropped, *states

# == Ranks: experts shared out over torch.distributed ==============================================
class Ranks:
    """The processes that share the experts, by nccl or gloo. One alone needs no process group."""
    def __init__(self, device="cpu", redundant=0, packed=False, shard_engram=False):
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.device, self.redundant, self.packed = device, redundant, packed
        self.shard_engram = shard_engram and self.size > 1
        if self.size > 1 and not dist.is_initialized():
            self._call(dist.init_process_group, timeout=datetime.timedelta(seconds=TIMEOUT))
            atexit.register(dist.destroy_process_group)

    def _call(self, collective, *args, **kwargs):
        try:
            return collective(*args, **kwargs)
        except RuntimeError as e:
            raise ConnectionError("lost another rank, which has ended or hangs") from e

    def any(self, flag):
        """Is the flag set on any rank? Every rank must ask."""
        if self.size > 1:
            flag = torch.tensor(int(flag), device=self.device)
            self._call(dist.all_reduce, flag, dist.ReduceOp.MAX)
        return bool(flag)

    def gather(self, x):
        """-> list of every rank's x, any object."""
        out = [x] * self.size
        if self.size > 1:
            self._call(dist.all_gather_object, out, x)
        return out

    def exchange(self, rows, to):
        """Send each of rows [n, ...] to rank to [n], ascending; -> what came, from which ranks."""
        sent = to.bincount(minlength=self.size)
        came = torch.empty_like(sent)
        self._call(dist.all_to_all_single, came, sent)
        got = rows.new_empty(int(came.sum()), *rows.shape[1:])
        self._call(dist.all_to_all_single, got, rows.contiguous(), came.tolist(), sent.tolist())
        return got, torch.arange(self.size, device=to.device).repeat_interleave(came)

def balance(loads, redundant, n_ranks):
    """EPLB: loads [E], tokens that chose each expert -> the experts of each rank, equally many.
    One by one, the redundant seats go to the expert with the highest load a replica (and as many
    more as make the ranks equal). Then all are packed, heaviest first, where the load is least."""
    E, bins, held = len(loads), [[] for _ in range(n_ranks)], [0.0] * n_ranks
    copies, per_rank = [1] * E, min(E, -(-(E + redundant) // n_ranks))
    while sum(copies) < per_rank * n_ranks:
        e = max((e for e in range(E) if copies[e] < n_ranks), key=lambda e: loads[e] / copies[e])
        copies[e] += 1
    share = [load / n for load, n in zip(loads, copies)]
    for e in sorted(range(E), key=lambda e: -share[e]):
        for _ in range(copies[e]):
            r = min((r for r in range(n_ranks) if len(bins[r]) < per_rank),
                    key=lambda r: (e in bins[r], held[r]))
            bins[r].append(e)
            held[r] += share[e]
    return bins

# == Model: one forward for prefill, chunks, decode and verification ===============================
class Weights(NamedTuple):
    """The checkpoint's tensors on their way into the model, and how to compute with them."""
    checkpoint: Checkpoint
    device: str
    dtype: torch.dtype                           # of activations and dequantized weights
    block: int | None                            # 16 in deterministic mode, see kernels.linear
    lazy: bool                                   # dequantize at every use
    eps: float                                   # of every rms_norm
    fused: bool                                  # Triton kernels: matrices stay packed
    ranks: Ranks                                 # the processes that share the experts

    def vector(self, name):
        """A norm, bias, sink or mHC parameter: fp32, always held."""
        return self.checkpoint.dequantized(name, torch.float32, self.device)

class Linear:
    """Matrices [N_i, in] of the checkpoint over one another, for kernels.project.
    For the references w is [sum of N_i, in] in the activations' dtype, dequantized once, or with
    --lazy at every use. For the fused kernels w and scale stay as they are in the file, as bytes;
    form is 16 (bf16 or fp32, no scale), 8 (e4m3, a scale for 32 x 32) or 4 (e2m1, for 1 x 32)."""
    def __init__(self, names, weights, norm=None, groups=1):
        """names: separated by blanks. norm [in]: of the input. groups: block-diagonal (wo_a)."""
        self.names, self.weights, self.held = names.split(), weights, None
        self.norm, self.groups, self.dtype, self.scale = norm, groups, weights.dtype, None
        if weights.fused:
            parts = [weights.checkpoint.stored(n) for n in self.names]
            self.form = {K.E4M3: 8, torch.int8: 4}.get(parts[0][0].dtype, 16)
            need(self.form != 8 or all(len(w) % 32 == 0 for w, _ in parts[:-1]) and
                 len(parts[0][0]) % (16 * groups) == 0, f"{names}: the rows of one are no multiple "
                 "of 32, or of a group of 16: the fused kernels cannot take them")
            if self.form < 16:                   # packed: bytes, and bytes of scales
                parts = [(w.view(torch.uint8), s.view(torch.uint8)) for w, s in parts]
                self.scale = torch.cat([s for _, s in parts]).to(weights.device)
            self.held = torch.cat([w for w, _ in parts]).to(weights.device)
        elif not weights.lazy:
            self.held = self.w

    @property
    def w(self):
        """[N, in], or as it is stored."""
        if self.held is not None:
            return self.held
        w = self.weights
        parts = [w.checkpoint.dequantized(n, w.dtype, w.device) for n in self.names]
        return torch.cat(parts) if parts[1:] else parts[0]

    def __call__(self, x, side=None):
        """x [T, in] -> fp32 [T, N]; with side, another Linear of the same x, both results."""
        w = self.weights
        return K.project(x, self, w.block, self.norm, w.eps, self.groups, side)

class Attention:
    """CSA2: window rows and selected groups under one softmax; K = V, one head of them."""
    def __init__(self, c, plan, weights, prefix, norm):
        self.c, self.plan, self.w = c, plan, weights
        self.q_norm, self.kv_norm, self.sink = (
            weights.vector(prefix + n) for n in ("q_norm.weight", "kv_norm.weight", "attn_sink"))
        full, scored = plan.mode == "full", plan.mode in ("full", "reindex")
        def linear(*names, **more):
            return Linear(" ".join(prefix + n for n in names), weights, **more)
        self.down = linear("wq_a", "wkv", norm=norm)
        self.wq = linear("wq_b", *["indexer.wq_b"] * scored)
        self.wo_a, self.wo_b = linear("wo_a", groups=c.o_groups), linear("wo_b")
        latent = ["compressor.wkv", "compressor.wgate"][: plan.ratio * full]     # a pair has gates
        self.side = linear(*latent, "indexer.weights_proj") if scored else None  # more readers of x
        if full:
            self.wk = linear("indexer.wk")
            self.norm, self.k_norm = (weights.vector(prefix + n) for n in (
                "compressor.norm.weight", "indexer.k_norm.weight"))

    def __call__(self, x, batch, cache, whole=True):
        """x fp32 [T, D] -> if whole, fp32 [T, 1, D]; writes window rows, and, if full, groups."""
        c, plan, w, rotate = self.c, self.plan, self.w, batch.rope[min(1, self.plan.ratio)]
        scored, window = plan.mode in ("full", "reindex"), cache.window[plan.index]
        latents, keys = (pools.get(plan.kv_source) for pools in (cache.latents, cache.keys))
        a = self.down(x, self.side)              # fp32 [T, Q + d], and [T, d (1 or 2 times) + Hi]
        a, side = a if scored else (a, None)
        q, qi = K.queries(
            a, self.q_norm, self.kv_norm, self.wq if whole else None, rotate, batch.slot, batch.pos,
            window, c.num_attention_heads, c.index_n_heads * scored, w.eps, w.dtype, w.block)
        if plan.mode == "full":                  # first: a token sees the group that it completes
            K.compress(side, self.norm, self.wk, self.k_norm, batch.rope[plan.ratio], batch,
                       cache.ring.get(plan.index), latents, keys, plan.ratio, w.eps, w.dtype,
                       w.block)
        if not whole:
            return None
        if scored:
            batch.selection[plan.index] = K.index(qi, side[:, -c.index_n_heads :], batch, keys,
                                                  plan.ratio, plan.candidates, c, w.block)
        L = c.sliding_window + c.dspark_block_size * (plan.mode == "draft")
        o = K.attention(q, self.sink, batch.slot, batch.newest, batch.oldest, L, window, latents,
                        batch.selection.get(plan.index_source), rotate, w.dtype)
        return self.wo_b(self.wo_a(o))[:, None]

class MoE:
    """Routed experts, shared out over the ranks, and one shared expert, which every rank holds.
    A *seat* is a replica of an expert: number seat % per_rank of rank seat // per_rank."""
    def __init__(self, c, weights, prefix, norm, n_experts, k):
        self.c, self.w, self.k, self.norm, self.prefix = c, weights, k, norm, prefix
        self.gate = Linear(prefix + "gate", weights, norm)
        self.bias = weights.vector(prefix + "gate.bias")
        self.tickets = torch.zeros(2**15, dtype=torch.int32, device=weights.device)   # 16 rows
        self.loads = torch.zeros(n_experts, dtype=torch.int64, device=weights.device)
        self.place([1] * n_experts)

    def place(self, loads):
        """Share the experts out by their loads, and hold this rank's."""
        w, ranks, R = self.w, self.w.ranks, self.w.ranks.size
        bins = balance(loads, ranks.redundant, R)
        self.per_rank, where = len(bins[0]), [[] for _ in loads]
        for seat, e in enumerate(sum(bins, [])):
            where[e].append(seat)
        self.copies = torch.tensor([len(x) for x in where], device=w.device)         # [E]
        self.replicas = torch.tensor([(x * R)[:R] for x in where], device=w.device)   # [E, R]
        names = [f"{self.prefix}experts.{e}." for e in bins[ranks.rank]]
        names.append(self.prefix + "shared_experts.")
        self.up = [Linear(f"{n}w1 {n}w3", w) for n in names]
        self.down = [Linear(n + "w2", w) for n in names]
        if w.fused:                              # one tensor for all the routed experts
            self.up, self.down = ([*map(torch.stack, zip(*((m.w, m.scale) for m in part[:-1]))),
                                   part[-1].w, part[-1].scale] for part in (self.up, self.down))

    def __call__(self, x):
        """x fp32 [T, D] -> fp32 [T, k + 1, D], to be added in the router's order, shared last."""
        chosen, weight = K.router(x, self.gate, self.bias, self.k, self.c.routed_scaling_factor,
                                  self.w.eps, self.tickets, self.w.block)
        if self.w.ranks.size == 1:
            return self._experts(x, self.norm, chosen, weight)
        self.loads += chosen.flatten().bincount(minlength=len(self.loads))
        return self._exchanged(x, chosen, weight)

    def _experts(self, x, norm, chosen, weight, shared=True):
        return K.experts(x, norm, self.w.eps, chosen, weight, self.up, self.down,
                         self.c.swiglu_limit, self.w.dtype, self.w.block, shared)

    def _exchanged(self, x, chosen, weight):
        """`_experts` with those of all ranks: a token goes once to each rank that has some of its
        experts; a row an expert comes back, in fp32 if that must not round (deterministic)."""
        w, ranks, k = self.w, self.w.ranks, self.k
        out = self._experts(x, self.norm, torch.full_like(chosen, -1), weight)      # the shared one
        turn = torch.arange(len(x), device=x.device)[:, None] + ranks.rank
        seat = self.replicas[chosen, turn % self.copies[chosen]]                    # [T, k]
        owner = torch.arange(ranks.size, device=x.device)[:, None, None]
        to, row = (seat // self.per_rank == owner).any(2).nonzero().unbind(1)       # [n] copies
        mine = seat[row] // self.per_rank == to[:, None]                            # [n, k]
        a = K.rms_norm(x, self.norm, w.eps).to(w.dtype)
        a = (K.quantize(a, K.FP8) if ranks.packed else a)[row]
        message = a, torch.where(mine, seat[row] % self.per_rank, -1).int(), weight[row]
        sizes = [t.shape[1] * t.itemsize for t in message]
        got, came = ranks.exchange(torch.cat([t.view(torch.uint8) for t in message], 1), to)
        a, ids, weight = (g.clone(memory_format=torch.contiguous_format).view(t.dtype)
                          for g, t in zip(got.split(sizes, 1), message))
        y = self._experts(K.dequantize(a, K.FP8) if ranks.packed else a, None, ids.long(), weight,
                          False)[:, :k]
        back = y[ids >= 0].to(torch.float32 if w.block else w.dtype)
        back, _ = ranks.exchange(back, came.repeat_interleave((ids >= 0).sum(1)))
        which, choice = mine.nonzero().unbind(1)
        out[row[which], choice] = back.float()
        return out

def token_classes(prompt, c):
    """Token id -> class int64 [V]: ids whose text is equal once normalized share a class."""
    normalize = norms.Sequence([
        norms.NFKC(), norms.NFD(), norms.StripAccents(), norms.Lowercase(),
        norms.Replace(Regex(r"[ \t\r\n]+"), " "), norms.Replace(Regex("^ $"), "\ue000"),
        norms.Strip(), norms.Replace("\ue000", " ")]).normalize_str      # a blank survives Strip
    classes, out = {}, []
    for i in range(c.vocab_size):
        text = prompt.whole.decode([i], skip_special_tokens=False)
        key = prompt.whole.id_to_token(i) if "\ufffd" in text else normalize(text) or text
        out.append(classes.setdefault(key, len(classes)))
    found, want = len(classes), c.engram_compressed_vocab_size
    need(found == want, f"the tokenizer has {found} token classes, config.json says {want}")
    return torch.tensor(out)

class Engram:
    """n-gram memory: hashed rows of a mapped table, gated into every stream."""
    def __init__(self, c, plan, weights, prefix):
        self.c, self.w, self.name = c, weights, prefix + "embed"
        self.wkv = Linear(prefix + "wkv", weights)
        self.q_weight, self.k_weight = (weights.vector(f"{prefix}{n}_weight") for n in "qk")
        self.primes = torch.tensor(K.engram_primes(c)[plan.engram], device=self.w.device)
        self.n_rows, total = c.engram_num_embeddings[plan.engram], int(self.primes.sum())
        need(total == self.n_rows, f"layer {plan.index}: the primes of its Engram table sum to "
             f"{total}, not to its {self.n_rows} rows")                    # each head has its own
        self.offsets = self.primes.flatten().cumsum(0).view_as(self.primes) - self.primes
        self.multipliers = torch.tensor(K.engram_multipliers(c, plan.index), device=self.w.device)

    def __call__(self, h, y, mix, memory):
        """h, y, mix: see kernels.hc_boundary; memory [T, C * width] -> h with both written."""
        return K.engram_write(h, y, mix, self.wkv(memory), self.q_weight, self.k_weight, self.c)

    def look_up(self, batch):
        """-> fp32 [T, C * width], the rows of each token's n-grams."""
        rows = K.ngram_rows(batch.classes, self.multipliers, self.primes, self.offsets)
        return self.rows(rows).flatten(1)

    def rows(self, index):
        """Table rows index [T, C] -> fp32 [T, C, width], read from the mapped file; with
        --shard-engram by the rank whose share they are in."""
        ranks = self.w.ranks
        if not ranks.shard_engram:
            return K.dequantize(self._read(index), K.FP8)
        owner, order = (index.flatten() // -(-self.n_rows // ranks.size)).sort()
        asked, came = ranks.exchange(index.flatten()[order], owner)
        got, _ = ranks.exchange(self._read(asked), came)
        return K.dequantize(got[order.argsort()].view(*index.shape, got.shape[1]), K.FP8)

    def _read(self, index):
        """Table rows -> their bytes [..., width + width / 32], values and scales."""
        weight, scale = (self.w.checkpoint.packed(f"{self.name}.{n}").view(torch.uint8)[index.cpu()]
                         for n in ("weight", "scale"))
        check_scale(self.name, scale.view(K.E8M0))
        return torch.cat([weight, scale], -1).to(self.w.device)

class Block:
    """(Engram,) attention and experts, each at its mHC site: a layer, or a draft stage."""
    def __init__(self, c, plan, weights):
        self.c, self.w, stage = c, weights, plan.index - len(c.layers)
        p, n, k = ((f"mtp.{stage}.", c.dspark_n_routed_experts, c.dspark_num_experts_per_tok)
                   if plan.mode == "draft" else
                   (f"layers.{plan.index}.", c.n_routed_experts, c.num_experts_per_tok))
        self.sites = [[weights.vector(f"{p}hc_{site}_{n}") for n in ("fn", "scale", "base")]
                      for site in ("attn", "ffn")]
        self.engram = Engram(c, plan, weights, p + "engram.") if plan.engram is not None else None
        self.attn = Attention(c, plan, weights, p + "attn.", weights.vector(p + "attn_norm.weight"))
        self.ffn = MoE(c, weights, p + "ffn.", weights.vector(p + "ffn_norm.weight"), n, k)

    def __call__(self, h, y, mix, batch, cache, whole=True):
        """State of kernels.hc_boundary, h [T, S, D], y, mix -> that one layer on, if whole."""
        index = self.attn.plan.index
        if self.engram:
            h, y = self.engram(h, y, mix, batch.memory[index]), None
        features = batch.features if index in self.c.dspark_target_layer_ids else None
        h, x, mix = K.hc_boundary(h, y, mix, self.sites[0], self.c, self.w.block, features)
        y = self.attn(x, batch, cache, whole)
        if not whole:
            return None
        h, x, mix = K.hc_boundary(h, y, mix, self.sites[1], self.c, self.w.block)
        return h, self.ffn(x), mix

def rope_frequencies(c, compressed):
    """Radians a position, fp32 [r/2]: plain for ratio 0; another base and YaRN for ratio > 0.
    c: Config (rope_theta, compress_rope_theta, rope_scaling_*). YaRN scales frequencies only."""
    r, theta = c.qk_rope_head_dim, c.compress_rope_theta if compressed else c.rope_theta
    f = theta ** -(torch.arange(0, r, 2, dtype=torch.float64) / r)
    if not compressed:
        return f.float()
    length = c.rope_scaling_original_max_position_embeddings
    low, high = (r * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
                 for turns in (c.rope_scaling_beta_fast, c.rope_scaling_beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), r - 1)     # pairs with so many turns
    ramp = ((torch.arange(r // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (f / c.rope_scaling_factor * ramp + f * (1 - ramp)).float()

class Graphs:
    """CUDA graphs: the hundreds of launches of a small step, recorded once and started as one.
    A graph is bound to its tensors, so it owns a Batch, which each step refills; there is one for
    every number of rows and every power of two that bounds the longest sequence."""
    def __init__(self):
        self.held, self.pool = {}, None

    def __call__(self, forward, batch, cache, blocks):
        """-> what forward(batch, cache, blocks) returns; to run it twice writes the same rows."""
        batch.reach = max(PAGE, 1 << (batch.reach - 1).bit_length())
        key = cache, blocks[0], len(batch.pos), batch.reach
        if key not in self.held:
            forward(copy.deepcopy(batch), cache, blocks)         # compiles, which none may while
            mine, graph = copy.deepcopy(batch), torch.cuda.CUDAGraph()               # recording
            with torch.cuda.graph(graph, self.pool):
                out = forward(mine, cache, blocks)
            self.pool, entry = graph.pool(), (key, (graph, mine, out))
            self.held = dict([*self.held.items(), entry][-64:])          # the last used are last
        graph, mine, out = self.held[key] = self.held.pop(key)
        mine.inputs.copy_(batch.inputs)
        for layer, rows in batch.memory.items():
            mine.memory[layer].copy_(rows)
        graph.replay()
        batch.features = [x.clone() for x in mine.features]      # graphs share their memory
        return out.clone()

class Transformer:
    """The backbone: embedding, blocks, norm, head."""
    def __init__(self, c, weights, progress=lambda *_: None):
        self.c, self.w, self.blocks, self.graphs = c, weights, [], None      # Graphs, if wanted
        self.embed = weights.checkpoint.packed("embed.weight").to(self.w.device)       # [V, D]
        for plan in c.layers:
            self.blocks.append(Block(c, plan, weights))
            progress("loading layer", plan.index + 1, len(c.layers))
        # past the last KV source, if it makes a latent a token, no layer writes but window rows
        last = next((p for p in c.layers[::-1] if p.mode == "full"), None)
        self.handover = last.index if last and last.ratio == 1 else None
        self.head = Linear("head", weights, weights.vector("norm.weight"))
        self.frequencies = [rope_frequencies(c, x).to(self.w.device) for x in (False, True)]

    def hidden(self, batch, cache, blocks):
        """The batch through blocks -> fp32 [T, D], not yet normed, of the rows that it keeps."""
        few = max((b - a for _, a, b, _ in batch.spans), default=RING) < RING     # as decode brings
        if self.graphs and few and not any(batch.dropped):
            return self.graphs(self._hidden, batch, cache, blocks)
        return self._hidden(batch, cache, blocks)

    def _hidden(self, batch, cache, blocks):
        plain, compressed = self.frequencies
        batch.rope = [K.rotation(batch.pos, plain), K.rotation(batch.pos, compressed),
                      K.rotation(batch.pos // 2 * 2, compressed)]
        h = F.embedding(batch.ids, self.embed).to(self.w.dtype)
        h, y, mix = h[:, None].repeat(1, self.c.hc_mult, 1), None, None
        for block in blocks:
            if block.attn.plan.index == self.handover and any(batch.dropped):
                dropped, state, (h, y, mix) = batch.split(h, y, mix)
                block(*state, dropped, cache, whole=False)
            if len(h):
                h, y, mix = block(h, y, mix, batch, cache)
            elif self.w.ranks.size > 1:                  # other ranks' tokens may need the experts
                block.ffn(h[:, 0])
            if block.attn.plan.index == self.handover:
                batch.oldest = batch.first_kept
        return K.hc_boundary(h, y, mix, None, self.c)[1] if len(h) else h[:, 0].float()

    def __call__(self, batch, cache, last):
        """All rows of the batch go through; -> logits fp32 [n, V] of last[i] of each sequence."""
        batch.memory = {b.attn.plan.index: b.engram.look_up(batch) for b in self.blocks if b.engram}
        x = self.hidden(batch, cache, self.blocks)
        rows = [i for n, (_, _, end, _) in zip(last, batch.spans) for i in range(end - n, end)]
        return self.head(x if len(rows) == len(x) else x[rows])

# == Draft: DSpark proposes tokens, the model judges them ==========================================
class Draft:
    """DSpark: three stages guess a block of n tokens at once, a Markov head makes them agree."""
    def __init__(self, c, weights, target):
        last = f"mtp.{len(c.stages) - 1}."
        self.c, self.w, self.target = c, weights, target
        self.stages = [Block(c, plan, weights) for plan in c.stages]
        self.main_proj = Linear("mtp.0.main_proj", weights)
        self.main_norm = weights.vector("mtp.0.main_norm.weight")
        self.head = copy.copy(target.head)               # the model's, behind a norm of its own
        self.head.norm = weights.vector(last + "norm.weight")
        self.markov_embed = weights.checkpoint.dequantized(
            last + "markov_head.embed", torch.bfloat16, weights.device)
        self.markov_head = Linear(last + "markov_head.head", weights)
        self.confidence = Linear(last + "confidence_head.proj", weights)

    def commit(self, batch, stand, cache):
        """Write the stages' context rows of the first stand[i] tokens of the i-th sequence, if they
        went past the handover: main_norm(main_proj(features)) through each stage's wkv."""
        spans = zip(batch.spans, stand, batch.dropped)
        rows = batch.tensor([i for (_, a, *_), n, gone in spans for i in range(a, a + n - gone)])
        x = self.main_proj(torch.cat([x[rows] for x in batch.features], 1))                # [n, nD]
        slot, pos = batch.slot[rows], batch.pos[rows]
        rotate = K.rotation(pos, self.target.frequencies[0])
        for stage in self.stages:
            a = K.project(x, stage.attn.down, self.w.block, self.main_norm, self.w.eps)
            K.queries(a, None, stage.attn.kv_norm, None, rotate, slot, pos,
                      cache.window[stage.attn.plan.index], 0, 0, self.w.eps, self.w.dtype)

    def propose(self, seqs, cache, choose):
        """-> per sequence: drafts (n ids), their logits [n, V], survival (n floats).
        A block is the anchor, the last id of a sequence, which has not been through the model, and
        n - 1 noise ids, which stay in seq.drafts. choose(seq, logits [V], j) -> j-th id, int64.
        Survival: the estimated chance that a draft and all before it are accepted."""
        n = self.c.dspark_block_size
        for seq in seqs:
            seq.drafts = [self.c.dspark_noise_token_id] * (n - 1)
            cache.open(seq, n)           # its own rows stand there until commit writes over them
        batch = Batch([(seq, n) for seq in seqs], self.w.device)
        batch.newest.view(len(seqs), n)[:] = batch.pos.view(len(seqs), n)[:, -1:]     # both ways
        raw = self.target.hidden(batch, cache, self.stages)
        if not seqs:                                     # it only lent its experts to other ranks
            return [], [], []
        base, raw = (t.unflatten(0, (-1, n)) for t in (self.head(raw), raw))
        tokens, logits = [batch.ids[::n]], []
        for j in range(n):                               # the only part that is sequential
            m = self.markov_embed[tokens[-1]]
            logits.append(base[:, j] + self.markov_head(m.to(self.w.dtype)))
            tokens.append(torch.stack([choose(seq, x, j) for seq, x in zip(seqs, logits[-1])]))
        m = self.markov_embed[torch.stack(tokens[:n], 1)].float()
        sure = K.sigmoid(self.confidence(torch.cat([raw, m], 2).flatten(0, 1))).view(-1, n)
        drafts = torch.stack(tokens[1:], 1).tolist()     # here a GPU is waited for
        return drafts, torch.stack(logits, 1), sure.cumprod(1).tolist()

# == Engine: requests in, tokens out ===============================================================
@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. temperature 0 is greedy; top_p keeps the token that crosses it.
    verify: the rule for drafts at temperature > 0, both exact in distribution. "coupled": one noise
    for draft and target, so the text is that without drafts. "rejection": accepts a little more."""
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    verify: str = "coupled"

    def __post_init__(self):
        t, p = (x if type(x) in (int, float) else math.nan for x in (self.temperature, self.top_p))
        n, s = (x if type(x) is int else -1 for x in (self.max_tokens, self.seed))
        for name, good, must in (
                ("verify", self.verify in ("coupled", "rejection"), "'coupled' or 'rejection'"),
                ("max_tokens", n >= 1, "a whole number from 1"),
                ("temperature", t == 0 or 1e-3 <= t < math.inf, "0 (greedy) or at least 0.001"),
                ("top_p", 0 < p <= 1, "above 0 and at most 1"),
                ("seed", 0 <= s < 2**64, "a whole number from 0 to 2^64 - 1")):
            need(good, f"{name} is {getattr(self, name)!r}, must be {must}")

class Output(NamedTuple):
    """A finished request; ids without the prompt and without the eos that stopped it."""
    ids: list
    text: str
    finish_reason: str                   # "stop" (eos) or "length"
    stats: dict

class Engine:
    """The model, its cache, and the requests that share them."""
    def __init__(self, cfg, model, draft, n_drafts, prompt, max_batch, max_pages, chunk, replay):
        self.cfg, self.model, self.prompt, self.device = cfg, model, prompt, model.w.device
        self.cache, self.chunk = Cache(cfg, max_batch, max_pages, chunk, self.device), chunk
        self.draft, self.n_drafts = draft, n_drafts      # n_drafts: a number, or "confidence"
        self.replay = replay * (model.handover is not None)       # tokens; 0: prefill is exact
        self.seconds = {"draft": 0.0, "forward": 0.0, "step": 0.0}          # where the time went
        self.cost = {}                   # rows of a decode step -> its mean seconds, for confidence
        self.waiting, self.running, self.ngram = [], [], None
        self.ranks, self.n_steps = model.w.ranks, 0
        if cfg.engram_layer_ids:
            classes = token_classes(prompt, cfg).to(self.device)
            self.ngram = classes, int(classes[cfg.engram_pad_token_id]), cfg.engram_max_ngram_size

    @classmethod
    def load(cls, folder, device=None, dtype=None, deterministic=False, lazy=None, max_batch=8,
             max_pages=None, chunk=512, speculate=True, replay=True, progress=lambda *_: None,
             redundant=0, packed=False, shard_engram=False, graphs=True):
        """An Engine for the checkpoint in `folder` (a local path, the published layout).
        dtype: of activations, default bf16 on a GPU, fp32 on a CPU. deterministic: a row's bits do
        not depend on the other rows (at one number of threads). lazy: dequantize and check weights
        as they are used; default where they do not fit into memory. max_batch: requests that run
        at once. max_pages: global pages of 128 tokens, default as many as the batch can use, within
        2 GiB. chunk: most rows of one step. speculate: judge all drafts (True), at most so many, as
        many as pay ("confidence") or none. replay: only the last tokens of a prompt go past the
        handover, a window (True) or so many; False is exact. Ranks (torchrun) share the experts:
        redundant copies of the busiest; packed: sent as FP8; shard_engram: tables shared too.
        graphs: on a GPU without other ranks, CUDA graphs for decode steps and drafts."""
        for name, x in (("max_batch", max_batch), ("chunk", chunk),
                        ("max_pages", 1 if max_pages is None else max_pages)):
            need(type(x) is int and x >= 1, f"{name} is {x!r}, not a whole number from 1")
        need(speculate == "confidence" or type(speculate) in (bool, int) and speculate >= 0,
             f"speculate is {speculate!r}, not True, False, a number of drafts or 'confidence'")
        need(max_batch <= chunk < 2**16, f"chunk is {chunk}, not {max_batch} (max_batch) to 65535")
        device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        need(device == "cpu" or torch.cuda.is_available(), f"device is {device!r}: no GPU is here")
        need(device == "cpu" or K.triton and torch.cuda.get_device_capability(device) >= (8, 9),
             f"device is {device!r}: the kernels need triton, and a GPU that has FP8")
        ranks = Ranks(device, redundant, packed, shard_engram)
        device += f":{os.environ['LOCAL_RANK']}" if device == "cuda" and ranks.size > 1 else ""
        if ":" in device:
            torch.cuda.set_device(device)                # where Triton launches
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        need(dtype in (torch.float32, torch.bfloat16), f"dtype is {dtype}, not float32 or bfloat16")
        need(not Path(folder).is_file(), f"{folder} is a file: a checkpoint is a local folder")
        cfg = Config.load(folder)
        n = cfg.dspark_block_size if speculate is True or not cfg.stages else speculate
        need(n == "confidence" or n <= cfg.dspark_block_size < RING, f"speculate is {n}: a block "
             f"holds {cfg.dspark_block_size} drafts here, and a step at most {RING - 1}")
        replay, W = cfg.sliding_window if replay is True else replay, cfg.sliding_window
        need(replay is False or type(replay) is int and (replay == 0 or replay >= W),
             f"replay is {replay!r}, not True, False or at least the window's {W} tokens")
        if lazy is None:                         # do the weights fit, with a fifth to spare?
            there = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device == "cpu"
                     else torch.cuda.mem_get_info()[1])
            lazy = weight_bytes(cfg, dtype, ranks.size, redundant) > 0.8 * there
        E, most = cfg.n_routed_experts, max_batch * -(-cfg.max_position_embeddings // PAGE)
        max_pages = max_pages or max(1, min(most, 2**31 // max(1, page_bytes(cfg))))
        fits = (E + redundant) % ranks.size == 0 and 0 <= redundant <= E * (ranks.size - 1)
        need(fits, f"{E} experts and {redundant} redundant ones do not fit {ranks.size} ranks")
        prompt, checkpoint = Prompt(folder, cfg.bos_token_id), Checkpoint(folder, cfg)
        same = cfg, checkpoint.specs, redundant, packed, shard_engram, dtype, deterministic, bool(n)
        digest = hashlib.sha256(repr(same).encode()).digest()
        need(len({*ranks.gather(digest)}) == 1, "the ranks' checkpoints or settings differ")
        weights = Weights(checkpoint, device, dtype, 16 if deterministic else None,
                          lazy, cfg.rms_norm_eps, K.FUSED or device != "cpu", ranks)
        model = Transformer(cfg, weights, progress)
        model.graphs = Graphs() if graphs and device != "cpu" and ranks.size == 1 else None
        draft = Draft(cfg, weights, model) if n and cfg.stages else None
        return cls(cfg, model, draft, n, prompt, max_batch, max_pages, chunk, replay)

    def _sequence(self, prompt, params=None):
        """A checked, not yet admitted Sequence; without params it will not be sampled from."""
        good = isinstance(prompt, (str, list, tuple))
        need(good, f"the prompt {prompt!r:.40} is no string and no list of ids")
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
        return Sequence(ids, params, self.prompt.decoder(), self.replay if params else 0)

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

    @torch.inference_mode()
    def step(self):
        """Draft, one forward for every running request, judge; -> the sequences that it moved."""
        start, work, budget = time.perf_counter(), [], self.chunk
        try:
            while self.waiting and self.cache.admit(self.waiting[0]):
                self.running.append(self.waiting.pop(0))
            self._draft()
            self.seconds["draft"] += time.perf_counter() - start
            order = sorted(self.running, key=lambda s: (not s.decoding, len(s.ids) - s.n_cached))
            for i, seq in enumerate(order):      # decode first; prompts share what is left
                n = min(len(seq.ids) + len(seq.drafts) - seq.n_cached,
                        budget if seq.decoding else budget // (len(order) - i))
                work += [(seq, n)] * (n > 0)
                budget -= n
            work = self._make_room(work)
            if not work and self.waiting:                # a leak must not become a hang
                raise RuntimeError("no page is free for the next request, and nothing runs")
            decoding = all(seq.decoding for seq, _ in work)
            if self.ranks.any(bool(work)):
                self._advance(work)
            self.n_steps += 1
            if self.ranks.redundant and self.n_steps % REBALANCE == 0:
                self.rebalance()
        except BaseException:
            for seq, _ in work or [(seq, 0) for seq in self.running]:
                self.cancel(seq, "error")
            raise
        seconds = time.perf_counter() - start
        self.seconds["step"] += seconds
        if work and decoding:
            rows = sum(n for _, n in work)
            count, mean = self.cost.get(rows, (0, 0.0))          # the first may have compiled
            self.cost[rows] = count + 1, mean + (seconds - mean) / min(max(1, count), 50)
        return [seq for seq, _ in work]

    def rebalance(self):
        """Place the experts of every layer anew, by what all ranks' tokens chose so far."""
        for moe in (b.ffn for b in self.model.blocks + (self.draft.stages if self.draft else [])):
            moe.place([sum(x) for x in zip(*self.ranks.gather(moe.loads.tolist()))])
            moe.loads.zero_()

    def _make_room(self, work):
        """While pages lack: go without drafts, then send the youngest requests back to wait."""
        def lacking():
            return sum(self.cache.lacks(*each) for each in work) > len(self.cache.global_pages.idle)
        if lacking():
            work = [(seq, n - len(seq.drafts)) for seq, n in work]
            for seq, _ in work:
                seq.drafts = []
        while lacking():
            seq = self.running.pop()
            self.cache.release(seq)
            self.waiting.insert(0, seq)
            work = [(s, n) for s, n in work if s is not seq]
        return work

    def _advance(self, work):
        """Forward, judge the (sequence, n) of work that reach an end, commit, append new ids."""
        judged = [(1 + len(s.drafts)) * (s.n_cached + n == len(s.ids + s.drafts)) for s, n in work]
        start = time.perf_counter()
        batch, logits = self._run(work, judged)
        made = self._judge([seq for seq, _ in work], judged, logits)
        self.seconds["forward"] += time.perf_counter() - start   # a GPU is waited for in _judge
        self._commit(batch, work, [n - x + len(new)              # rejected drafts do not stand
                                   for (_, n), x, new in zip(work, judged, made)])
        for (seq, _), new in zip(work, made):
            if new:
                seq.runs.append((len(seq.drafts), self._emit(seq, new) - 1))
                seq.drafts = []

    def _draft(self):
        """Give every decoding sequence the drafts that this step will judge."""
        seqs = [s for s in self.running if s.decoding] if self.draft else []
        most = (self.chunk - len(self.running)) // max(1, len(seqs))       # a row for each prompt
        room = {s: min(most, s.params.max_tokens - len(s.new) - 1) for s in seqs}   # and one token
        seqs = [s for s in seqs if room[s]]
        if not self.ranks.any(bool(seqs)):
            return
        def choose(seq, logits, j):                      # with its own noise, or the target's
            p, at = seq.params, len(seq.ids) + j
            return K.sample(logits, p.temperature, 1.0, p.seed, at, int(p.verify == "rejection"))
        drafts, logits, survival = self.draft.propose(seqs, self.cache, choose)
        for seq, ids, x, s in zip(seqs, drafts, logits, survival):
            n = self._worth(s, len(seqs)) if self.n_drafts == "confidence" else self.n_drafts
            seq.drafts, seq.proposals = ids[: min(n, room[seq])], x

    def _worth(self, survival, n_seqs):
        """How many drafts pay: up to the first whose estimated survival is below the price of a row
        in tokens. It never looks at a later draft: that would bias what rejection accepts."""
        costs = sorted((rows, mean) for rows, (_, mean) in self.cost.items())
        if len(costs) < 3:                               # learn the price first
            return len(costs)
        (a, least), (b, most) = costs[0], costs[-1]
        made = [x for seq in self.running for x in seq.runs[-8:]]
        rows, tokens = (sum(1 + x[i] for x in made) / len(made) * n_seqs for i in (0, 1))
        row = max(0.0, (most - least) / (b - a))         # seconds; a step: least + (rows - a) * row
        price = row * tokens / (least + max(0.0, rows - a) * row)
        return next((i for i, s in enumerate(survival) if s < price), len(survival))

    def _run(self, work, last):
        """The forward: next n tokens of each (sequence, n) -> batch, logits of the last."""
        for seq, n in work:
            self.cache.extend(seq, n)
            self.cache.open(seq, n)
        batch = Batch(work, self.device, self.ngram)
        return batch, self.model(batch, self.cache, last)

    def _commit(self, batch, work, stand):
        """The first stand[i] tokens of the i-th sequence are there to be seen from now on."""
        if self.draft and len(batch.pos):
            self.draft.commit(batch, stand, self.cache)
        for (seq, _), n in zip(work, stand):
            self.cache.commit(seq, n)

    @torch.inference_mode()
    def _forward(self, work, last=None):
        """Run and commit all tokens of work -> logits of so many last ones of each, or of all."""
        batch, logits = self._run(work, last or [n for _, n in work])
        self._commit(batch, work, [n for _, n in work])
        return logits

    def _judge(self, seqs, judged, logits):
        """logits [sum of judged, V], 1 + drafts (or 0) of each -> accepted drafts and one token."""
        picks, made = [logits.isfinite().all().long()], []
        for seq, rows in zip(seqs, logits.split(judged)):
            p = seq.params
            for i, (row, draft) in enumerate(zip(rows, [*seq.drafts, None])):
                draw = (p.temperature, p.top_p, p.seed, len(seq.ids) + i)
                by_rule = draft is not None and p.temperature and p.verify == "rejection"
                picks.append(K.accept(row, seq.proposals[i], draft, *draw) if by_rule else
                             K.sample(row, *draw))
        finite, *picks = torch.stack(picks).tolist()     # here a GPU is waited for, once
        need(finite, "the logits are not finite: the checkpoint is damaged")
        for seq, x in zip(seqs, judged):
            new, picks = picks[:x], picks[x:]
            n = next((i for i, (a, b) in enumerate(zip(new, seq.drafts)) if a != b), len(new))
            made.append(new[: n + 1])
        return made

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

    def logits(self, ids, chunks=None):
        """Exact prefill of a fresh sequence: ids [n] -> logits fp32 [n, V] of every position.
        chunks: sizes that sum to n, to cut the prompt there. Image ids are taken as text tokens."""
        seq = self._sequence(ids)
        chunks = [len(seq.ids)] if chunks is None else list(chunks)
        good = all(type(n) is int and n > 0 for n in chunks) and sum(chunks) == seq.n_prompt
        need(good, f"chunks {chunks} do not cut {seq.n_prompt} tokens")
        sizes = [min(self.chunk, n - i) for n in chunks for i in range(0, n, self.chunk)]
        need(self.cache.admit(seq), f"{-(-seq.n_prompt // PAGE)} pages and a slot are needed, "
             f"{len(self.cache.global_pages.idle)} and {len(self.cache.free_slots)} are free")
        try:
            return torch.cat([self._forward([(seq, n)]) for n in sizes])
        finally:
            self.cache.release(seq)

    def generate(self, prompts, params=SamplingParams()):
        """prompts: list of strings or id lists; params: one for all or a list -> list of Output.
        Every rank calls it with the same prompts, runs its part of them and gets all outputs."""
        need(isinstance(prompts, (list, tuple)), "generate takes a list of prompts")
        params = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        need(len(params) == len(prompts), f"{len(prompts)} prompts but {len(params)} params")
        seqs = [self._sequence(p, q or SamplingParams()) for p, q in zip(prompts, params)]
        seqs = seqs[self.ranks.rank :: self.ranks.size]  # this rank's, once all were accepted
        for _ in self._steps(seqs):
            pass
        made = self.ranks.gather([Output(s.new, s.text, s.finish_reason, s.stats()) for s in seqs])
        return [made[i % len(made)][i // len(made)] for i in range(len(prompts))]

    def stream(self, prompt, params=SamplingParams()):
        """-> iterator of the text of one prompt, as it is made; closing it cancels the request."""
        return self._pieces(self._sequence(prompt, params or SamplingParams()))

    def _pieces(self, seq):
        shown = 0
        for _ in self._steps([seq]):
            new, shown = seq.text[shown:], len(seq.text)
            if new:
                yield new

    def _steps(self, seqs):
        """Queue seqs and step until all have ended; closed before that, it takes them out."""
        self.waiting.extend(seqs)
        try:
            while self.ranks.any(not all(s.finish_reason for s in seqs)):
                yield self.step()
            need(all(s.finish_reason != "error" for s in seqs), "a step that another call made has "
                 "failed and ended this request", RuntimeError)
            yield                                        # another caller's step may have ended them
        finally:
            for seq in seqs:
                self.cancel(seq)

# == Main: the command line ========================================================================
def progress(what, done, of):
    """A line on stderr that overwrites itself, if a person is watching."""
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{of}", end="\n" * (done == of), file=sys.stderr, flush=True)

def arguments(argv):
    """argv -> the parsed options."""
    def drafts(text):
        return text if text == "confidence" else int(text)
    p = argparse.ArgumentParser("nanoflash.py", description="DeepSeek-V4.1-Flash in two files.")
    add = p.add_argument
    add("--prompt", help="text to continue (with --chat: what the user says)")
    add("--model", default=DOCS / "tiny", help="a checkpoint's folder (docs/tiny)")
    add("--max-tokens", type=int, default=128, help="most new tokens (128)")
    add("--temperature", type=float, help="0 is greedy (generation_config.json, or 0)")
    add("--top-p", type=float, help="mass of tokens kept (generation_config.json, or 1)")
    add("--seed", type=int, default=0, help="the same seed, the same text (0)")
    add("--effort", type=int, default=75, help="with --think: 1 to 100 (75)")
    add("--drafts", type=drafts, default=True, help="most a step; `confidence`: what pays (all)")
    add("--verify", choices=("coupled", "rejection"), default="coupled", help="rule for drafts")
    add("--dtype", choices=("fp32", "bf16"), help="(bf16 on a GPU, else fp32)")
    add("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU)")
    add("--ranks", type=int, default=1, help="with --plan: number of ranks (1)")
    add("--trace", metavar="FILE", help="write what every token read and chose, as JSON lines")
    add("--redundant-experts", type=int, default=0, metavar="R", help="copies of R experts (0)")
    for flag, text in {
            "chat": "wrap the prompt in the chat encoding", "think": "with --chat: reason first",
            "no-speculate": "make no drafts", "no-graphs": "launch kernel by kernel",
            "no-replay": "exact prefill of long prompts",
            "deterministic": "the same bits in any company", "lazy": "dequantize weights at use",
            "pack-dispatch": "send tokens to experts as FP8", "stats": "print counts and speed",
            "shard-engram": "a rank reads its table rows only", "plan": "print sizes, open no file",
            "selfcheck": "hold this device to docs/golden"}.items():
        add(f"--{flag}", action="store_true", help=text)
    args = p.parse_args(argv)
    if args.prompt is None and not (args.plan or args.selfcheck):
        p.error("--prompt (or --plan) is needed")
    for flag, wants in (("think", "chat"), ("effort", "chat"), ("ranks", "plan")):
        if getattr(args, flag) != p.get_default(flag) and not getattr(args, wants):
            p.error(f"--{flag} goes with --{wants}")
    return args

def run(args):
    """Print the plan, or the continuation of one prompt as it is made."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(args.dtype)
    if args.plan:
        plan = runpy.run_path(f"{DOCS}/plan.py")["plan"]
        return plan(args.model, dtype, args.ranks, args.redundant_experts)
    if args.selfcheck:
        check = runpy.run_path(f"{DOCS}/selfcheck.py")["selfcheck"]
        return check(args.device, dtype, args.deterministic)
    path = Path(args.model) / "generation_config.json"
    defaults = _json(path) if path.is_file() else {}
    need(isinstance(defaults, dict), f"{path} holds no object")
    t = defaults.get("temperature", 0) if args.temperature is None else args.temperature
    top_p = defaults.get("top_p", 1) if args.top_p is None else args.top_p
    params = SamplingParams(args.max_tokens, t, top_p, args.seed, verify=args.verify)
    engine = Engine.load(args.model, args.device, dtype, args.deterministic, args.lazy or None,
                         max_batch=1, speculate=not args.no_speculate and args.drafts,
                         replay=not args.no_replay, redundant=args.redundant_experts,
                         packed=args.pack_dispatch, shard_engram=args.shard_engram,
                         graphs=not args.no_graphs, progress=progress)
    if weight_bytes(engine.cfg, torch.float32) < 2**28:
        torch.set_num_threads(1)                 # on small tensors a second thread only costs
    chat = [{"role": "user", "content": args.prompt}]
    prompt = engine.prompt.chat(chat, args.think, args.effort) if args.chat else args.prompt
    if engine.ranks.rank > 0:                            # rank 0 has the request, all the experts
        while engine.ranks.any(False):
            engine.step()
        return
    seq = engine._sequence(prompt, params)
    if args.trace is not None:
        runpy.run_path(f"{DOCS}/trace.py")["attach"](engine, args.trace)
    for piece in engine._pieces(seq):
        print(piece, end="", flush=True)
    print()
    if args.stats:
        draft, forward, step = engine.seconds.values()
        stats = seq.stats() | {"draft_s": round(draft, 2), "forward_s": round(forward, 2),
                               "host_share": round(1 - (draft + forward) / step, 2)}
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
    except (ValueError, OSError, ImportError) as e:
        rank = os.environ.get("RANK")
        if rank in (None, "0") or not isinstance(e, ConnectionError):
            print(f"nanoflash: rank {rank}: {e}" if rank else f"nanoflash: {e}", file=sys.stderr)
        return os._exit(2) if rank else 2                # a group's threads might hold it up
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    sys.exit(main())
