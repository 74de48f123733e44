"""kernels.py: every operation of DeepSeek-V4.1-Flash, each in a few lines of PyTorch.

Each stands here once and says what it means; nanoflash.py holds the parameters and the state and
calls these. They take any device and compute in fp32; caches come and go as packed bytes.

Sections, in reading order:
    Number formats    FP8 and FP4 quantizers, packed rows, dequantized weights
    Dense             linear, rms_norm, rope, swiglu
    mHC               the mix of the S residual streams around every sublayer
    Sparse attention  pair pooling, index scores, top-k with its tie rule, candidates, attention
    Experts           the router
    Engram            n-gram hash and the gated write into the streams
    Sampling          counter-based Gumbel noise, top-p, one token

Dimension letters (the same in nanoflash.py): T tokens (rows of a ragged batch), D hidden size,
H heads, d head dim, r rotated channels, S residual streams, W window, K selected groups, E experts,
k experts a token, Hi index heads, di index head dim, n groups of a sequence, L rows that a query
attends to, N n-gram length, V vocabulary, F expert width. `block` is the number of rows that a
matrix product always sees in deterministic mode: a row's bits then do not depend on how many rows
came with it. None multiplies all rows at once.
"""
import math

import torch
import torch.nn.functional as F

# ------------------------------------------------------------------------------------------------
# Number formats: what stands on disk and in the caches
# ------------------------------------------------------------------------------------------------
FP8_BLOCK = 32      # channels that share a ue8m0 scale in a window row; also the weights' 32 x 32
LATENT_BLOCK = 16   # channels of a compressed KV latent that share an e4m3 scale
INDEX_BLOCK = 32    # channels of an index key or query that share a ue8m0 scale
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([_E2M1, -_E2M1])                               # code 0..15 -> value; 8 is -0

def _blocks(x, size):
    return x.float().unflatten(-1, (-1, size))                  # [..., n] -> [..., n/size, size]

def _ue8m0_ceil(x):
    """The least power of two that is >= x, as its exponent byte; x fp32, positive and normal."""
    bits = x.contiguous().view(torch.int32)
    return ((bits >> 23) + (bits & 0x7FFFFF != 0)).to(torch.uint8)

def _e2m1_code(q):
    """Nearest e2m1 code of q (fp32, |q| <= 6), halves to the even code, sign kept on zero."""
    a = q.abs()
    code = ((a > 0.25).int() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5)
            + (a > 5.0))
    return (code + 8 * q.signbit()).to(torch.uint8)

def quantize_fp8(x):
    """Window row: x [..., n] -> bytes [..., n + n/32], e4m3 values then ue8m0 scales (528 of 512).

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)) over each 32 channels.
    """
    b = _blocks(x, FP8_BLOCK)
    scale = _ue8m0_ceil(b.abs().amax(-1).clamp(min=1e-4) / 448)
    values = (b / scale.view(E8M0).float()[..., None]).to(E4M3)
    return torch.cat([values.flatten(-2).view(torch.uint8), scale], -1)

def dequantize_fp8(row):
    """Inverse of `quantize_fp8`: bytes [..., n + n/32] -> fp32 [..., n]."""
    n = row.shape[-1] * FP8_BLOCK // (FP8_BLOCK + 1)
    values, scale = row[..., :n].contiguous().view(E4M3), row[..., n:].contiguous().view(E8M0)
    return (_blocks(values, FP8_BLOCK) * scale.float()[..., None]).flatten(-2)

