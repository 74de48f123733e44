"""Train the tiny checkpoint: the whole model, 8 million parameters, on two CPU cores.

    python docs/tiny/train.py            # from text.xz to model.safetensors; goes on where it was
    python docs/tiny/train.py --smoke    # every stage, a few steps each, in a scratch folder
    python docs/tiny/train.py --eval     # bits per byte and accepted drafts of the checkpoint here

It needs the `test` extra of pyproject.toml and the whole repository: the training model is the slow
reference of test_nanoflash.py, with those parts batched that look across tokens. Two processes of
one thread each share the parameters: each makes gradients of its half of the batch, then steps its
half of the tensors.

Letters: B sequences, T tokens of each, R = B*T rows, n blocks of W tokens; else as in nanoflash.py.
"""
import argparse
import json
import lzma
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import kernels as K                                                      # noqa: E402
import nanoflash as nf                                                   # noqa: E402
from test_nanoflash import Reference, token_classes                      # noqa: E402

torch.multiprocessing.set_sharing_strategy("file_system")               # else a file a tensor
WORKERS = 2                # processes; part of the recipe, since each draws its own dropout
MUON_RATE, ADAM_RATE, DECAY, BIAS_RATE, INDEX_WEIGHT = 3.75e-3, 2.5e-3, 0.1, 0.003, 0.05
TEMPERATURE = 0.7          # of the demonstration
LIVE = 4                   # Sinkhorn steps, of 39, that the gradient passes through
BOS, EOS, PAD, NOISE = range(4)

# ------------------------------------------------------------------------------------------------
# Text and tokenizer
# ------------------------------------------------------------------------------------------------
def chapters(part):
    """The chapters of text.xz that are "held out" (48), for "validation" (12) or "training"."""
    text = lzma.open(HERE / "text.xz", "rt", encoding="utf-8").read().split("\n\n")
    kind = {12: "held out", 50: "validation"}
    return [x for i, x in enumerate(text)
            if part == (kind.get(i % 25) or kind.get(i % 100) or "training")]

def train_tokenizer(folder, texts, vocab_size):
    """Byte-level BPE with the marks of V4.1, into folder/tokenizer.json."""
    marks = [nf.BOS, nf.EOS, "<｜▁pad▁｜>", nf.SYSTEM, nf.USER, nf.ASSISTANT, nf.REMINDER,
             nf.THINK, nf.END_THINK]
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False,
        special_tokens=[AddedToken(str(m), special=True) for m in marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.save(str(folder / "tokenizer.json"))

def config(vocab_size):
    """config.json of the tiny model, but for what the tokenizer and the primes decide."""
    return {
        "vocab_size": vocab_size, "hidden_size": 160, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
        "qk_rope_head_dim": 16, "q_lora_rank": 96, "o_groups": 2, "o_lora_rank": 64,
        "sliding_window": 32, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 4, 6],
        "candidate_source_layer_id": 4, "candidate_topk_blocks": 16, "candidate_block_size": 8,
        "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 128, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "hidden_act": "silu", "expert_dtype": "fp4", "attention_bias": False,
        "rms_norm_eps": 1e-20, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 1024},
        "engram_layer_ids": [1, 4], "engram_max_ngram_size": 3, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_vocab_size": 1500, "engram_pad_token_id": PAD,
        "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [5, 6, 7], "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 6, "dspark_num_experts_per_tok": 2,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }

def complete(cfg, folder):
    """Add to cfg what follows from the tokenizer in folder: token classes, rows of the tables."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    classes = token_classes(tokenizer, cfg["vocab_size"])
    cfg["engram_compressed_vocab_size"] = int(classes.max()) + 1
    cfg["engram_num_embeddings"] = [1] * len(cfg["engram_layer_ids"])
    cfg["engram_num_embeddings"] = [int(sum(map(sum, x)))
                                    for x in nf.K.engram_primes(nf.Config.read(cfg))]
    return cfg, classes

# ------------------------------------------------------------------------------------------------
# The model: the slow reference over B sequences at once
# ------------------------------------------------------------------------------------------------
def parameters(cfg, seed):
    """-> {name: fp32 tensor}: published names, but for the experts, stacked as w13 and w2."""
    params, g = {}, torch.Generator().manual_seed(seed)

    def normal(shape, std):
        return torch.randn(shape, generator=g) * std
    depth = (2 * cfg["num_hidden_layers"]) ** -0.5
    for name, spec in nf.inventory(nf.Config.read(cfg)).items():
        shape, kind = list(spec.shape), name.removesuffix(".weight").split(".")[-1]
        if name.endswith(".scale") or ".experts." in name:
            continue
        if name.startswith("hc_", name.rfind(".") + 1):
            S = cfg["hc_mult"]
            x = {"fn": lambda: normal(shape, 0.01), "scale": lambda: torch.ones(shape),
                 "base": lambda: torch.cat([torch.full((S,), -1.1), torch.zeros(S),
                                            2 * torch.eye(S).flatten()]) + normal(shape, 0.3),
                 }[kind.split("_")[-1]]()
        elif kind in ("bias", "bias_vl", "attn_sink"):
            x = torch.zeros(shape)
        elif "norm" in kind or kind in ("q_weight", "k_weight"):
            x = torch.ones(shape)
        elif kind == "embed":
            x = normal(shape, 0.02 if "markov" in name else 0.3)
        else:
            x = normal(shape, shape[-1] ** -0.5 * (depth if kind in ("wo_b", "w2") else 1))
        params[name] = x
    D, W = cfg["hidden_size"], cfg["moe_intermediate_size"]
    for name in [n for n in params if n.endswith("ffn.gate.weight")]:
        at, E = name.removesuffix("gate.weight"), len(params[name])
        params[at + "experts.w13"] = normal((E, 2 * W, D), D**-0.5)
        params[at + "experts.w2"] = normal((E, D, W), W**-0.5 * depth)
    return params

class Model(Reference):
    """Reference, over `shape` = (B, T): rows are B sequences of T tokens, one after the other."""
    shape, dense, dropout, replay, training = None, False, 0.0, None, False
    index_weight = 0.0

    def run(self, ids, trace=None):
        """ids [B, T] -> logits [B, T, V]; fills trace, where index_loss is to be minimized."""
        trace = {} if trace is None else trace
        trace["index_loss"], self.shape = torch.zeros(()), ids.shape
        return self.forward(ids.flatten(), trace).unflatten(0, ids.shape)

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], eps=self.config["rms_norm_eps"]) * self.params[name]

    def mixes(self, h, name):
        """As the reference; streams first, so that every sum is over whole rows; the gradient
        passes through the last rounds alone, which by then hardly change the matrix."""
        S, eps, x = h.shape[1], self.config["hc_eps"], h.flatten(1)
        fn, scale, base = (self.params[f"{name}_{part}"] for part in ("fn", "scale", "base"))
        x = x @ fn.T * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        x = x * scale.repeat_interleave(torch.tensor([S, S, S * S])) + base
        pre, post = x[:, :S].sigmoid() + eps, 2 * x[:, S : 2 * S].sigmoid()
        comb = x[:, 2 * S :].T.unflatten(0, (S, S)).softmax(1) + eps         # [S, S, R]
        axes = [0] + [1, 0] * (self.config["hc_sinkhorn_iters"] - 1)
        with torch.no_grad():
            rows, columns = torch.ones_like(comb[:, :1]), torch.ones_like(comb[:1])
            for axis in axes[:-LIVE]:
                scale = columns if axis == 0 else rows
                scale /= (comb * rows * columns).sum(axis, keepdim=True) + eps
        comb = comb * (rows * columns)
        for axis in axes[-LIVE:]:
            comb = comb / (comb.sum(axis, keepdim=True) + eps)
        return pre, post, comb.permute(2, 0, 1).contiguous()

    def engram_rows(self, ids, dead):
        rows = [super(Model, self).engram_rows(x, dead[: len(x)]) for x in ids.view(self.shape)]
        return torch.cat(rows)

    def attention(self, x, layer, trace):
        c, p, name, (B, T) = self.config, self.params, f"layers.{layer}.attn.", self.shape
        H, d, W = c["num_attention_heads"], c["head_dim"], c["sliding_window"]
        n, position, ratio = T // W, torch.arange(T).repeat(B), c["compress_ratios"][layer]
        qr = self.norm(x @ p[name + "wq_a.weight"].T, name + "q_norm.weight")
        q = self.rope((qr @ p[name + "wq_b.weight"].T).view(B * T, H, d), position, ratio)
        kv = self.norm(x @ p[name + "wkv.weight"].T, name + "kv_norm.weight")
        kv = self.stored(self.rope(kv, position, ratio), "fp8").view(B, n, W, d)
        kv = torch.cat([F.pad(kv, (0, 0, 0, 0, 1, -1)), kv], 2)             # [B, n, 2W, d]
        i, j = torch.arange(W)[:, None], torch.arange(2 * W)
        hidden = ((j <= i) | (j > i + W)).expand(n, W, 2 * W).clone()       # [n, W, 2W]
        hidden[0, :, :W] = True
        first_decoder = c["compress_ratios"].index(1)
        if self.replay is not None and layer > first_decoder:               # those rows never ran
            at = torch.arange(n)[:, None, None] * W - W
            hidden |= (at + j < self.replay) & (at + W + i >= self.replay)
        logits = q.view(B, n, W * H, d) @ kv.mT * d**-0.5                   # [B, n, W*H, 2W]
        logits = logits.view(B, n, W, H, 2 * W).masked_fill(hidden[:, :, None], -torch.inf)
        if layer in c["kv_source_layer_ids"]:
            self.compress(x, layer, trace)
        if layer in c["index_source_layer_ids"]:
            self.select(x, qr, layer, trace)
        if ratio > 0:
            far = (q.view(B, T * H, d) @ trace["latents"].mT * d**-0.5).view(B, n, W, H, -1)
            far = far.masked_fill(~trace["selected"].view(B, n, W, 1, -1), -torch.inf)
            logits = torch.cat([logits, far], -1)
        sink = p[name + "attn_sink"].view(H, 1).expand(B, n, W, H, 1)
        share = torch.cat([logits, sink], -1).softmax(-1)
        o = (share[..., : 2 * W].reshape(B, n, W * H, 2 * W) @ kv).view(B * T, H, d)
        if ratio > 0:
            far = share[..., 2 * W : -1].reshape(B, T * H, -1)
            o = o + (far @ trace["latents"]).view(B * T, H, d)
            if self.index_weight:
                mass = far.detach().view(B, T, H, -1).sum(2)
                mass = mass / (mass.sum(-1, keepdim=True) + 1e-9)
                trace["index_loss"] -= (mass * trace["index_log"]).sum() / B / T
        o = self.rope(o, -position, ratio).view(B * T, c["o_groups"], -1)
        wo_a = p[name + "wo_a.weight"].unflatten(0, (c["o_groups"], -1))
        o = torch.einsum("tgi,goi->tgo", o, wo_a).flatten(1) @ p[name + "wo_b.weight"].T
        return F.dropout(o, self.dropout, self.training)

    def compress(self, x, layer, trace):
        p, ratio, (B, T) = self.params, self.config["compress_ratios"][layer], self.shape
        name, G, x = f"layers.{layer}.attn.", T // ratio, x.view(B * T // ratio, ratio, -1)
        latent = x @ p[name + "compressor.wkv.weight"].T
        if ratio > 1:
            latent = latent * (x @ p[name + "compressor.wgate.weight"].T).softmax(1)
        latent = self.norm(latent.sum(1), name + "compressor.norm.weight")
        key = latent.detach() @ p[name + "indexer.wk.weight"].T
        key = self.norm(key, name + "indexer.k_norm.weight")
        position = torch.arange(G).repeat(B) * ratio
        latent, key = (self.rope(a, position, ratio) for a in (latent, key))
        trace["latents"] = self.stored(latent, "nvfp4").view(B, G, -1)
        trace["keys"] = self.stored(key, "mxfp4").view(B, G, -1)

    def select(self, x, qr, layer, trace):
        """The indexer learns from the attention mass alone: it reads x and qr detached."""
        c, p, name, (B, T) = self.config, self.params, f"layers.{layer}.attn.indexer.", self.shape
        ratio, key, position = c["compress_ratios"][layer], trace["keys"], torch.arange(T)
        G, di = key.shape[1:]
        newest = (position + 1) // ratio - 1
        trace["selected"] = visible = (torch.arange(G) <= newest[:, None]).expand(B, T, G)
        if self.dense and not self.index_weight:
            return
        q = (qr.detach() @ p[name + "wq_b.weight"].T).view(B * T, -1, di)
        q = self.stored(self.rope(q, position.repeat(B), ratio), "mxfp4").view(B, -1, di)
        w = x.detach() @ p[name + "weights_proj.weight"].T * (c["index_n_heads"] * di) ** -0.5
        score = ((q @ key.mT).relu().view(B, T, -1, G) * w.view(B, T, -1, 1)).sum(2)   # [B, T, G]
        if not self.dense and layer > c["candidate_source_layer_id"]:
            visible = visible & trace["candidates"]
        score = score.masked_fill(~visible, -torch.inf)
        if not self.dense and layer == c["candidate_source_layer_id"]:
            size, n = c["candidate_block_size"], (newest + 1).repeat(B)
            kept = K.candidate_blocks(score.flatten(0, 1), n, size, c["candidate_topk_blocks"])
            trace["candidates"] = kept.repeat_interleave(size, 1)[:, :G].view(B, T, G)
        selected = visible
        if not self.dense:
            selected = K.topk_mask(score.flatten(0, 1), c["index_topk"]).view(B, T, G)
        trace["selected"] = selected
        score = score.masked_fill(~selected, -1e9)
        trace["index_log"] = score.log_softmax(-1).masked_fill(~selected, 0.0)

    def moe(self, x, layer, trace):
        return self.experts(x, f"layers.{layer}.ffn.", self.config["num_experts_per_tok"], trace)

    def experts(self, x, name, k, trace):
        """x [R, D] -> [R, D]; counts the tokens of each expert."""
        p, limit, E = self.params, self.config["swiglu_limit"], len(self.params[name + "gate.bias"])
        scale = self.config["routed_scaling_factor"]
        score = F.softplus(x @ p[name + "gate.weight"].T).sqrt()
        top = (score + p[name + "gate.bias"]).topk(k).indices
        weight = score.gather(1, top)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * scale
        order = top.flatten().sort(stable=True).indices
        count = trace[name + "count"] = top.flatten().bincount(minlength=E)
        token = order // k
        w13, w2 = p[name + "experts.w13"].unbind(), p[name + "experts.w2"].unbind()
        gate_up = torch.cat([a @ w.T for a, w in zip(x[token].split(count.tolist()), w13)])
        a = self.swiglu(gate_up, limit) * weight.flatten()[order, None]
        routed = torch.cat([a @ w.T for a, w in zip(a.split(count.tolist()), w2)])
        w1, w2, w3 = (p[f"{name}shared_experts.w{i}.weight"] for i in (1, 2, 3))
        y = self.swiglu(x @ torch.cat([w1, w3]).T, limit) @ w2.T
        return F.dropout(y.index_add(0, token, routed), self.dropout, self.training)

    def draft(self, ids, trace, anchors):
        """Anchors [B, A] (positions of committed tokens' successors) -> logits before the Markov
        head [B, A, n, V] and collapsed states [B, A, n, D] of the n rows of each draft block."""
        c, p, (B, T), A = self.config, self.params, self.shape, anchors.shape[1]
        S, W, n, N = c["hc_mult"], c["sliding_window"], c["dspark_block_size"], anchors.numel()
        main_x = trace["features"] @ p["mtp.0.main_proj.weight"].T
        main_x = self.norm(main_x, "mtp.0.main_norm.weight")
        back = anchors[..., None] + torch.arange(-W, 0)                     # [B, A, W]
        hidden = F.pad(back < 0, (0, n)).view(N, 1, W + n)
        at = back.clamp(min=0).view(B, A * W, 1)
        tokens = torch.full((B, A, n), c["dspark_noise_token_id"])
        tokens[..., 0] = ids.gather(1, anchors)
        position = (anchors[..., None] + torch.arange(n)).flatten()
        h = p["embed.weight"][tokens.flatten()][:, None].repeat(1, S, 1)    # [N * n, S, D]
        pre = torch.eye(S)[0].expand(N * n, S)
        for s in range(c["num_nextn_predict_layers"]):
            name = f"mtp.{s}."
            context = self.window_rows(main_x, name, torch.arange(T).repeat(B)).view(B, T, -1)
            context = context.gather(1, at.expand(-1, -1, context.shape[-1])).view(N, W, -1)
            for kind in "attn", "ffn":
                x = torch.einsum("ts,tsd->td", pre, h)
                x = self.norm(x, f"{name}{kind}_norm.weight")
                pre, post, comb = self.mixes(h, f"{name}hc_{kind}")
                y = (self.experts(x, name + "ffn.", c["dspark_num_experts_per_tok"], trace)
                     if kind == "ffn" else self.block(x, name, context, hidden, position))
                h = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, h)
        raw = torch.einsum("ts,tsd->td", pre, h)
        logits = self.norm(raw, f"mtp.{s}.norm.weight") @ p["head.weight"].T
        return logits.view(B, A, n, -1), raw.view(B, A, n, -1)

    def window_rows(self, x, name, position):
        """x [R, D] -> rows [R, d] as the window of a draft stage keeps them."""
        kv = self.norm(x @ self.params[name + "attn.wkv.weight"].T, name + "attn.kv_norm.weight")
        return self.stored(self.rope(kv, position, 0), "fp8")

    def block(self, x, name, context, hidden, position):
        """Attention of draft blocks: x [N * n, D], context [N, W, d], hidden [N, 1, W + n]: every
        row sees the context and all n rows of its block."""
        c, p, (N, W, d) = self.config, self.params, context.shape
        H, at = c["num_attention_heads"], name + "attn."
        qr = self.norm(x @ p[at + "wq_a.weight"].T, at + "q_norm.weight")
        q = self.rope((qr @ p[at + "wq_b.weight"].T).view(-1, H, d), position, 0)
        kv = torch.cat([context, self.window_rows(x, name, position).view(N, -1, d)], 1)
        logits = (q.view(N, -1, d) @ kv.mT * d**-0.5).masked_fill(hidden, -torch.inf)
        sink = p[at + "attn_sink"].repeat(logits.shape[1] // H)[:, None].expand(N, -1, 1)
        o = torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ kv
        o = self.rope(o.view(-1, H, d), -position, 0).view(len(x), c["o_groups"], -1)
        wo_a = p[at + "wo_a.weight"].unflatten(0, (c["o_groups"], -1))
        return torch.einsum("tgi,goi->tgo", o, wo_a).flatten(1) @ p[at + "wo_b.weight"].T

    def markov(self, logits, raw, previous):
        """Logits [..., V] and states [..., D] of draft rows, the token before each proposal [...]
        -> logits of the proposals [..., V], confidence before its sigmoid [...]."""
        p, last = self.params, f"mtp.{self.config['num_nextn_predict_layers'] - 1}."
        m = p[last + "markov_head.embed.weight"][previous]
        sure = torch.cat([raw, m], -1).detach() @ p[last + "confidence_head.proj.weight"][0]
        return logits + m @ p[last + "markov_head.head.weight"].T, sure

    @staticmethod
    def swiglu(gate_up, limit):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

# ------------------------------------------------------------------------------------------------
# Optimization: Muon for matrices, AdamW for the rest, two processes
# ------------------------------------------------------------------------------------------------
def is_matrix(name, x):
    """Does Muon train it? Not what is looked up or scattered, and nothing thin."""
    tables = ("embed.weight", "head.weight", "hc_", "q_weight", "k_weight")
    return x.dim() > 1 and min(x.shape[-2:]) >= 32 and not any(t in name for t in tables)

def orthogonal(x):
    """Newton-Schulz, five steps: x [..., m, n] -> about its U V^T (Muon, Jordan et al. 2024)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x

def update(name, x, grad, state, step, rate):
    """One step on x, in place; rate: the factor of the schedule."""
    m, v = state
    if is_matrix(name, x):
        lr = MUON_RATE * rate
        m.lerp_(grad, 0.05)
        change = orthogonal(grad.lerp(m, 0.95)) * 0.2 * max(x.shape[-2:]) ** 0.5
    else:
        lr = ADAM_RATE * rate
        m.lerp_(grad, 0.1)
        v.lerp_(grad.square(), 0.03)
        change = m / (1 - 0.9**step) / ((v / (1 - 0.97**step)).sqrt() + 1e-8)
    x.mul_(1 - lr * DECAY * (x.dim() > 1)).sub_(change, alpha=lr)

def schedule(done):
    """Fraction of the run -> factor of the rates: warm-up, constant, linear to 3 %."""
    return min(1, done / 0.01 + 0.02, 1 - 0.97 * max(0, done - 0.4) / 0.6)

class Shared:
    """What the processes of one stage share: parameters, gradients, moments, expert counts."""

    def __init__(self, folder, cfg, classes, params, data, stage):
        self.folder, self.cfg, self.classes = folder, cfg, classes
        self.data, self.stage = data, stage
        self.params, self.step, self.seconds = params, 0, 0.0
        self.names = [n for n in params if n.startswith("mtp.") == stage["draft"]
                      and not n.endswith(("gate.bias", "bias_vl"))]
        self.biases = [n for n in params if n.startswith("mtp.") == stage["draft"]
                       and n.endswith("gate.bias")]
        self.moments = {n: [torch.zeros_like(params[n]) for _ in "mv"] for n in self.names}
        self.grads = [{n: torch.zeros_like(params[n]) for n in self.names} for _ in range(WORKERS)]
        self.counts = torch.zeros(WORKERS, len(self.biases), cfg["n_routed_experts"])
        self.losses, self.norms = torch.zeros(2, WORKERS)
        self.file = folder / f"{stage['name']}.pt"
        if self.file.is_file():
            saved = torch.load(self.file)
            self.params, self.moments = params | saved["params"], saved["moments"]
            self.step, self.seconds = saved["step"], saved["seconds"]
        every = [self.params, *self.grads, dict(enumerate([self.counts, self.losses, self.norms])),
                 *map(dict, map(enumerate, self.moments.values()))]
        for tensors in every:
            for x in tensors.values():
                x.share_memory_()

    def save(self, step, seconds):
        """Write all that a later run needs to go on from here."""
        names = {*self.names, *self.biases}
        torch.save({"step": step, "seconds": seconds, "moments": self.moments,
                    "params": {n: x for n, x in self.params.items() if n in names}},
                   self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def mine(self, rank):
        """The names of the tensors that this process steps: an equal part of the work."""
        def cost(n):
            x = self.params[n]
            return x.numel() * (20 + min(x.shape[-2:]) * is_matrix(n, x))
        load, mine = [0] * WORKERS, []
        for n in sorted(self.names, key=cost, reverse=True):
            to = load.index(min(load))
            load[to] += cost(n)
            mine += [n] * (to == rank)
        return mine

def train(folder, cfg, classes, params, data, stage):
    """Run one stage to its end; -> params, trained. Goes on where an earlier run stopped."""
    shared = Shared(folder, cfg, classes, params, data, stage)
    if shared.step < stage["steps"]:
        barrier = torch.multiprocessing.get_context("spawn").Barrier(WORKERS)
        torch.multiprocessing.spawn(process, (shared, barrier), nprocs=WORKERS)
    return shared.params

def process(rank, shared, barrier):
    """One process of a stage."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    stage, steps, start = shared.stage, shared.stage["steps"], time.time() - shared.seconds
    params, mine = {n: x.detach() for n, x in shared.params.items()}, shared.mine(rank)
    for n in shared.names:
        params[n].requires_grad_().grad = shared.grads[rank][n]
    model, mean = Model(shared.cfg, params, shared.classes, quant=False), []
    model.dropout, model.training = stage["dropout"], True
    for step in range(shared.step, steps):
        torch.manual_seed(1_000_003 * step + rank)
        for grad in shared.grads[rank].values():
            grad.zero_()
        loss, trace = LOSSES[stage["loss"]](model, shared, rank, step)
        loss.backward()
        shared.losses[rank] = trace["shown"].detach()
        for i, n in enumerate(shared.biases):
            count = trace[n.removesuffix("gate.bias") + "count"]
            shared.counts[rank, i, : len(count)] = count
        barrier.wait()
        with torch.no_grad():
            grads = {n: sum(g[n] for g in shared.grads) / WORKERS for n in mine}
            shared.norms[rank] = sum(g.square().sum() for g in grads.values())
            barrier.wait()                                        # all gradients have been read
            factor = min(1.0, 1 / float(shared.norms.sum().sqrt()))
            for n in mine:
                update(n, params[n], grads[n] * factor, shared.moments[n], step + 1,
                       schedule(step / steps))
            for i, n in enumerate(shared.biases if rank == 0 else ()):
                count = shared.counts[:, i, : len(params[n])].sum(0)
                params[n] += BIAS_RATE * (count.mean() - count).sign()
        mean.append(float(shared.losses.mean()))
        barrier.wait()                                            # all tensors have been stepped
        if rank == 0:
            note(shared, model, step + 1, mean, time.time() - start)

def note(shared, model, step, mean, seconds):
    """The progress line; now and then a line of the log, a checkpoint, the validation loss."""
    stage, steps, every = shared.stage, shared.stage["steps"], shared.stage["every"]
    left = seconds / step * (steps - step)
    print(f"\r{stage['name']} {step}/{steps} loss {sum(mean[-20:]) / len(mean[-20:]):.4f} "
          f"{seconds / 60:.1f} min, {left / 60:.1f} left ", end="", file=sys.stderr, flush=True)
    if step % every == 0 or step == steps:
        model.training = False
        with torch.no_grad():
            line = {"stage": stage["name"], "step": step, "minutes": round(seconds / 60, 1),
                    "loss": round(sum(mean) / len(mean), 4), **CHECKS[stage["loss"]](model, shared)}
        model.training = True
        mean.clear()
        shared.save(step, seconds)
        with open(shared.folder / "log.jsonl", "a") as f:
            print(json.dumps(line), file=f)
        print(f"\n{json.dumps(line)}", file=sys.stderr)

# ------------------------------------------------------------------------------------------------
# Stage 1: the target, on windows of the text
# ------------------------------------------------------------------------------------------------
def stream(tokenizer, texts):
    """Texts -> ids [n] of all of them, an eos and a bos after each."""
    return torch.tensor([i for x in texts for i in [*tokenizer.encode(x).ids, EOS, BOS]])

def windows(ids, T, n, first, seed):
    """n windows [n, T + 1], each a bos and T tokens, the first-th and on of a shuffled endless row
    of epochs: an epoch has every token once, cut at another place."""
    out, per_epoch = [], len(ids) // T - 1
    for i in range(first, first + n):
        g = torch.Generator().manual_seed(1_000_003 * (i // per_epoch) + seed)
        shift = int(torch.randint(T, (1,), generator=g))
        at = shift + T * int(torch.randperm(per_epoch, generator=g)[i % per_epoch])
        out.append(F.pad(ids[at : at + T], (1, 0), value=BOS))
    return torch.stack(out)

def target_loss(model, shared, rank, step):
    """Cross-entropy of the next token, and the indexer's distance from the attention mass."""
    stage = shared.stage
    switch, indexer = int(0.58 * stage["steps"]), step > 0.3 * stage["steps"]
    model.dense, long, model.index_weight = step < switch, step >= switch, indexer * INDEX_WEIGHT
    T = stage["T"] * (1 + long)
    n = stage["rows"] // T
    first = (step - switch * long) * n * WORKERS + rank * n
    ids, trace = windows(shared.data, T, n, first, long), {}
    logits = model.run(ids[:, :-1], trace)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return loss + model.index_weight * trace["index_loss"], trace | {"shown": loss}

def text_nats(model, texts, tokenizer, T=512):
    """-> (sum of nats, bytes) over texts. Each is read in windows of T tokens after a bos, half a
    window apart, so that every token but the first ones has T / 2 tokens of context or more."""
    batch, nats = [], 0.0
    for text in texts:
        ids = torch.tensor([*tokenizer.encode(text).ids, EOS])
        for at in range(0, max(1, len(ids) - T // 2), T // 2):
            x = F.pad(ids[at : at + T], (1, 0), value=BOS)
            score = torch.arange(1, T + 1) > (T // 2 if at else 0)
            score[len(x) - 1 :] = False
            batch.append((F.pad(x, (0, T + 1 - len(x)), value=PAD), score))
    for i in range(0, len(batch), 4):
        x, score = (torch.stack(a) for a in zip(*batch[i : i + 4]))
        logits = model.run(x[:, :-1])
        nats += float(F.cross_entropy(logits[score], x[:, 1:][score], reduction="sum"))
    return nats, sum(len(x.encode()) for x in texts)

def target_check(model, shared):
    """-> {"bits_per_byte" of the validation chapters}."""
    model.index_weight = 0.0
    tokenizer = Tokenizer.from_file(str(shared.folder / "tokenizer.json"))
    nats, n = text_nats(model, chapters("validation")[: shared.stage["chapters"]], tokenizer)
    return {"bits_per_byte": round(nats / n / math.log(2), 4)}


# ------------------------------------------------------------------------------------------------
# Stage 2: the draft, on what the target makes of the text
# ------------------------------------------------------------------------------------------------
def continuations(folder, prefixes, *phases):
    """The engine's continuations of prefixes (lists of ids of one length): for each phase (n,
    temperature) n more ids -> ids [prefixes, length]."""
    with torch.multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        parts = [(folder, prefixes[i::WORKERS], phases) for i in range(WORKERS)]
        return torch.tensor(sum(pool.starmap(continued, parts), []))

def continued(folder, prefixes, phases):
    """One process's part of `continuations`."""
    torch.set_num_threads(1)
    engine = nf.Engine.load(folder, "cpu", torch.float32, max_batch=48, speculate=False)
    for n, temperature in phases:
        out = engine.generate(prefixes, [
            nf.SamplingParams(n, temperature, seed=sum(p), ignore_eos=True) for p in prefixes])
        prefixes = [[*p, *o.ids] for p, o in zip(prefixes, out)]
    return prefixes

def prefixes(ids, n, length, seed):
    """n prefixes (lists of `length` ids, a bos first) from random places of a stream of ids."""
    g = torch.Generator().manual_seed(seed)
    at = torch.randint(len(ids) - length, (n,), generator=g)
    return [[BOS, *ids[a : a + length - 1].tolist()] for a in at]

def draft_rows(model, ids, anchors):
    """What drafting from each anchor [B, A] of ids [B, T] gives and what the target says to it:
    -> proposals' logits, confidences, the target's logits, the true tokens, trace."""
    n, trace = model.config["dspark_block_size"], {}
    with torch.no_grad():
        target, index = model.run(ids, trace), anchors[..., None] + torch.arange(n)
    B, A = anchors.shape
    target = target[torch.arange(B)[:, None, None], index]                   # [B, A, n, V]
    tokens = ids.gather(1, index.view(B, -1)).view(B, A, n)
    true = ids.gather(1, index.view(B, -1) + 1).view(B, A, n)
    logits, sure = model.markov(*model.draft(ids, trace, anchors), tokens)
    return logits, sure, target, true, trace

def draft_loss(model, shared, rank, step):
    """Half of the batch: mostly continuations, sampled and greedy, now and then the text.

    Soft: cross-entropy with the target's distribution and total variation from it. Hard: the
    cross-entropy of its argmax; a row behind a token that greedy decoding would not have made
    counts less. The confidence learns how often a row is right that is reached.
    """
    stage, n = shared.stage, model.config["dspark_block_size"]
    (text, continued), done = shared.data, step / stage["steps"]
    g = torch.Generator().manual_seed(2_000_003 * step + rank)
    if (step + rank) % 4:
        B, start = stage["rows"] // continued.shape[1], CONTINUED[0]
        ids = continued[torch.randint(len(continued), (B,), generator=g)]
    else:
        B, start = stage["rows"] // stage["T"], 1
        ids = windows(text, stage["T"], B, (step * WORKERS + rank) * B, 7)[:, :-1]
    anchors = torch.randint(start, ids.shape[1] - n, (B, stage["anchors"] // B), generator=g)
    logits, sure, target, true, trace = draft_rows(model, ids, anchors)
    q, p, best = logits.log_softmax(-1), target.softmax(-1), target.argmax(-1)
    greedy_so_far = F.pad((best == true)[..., :-1].cumprod(-1).bool(), (1, 0), value=True)
    weight = torch.where(greedy_so_far, 1.0, 0.15)
    hard = (F.cross_entropy(logits.movedim(-1, 1), best, reduction="none") * weight).mean()
    soft, variation = -(p * q).sum(-1).mean(), (p - q.exp()).abs().sum(-1).mean() / 2
    right = (logits.argmax(-1) == best) & greedy_so_far
    reached = F.pad(right[..., :-1].cumprod(-1).bool(), (1, 0), value=True) & greedy_so_far
    confidence = F.binary_cross_entropy_with_logits(sure, right.float(), weight=reached.float())
    mix = min(1.0, max(0.0, (done - 0.2) / 0.3)) * stage["hard"]
    return mix * hard + (1 - mix) * soft + variation + confidence, trace | {"shown": variation}

@torch.no_grad()
def loop(model, ids, start):
    """Decode ids [T], greedy from position `start` on, with drafts -> bool [steps, n]: which draft
    of each step is right; and the anchors [steps], as places behind start."""
    anchors = torch.arange(start, len(ids) - model.config["dspark_block_size"])
    logits, _, _, true, _ = draft_rows(model, ids[None], anchors[None])
    right, at, steps = (logits.argmax(-1) == true)[0], 0, []
    while at < len(right):
        steps.append(at)
        at += int(right[at].cumprod(0).sum()) + 1
    return right[steps], steps

def tokens_a_step(model, ids, start):
    """ids [B, T], greedy from position `start` on -> tokens a step of a loop over that part."""
    right = torch.cat([loop(model, x, start)[0] for x in ids])
    return 1 + right.cumprod(1).sum(1).float().mean().item()

def calibrated(folder, cfg, classes, params, tokenizer, n):
    """Fit the confidence head anew on what is accepted in text that neither target nor draft has
    seen: greedy continuations of n prefixes of the validation chapters. -> params."""
    starts = prefixes(stream(tokenizer, chapters("validation")), n, 96, 3)
    texts = list(continuations(folder, starts, (64, 0.0)))
    model, last = Model(cfg, params, classes), f"mtp.{cfg['num_nextn_predict_layers'] - 1}."
    embed, head = last + "markov_head.embed.weight", last + "confidence_head.proj.weight"
    markov, seen, rows = model.markov, [], []

    def observed(logits, raw, previous):
        seen.append(torch.cat([raw, params[embed][previous]], -1))
        return markov(logits, raw, previous)
    model.markov = observed
    for ids in [x for x in texts if not loops(x[96:].tolist())] or texts:
        right, steps = loop(model, ids, 96)      # anchors of a real loop come after a refused draft
        reached = F.pad(right[:, :-1].cumprod(-1).bool(), (1, 0), value=True)
        rows.append((seen.pop()[0, steps][reached], right[reached].float()))
    x, y = (torch.cat(a) for a in zip(*rows))
    w = params[head][0].detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        out = F.binary_cross_entropy_with_logits(x @ w, y) + 1e-4 * w.square().sum()
        out.backward()
        return out
    optimizer.step(loss)
    return params | {head: w.detach()[None]}

def draft_check(model, shared):
    """-> tokens a step on some of the continuations, which the draft has seen."""
    model.index_weight = 0.0
    ids, start = shared.data[1][: shared.stage["checked"]], sum(CONTINUED[:2])
    return {"tokens_a_step": round(tokens_a_step(model, ids, start), 3)}

LOSSES = {"target": target_loss, "draft": draft_loss}
CHECKS = {"target": target_check, "draft": draft_check}

# ------------------------------------------------------------------------------------------------
# Export: the published names, types and shapes
# ------------------------------------------------------------------------------------------------
def packed(x, form):
    """fp32 [out, in] -> weight and scale as `form` (of nanoflash.PACKED) wants them."""
    dtype, per_byte, height = nf.PACKED[form]
    blocks = F.pad(x, (0, -x.shape[1] % 32, 0, -x.shape[0] % height))
    blocks = blocks.unflatten(1, (-1, 32)).unflatten(0, (-1, height))        # [o, height, i, 32]
    largest = 6.0 if per_byte == 2 else 448.0
    top = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-20) / largest
    tried = []
    for less in (0, 1) if per_byte == 2 else (0,):            # clipping the largest may pay in FP4
        scale = 2.0 ** (top.log2().ceil() - less)
        y = (blocks / scale).clamp(-largest, largest)
        value = K.E2M1[K._e2m1_code(y).long()] if per_byte == 2 else y.to(K.E4M3).float()
        tried.append(((value * scale - blocks).square().sum((1, 3), keepdim=True), value, scale))
    worse = tried[0][0] > tried[-1][0]
    value, scale = (torch.where(worse, b, a) for a, b in zip(tried[0][1:], tried[-1][1:]))
    value = value.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    scale = scale.flatten(2).flatten(0, 1).log2().add(127).to(torch.uint8).view(K.E8M0)
    if per_byte == 2:
        code = K._e2m1_code(value)
        return (code[:, ::2] | code[:, 1::2] << 4).view(torch.int8), scale
    return value.to(K.E4M3), scale

def export(folder, cfg, params):
    """Write config.json, generation_config.json and model.safetensors into folder."""
    raw = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
           "dtype": "bfloat16", "text_config": cfg,
           "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
                                   "fmt": "e4m3", "weight_block_size": [32, 32],
                                   "scale_fmt": "ue8m0"}}
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": TEMPERATURE}) + "\n")
    flat = dict(params)
    for name, x in params.items():
        at, _, kind = name.rpartition("experts.")
        if kind in ("w13", "w2"):
            for e, w in enumerate(flat.pop(name)):
                for part, y in zip(("w1", "w3") if kind == "w13" else ("w2",),
                                   w.chunk(2) if kind == "w13" else (w,)):
                    flat[f"{at}experts.{e}.{part}.weight"] = y
        if name.endswith("gate.bias"):
            flat[name + "_vl"] = x                            # no image was ever seen
    tensors = {}
    for name, spec in nf.inventory(nf.Config.load(folder)).items():
        if name.endswith(".scale"):
            continue
        form = {"I8": "fp4", "F8_E4M3": "rows" if ".engram.embed." in name else "fp8"}.get(
            spec.dtypes[0])
        x = flat[name].detach()
        if form:
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = packed(x, form)
        else:
            tensors[name] = x.to(nf.DTYPES[spec.dtypes[0]]).clone()
    save_file(tensors, folder / "model.safetensors")

def read(folder):
    """-> cfg, token classes, params of an exported checkpoint, dequantized and stacked again."""
    reference = Reference.load(folder)
    params, cfg = reference.params, reference.config
    for at in [n.removesuffix("gate.weight") for n in params if n.endswith("ffn.gate.weight")]:
        w1, w2, w3 = (torch.stack([params.pop(f"{at}experts.{e}.w{i}.weight")
                                   for e in range(len(params[at + "gate.bias"]))])
                      for i in (1, 2, 3))
        params |= {at + "experts.w13": torch.cat([w1, w3], 1), at + "experts.w2": w2}
    return cfg, reference.token_map, params

# ------------------------------------------------------------------------------------------------
# The stages in order
# ------------------------------------------------------------------------------------------------
CONTINUED = 16, 144, 64     # ids of a continuation: from the text, sampled, greedy
TARGET = {"name": "target", "loss": "target", "draft": False, "steps": 3300, "every": 200,
          "T": 256, "rows": 1024, "dropout": 0.1, "chapters": 12}
DRAFT = {"name": "draft", "loss": "draft", "draft": True, "steps": 2400, "every": 100,
         "T": 256, "rows": 1024, "dropout": 0.0, "anchors": 400, "hard": 0.5, "prefixes": 1536,
         "calibration": 768, "checked": 32, "first": {"steps": 1200, "hard": 0.7}}

def run(folder, target, draft):
    """Every stage, in `folder`, which holds all that a later call needs to go on."""
    folder.mkdir(exist_ok=True)
    texts = chapters("training")
    if not (folder / "tokenizer.json").is_file():
        train_tokenizer(folder, texts, 1536)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cfg, classes = complete(config(1536), folder)
    text = stream(tokenizer, texts)
    params = train(folder, cfg, classes, parameters(cfg, 0), text, target)
    export(folder, cfg, params)                 # the draft learns on the target that will be run
    if not (folder / "continued.pt").is_file():
        starts = prefixes(text, draft["prefixes"], CONTINUED[0], 1)
        # the target knows its training text by heart: what it samples is text that it does not know
        continued = continuations(folder, starts, (CONTINUED[1], 1.0), (CONTINUED[2], 0.0))
        torch.save(continued, folder / "continued.pt")
    _, _, rounded = read(folder)
    rounded |= {n: x for n, x in parameters(cfg, 1).items() if n.startswith("mtp.")}
    data = text, torch.load(folder / "continued.pt")
    train(folder, cfg, classes, rounded, data, draft | draft["first"])
    trained = train(folder, cfg, classes, rounded, data, draft)
    trained = calibrated(folder, cfg, classes, trained, tokenizer, draft["calibration"])
    params |= {n: x for n, x in trained.items() if n.startswith("mtp.")}
    export(folder, cfg, params)
    curve(folder)

def curve(folder):
    """log.jsonl -> curve.svg: bits per byte of the validation chapters, tokens a step of drafts."""
    log = [json.loads(x) for x in (folder / "log.jsonl").read_text().split("\n") if x]
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="720" height="260" font-size="12" '
           'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" fill="#6e7781">']
    for left, stage, key, title in ((50, "target", "bits_per_byte", "validation bits per byte"),
                                    (410, "draft", "tokens_a_step", "tokens a step, greedy")):
        points = [(x["minutes"], x[key]) for x in log if x["stage"] == stage]
        low, high = (f(y for _, y in points) for f in (min, max))
        end = points[-1][0] or 1
        line = " ".join(f"{left + 280 * x / end:.1f},"
                        f"{220 - 180 * (y - low) / (high - low or 1):.1f}" for x, y in points)
        out += [f'<text x="{left}" y="24">{title}, over {end} minutes</text>',
                f'<path fill="none" stroke="#6e7781" d="M{left} 40V220H{left + 280}"/>',
                f'<polyline fill="none" stroke="#3b82f6" stroke-width="2" points="{line}"/>',
                f'<text x="{left - 40}" y="44">{high:.3f}</text>',
                f'<text x="{left - 40}" y="224">{low:.3f}</text>',
                f'<text x="{left}" y="240">0</text>',
                f'<text x="{left + 265}" y="240">{end}</text>']
    (folder / "curve.svg").write_text("\n".join([*out, "</svg>"]) + "\n")

# ------------------------------------------------------------------------------------------------
# Evaluation, on the chapters that no stage has seen
# ------------------------------------------------------------------------------------------------
@torch.no_grad()
def replayed(model, texts, tokenizer, T=512, cut=256, n=32):
    """Nats a token of the n tokens behind prompts of `cut` tokens: exact, and after a prefill that
    ran the decoder on the prompt's last W tokens only."""
    ids = stream(tokenizer, texts)
    ids = F.pad(ids[: len(ids) // (T - 1) * (T - 1)].view(-1, T - 1), (1, 0), value=BOS)
    nats = []
    for model.replay in (None, cut - model.config["sliding_window"]):
        logits = torch.cat([model.run(x)[:, cut - 1 : cut + n - 1] for x in ids.split(4)])
        nats.append(F.cross_entropy(logits.flatten(0, 1), ids[:, cut : cut + n].flatten()).item())
    model.replay = None
    return nats

def loops(ids, n=12):
    """Does a run of n ids come twice? In 1.5 % of windows of 64 ids of the real text one does."""
    runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(runs)) < len(runs)

def evaluate(folder, n_prompts=192, new=64):
    """Print bits per byte and what drafting brings, for the checkpoint in folder."""
    torch.set_num_threads(1)
    cfg, classes, params = read(folder)
    tokenizer, texts = Tokenizer.from_file(str(folder / "tokenizer.json")), chapters("held out")
    exact, packed_ = (Model(cfg, params, classes, quant=q) for q in (False, True))
    print(f"{len(texts)} held-out chapters, {sum(len(x.encode()) for x in texts):,} bytes")
    with torch.no_grad():
        for name, model in (("fp32 caches", exact), ("packed caches", packed_)):
            nats, n = text_nats(model, texts, tokenizer)
            print(f"bits per byte, {name}: {nats / n / math.log(2):.4f}")
    a, b = replayed(packed_, texts, tokenizer)
    print(f"nats a token of 32 tokens after a prompt of 256: exact {a:.4f}, bounded replay {b:.4f} "
          f"({b / a - 1:+.2%})")
    engine = nf.Engine.load(folder, "cpu", torch.float32, max_batch=32)
    starts = prefixes(stream(tokenizer, texts), n_prompts, 96, 2)
    propose, survival = engine.draft.propose, {}

    def observed(seqs, *args):
        out = propose(seqs, *args)
        for seq, sure in zip(seqs, out[2]):
            survival.setdefault(seq, []).append(sure)
        return out
    engine.draft.propose = observed
    for t, verify in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection")):
        seqs = [engine.submit(p, nf.SamplingParams(new, t, 1.0, i, True, verify))
                for i, p in enumerate(starts)]
        while engine.step():
            pass
        seqs = [s for s in seqs if not loops(s.new)]
        steps = [(n, sure) for s in seqs for (full, n), sure in zip(s.runs[1:], survival[s])
                 if full == len(sure)]                   # not those that max_tokens cut short
        runs, sure = torch.tensor([n for n, _ in steps]), torch.tensor([x for _, x in steps])
        print(f"temperature {t:g}, {verify if t else 'greedy'}: {1 + runs.float().mean():.3f} "
              f"tokens a step on {len(seqs)} of {n_prompts} prompts, the others loop")
        for i, predicted in enumerate(sure.mean(0).tolist()):
            real = (runs > i).float().mean().item()
            error = f", predicted {predicted:.3f} ({predicted / max(real, 1e-9) - 1:+.1%})"
            print(f"  survival of draft {i + 1}: {real:.3f}" + error * (t == 0))

def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--smoke", action="store_true", help="a few steps of every stage, thrown away")
    p.add_argument("--eval", action="store_true", help="measure the checkpoint in docs/tiny")
    p.add_argument("--work", type=Path, default=HERE / "work", help="where the run lives")
    args = p.parse_args()
    if args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), TARGET | {"steps": 4, "every": 4, "chapters": 1},
                DRAFT | {"steps": 4, "every": 4, "prefixes": 16, "calibration": 4, "checked": 2,
                         "first": {"steps": 2}})
            return
    if args.eval:
        return evaluate(HERE)
    run(args.work, TARGET, DRAFT)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                 "log.jsonl", "curve.svg"):
        shutil.copy(args.work / name, HERE)

if __name__ == "__main__":
    main()