def _pack(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4                 # even channel: low nibble

def unpack_e2m1(packed, dtype=torch.float32):
    """Two e2m1 codes a byte, even column in the low nibble: [..., n/2] uint8 -> [..., n] dtype."""
    byte = torch.arange(256)
    pairs = torch.stack([E2M1[byte & 15], E2M1[byte >> 4]], -1).to(dtype).to(packed.device)
    return F.embedding(packed.int(), pairs).flatten(-2)             # one look-up for two codes

def quantize_latent(x):
    """Compressed KV: x [..., n] -> bytes [..., n/2 + n/16], e2m1 then e4m3 scales (288 of 512).

    scale = e4m3(max(amax, 6 * 2^-9) / 6), at most 448; x is divided by the rounded scale.
    """
    b = _blocks(x, LATENT_BLOCK)
    scale = (b.abs().amax(-1).clamp(min=6 * 2.0**-9) / 6).clamp(max=448).to(E4M3)
    codes = _e2m1_code((b / scale.float()[..., None]).clamp(-6, 6))
    return torch.cat([_pack(codes.flatten(-2)), scale.view(torch.uint8)], -1)

def quantize_index(x):
    """Index keys and queries: x [..., n] -> bytes [..., n/2 + n/32], e2m1 then ue8m0 (68 of 128).

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) over each 32 channels.
    """
    b = _blocks(x, INDEX_BLOCK)
    scale = _ue8m0_ceil(b.abs().amax(-1).clamp(min=6 * 2.0**-126) / 6)
    codes = _e2m1_code((b / scale.view(E8M0).float()[..., None]).clamp(-6, 6))
    return torch.cat([_pack(codes.flatten(-2)), scale], -1)

def _dequantize_fp4(row, size, scale_dtype):
    n = row.shape[-1] * 2 * size // (size + 2)                      # n/2 + n/size bytes a row
    values, scale = unpack_e2m1(row[..., : n // 2]), row[..., n // 2 :].contiguous()
    return (_blocks(values, size) * scale.view(scale_dtype).float()[..., None]).flatten(-2)

def dequantize_latent(row):
    """Inverse of `quantize_latent`: bytes [..., n/2 + n/16] -> fp32 [..., n]."""
    return _dequantize_fp4(row, LATENT_BLOCK, E4M3)

def dequantize_index(row):
    """Inverse of `quantize_index`: bytes [..., n/2 + n/32] -> fp32 [..., n]."""
    return _dequantize_fp4(row, INDEX_BLOCK, E8M0)

def dequantize_weight(weight, scale, dtype):
    """A stored matrix -> [out, in] dtype, exactly (e4m3 or e2m1 times a power of two fits bf16).

    weight e4m3 [out, in] with e8m0 scale [ceil(out/32), ceil(in/32)]; or int8 [out, in/2], two e2m1
    a byte, with e8m0 scale [out, in/32]; or bf16/fp32 [out, in] with scale None.
    """
    if scale is None:
        return weight.to(dtype)
    scale = scale.to(dtype)
    if weight.dtype == E4M3:
        out, n_in = weight.shape
        scale = scale.repeat_interleave(FP8_BLOCK, 0)[:out].repeat_interleave(FP8_BLOCK, 1)
        return weight.to(dtype).mul_(scale[:, :n_in])
    values = unpack_e2m1(weight.view(torch.uint8), dtype).unflatten(1, (-1, FP8_BLOCK))
    return values.mul_(scale[:, :, None]).flatten(1)

# ------------------------------------------------------------------------------------------------
# Dense
# ------------------------------------------------------------------------------------------------
def linear(x, w, block=None):
    """x [T, in] @ w [out, in].T -> fp32 [T, out], summed in fp32 whatever the input types.

    `block`: rows go through in blocks of exactly that many (the last one padded with zeros).
    """
    x, w = x.float(), w.float()
    if block is None:
        return x @ w.T
    n_rows, n_out = x.shape[0], w.shape[0]
    w = w.expand(2, -1) if n_out == 1 else w             # BLAS sums a single column otherwise
    blocks = F.pad(x, (0, 0, 0, -n_rows % block)).split(block)
    return torch.cat([b @ w.T for b in blocks])[:n_rows, :n_out]

def rms_norm(x, weight, eps):
    """x [..., n] / sqrt(mean(x^2) + eps) * weight [n] -> fp32. eps is 1e-20 in the checkpoint."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()

def rope_frequencies(c, compressed):
    """Radians a position, fp32 [r/2]: plain for ratio 0; another base and YaRN for ratio > 0.

    c: Config (rope_theta, compress_rope_theta, rope_scaling_*). YaRN scales frequencies only.
    """
    r, scale = c.qk_rope_head_dim, c.rope_scaling_factor
    theta = c.compress_rope_theta if compressed else c.rope_theta
    f = theta ** -(torch.arange(0, r, 2, dtype=torch.float64) / r)
    if not compressed:
        return f.float()

    def pair(turns):                            # the pair that turns so often in the old context
        length = c.rope_scaling_original_max_position_embeddings
        return r * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low = max(math.floor(pair(c.rope_scaling_beta_fast)), 0)
    high = min(math.ceil(pair(c.rope_scaling_beta_slow)), r - 1)
    ramp = ((torch.arange(r // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (f / scale * ramp + f * (1 - ramp)).float()

def rotation(pos, frequencies):
    """pos int64 [T], frequencies fp32 [r/2] -> cos, sin fp32 [T, r/2] of their fp32 products."""
    angle = pos[:, None].float() * frequencies
    return angle.cos(), angle.sin()

def rope(x, cos, sin):
    """Rotate the adjacent pairs (2i, 2i+1) of the last r channels: x [T, ..., n] -> fp32.

    cos, sin [T, r/2]; rotate back with -sin. Channels before the last r pass through.
    """
    r = 2 * cos.shape[-1]
    x, tail = x.float().split([x.shape[-1] - r, r], -1)
    cos, sin = (t.view(-1, *[1] * (x.dim() - 2), r // 2) for t in (cos, sin))
    a, b = tail[..., 0::2], tail[..., 1::2]
    return torch.cat([x, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)

def sigmoid(x):
    """1 / (1 + e^-x); written out, since torch.sigmoid rounds the tail of a tensor differently."""
    return 1 / (1 + torch.exp(-x))

def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit), both [..., F] fp32; `swiglu_limit`."""
    gate = gate.clamp(max=limit)
    return gate * sigmoid(gate) * up.clamp(-limit, limit)

# ------------------------------------------------------------------------------------------------
# mHC: single-pass manifold-constrained hyper-connections
# ------------------------------------------------------------------------------------------------
def sinkhorn(a, iters, eps):
    """a [T, S, S] -> nearly doubly stochastic [T, S, S]: rows along the last axis, then columns."""
    a = torch.softmax(a, -1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a

def hc_mix(h, fn, scale, base, norm_eps, hc_eps, iters, block=None):
    """The weights of one site from the streams that it reads: h [T, S, D] -> pre, post, comb.

    fn [(2+S)S, S*D], scale [3], base [(2+S)S], all fp32. pre [T, S] collapses for the NEXT
    sublayer, post [T, S] writes this one's output, comb [T, S, S] carries the streams over.
    """
    S = h.shape[1]
    x = h.flatten(1).float()
    mixes = linear(x, fn, block) * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixes.split([S, S, S * S], -1)
    pre = sigmoid(pre * scale[0] + base[:S]) + hc_eps
    post = 2 * sigmoid(post * scale[1] + base[S : 2 * S])
    comb = (comb * scale[2] + base[2 * S :]).unflatten(-1, (S, S))
    return pre, post, sinkhorn(comb, iters, hc_eps)

def hc_collapse(h, pre):
    """sum_s pre[s] * h[s]: h [T, S, D], pre [T, S] -> fp32 [T, D]."""
    return sum(pre[:, s, None] * h[:, s].float() for s in range(h.shape[1]))

def hc_expand(h, y, post, comb):
    """h'[k] = post[k] * y + sum_j comb[j, k] * h[j]: h [T, S, D], y [T, D] -> like h."""
    mixed = sum(comb[:, j, :, None] * h[:, j, None].float() for j in range(h.shape[1]))
    return (post[:, :, None] * y[:, None].float() + mixed).to(h.dtype)

# ------------------------------------------------------------------------------------------------
# Sparse attention
# ------------------------------------------------------------------------------------------------
KEY_BLOCK = 1024    # index keys that one product sees: bounds memory; padded in deterministic mode

def pool_pair(first, second):
    """Ratio-2 compressor: (kv, gate) of the two tokens, each [n, 2, d] fp32 -> latent [n, d].

    Per channel, the softmax of the two gates weighs the two values.
    """
    gate = torch.maximum(first[:, 1], second[:, 1])
    a, b = torch.exp(first[:, 1] - gate), torch.exp(second[:, 1] - gate)
    return (a * first[:, 0] + b * second[:, 0]) / (a + b)

def index_scores(q, w, keys, block=None):
    """score[t, j] = sum_h w[t, h] * relu(q[t, h] . keys[j]) -> fp32 [T, n].

    q [T, Hi, di], w [T, Hi], keys [n, di], all fp32 (dequantized FP4).
    """
    n_rows, n_keys, size = q.shape[0], keys.shape[0], block or q.shape[0]
    if block is not None:                                # every product gets the same shape
        q, w = (F.pad(t, (0, 0) * (t.dim() - 1) + (0, -n_rows % block)) for t in (q, w))
        keys = F.pad(keys, (0, 0, 0, -n_keys % KEY_BLOCK))
    tiles = []
    for qb, wb in zip(q.split(size), w.split(size)):
        dots = [(qb.flatten(0, 1) @ k.T).unflatten(0, wb.shape) for k in keys.split(KEY_BLOCK)]
        tiles.append(torch.cat([(s.relu() * wb[:, :, None]).sum(1) for s in dots], 1))
    return torch.cat(tiles)[:n_rows, :n_keys]

def topk_mask(scores, k):
    """The k highest of each row, equal scores to the lower index: [T, n] -> bool [T, n].

    -inf is never taken, so fewer than k are set where fewer are visible.
    """
    k = min(k, scores.shape[1])
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    kth = scores.topk(k).values[:, -1:]       # not .indices: torch.topk breaks ties as it likes
    above, tied = scores > kth, (scores == kth) & (scores > -torch.inf)
    return above | tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True))

def mask_to_index(mask, k):
    """Set columns of each row, ascending, padded with -1: bool [T, n] -> int64 [T, k]."""
    n_rows, n = mask.shape
    out = torch.full((n_rows, k + 1), -1, dtype=torch.int64, device=mask.device)
    place = torch.where(mask, mask.cumsum(1) - 1, k)     # column k takes what is not selected
    out.scatter_(1, place, torch.arange(n, device=mask.device).expand(n_rows, n))
    return out[:, :k]

def candidate_blocks(scores, n_visible, size, k):
    """Level one of two-level top-k: scores [T, n] (-inf: invisible) -> bool [T, ceil(n/size)].

    Keeps the k blocks of `size` consecutive groups with the highest best score; the block of the
    newest visible group (n_visible [T] - 1) always stays and counts as one of the k.
    """
    best = F.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    best = best.unflatten(1, (-1, size)).amax(-1)
    newest = (n_visible[:, None] - 1).div(size, rounding_mode="floor")
    block = torch.arange(best.shape[1], device=best.device)
    return topk_mask(best.masked_fill(block == newest, torch.inf), k)

def attend(q, kv, visible, sink):
    """Attention with K = V and a sink: q [T, H, d], kv [T, L, d], visible bool [T, L] -> [T, H, d].

    One softmax over all L rows of a token; the per-head logit sink [H] joins the denominator only.
    Scale d^-0.5. A query that sees nothing returns zeros. Invisible rows may hold anything (NaN).
    """
    # BLAS sums a batch of one, and a single key, in another order: never give it either
    if q.shape[0] == 1:
        return attend(*(t.expand(2, *t.shape[1:]) for t in (q, kv, visible)), sink)[:1]
    if kv.shape[1] == 1:
        kv, visible = F.pad(kv, (0, 0, 0, 1)), F.pad(visible, (0, 1))
    kv = kv.masked_fill(~visible[:, :, None], 0)
    logits = torch.bmm(q, kv.transpose(1, 2)) * q.shape[-1] ** -0.5             # [T, H, L]
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    top = torch.maximum(logits.amax(-1), sink)[..., None]
    p = torch.exp(logits - top)
    return torch.bmm(p, kv) / (p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top))

# ------------------------------------------------------------------------------------------------
# Experts
# ------------------------------------------------------------------------------------------------
def route(logits, bias, k, scale):
    """sqrt-softplus router: logits [T, E], bias [E] -> experts int64 [T, k], weights fp32 [T, k].

    s = sqrt(softplus(logits)); the k highest of s + bias, ties to the lower expert; the bias picks
    and never weighs: w = s / (sum of the k s + 1e-20) * routed_scaling_factor.
    """
    s = torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs())))
    experts = (s + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    w = s.gather(1, experts)
    return experts, w / (w.sum(-1, keepdim=True) + 1e-20) * scale

# ------------------------------------------------------------------------------------------------
# Engram
# ------------------------------------------------------------------------------------------------
# numpy promises no stable stream, so its generator stands here, on Python ints.
def seed_sequence(entropy):
    """numpy's SeedSequence(entropy).generate_state(8): 8 uint32, for entropy below 2^32."""
    m32 = 0xFFFFFFFF

    def hasher(init, mult):
        const = init

        def step(value):
            nonlocal const
            value ^= const
            const = const * mult & m32
            value = value * const & m32
            return value ^ value >> 16
        return step
    hashed = hasher(0x43B0D7E5, 0x931E8875)
    pool = [hashed(x) for x in (entropy, 0, 0, 0)]
    for src in range(4):
        for dst in range(4):
            if src != dst:
                x = 0xCA01F9DD * pool[dst] - 0x4973F715 * hashed(pool[src]) & m32
                pool[dst] = x ^ x >> 16
    out = hasher(0x8B51F9DD, 0x58F38DED)
    return [out(x) for x in pool * 2]

def default_rng_integers(seed, bound, n):
    """numpy.random.default_rng(seed).integers(0, bound, n): PCG64 XSL-RR, then Lemire's method."""
    m64, m128, mult = 2**64 - 1, 2**128 - 1, 0x2360ED051FC65DA44385DF649FCCF645
    s = seed_sequence(seed)
    s = [s[i] | s[i + 1] << 32 for i in range(0, 8, 2)]
    inc = ((s[2] << 64 | s[3]) << 1 | 1) & m128
    state = ((inc + (s[0] << 64 | s[1])) * mult + inc) & m128
    out = []
    while len(out) < n:
        state = (state * mult + inc) & m128
        x, rot = (state >> 64 ^ state) & m64, state >> 122
        product = ((x >> rot | x << (64 - rot)) & m64) * bound
        if product & m64 >= (2**64 - bound) % bound:
            out.append(product >> 64)
    return out

def engram_primes(c):
    """[table][n - 2][head]: for every n anew the primes from engram_vocab_size up, none twice.

    c: Config (engram_layer_ids, engram_max_ngram_size, engram_n_heads, engram_vocab_size).
    """
    taken, tables = set(), []

    def next_prime(p):
        while p in taken or any(p % q == 0 for q in range(2, math.isqrt(p) + 1)):
            p += 1
        taken.add(p)
        return p
    for _ in c.engram_layer_ids:
        table = []
        for _ in range(c.engram_max_ngram_size - 1):
            p, heads = c.engram_vocab_size - 1, []
            for _ in range(c.engram_n_heads):
                heads.append(p := next_prime(p + 1))
            table.append(heads)
        tables.append(table)
    return tables

def engram_multipliers(c, layer):
    """One odd multiplier for each look-back of the n-gram hash of a layer: ints [N]."""
    bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
    return [2 * x + 1 for x in default_rng_integers(10007 * layer, bound, c.engram_max_ngram_size)]

def ngram_rows(classes, multipliers, primes, offsets):
    """Table rows of the n-grams that end at each token: -> int64 [T, (N-1) * heads].

    classes int64 [T, N]: the token's own class first, then looking back. For n = 2..N the XOR of
    class[i] * multipliers[i], i < n, modulo primes [N-1, heads], plus offsets [N-1, heads].
    """
    rolling = classes * multipliers                                            # [T, N]
    rows = []
    for n in range(1, classes.shape[1]):
        rolling[:, n] ^= rolling[:, n - 1]
        rows.append(rolling[:, n, None] % primes[n - 1] + offsets[n - 1])
    return torch.cat(rows, 1)

def engram_write(h, key, value, q_weight, k_weight, eps):
    """h[s] += gate[s] * value, each stream gated by its own match with its key.

    h, key [T, S, D], value [T, D], q_weight, k_weight [S, D] -> like h.
    gate = sigmoid(ssqrt(<norm(h), norm(key)> * D^-0.5)), ssqrt(a) = sign(a) * sqrt(max(|a|, 1e-6)).
    """
    x, key = h.float(), key.float()
    dot = (x * q_weight * k_weight * key).sum(-1) * torch.rsqrt(x.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + eps) * h.shape[-1] ** -0.5
    gate = sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    return (x + gate[..., None] * value[:, None]).to(h.dtype)

# ------------------------------------------------------------------------------------------------
# Sampling
# ------------------------------------------------------------------------------------------------
def philox(seed, c0, c1, c2=0):
    """Philox4x32-10: counters c0, c1 int64 tensors (32 bits each), key = seed -> 32 random bits.

    The first word of the block (c0, c1, c2, 0), as int64 in 0..2^32-1 (Salmon et al. 2011).
    """
    low = 0xFFFFFFFF
    k0, k1 = seed & low, seed >> 32 & low
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2, c3 = torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57        # int64 wraps; both words stay right
        c0, c1 = (p1 >> 32 & low) ^ c1 ^ k0, p1 & low
        c2, c3 = (p0 >> 32 & low) ^ c3 ^ k1, p0 & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0

def uniform(seed, pos, n, device=None, stream=0):
    """Random numbers in (0, 1), float64 [n], of one position of one request and one purpose.

    stream: 0 the target's draws, 1 the draft's own draws, 2 whether a draft is accepted.
    """
    token, pos = torch.arange(n, device=device), torch.tensor(pos, device=device)
    return (philox(seed, token, pos, stream).double() + 0.5) * 2.0**-32

def gumbel(seed, pos, n, device=None, stream=0):
    """Gumbel noise float64 [n] from `uniform`: the argmax of log p + noise is a draw from p."""
    return -torch.log(-torch.log(uniform(seed, pos, n, device, stream)))

def scaled_logits(logits, temperature, top_p=1.0):
    """logits fp32 [V] -> float64 logits / T, -inf outside the smallest set of most likely tokens
    whose mass reaches top_p (the token that crosses it stays)."""
    scaled = logits.double() / temperature
    if top_p < 1:
        p, order = torch.softmax(scaled, -1).sort(descending=True, stable=True)
        scaled[order[p.cumsum(-1) - p >= top_p]] = -torch.inf
    return scaled

def sample(logits, temperature, top_p, seed, pos, stream=0):
    """One token id (int) for position `pos` from logits fp32 [V].

    temperature 0: the argmax, ties to the lower id. Otherwise an exact draw, by Gumbel noise that
    depends on seed, position and stream alone: who draws at a position again, draws the same.
    """
    if temperature == 0:
        return int(logits.argmax())
    scaled = scaled_logits(logits, temperature, top_p)
    return int((scaled + gumbel(seed, pos, len(logits), logits.device, stream)).argmax())

def accept(logits, proposal, draft, temperature, top_p, seed, pos):
    """The textbook rule: the draft if u * q(draft) < p(draft), else a draw from max(p - q, 0).

    logits, proposal fp32 [V]: the target's, and those the draft was drawn from, at temperature > 0
    without top-p. Exactly a draw from p whatever q is (Leviathan et al. 2023).
    """
    p = scaled_logits(logits, temperature, top_p).softmax(-1)
    q = scaled_logits(proposal, temperature).softmax(-1)
    if uniform(seed, pos, 1, p.device, 2) * q[draft] < p[draft]:
        return draft
    rest = (p - q).clamp(min=0).log() + gumbel(seed, pos, len(p), p.device)
    return int(rest.argmax())
