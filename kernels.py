"""kernels.py: every operation of DeepSeek-V4.1-Flash, each a few lines of PyTorch and a kernel.

Each stands here once: the reference says what it means, in fp32; the Triton kernel right below does
it in one launch, weights and caches packed as they are stored. `fused` picks. nanoflash.py holds
the parameters and the state and calls these.

Sections, in reading order:
    Number formats    packed rows, FP8 and FP4; dequantized weights
    Dense             matrix products, rms_norm, rope, swiglu
    mHC               the boundary between two sublayers: write, read and mix the S streams
    Sparse attention  queries and window rows, compressor, index with its tie rule, attention
    Experts           the router, routed and shared experts
    Engram            the gated write into the streams
    Sampling          counter-based Gumbel noise, top-p, one token

Dimension letters are those of nanoflash.py, and: n groups of a sequence, L rows that a query
attends to, F expert width, P parts of a sum, N and n_in the sides of a matrix.
`block` is the number of rows that a matrix product always sees in deterministic mode: a row's bits
then do not depend on how many rows came with it. None multiplies all rows at once.
"""
import itertools, math, os
from typing import NamedTuple

import torch
import torch.nn.functional as F

FUSED = os.environ.get("TRITON_INTERPRET") == "1"        # the kernels on a CPU, in the interpreter
try:
    if not (FUSED or torch.cuda.is_available()):
        raise ImportError                                # a CPU needs no triton: half a second
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    triton = tl = constexpr = None

def fused(x):
    """Do the Triton kernels take this tensor? On a GPU always, on a CPU in the interpreter."""
    return FUSED or x.is_cuda

RUN_TIME = "T", "n", "kept", "width", "width_w", "width_g", "stride"       # one binary for all
jit = triton.jit(do_not_specialize=RUN_TIME) if triton else lambda f: f

def _act(dtype):
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32

# -- Number formats: what stands on disk and in the caches -----------------------------------------
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([s * m for s in (1, -1) for m in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)])  # E2M1[code]
E2M1_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], 1)      # [byte] low, high

class Format(NamedTuple):
    """How a row is packed: all values, then one scale for every `size` channels."""
    size: int
    bits: int               # 8: e4m3; 4: two e2m1 a byte, the even channel in the low nibble
    least: float            # what a scale is made of: max(amax, least) / largest
    largest: float
    scale: torch.dtype      # E8M0: up to the next power of two; E4M3: to the nearest, at most 448

FP8 = Format(32, 8, 1e-4, 448.0, E8M0)               # window rows: 528 bytes of 512 channels
LATENT = Format(16, 4, 6 * 2.0**-9, 6.0, E4M3)       # compressed KV: 288 of 512
INDEX = Format(32, 4, 6 * 2.0**-126, 6.0, E8M0)      # index keys and queries: 68 of 128

def _e2m1_code(q):
    """Nearest e2m1 code of q (fp32, |q| <= 6), halves to the even code, sign kept on zero."""
    a = q.abs()
    code = ((a > 0.25).int() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5)
            + (a > 5.0))
    return (code + 8 * q.signbit()).to(torch.uint8)

def quantize(x, f):
    """x [..., n] -> bytes [..., n * bits / 8 + n / size] in Format f; x is divided by the scale as
    it was rounded."""
    x = x.float().unflatten(-1, (-1, f.size))
    scale = x.abs().amax(-1).clamp(min=f.least) / f.largest
    if f.scale == E8M0:
        bits = scale.contiguous().view(torch.int32)
        scale = ((bits >> 23) + (bits & 0x7FFFFF != 0)).to(torch.uint8).view(E8M0)
    else:
        scale = scale.clamp(max=448).to(E4M3)
    q = (x / scale.float()[..., None]).clamp(-f.largest, f.largest).flatten(-2)
    values = q.to(E4M3).view(torch.uint8) if f.bits == 8 else _e2m1_code(q)
    values = values if f.bits == 8 else values[..., 0::2] | values[..., 1::2] << 4
    return torch.cat([values, scale.view(torch.uint8)], -1)

def unpack_e2m1(packed, dtype=torch.float32):
    """Two e2m1 codes a byte, even column in the low nibble: [..., n/2] uint8 -> [..., n] dtype."""
    return F.embedding(packed.int(), E2M1_PAIRS.to(packed.device, dtype)).flatten(-2)

def dequantize(row, f):
    """Inverse of `quantize`: bytes of Format f -> fp32 [..., n]."""
    n = row.shape[-1] * f.bits * f.size // (f.bits * f.size + 8)        # bytes of values
    values, scale = row[..., :n].contiguous(), row[..., n:].contiguous().view(f.scale).float()
    values = values.view(E4M3).float() if f.bits == 8 else unpack_e2m1(values)
    return (values.unflatten(-1, (-1, f.size)) * scale[..., None]).flatten(-2)

def dequantize_weight(weight, scale, dtype):
    """A stored matrix -> [out, in] dtype, exactly (e4m3 or e2m1 times a power of two fits bf16).
    weight e4m3 [out, in] with e8m0 scale [ceil(out/32), ceil(in/32)]; or int8 [out, in/2], two e2m1
    a byte, with e8m0 scale [out, in/32]; or bf16/fp32 [out, in] with scale None."""
    if scale is None:
        return weight.to(dtype, copy=True)               # never a view of the mapped file
    scale = scale.to(dtype)
    if weight.dtype == E4M3:
        scale = scale.repeat_interleave(32, 0)[: weight.shape[0]].repeat_interleave(32, 1)
        return weight.to(dtype).mul_(scale[:, : weight.shape[1]])
    values = unpack_e2m1(weight.view(torch.uint8), dtype).unflatten(1, (-1, 32))
    return values.mul_(scale[:, :, None]).flatten(1)

@jit
def _e2m1(code):
    """e2m1 codes 0..15 (int32) -> fp32: their bits are an fp32's, but for the exponent's bias."""
    bits = (code & 8) << 28 | (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 2.0**126

@jit
def _e8m0(byte):
    """ue8m0 bytes -> fp32 powers of two."""
    bits = byte.to(tl.int32)
    return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)

@jit
def _e4m3(byte):
    """e4m3 bytes -> fp32."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)

@jit
def _power_of_two(x):
    """x fp32, positive, normal -> exponent byte of the least power of two >= x; see quantize."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)

@jit
def _nearest_e2m1(q):
    """Nearest e2m1 code of q (fp32, |q| <= 6), halves to the even code; see _e2m1_code."""
    a, code = tl.abs(q), (q.to(tl.int32, bitcast=True) >> 31) & 8
    code += (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    return code + (a > 5.0).to(tl.int32)

@jit
def _store_fp8(row, x, some):
    """Rows x fp32 [BT, n], quantized as Format FP8, to the addresses row [BT]."""
    n: constexpr = x.shape[1]
    b = tl.reshape(x, [x.shape[0], n // 32, 32])
    scale = _power_of_two(tl.div_rn(tl.maximum(tl.max(tl.abs(b), 2), 1e-4), 448.0))
    value = tl.reshape(b * _e8m0(254 - scale)[:, :, None], x.shape).to(tl.float8e4nv)
    tl.store(row[:, None] + tl.arange(0, n), value.to(tl.uint8, bitcast=True), some[:, None])
    tl.store(row[:, None] + n + tl.arange(0, n // 32), scale.to(tl.uint8), some[:, None])

@jit
def _fp4(x, SIZE: constexpr, LATENT: constexpr):
    """x fp32 [BT, n] -> codes int32 [BT, n], scales fp32 [BT, n / SIZE], their bytes uint8."""
    b = tl.reshape(x, [x.shape[0], x.shape[1] // SIZE, SIZE])
    top = tl.max(tl.abs(b), 2)
    if LATENT:
        code = tl.minimum(tl.div_rn(tl.maximum(top, 6 * 2.0**-9), 6.0), 448.0).to(tl.float8e4nv)
        scale, byte = code.to(tl.float32), code.to(tl.uint8, bitcast=True)
    else:
        power = _power_of_two(tl.div_rn(tl.maximum(top, 6 * 2.0**-126), 6.0))
        scale, byte = _e8m0(power), power.to(tl.uint8)
    q = tl.clamp(tl.div_rn(b, tl.broadcast_to(scale[:, :, None], b.shape)), -6.0, 6.0)
    return tl.reshape(_nearest_e2m1(q), x.shape), scale, byte

@jit
def _store_fp4(row, x, some, SIZE: constexpr, LATENT: constexpr):
    """Rows x fp32 [BT, n], quantized as Format LATENT or INDEX, to row [BT]."""
    n: constexpr = x.shape[1]
    code, _, byte = _fp4(x, SIZE, LATENT)
    low, high = tl.split(tl.reshape(code, [x.shape[0], n // 2, 2]))
    tl.store(row[:, None] + tl.arange(0, n // 2), (low | high << 4).to(tl.uint8), some[:, None])
    tl.store(row[:, None] + n // 2 + tl.arange(0, n // SIZE), byte, some[:, None])

@jit
def _row(pool, table, slot, i, some, width, PER: constexpr, BYTES: constexpr):
    """Address of row i [BT] (a position or group) of the sequence in slot [BT]."""
    page = tl.load(table + slot * width + i // PER, some, 0)
    return pool + (page * PER + i % PER) * BYTES

@jit
def _weights(w, scale, n, k0, N: constexpr, K: constexpr, FORM: constexpr, BK: constexpr,
             ACT: constexpr):
    """Rows n [BN] and columns k0..k0+BK of a stored matrix [N, K] -> [BN, BK] ACT.
    FORM 16: plain values. 8: e4m3 bytes with a scale for 32 x 32. 4: two e2m1 a byte with a scale
    for 32 columns of a row. w and scale point at the matrix (int64 offsets are the caller's)."""
    BN: constexpr = n.shape[0]
    COLS: constexpr = (K + 31) // 32
    k, there, row = k0 + tl.arange(0, BK), n[:, None] < N, n[:, None].to(tl.int64)
    if FORM == 16:
        return tl.load(w + row * K + k, there & (k < K), 0.0).to(tl.float32).to(ACT)
    else:
        block = k0 // 32 + tl.arange(0, BK // 32)
        if FORM == 8:
            value = _e4m3(tl.load(w + row * K + k, there & (k < K), 0))
            row = row // 32
        else:
            k = k0 // 2 + tl.arange(0, BK // 2)
            pair = tl.load(w + row * (K // 2) + k, there & (k < K // 2), 0).to(tl.int32)
            value = tl.reshape(tl.join(_e2m1(pair & 15), _e2m1(pair >> 4)), [BN, BK])
        s = _e8m0(tl.load(scale + row * COLS + block, there & (block < COLS), 127))
        return tl.reshape(tl.reshape(value, [BN, BK // 32, 32]) * s[:, :, None], [BN, BK]).to(ACT)

# -- Dense -----------------------------------------------------------------------------------------
def linear(x, w, block=None):
    """x [T, in] @ w [out, in].T -> fp32 [T, out], summed in fp32 whatever the input types.
    `block`: rows go through in blocks of exactly that many (the last one padded with zeros)."""
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

def project(x, m, block=None, norm=None, eps=0.0, groups=1, side=None):
    """x [T, groups * in] -> fp32 [T, N], its products with a nanoflash.Linear m [N, in].
    norm [in]: rms_norm x first. groups: m is block-diagonal, g-th outputs of g-th columns (wo_a).
    side: another Linear, not quantized, of the same x -> both results, of one launch."""
    if not fused(x):
        a = (x if norm is None else rms_norm(x, norm, eps)).to(m.dtype)
        y = linear(a, m.w, block) if groups == 1 else torch.cat([
            linear(*part, block) for part in zip(a.chunk(groups, 1), m.w.chunk(groups))], 1)
        return (y, linear(a, side.w, block)) if side else y
    (T, n_in), (N, M) = x.shape, (len(o.w) if o else 0 for o in (m, side))
    y, z = torch.empty(T, N, device=x.device), torch.empty(T, M, device=x.device)
    linear_kernel[triton.cdiv(N, 16) + triton.cdiv(M, 16), triton.cdiv(T, 16)](
        x, norm, m.w, m.scale, y, side and side.w, z, T, n_in, eps, N, M, n_in // groups,
        N // groups, m.form, norm is not None, 16, 256, _act(m.dtype), num_warps=4, num_stages=3)
    return (y, z) if side else y

@jit
def _product(x, norm, w, scale, t, n, T, stride, N: constexpr, K: constexpr, FORM: constexpr,
             NORM: constexpr, BK: constexpr, ACT: constexpr):
    """x [rows t, K] @ W [rows n, K].T -> fp32 [BT, BN]; NORM: of x times norm's weight.
    Returns mean(x^2) [BT] too: a caller that norms multiplies by rsqrt(that + eps) afterwards."""
    acc = tl.zeros([t.shape[0], n.shape[0]], tl.float32)
    squares = tl.zeros([t.shape[0]], tl.float32)
    row, some = x + t[:, None].to(tl.int64) * stride, t[:, None] < T
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(row + k, some & (k < K), 0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(a * a, 1)
            a *= tl.load(norm + k, k < K, 0.0).to(tl.float32)
        b = _weights(w, scale, n, k0, N, K, FORM, BK, ACT)
        acc = tl.dot(a.to(ACT), tl.trans(b), acc, input_precision="ieee")
    return acc, squares / K

@jit
def _linear(x, norm, w, scale, y, tile, T, stride, eps, N: constexpr, K: constexpr,
            FORM: constexpr, NORM: constexpr, BN: constexpr, BK: constexpr, ACT: constexpr):
    n, t = tile * BN + tl.arange(0, BN), tl.program_id(1) * 16 + tl.arange(0, 16)
    acc, squares = _product(x, norm, w, scale, t, n, T, stride, N, K, FORM, NORM, BK, ACT)
    if NORM:
        acc *= tl.rsqrt(squares + eps)[:, None]
    tl.store(y + t[:, None].to(tl.int64) * N + n, acc, (t[:, None] < T) & (n < N))

@jit
def linear_kernel(x, norm, w, scale, y, side, z, T, stride, eps, N: constexpr, M: constexpr,
                  K: constexpr, PER_GROUP: constexpr, FORM: constexpr, NORM: constexpr,
                  BN: constexpr, BK: constexpr, ACT: constexpr):
    """Grid (tiles of BN outputs of w, then of side; blocks of 16 rows): see project. Outputs of
    group n // PER_GROUP read the columns from group * K on."""
    tile, TILES = tl.program_id(0), (N + BN - 1) // BN
    if tile < TILES:
        x += tile * BN // PER_GROUP * K
        _linear(x, norm, w, scale, y, tile, T, stride, eps, N, K, FORM, NORM, BN, BK, ACT)
    elif M:
        _linear(x, norm, side, None, z, tile - TILES, T, stride, eps, M, K, 16, NORM, BN, BK, ACT)

def rotation(pos, frequencies):
    """pos int64 [T], frequencies fp32 [r/2] -> cos, sin fp32 [T, r/2] of their fp32 products."""
    angle = pos[:, None].float() * frequencies
    return angle.cos(), angle.sin()

def rope(x, cos, sin):
    """Rotate the adjacent pairs (2i, 2i+1) of the last r channels: x [T, ..., n] -> fp32.
    cos, sin [T, r/2]; rotate back with -sin. Channels before the last r pass through."""
    r = 2 * cos.shape[-1]
    x, tail = x.float().split([x.shape[-1] - r, r], -1)
    cos, sin = (t.view(-1, *[1] * (x.dim() - 2), r // 2) for t in (cos, sin))
    a, b = tail[..., 0::2], tail[..., 1::2]
    return torch.cat([x, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)

@jit
def _rotate(x, cos, sin, t, T, d: constexpr, r: constexpr, channel):
    """Rotate the adjacent pairs of x [BT, BN]: rows t, even channels `channel` [BN / 2] of d. Those
    before the last r stay as they are. cos, sin fp32 [T, r / 2]."""
    pair = (channel - (d - r)) // 2
    at, turns = t[:, None] * (r // 2) + pair, (t[:, None] < T) & (channel >= d - r) & (channel < d)
    c, s = tl.load(cos + at, turns, 1.0), tl.load(sin + at, turns, 0.0)
    a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.reshape(tl.join(a * c - b * s, a * s + b * c), x.shape)

def sigmoid(x):
    """1 / (1 + e^-x); written out, since torch.sigmoid rounds the tail of a tensor differently."""
    return 1 / (1 + torch.exp(-x))

def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit), both [..., F] fp32; `swiglu_limit`."""
    gate = gate.clamp(max=limit)
    return gate * sigmoid(gate) * up.clamp(-limit, limit)

# -- mHC: single-pass manifold-constrained hyper-connections ---------------------------------------
def sinkhorn(a, iters, eps):
    """a [T, S, S] -> nearly doubly stochastic: rows (the last axis) first, columns last, so that
    columns sum to 1 and rows nearly."""
    one, least, a = torch.ones_like(a), torch.full_like(a, eps), torch.softmax(a, -1) + eps
    for i in range(2 * iters - 1):                       # columns, then rows and columns by turns
        a = a / torch.baddbmm(least, *((a, one) if i % 2 else (one, a)))   # eps + sums, in one op
    return a

def hc_mix(h, fn, scale, base, norm_eps, hc_eps, iters, block=None):
    """The weights of one site from the streams that it reads: h [T, S, D] -> pre, post, comb.
    fn [(2+S)S, S*D], scale [3], base [(2+S)S], all fp32. pre [T, S] collapses for the NEXT
    sublayer, post [T, S] writes this one's output, comb [T, S, S] carries the streams over."""
    S = h.shape[1]
    x = h.flatten(1).float()
    mixes = linear(x, fn, block) * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixes.split([S, S, S * S], -1)
    pre = sigmoid(pre * scale[0] + base[:S]) + hc_eps
    post = 2 * sigmoid(post * scale[1] + base[S : 2 * S])
    comb = (comb * scale[2] + base[2 * S :]).unflatten(-1, (S, S))
    return pre, post, sinkhorn(comb, iters, hc_eps)

def hc_expand(h, y, post, comb):
    """h'[k] = post[k] * y + sum_j comb[j, k] * h[j]: h [T, S, D], y [T, D] -> like h."""
    mixed = (comb[..., None] * h[:, :, None].float()).sum(1)
    return (post[:, :, None] * y[:, None].float() + mixed).to(h.dtype)

def _hc_sizes(h, y, c):
    S, D = h.shape[1:]
    return dict(D=D, S=S, ITERS=c.hc_sinkhorn_iters, PARTS=0 if y is None else y.shape[1],
                CHUNKS=triton.next_power_of_2(triton.cdiv(D, 128)),
                COLS=triton.next_power_of_2((2 + S) * S + 1), ACT=_act(h.dtype))

def hc_boundary(h, y, mix, site, c, block=None, features=None):
    """Between two sublayers: write y into the streams, read them for the next one.
    h [T, S, D]; y fp32 [T, P, D], parts of the sublayer's output to add in order, or None; mix as
    the boundary before returned it, opaque to the caller, None at the first; site (fn, scale, base)
    of the sublayer to come, None after the last; features: a list that gets the mean of the
    streams, like h [T, D]. -> h, x fp32 [T, D] collapsed with the PREVIOUS site's pre, mix."""
    if not fused(h):
        h = h if y is None else hc_expand(h, sum(y.unbind(1)).to(h.dtype), *mix[1:])
        if features is not None:
            features.append(h.float().mean(1).to(h.dtype))
        x = h[:, 0].float() if mix is None else (mix[0][:, :, None] * h.float()).sum(1)
        return h, x, site and hc_mix(h, *site, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters, block)
    (T, S, D), sizes = h.shape, _hc_sizes(h, y, c)
    out, x = h if y is None else torch.empty_like(h), torch.empty(T, D, device=h.device)
    mixes = torch.empty(T, sizes["CHUNKS"], sizes["COLS"], device=h.device)
    fn, *rest = site or (None,)
    if features is not None:
        features.append(torch.empty_like(h[:, 0]))
    boundary_kernel[triton.cdiv(D, 128), T](
        h, y, *(mix or (None,) * 3), fn, out, x, mixes, features and features[-1], c.rms_norm_eps,
        c.hc_eps, FIRST=mix is None, **sizes, num_warps=4)
    return out, x, site and (mixes, *rest)

@jit
def _mix(mixes, scale, base, t, norm_eps, hc_eps, D: constexpr, S: constexpr, ITERS: constexpr,
         CHUNKS: constexpr, COLS: constexpr):
    """Sums of one row over chunks of D -> pre [S], post [S], comb [S, S]; see hc_mix."""
    c, s = tl.arange(0, CHUNKS), tl.arange(0, S)
    at, some = mixes + (t.to(tl.int64) * CHUNKS + c) * COLS, c < (D + 127) // 128
    pair = 2 * S + s[:, None] * S + s
    r = tl.sum(tl.load(at + (2 + S) * S, some, 0.0), 0) / (S * D)
    at, some, r = at[:, None], some[:, None], tl.rsqrt(r + norm_eps)
    pre = tl.sum(tl.load(at + s, some, 0.0), 0) * r * tl.load(scale) + tl.load(base + s)
    post = tl.sum(tl.load(at + S + s, some, 0.0), 0) * r * tl.load(scale + 1)
    a = tl.sum(tl.load(at[:, :, None] + pair, some[:, :, None], 0.0), 0) * r * tl.load(scale + 2)
    pre, a = 1 / (1 + tl.exp(-pre)) + hc_eps, a + tl.load(base + pair)
    post = 2 / (1 + tl.exp(-(post + tl.load(base + S + s))))
    a = tl.exp(a - tl.max(a, 1)[:, None])
    a = a / tl.sum(a, 1)[:, None] + hc_eps
    a = a / (tl.sum(a, 0)[None] + hc_eps)
    for _ in range(ITERS - 1):
        a = a / (tl.sum(a, 1)[:, None] + hc_eps)
        a = a / (tl.sum(a, 0)[None] + hc_eps)
    return pre, post, a

@jit
def _stream(h, y, post, comb, t, k, d, D: constexpr, S: constexpr, PARTS: constexpr,
            ACT: constexpr):
    """Channels d [BD] of stream k of row t -> fp32; with PARTS after y [T, PARTS, D] is written."""
    row, some, s = t.to(tl.int64) * D, d < D, tl.arange(0, S)
    if PARTS == 0:
        return tl.load(h + row * S + k * D + d, some, 0.0).to(tl.float32)
    else:                                   # what follows a return would still be compiled
        total = tl.zeros([d.shape[0]], tl.float32)
        for i in tl.static_range(PARTS):
            total += tl.load(y + row * PARTS + i * D + d, some, 0.0)
        streams = tl.load(h + row * S + s[:, None] * D + d, some, 0.0).to(tl.float32)
        x = tl.sum(tl.sum(tl.where(s == k, comb, 0.0), 1)[:, None] * streams, 0)
        x += tl.sum(tl.where(s == k, post, 0.0), 0) * total.to(ACT).to(tl.float32)
        return x.to(ACT).to(tl.float32)

@jit
def boundary_kernel(h, y, mixes, scale, base, fn, h_out, x, mixes_out, feature, norm_eps, hc_eps,
                    D: constexpr, S: constexpr, ITERS: constexpr, PARTS: constexpr,
                    FIRST: constexpr, CHUNKS: constexpr, COLS: constexpr, ACT: constexpr):
    """Grid (chunks of 128 channels, T): see hc_boundary. The mix of a site needs the whole row, but
    not before the next boundary: mixes fp32 [T, CHUNKS, COLS] holds each chunk's share of the
    products with fn, and of the sum of squares, which the next boundary adds up."""
    d, t, m = tl.program_id(0) * 128 + tl.arange(0, 128), tl.program_id(1), tl.arange(0, COLS)
    some, s, at = d < D, tl.arange(0, S), t.to(tl.int64)
    pre, post, comb = tl.where(s == 0, 1.0, 0.0), 0.0, 0.0
    if not FIRST:
        pre, post, comb = _mix(mixes, scale, base, t, norm_eps, hc_eps, D, S, ITERS, CHUNKS, COLS)
    collapsed, mean = tl.zeros([128], tl.float32), tl.zeros([128], tl.float32)
    sums, squares = tl.zeros([COLS], tl.float32), 0.0
    for k in tl.static_range(S):
        x_k = _stream(h, y, post, comb, t, k, d, D, S, PARTS, ACT)
        if PARTS:
            tl.store(h_out + (at * S + k) * D + d, x_k, some)
        collapsed += tl.sum(tl.where(s == k, pre, 0.0), 0) * x_k
        mean += x_k / S
        if fn is not None:
            w = tl.load(fn + (m[:, None] * S + k) * D + d, (m[:, None] < (2 + S) * S) & some, 0.0)
            sums += tl.sum(w * x_k, 1)
            squares += tl.sum(x_k * x_k, 0)
    tl.store(x + at * D + d, collapsed, some)
    if fn is not None:
        sums = tl.where(m == (2 + S) * S, squares, sums)
        tl.store(mixes_out + (at * CHUNKS + tl.program_id(0)) * COLS + m, sums)
    if feature is not None:
        tl.store(feature + at * D + d, mean, some)

# -- Sparse attention ------------------------------------------------------------------------------
SPLIT = 64          # cache rows that one program attends to: fixed, as a row's bits depend on it
ROWS = 32           # rows that attend or score at once: bounds memory, changes nothing
KEY_BLOCK = 1024    # index keys that one product sees: bounds memory; padded in deterministic mode

def queries(a, q_norm, kv_norm, wq, rotate, slot, pos, window, H, Hi, eps, dtype, block=None):
    """a fp32 [T, Q + d] of wq_a and wkv -> q [T, H, d] dtype, index queries [T, Hi, di] or None;
    writes the window rows pos of the sequences in slot, int64 [T], into the Pool `window`.
    wq: wq_b over indexer.wq_b (Hi 0: without); None: only the window rows are wanted. Both queries
    and K = V are rotated, index queries rounded to FP4, window rows to FP8."""
    (T, A), d = a.shape, len(kv_norm)
    Q, n_q = A - d, H * d
    if not fused(a):
        kv = rms_norm(a[:, Q:], kv_norm, eps).to(dtype)
        window.write(slot, pos, quantize(rope(kv, *rotate), FP8))
        if wq is None:
            return None, None
        x = project(a[:, :Q], wq, block, q_norm, eps)
        q = rope(x[:, :n_q].unflatten(1, (H, -1)), *rotate).to(dtype)
        if not Hi:
            return q, None
        qi = rope(x[:, n_q:].unflatten(1, (Hi, -1)), *rotate)
        return q, dequantize(quantize(qi, INDEX), INDEX)
    n_q, n_i = (n_q, len(wq.w) - n_q) if wq else (0, 0)
    q, qi = (torch.empty(T, n, dtype=dtype, device=a.device) for n in (n_q, n_i))
    queries_kernel[(n_q + n_i) // 32 + 1, triton.cdiv(T, 16)](
        a, q_norm, kv_norm, wq and wq.w, wq and wq.scale, *rotate, slot, pos, window.rows,
        window.table, q, qi, T, eps, window.table.stride(0), Q, d, 2 * rotate[0].shape[1], n_q, n_i,
        n_i // max(1, Hi), window.per_page, 32, 128, _act(dtype), num_warps=8, num_stages=2)
    return q.view(T, -1, d), qi.view(T, Hi, -1) if Hi else None

@jit
def queries_kernel(a, q_norm, kv_norm, w, scale, cos, sin, slot, pos, window, table, q, qi, T, eps,
                   width, Q: constexpr, d: constexpr, r: constexpr, NQ: constexpr, NI: constexpr,
                   di: constexpr, PER: constexpr, BN: constexpr, BK: constexpr, ACT: constexpr):
    """Grid (tiles of q and index q, then one for the window rows; blocks of 16 rows).
    a fp32 [T, Q + d]: what wq_a and wkv gave. w: wq_b over indexer.wq_b [NQ + NI, Q], e4m3.
    Writes q ACT [T, NQ], index queries ACT [T, NI] as FP4 would give them back, and window rows."""
    tile, t = tl.program_id(0), tl.program_id(1) * 16 + tl.arange(0, 16)
    some, at = t < T, t.to(tl.int64)
    if tile == (NQ + NI) // BN:
        c = tl.arange(0, d)
        kv = tl.load(a + at[:, None] * (Q + d) + Q + c, some[:, None], 0.0)
        kv *= tl.rsqrt(tl.sum(kv * kv, 1) / d + eps)[:, None]
        kv = (kv * tl.load(kv_norm + c)).to(ACT).to(tl.float32)
        kv = _rotate(kv, cos, sin, t, T, d, r, 2 * tl.arange(0, d // 2))
        p = tl.load(pos + t, some, 0)
        row = _row(window, table, tl.load(slot + t, some, 0), p, some, width, PER, d + d // 32)
        _store_fp8(row, kv, some)
    elif NQ:
        n = tile * BN + tl.arange(0, BN)
        acc, squares = _product(a, q_norm, w, scale, t, n, T, Q + d, NQ + NI, Q, 8, True, BK, ACT)
        acc *= tl.rsqrt(squares + eps)[:, None]
        even = tile * BN + 2 * tl.arange(0, BN // 2)
        if tile < NQ // BN:
            acc = _rotate(acc, cos, sin, t, T, d, r, even % d)
            tl.store(q + at[:, None] * NQ + n, acc, some[:, None])
        else:
            acc = _rotate(acc, cos, sin, t, T, di, r, even % di)
            code, by, _ = _fp4(acc, 32, False)
            value = tl.reshape(_e2m1(code), [16, BN // 32, 32]) * by[:, :, None]
            tl.store(qi + at[:, None] * NI + n - NQ, tl.reshape(value, [16, BN]), some[:, None])

def pool_pair(first, second):
    """Ratio-2 compressor: (kv, gate) of the two tokens, each [n, 2, d] fp32 -> latent [n, d].
    Per channel, the softmax of the two gates weighs the two values."""
    top = torch.maximum(first[:, 1], second[:, 1])
    a, b = torch.exp(first[:, 1] - top), torch.exp(second[:, 1] - top)
    return (a * first[:, 0] + b * second[:, 0]) / (a + b)

def compress(a, norm, wk, k_norm, rotate, batch, ring, latents, keys, ratio, eps, dtype,
             block=None):
    """Full layers: the latent and index key of every group that these rows complete, as FP4.
    a fp32 [T, ..]: kv, and for ratio 2 gate, of each row [d]; wk Linear [di, d]; ring fp32 [slot,
    position % R, 2, d]: a pair's first token is the row before or, at the seam of a chunk, there;
    latents, keys: Pools; rotate: of each row's group. batch: nanoflash.Batch."""
    (T, A), d, pos, slot, done = a.shape, len(norm), batch.pos, batch.slot, slice(None)
    if not fused(a):
        latent = a[:, :d]
        if ratio == 2:
            now, R = a[:, : 2 * d].unflatten(1, (2, d)), ring.shape[1]
            before = ring[slot, (pos - 1) % R]                              # read, then written
            follows = F.pad(slot[1:] == slot[:-1], (1, 0))              # row t - 1 is pos - 1
            before = torch.where(follows[:, None, None], now.roll(1, 0), before)
            # more rows than a ring has would meet in one place, and such a scatter is undefined
            kept = batch.last - torch.arange(T, device=a.device) < R
            ring[slot[kept], pos[kept] % R] = now[kept]
            done = (pos % 2 == 1).nonzero()[:, 0]
            latent = pool_pair(before[done], now[done])
        rotate, group = [t[done] for t in rotate], pos[done] // ratio
        latent = rms_norm(latent, norm, eps).to(dtype)
        key = rms_norm(project(latent, wk, block), k_norm, eps).to(dtype)   # before its rotation
        latents.write(slot[done], group, quantize(rope(latent, *rotate), LATENT))
        keys.write(slot[done], group, quantize(rope(key, *rotate), INDEX))
        return
    compress_kernel[(triton.cdiv(T, 16),)](
        a, norm, wk.w, k_norm, *rotate, slot, pos, batch.last, ring, latents.rows, keys.rows,
        keys.table, torch.empty(T, d, device=a.device), T, eps, keys.table.stride(0), A, d,
        len(k_norm), 2 * rotate[0].shape[1], ratio, keys.per_page, 0 if ring is None else
        ring.shape[1], 64, _act(dtype), num_warps=8, num_stages=1)

@jit
def _pool_pair(a, out, ring, t, slot, pos, end, follows, first, some, A: constexpr, d: constexpr,
               RING: constexpr, BK: constexpr):
    """BK channels of pool_pair for 16 rows; a sequence's first row also renews its ring."""
    c = tl.arange(0, BK)
    now = t.to(tl.int64)[:, None] * A + c
    seam = (slot * RING + (pos + RING - 1) % RING)[:, None] * 2 * d + c
    kv, gate = tl.load(a + now, some, 0.0), tl.load(a + now + d, some, 0.0)
    kv_1 = tl.load(a + now - A, follows, 0.0) + tl.load(ring + seam, first, 0.0)
    gate_1 = tl.load(a + now - A + d, follows, 0.0) + tl.load(ring + seam + d, first, 0.0)
    top = tl.maximum(gate, gate_1)
    e_1, e_2 = tl.exp(gate_1 - top), tl.exp(gate - top)
    tl.store(out + t.to(tl.int64)[:, None] * d + c, (e_1 * kv_1 + e_2 * kv) / (e_1 + e_2), some)
    tl.debug_barrier()
    for i in tl.static_range(RING):
        keep = first & (end - i >= t)[:, None]
        old = (end - i)[:, None] * A + c
        to = (slot * RING + (pos + end - i - t) % RING)[:, None] * 2 * d + c
        tl.store(ring + to, tl.load(a + old, keep, 0.0), keep)
        tl.store(ring + to + d, tl.load(a + old + d, keep, 0.0), keep)

@jit
def compress_kernel(a, norm, wk, k_norm, cos, sin, slot, pos, last, ring, latents, keys, table,
                    scratch, T, eps, width, A: constexpr, d: constexpr, di: constexpr,
                    r: constexpr, RATIO: constexpr, PER: constexpr, RING: constexpr, BK: constexpr,
                    ACT: constexpr):
    """Grid (blocks of 16 rows): latents and index keys of the groups that rows complete.
    a fp32 [T, A]: what wkv (and wgate) gave. last int64 [T]: the last row of a row's sequence. At
    a sequence's first row the pair's first token is in the ring, which the program then renews:
    one program has both, so that nothing is overwritten before it is read."""
    t, c = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, d)
    some, at = t < T, t.to(tl.int64)
    p, s = tl.load(pos + t, some, 0), tl.load(slot + t, some, 0)
    done, source, stride = some, a, A
    if RATIO == 2:
        done, source, stride = some & (p % 2 == 1), scratch, d
        follows = some & (t > 0)
        follows = follows & (tl.load(slot + t - 1, follows, -1) == s)
        first, end = (some & (follows == 0))[:, None], tl.load(last + t, some, 0)
        for c0 in range(0, d, BK):
            _pool_pair(a + c0, scratch + c0, ring + c0, t, s, p, end, follows[:, None], first,
                       some[:, None], A, d, RING, BK)
        tl.debug_barrier()
    latent = tl.load(source + at[:, None] * stride + c, done[:, None], 0.0)
    latent *= tl.rsqrt(tl.sum(latent * latent, 1) / d + eps)[:, None]
    latent = (latent * tl.load(norm + c)).to(ACT).to(tl.float32)
    tl.store(scratch + at[:, None] * d + c, latent, some[:, None])
    group = p // RATIO
    latent = _rotate(latent, cos, sin, t, T, d, r, 2 * tl.arange(0, d // 2))
    row = _row(latents, table, s, group, done, width, PER, d // 2 + d // 16)
    _store_fp4(row, latent, done, 16, True)
    tl.debug_barrier()
    n = tl.arange(0, di)
    key, _ = _product(scratch, norm, wk, wk, t, n, T, d, di, d, 16, False, BK, ACT)
    key *= tl.rsqrt(tl.sum(key * key, 1) / di + eps)[:, None]
    key = (key * tl.load(k_norm + n)).to(ACT).to(tl.float32)
    key = _rotate(key, cos, sin, t, T, di, r, 2 * tl.arange(0, di // 2))
    row = _row(keys, table, s, group, done, width, PER, di // 2 + di // 32)
    _store_fp4(row, key, done, 32, False)

def index_scores(q, w, keys, block=None):
    """score[t, j] = sum_h w[t, h] * relu(q[t, h] . keys[j]) -> fp32 [T, n].
    q [T, Hi, di], w [T, Hi], keys [n, di], all fp32 (dequantized FP4)."""
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
    -inf is never taken, so fewer than k are set where fewer are visible."""
    k = min(k, scores.shape[1])
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
    newest visible group (n_visible [T] - 1) always stays and counts as one of the k."""
    best = F.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    best = best.unflatten(1, (-1, size)).amax(-1)
    newest = (n_visible[:, None] - 1).div(size, rounding_mode="floor")
    block = torch.arange(best.shape[1], device=best.device)
    return topk_mask(best.masked_fill(block == newest, torch.inf), k)

def index(q, w, batch, keys, ratio, role, c, block=None):
    """Full and reindex layers: the groups that each row may attend to -> int64 [T, K].
    q [T, Hi, di] as FP4 gives it back, w fp32 [T, Hi]; keys: Pool. role "source" fills
    batch.candidates [T, C], "reader" scores those blocks only. Both ascending, -1 padded. The
    caller keeps the result under its layer, for the layers that reuse it."""
    size, n_kept, (T, Hi, di) = c.candidate_block_size, c.candidate_topk_blocks, q.shape
    factor = di**-0.5 * Hi**-0.5
    if fused(q):
        n = max(1, batch.reach // ratio)
        pieces = [_index(*(x[a : a + ROWS] for x in (q, w, batch.slot, batch.pos)), keys, ratio,
                         role, c, n, factor,
                         batch.candidates[a : a + ROWS] if role == "reader" else None)
                  for a in range(0, T, ROWS)]
        if role == "source":
            batch.candidates = torch.cat([kept for _, kept in pieces]) if T > ROWS else pieces[0][1]
        return torch.cat([x for x, _ in pieces]) if T > ROWS else pieces[0][0]
    n_visible, candidates = (batch.pos + 1) // ratio, torch.full((T, n_kept), -1, device=q.device)
    batch.candidates = candidates if role == "source" else batch.candidates
    selected = torch.full((T, c.index_topk), -1, device=q.device)
    for slot, first, end, start in batch.spans:
        n = (start + end - first) // ratio
        k = dequantize(keys.read(slot, torch.arange(n, device=q.device)), INDEX)
        for a in range(first, end if n else first, ROWS):             # no keys: none selected
            rows = slice(a, min(a + ROWS, end))
            scores = index_scores(q[rows], w[rows] * factor, k, block)
            hidden = torch.arange(n, device=q.device) >= n_visible[rows, None]
            scores = scores.masked_fill(hidden, -torch.inf)
            if role == "source":
                kept = candidate_blocks(scores, n_visible[rows], size, n_kept)
                candidates[rows] = mask_to_index(kept, n_kept)
            if role == "reader":
                kept = torch.zeros(len(scores), -(-n // size) + 1, device=q.device)
                kept.scatter_(1, batch.candidates[rows] % kept.shape[1], 1)   # -1: a spare column
                kept = kept[:, :-1].repeat_interleave(size, 1)[:, :n]
                scores = scores.masked_fill(kept == 0, -torch.inf)
            selected[rows] = mask_to_index(topk_mask(scores, c.index_topk), c.index_topk)
    return selected

def _index(q, w, slot, pos, keys, ratio, role, c, n, factor, among):
    """Some rows of `index`, n groups at most -> selected, candidates (`among`, if there were)."""
    (T, Hi, di), size, n_kept = q.shape, c.candidate_block_size, c.candidate_topk_blocks
    n = n if among is None else min(n_kept, triton.cdiv(n, size)) * size
    scores = torch.empty(T, n, device=q.device)
    best = torch.empty(T, triton.cdiv(n, size), device=q.device) if role == "source" else None
    scores_kernel[triton.cdiv(n, 128), T](
        q, w, keys.rows, keys.table, slot, pos, among, n_kept, scores, best, n,
        keys.table.stride(0), w.stride(0), factor, ratio, size, Hi, di, keys.per_page,
        max(16, triton.next_power_of_2(Hi)), 128, _act(q.dtype), num_warps=4)
    return _tournament(scores, c.index_topk, among, size), (
        among if best is None else _tournament(best, n_kept))

def _tournament(scores, k, candidates=None, size=1):
    """mask_to_index(topk_mask(scores, k), k), columns mapped to the groups of the candidates: the k
    best of every tile are the next round's."""
    T, n = scores.shape
    tile = triton.next_power_of_2(max(2 * k, min(n, 8192)))             # more columns would spill
    tiles = triton.cdiv(n, tile)
    best = torch.empty(T, tiles * k, device=scores.device)
    out = torch.empty(T, tiles * k, dtype=torch.int64, device=scores.device)
    topk_kernel[tiles, T](scores, candidates, 0 if candidates is None else candidates.shape[1],
                          best, out, n, size, k, triton.next_power_of_2(k), tile, num_warps=8)
    return out if tiles == 1 else _tournament(best, k, out)

@jit
def scores_kernel(q, w, rows, table, slot, pos, candidates, kept, out, best, n, width, stride,
                  factor, RATIO: constexpr, SIZE: constexpr, HI: constexpr, DI: constexpr,
                  PER: constexpr, HP: constexpr, BN: constexpr, ACT: constexpr):
    """score[t, j] = sum_h w[t, h] * relu(q[t, h] . key_j), -inf where j is not visible.
    Grid (tiles of BN columns, T): scores fp32 [T, n], and best [T, blocks] for candidate blocks.
    Column j is group j; with candidates int64 [T, kept] group candidates[t, j / SIZE] * SIZE +
    j % SIZE. FP4 is exact in bf16: only sums round. HP: HI padded to what a dot takes."""
    t, j = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    group = j
    if candidates is not None:                           # block -1 gives groups below 0
        block = tl.load(candidates + t * kept + j // SIZE, j < n, -1)
        group = block * SIZE + j % SIZE
    visible = (j < n) & (group >= 0) & (group < (tl.load(pos + t) + 1) // RATIO)
    score = tl.full([BN], float("-inf"), tl.float32)
    if tl.max(visible.to(tl.int32), 0) > 0:
        row = _row(rows, table, tl.load(slot + t), group, visible, width, PER, DI // 2 + DI // 32)
        row, there = row[:, None], visible[:, None]
        pair = tl.load(row + tl.arange(0, DI // 2), there, 0).to(tl.int32)
        key = tl.reshape(tl.join(_e2m1(pair & 15), _e2m1(pair >> 4)), [BN, DI // 32, 32])
        key *= _e8m0(tl.load(row + DI // 2 + tl.arange(0, DI // 32), there, 127))[:, :, None]
        h, c = tl.arange(0, HP), tl.arange(0, DI)[:, None]
        query = tl.load(q + (t * HI + h) * DI + c, h < HI, 0.0).to(tl.float32).to(ACT)
        dots = tl.dot(tl.reshape(key, [BN, DI]).to(ACT), query, input_precision="ieee")
        weight = tl.load(w + t * stride + h, h < HI, 0.0) * factor
        score = tl.where(visible, tl.sum(tl.maximum(dots, 0.0) * weight, 1), score)
    tl.store(out + t * n + j, score, j < n)
    if best is not None:
        block = tl.program_id(0) * (BN // SIZE) + tl.arange(0, BN // SIZE)
        newest = ((tl.load(pos + t) + 1) // RATIO + SIZE - 1) // SIZE - 1    # none of 0 groups
        top = tl.max(tl.reshape(score, [BN // SIZE, SIZE]), 1)
        n_blocks = (n + SIZE - 1) // SIZE
        tl.store(best + t * n_blocks + block, tl.where(block == newest, float("inf"), top),
                 block < n_blocks)

@jit
def topk_kernel(scores, candidates, kept, best, out, n, SIZE: constexpr, K: constexpr,
                KP: constexpr, TILE: constexpr):
    """The K highest of every tile, in their order, equal ones to the lower column, never -inf.
    Grid (tiles of TILE >= K columns, T). scores fp32 [T, n] -> best fp32, out int64 [T, tiles, K]:
    their scores and groups (columns as in scores_kernel), -inf and -1 where there are fewer. A tile
    stays in registers, so it is cheap to count 32 times: that finds the K-th highest bit by bit, as
    an integer that sorts like the score. KP: the power of two from K on."""
    t, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE)
    score = tl.load(scores + t * n + i, i < n, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)                # -0.0 and 0.0 are both 0
    key = bits.to(tl.uint32, bitcast=True) ^ 0x80000000
    kth, bit = tl.full([], 0, tl.uint32), tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        higher = kth + bit
        kth = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= K, higher, kth)
        bit = bit >> 1
    above, tied = key > kth, key == kth
    n_above = tl.sum(above.to(tl.int32), 0)
    n_tied = tl.where(kth == 0x00800000, 0, K - n_above)                 # the key of -inf
    count = tl.cumsum(above.to(tl.int32) + 65536 * tied.to(tl.int32), 0)          # two in one scan
    place = (count & 0xFFFF) + tl.minimum(count >> 16, n_tied) - 1
    take = above | tied & (count >> 16 <= n_tied)
    group = i
    if candidates is not None:
        block = tl.load(candidates + t * kept + i // SIZE, take, 0).to(tl.int32)
        group = block * SIZE + i % SIZE
    first = (t * tl.num_programs(0) + tl.program_id(0)) * K
    best, out = best + first, out + first
    tl.store(best + place, score, take)
    tl.store(out + place, group, take)
    rest = tl.arange(0, KP)
    lacking = (rest >= n_above + n_tied) & (rest < K)
    tl.store(best + rest, float("-inf"), lacking)
    tl.store(out + rest, -1, lacking)

def attend(q, kv, visible, sink):
    """Attention with K = V and a sink: q [T, H, d], kv [T, L, d], visible bool [T, L] -> [T, H, d].
    One softmax over all L rows of a token; the per-head logit sink [H] joins the denominator only.
    Scale d^-0.5. A query that sees nothing gets zeros. Invisible rows may hold anything (NaN)."""
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

def attention(q, sink, slot, newest, oldest, L, window, latents, selected, rotate, dtype):
    """q [T, H, d] -> [T, H * d] dtype, its rotation undone (K = V carried it): each row sees L rows
    of the window, to newest [T], from oldest [T], and its selected groups [T, K], in one softmax.
    slot int64 [T]; window, latents (None: no groups): Pools; all tensors contiguous. Always as many
    keys: a row's bits depend on that row alone."""
    (T, H, d), cos, K = q.shape, rotate[0], selected.shape[1] if latents else 0
    if T > ROWS:
        pieces = [slice(a, a + ROWS) for a in range(0, T, ROWS)]
        return torch.cat([attention(q[i], sink, slot[i], newest[i], oldest[i], L, window, latents,
                                    selected[i] if K else None, [t[i] for t in rotate], dtype)
                          for i in pieces])
    if not fused(q):
        at = newest[:, None] + torch.arange(1 - L, 1, device=q.device)                 # [T, L]
        seen = at >= oldest[:, None]
        kv = dequantize(window.read(slot[:, None], at), FP8)                            # [T, L, d]
        if K:
            kv = torch.cat([kv, dequantize(latents.read(slot[:, None], selected), LATENT)], 1)
            seen = torch.cat([seen, selected >= 0], 1)
        return rope(attend(q.float(), kv, seen, sink), cos, -rotate[1]).to(dtype).flatten(1)
    groups, splits = latents or window, triton.cdiv(L, SPLIT) + triton.cdiv(K, SPLIT)
    part, top, total = (torch.empty(T, splits, H, n, device=q.device) for n in (d, 1, 1))
    o = torch.empty(T, H * d, dtype=dtype, device=q.device)
    # heads at once: fewer where a block has less than 128 KiB of shared memory
    few = q.is_cuda and torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    heads = 16 if few and few < 2**17 else min(64, max(16, triton.next_power_of_2(H)))
    attend_kernel[splits, T](
        q, slot, newest, oldest, window.rows, window.table, window.table.stride(0), groups.rows,
        groups.table, groups.table.stride(0), selected if K else newest, part, top, total, H, d, L,
        K, window.per_page, groups.per_page, SPLIT, heads, _act(q.dtype), num_warps=8, num_stages=1)
    combine_kernel[H, T](part, top, total, sink, *rotate, o, splits,
                         triton.next_power_of_2(splits), H, d, 2 * cos.shape[1], num_warps=4)
    return o

@jit
def _scaled(value, s, ACT: constexpr):
    """value [n, c] times s [n, blocks], each scale over c / blocks neighbours -> [n, c] ACT."""
    blocks: constexpr = s.shape[1]
    value = tl.reshape(value, [value.shape[0], blocks, value.shape[1] // blocks]) * s[:, :, None]
    return tl.reshape(value, [value.shape[0], value.shape[1] * value.shape[2]]).to(ACT)

@jit
def _fp8_pairs(row, seen, d: constexpr, ACT: constexpr):
    """Packed window rows at the pointers row [n] -> even and odd channels [n, d/2], 0 if unseen."""
    row, seen = row[:, None], seen[:, None]
    s = _e8m0(tl.load(row + d + tl.arange(0, d // 32), seen, 0))
    value = _e4m3(tl.load(row + tl.arange(0, d), seen, 0))
    even, odd = tl.split(tl.reshape(value, [row.shape[0], d // 2, 2]))
    return _scaled(even, s, ACT), _scaled(odd, s, ACT)

@jit
def _fp4_pairs(row, seen, d: constexpr, ACT: constexpr):
    """The same of packed latents."""
    row, seen = row[:, None], seen[:, None]
    byte = tl.load(row + tl.arange(0, d // 2), seen, 0).to(tl.int32)
    s = _e4m3(tl.load(row + d // 2 + tl.arange(0, d // 16), seen, 0))
    return _scaled(_e2m1(byte & 15), s, ACT), _scaled(_e2m1(byte >> 4), s, ACT)

@jit
def attend_kernel(q, slot, newest, oldest, window, table_w, width_w, latents, table_g, width_g,
                  selected, part, top, total, H: constexpr, d: constexpr, L: constexpr,
                  K: constexpr, PAGE: constexpr, GROUPS: constexpr, ROWS: constexpr, BH: constexpr,
                  ACT: constexpr):
    """Grid (splits, T): one query, all its heads, against ROWS cache rows, which are read once.
    window, latents: rows of Pools with PAGE and GROUPS rows a page. The first splits take the
    window, the others the selection. Per split and head: top, total fp32 [T, splits, H], the
    greatest logit and sum(exp(logit - top)), -inf and 0 where nothing is seen; part fp32
    [T, splits, H, 2, d/2], sum(exp(logit - top) * row). Even and odd channels stay apart: a byte of
    FP4 holds one of each, and so does a rotated pair."""
    split, t, i = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, ROWS)
    SPLITS: constexpr = (L + ROWS - 1) // ROWS
    if split < SPLITS:
        i += split * ROWS
        at = tl.load(newest + t) - L + 1 + i
        seen = (at >= tl.load(oldest + t)) & (i < L)
        row = _row(window, table_w, tl.load(slot + t), at, seen, width_w, PAGE, d + d // 32)
        even, odd = _fp8_pairs(row, seen, d, ACT)
    else:
        i += (split - SPLITS) * ROWS
        at = tl.load(selected + t * K + i, i < K, -1)
        seen = at >= 0
        row = _row(latents, table_g, tl.load(slot + t), at, seen, width_g, GROUPS, d // 2 + d // 16)
        even, odd = _fp4_pairs(row, seen, d, ACT)
    # rows x heads, not heads x rows: the rows fill a matrix unit's wide side however few the heads
    for h0 in range(0, H, BH):
        h, c = h0 + tl.arange(0, BH), tl.arange(0, d)
        x = tl.load(q + (t * H + h[:, None]) * d + c, h[:, None] < H, 0.0).to(ACT)
        q_even, q_odd = tl.split(tl.reshape(x, [BH, d // 2, 2]))
        logits = tl.dot(even, tl.trans(q_even), input_precision="ieee")
        logits = tl.dot(odd, tl.trans(q_odd), logits, input_precision="ieee")
        logits = tl.where(seen[:, None], logits * d ** -0.5, float("-inf"))
        m = tl.max(logits, 0)
        p = tl.exp(logits - tl.where(m == float("-inf"), 0.0, m))
        out = (t * tl.num_programs(0) + split) * H + h
        tl.store(top + out, m, h < H)
        tl.store(total + out, tl.sum(p, 0), h < H)
        p, to = p.to(ACT), part + out * d + tl.arange(0, d // 2)[:, None]
        tl.store(to, tl.dot(tl.trans(even), p, input_precision="ieee"), h < H)
        tl.store(to + d // 2, tl.dot(tl.trans(odd), p, input_precision="ieee"), h < H)

@jit
def combine_kernel(part, top, total, sink, cos, sin, o, SPLITS: constexpr, BS: constexpr,
                   H: constexpr, d: constexpr, r: constexpr):
    """Grid (H, T): joins the splits of attend_kernel and the sink [H] in one softmax, then takes
    the rotation off the last r channels. cos, sin fp32 [T, r/2] -> o [T, H, d]."""
    h, t, s = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BS)
    c, row, there = tl.arange(0, d // 2), (t * SPLITS + s) * H + h, s < SPLITS
    m, sink_h = tl.load(top + row, there, float("-inf")), tl.load(sink + h)
    best = tl.maximum(tl.max(m, 0), sink_h)
    w = tl.exp(m - best)
    w /= tl.sum(w * tl.load(total + row, there, 0.0), 0) + tl.exp(sink_h - best)
    at = part + row[:, None] * d + c
    even = tl.sum(w[:, None] * tl.load(at, there[:, None], 0.0), 0)
    odd = tl.sum(w[:, None] * tl.load(at + d // 2, there[:, None], 0.0), 0)
    pair = c - (d - r) // 2
    a = tl.load(cos + t * (r // 2) + pair, pair >= 0, 1.0)
    b = tl.load(sin + t * (r // 2) + pair, pair >= 0, 0.0)
    x = tl.interleave(even * a + odd * b, odd * a - even * b)
    tl.store(o + (t * H + h) * d + tl.arange(0, d), x)

# -- Experts ---------------------------------------------------------------------------------------
def route(logits, bias, k, scale):
    """sqrt-softplus router: logits [T, E], bias [E] -> experts int64 [T, k], weights fp32 [T, k].
    s = sqrt(softplus(logits)); the k highest of s + bias, ties to the lower expert; the bias picks
    and never weighs: w = s / (sum of the k s + 1e-20) * routed_scaling_factor."""
    s = torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs())))
    experts = (s + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    w = s.gather(1, experts)
    return experts, w / (w.sum(-1, keepdim=True) + 1e-20) * scale

def router(x, gate, bias, k, scale, eps, tickets, block=None):
    """x fp32 [T, D] -> `route` of its products with gate, a Linear with a norm. tickets int32: a
    zero for every 16 rows, for the kernel."""
    if not fused(x):
        return route(project(x, gate, block, gate.norm, eps), bias, k, scale)
    (T, D), E = x.shape, len(bias)
    scores, weights = (torch.empty(T, n, device=x.device) for n in (E, k))
    chosen = torch.empty(T, k, dtype=torch.int64, device=x.device)
    router_kernel[triton.cdiv(E, 16), triton.cdiv(T, 16)](
        x, gate.norm, gate.w, bias, scores, tickets, chosen, weights, T, eps, scale, E, D, k,
        triton.next_power_of_2(E), triton.next_power_of_2(k), 256, _act(gate.dtype), num_warps=4,
        num_stages=3)
    return chosen, weights

@jit
def _score(logit):
    """sqrt(softplus(logit)), softplus(x) = max(x, 0) + log1p(exp(-|x|))."""
    e = tl.exp(-tl.abs(logit))
    z = e / (2 + e)                         # log1p(e) = 2 atanh(z), a short series as z <= 1/3
    q = z * z
    series = 1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * series))
    return tl.sqrt_rn(tl.maximum(logit, 0.0) + 2 * z * series)

@jit
def router_kernel(x, norm, gate, bias, scores, count, experts, weights, T, eps, factor,
                  E: constexpr, D: constexpr, TOP: constexpr, EPAD: constexpr, TPAD: constexpr,
                  BK: constexpr, ACT: constexpr):
    """Grid (tiles of 16 experts, blocks of 16 rows): see router. Each program leaves its scores in
    `scores` fp32 [T, E] and takes a ticket from count int32 [blocks of rows], zeros. The last one
    finds all of them there, picks, and sets count back to 0."""
    n, t = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1) * 16 + tl.arange(0, 16)
    acc, squares = _product(x, norm, gate, gate, t, n, T, D, E, D, 16, True, BK, ACT)
    row, there = scores + t[:, None] * E, t[:, None] < T
    tl.store(row + n, _score(acc * tl.rsqrt(squares + eps)[:, None]), there & (n < E))
    tl.debug_barrier()                      # every thread's scores go before this program's ticket
    ticket = tl.atomic_add(count + tl.program_id(1), 1, sem="acq_rel")
    if ticket == tl.num_programs(0) - 1:
        tl.store(count + tl.program_id(1), 0)
        e, i = tl.arange(0, EPAD), tl.arange(0, TPAD)
        s = tl.load(row + e, there & (e < E), 0.0) + tl.load(bias + e, e < E, 0.0)
        s = tl.where((e < E) & (s == s), s, float("-inf"))     # NaN too picks an expert that exists
        picked = tl.zeros([16, TPAD], tl.int32)
        for j in range(TOP):
            best = tl.max(s, 1)[:, None]
            best = tl.min(tl.where(s == best, e, EPAD), 1)[:, None]         # ties: the lower expert
            picked = tl.where(i == j, best, picked)
            s = tl.where(e == best, float("-inf"), s)
        out, mine = t[:, None] * TOP + i, there & (i < TOP)
        w = tl.load(row + picked, mine, 0.0)
        w = w / (tl.sum(w, 1)[:, None] + 1e-20) * factor
        tl.store(experts + out, picked.to(tl.int64), mine)
        tl.store(weights + out, w, mine)

def experts(x, norm, eps, chosen, weight, up, down, limit, dtype, block=None, shared=True):
    """x [T, D], rms_normed here unless norm is None -> fp32 [T, k + 1, D]: what each chosen expert
    adds, then the shared one, if it is wanted: w2 @ (weight * swiglu(w1 @ x, w3 @ x)).
    chosen, weight [T, k] of `route`; -1 is no expert, its place holds anything. up, down: Linears
    [2F, D] (w1 over w3) and [D, F], the shared one last; for kernels as MoE.place stacks them."""
    (T, k), D = chosen.shape, x.shape[1]
    out = torch.empty(T, k + 1, D, device=x.device)
    if fused(x):
        width = len(up[2]) // 2
        act = torch.empty(T, k + 1, width, dtype=dtype, device=x.device)
        for x, w, y, N, n_in in ((x, up, act, 2 * width, D), (act, down, out, D, width)):
            BN = 32 if N % 64 else 64
            experts_kernel[N // BN, min(T, 16) * (k + 1), triton.cdiv(T, 16)](
                x, norm if w is up else None, chosen, weight, *w, y, T, eps, limit, len(w[0]), N,
                n_in, k, triton.next_power_of_2(k + 1), w is up, shared, BN, 128, _act(dtype),
                num_warps=4, num_stages=4)
        return out
    E = len(up) - 1
    chosen = F.pad(chosen, (0, 1), value=E if shared else -1)
    weight = F.pad(weight, (0, 1), value=1.0)
    x = x if norm is None else rms_norm(x, norm, eps)
    ids, place = chosen.flatten().sort(stable=True)      # expert after expert, nobody's first
    none, *counts = (ids + 1).bincount(minlength=E + 2).tolist()
    place = place[none:]
    def each(a, linears):
        parts = zip(a.to(dtype).split(counts), linears)
        return torch.cat([linear(part, m.w, block) for part, m in parts if len(part)])
    if len(place):
        gate, value = each(x[place // (k + 1)], up).chunk(2, 1)
        act = weight.flatten()[place, None] * swiglu(gate, value, limit)
        out.flatten(0, 1)[place] = each(act, down)
    return out

@jit
def experts_kernel(x, norm, experts, weights, w, w_scale, s, s_scale, y, T, eps, limit,
                   E: constexpr, N: constexpr, K: constexpr, TOP: constexpr, TPAD: constexpr,
                   UP: constexpr, SHARED: constexpr, BN: constexpr, BK: constexpr, ACT: constexpr):
    """Grid (tiles of BN rows of the weights, slots, blocks of 16 rows of x).
    w FP4 [E, N, K/2] are the routed experts, s e4m3 [N, K] the shared one: number E, choice TOP of
    every row where it is wanted. Slot j is choice j % (TOP + 1) of row j // (TOP + 1).
    Rows may agree: the first slot with an expert multiplies its weights by every row that chose it,
    the others leave. A product always has 16 rows, so a row's bits depend on that row alone.
    UP: x [T, K], normed here if norm is given, N = 2F -> y [T, TOP + 1, F], weight * swiglu(w1 x,
    w3 x); a tile pairs rows of w1 and w3. Else: x [T, TOP + 1, K] -> y [.., N]."""
    t, i = tl.program_id(2) * 16 + tl.arange(0, 16), tl.arange(0, TPAD)
    slot, slots = tl.program_id(1), tl.arange(0, 16)[:, None] * (TOP + 1) + i
    there = t[:, None] < T
    ids = tl.load(experts + t[:, None] * TOP + i, there & (i < TOP), -1)
    ids = tl.where(there & (i == TOP) & SHARED, E, ids)                 # [16, TPAD], -1: nobody's
    e = tl.max(tl.where(slots == slot, ids, -1))
    if (e < 0) | (tl.min(tl.where(ids == e, slots, slot)) < slot):
        return
    choice, j = tl.max(tl.where(ids == e, i, -1), 1), tl.arange(0, BN)  # [16], -1: not this row's
    mine, place = choice >= 0, t * (TOP + 1) + choice
    if UP:
        n, rows = tl.program_id(0) * (BN // 2) + j // 2 + j % 2 * (N // 2), T
        source = tl.where(mine, t, rows)                                # `rows`: out of range, 0
    else:
        n, rows = tl.program_id(0) * BN + j, T * (TOP + 1)
        source = tl.where(mine, place, rows)
    NORM: constexpr = norm is not None
    if e == E:
        acc, squares = _product(x, norm, s, s_scale, source, n, rows, K, N, K, 8, NORM, BK, ACT)
    else:
        w, w_scale = w + e * (N * K // 2), w_scale + e * (N * K // 32)
        acc, squares = _product(x, norm, w, w_scale, source, n, rows, K, N, K, 4, NORM, BK, ACT)
    if UP:
        acc = acc * tl.rsqrt(squares + eps)[:, None] if NORM else acc
        gate, up = tl.split(tl.reshape(acc, [16, BN // 2, 2]))
        gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, tl.PropagateNan.ALL)
        weight = tl.load(weights + t * TOP + choice, mine & (choice < TOP), 1.0)
        y += place[:, None].to(tl.int64) * (N // 2) + tl.program_id(0) * (BN // 2)
        act = weight[:, None] * (gate / (1 + tl.exp(-gate)) * up)
        tl.store(y + tl.arange(0, BN // 2), act, mine[:, None])
    else:
        tl.store(y + place[:, None].to(tl.int64) * N + n, acc, mine[:, None])

# -- Engram ----------------------------------------------------------------------------------------
# numpy promises no stable stream, so its generator stands here, on Python ints.
def seed_sequence(entropy):
    """numpy's SeedSequence(entropy).generate_state(8): 8 uint32, for entropy below 2^32."""
    def mix(x, k, init=0x43B0D7E5, mult=0x931E8875):       # the k-th call has its own constants
        x = (x ^ init * mult**k) * init * mult ** (k + 1) & 0xFFFFFFFF
        return x ^ x >> 16
    pool = [mix(x, k) for k, x in enumerate((entropy, 0, 0, 0))]
    for k, (src, dst) in enumerate(itertools.permutations(range(4), 2), 4):
        x = 0xCA01F9DD * pool[dst] - 0x4973F715 * mix(pool[src], k) & 0xFFFFFFFF
        pool[dst] = x ^ x >> 16
    return [mix(x, k, 0x8B51F9DD, 0x58F38DED) for k, x in enumerate(pool * 2)]

def random_integers(seed, bound, n):
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
    """[table][n - 2][head]: the primes from engram_vocab_size up in this order, none twice."""
    primes = (p for p in itertools.count(c.engram_vocab_size)
              if all(p % q for q in range(2, math.isqrt(p) + 1)))
    orders = range(2, c.engram_max_ngram_size + 1)
    return [[list(itertools.islice(primes, c.engram_n_heads)) for _ in orders]
            for _ in c.engram_layer_ids]

def engram_multipliers(c, layer):
    """One odd multiplier for each look-back of the n-gram hash of a layer: ints [N]. Bounded so
    that class * multiplier is below 2^63."""
    bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
    return [2 * x + 1 for x in random_integers(10007 * layer, bound, c.engram_max_ngram_size)]

def ngram_rows(classes, multipliers, primes, offsets):
    """Table rows of the n-grams that end at each token: -> int64 [T, (N-1) * heads].
    classes int64 [T, N]: the token's own class first, then looking back. For n = 2..N the XOR of
    class[i] * multipliers[i], i < n, modulo primes [N-1, heads], plus offsets [N-1, heads]."""
    rolling, rows = classes * multipliers, []                                  # [T, N]
    for n in range(1, classes.shape[1]):
        rolling[:, n] ^= rolling[:, n - 1]
        rows.append(rolling[:, n, None] % primes[n - 1] + offsets[n - 1])
    return torch.cat(rows, 1)

def engram_gates(x, key, q_weight, k_weight, eps):
    """Streams x and their keys fp32 [T, S, D], weights [S, D] -> how far each opens, [T, S]:
    sigmoid(ssqrt(<norm(x), norm(key)> * D^-0.5)), ssqrt(a) = sign(a) * sqrt(max(|a|, 1e-6))."""
    dot = (x * q_weight * k_weight * key).sum(-1) * torch.rsqrt(x.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + eps) * x.shape[-1] ** -0.5
    return sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())

def engram_write(h, y, mix, kv, q_weight, k_weight, c):
    """h[s] += gate[s] * value, each stream gated by its own match with its key -> like h.
    h, y, mix: see hc_boundary, y is written first; kv fp32 [T, (S + 1) * D]: a key for each stream,
    then the value; q_weight, k_weight [S, D]."""
    if not fused(h):
        h = h if y is None else hc_expand(h, sum(y.unbind(1)).to(h.dtype), *mix[1:])
        x, kv = h.float(), kv.unflatten(1, (-1, h.shape[2]))
        gate = engram_gates(x, kv[:, :-1], q_weight, k_weight, c.rms_norm_eps)
        return (x + gate[..., None] * kv[:, -1:]).to(h.dtype)
    engram_kernel[h.shape[1], len(h)](
        h, y, *(mix or (None,) * 3), kv, q_weight, k_weight, out := torch.empty_like(h),
        c.rms_norm_eps, c.hc_eps, BD=1024, **_hc_sizes(h, y, c), num_warps=8)
    return out

@jit
def engram_kernel(h, y, mixes, scale, base, kv, q_weight, k_weight, h_out, norm_eps, hc_eps,
                  D: constexpr, S: constexpr, ITERS: constexpr, PARTS: constexpr, CHUNKS: constexpr,
                  COLS: constexpr, BD: constexpr, ACT: constexpr):
    """Grid (S, T): see engram_write, for one stream of a row; y is written before."""
    k, t, at = tl.program_id(0), tl.program_id(1), tl.program_id(1).to(tl.int64)
    post, comb = 0.0, 0.0
    if PARTS:
        _, post, comb = _mix(mixes, scale, base, t, norm_eps, hc_eps, D, S, ITERS, CHUNKS, COLS)
    dot, xx, kk = 0.0, 0.0, 0.0
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        some = d < D
        x = _stream(h, y, post, comb, t, k, d, D, S, PARTS, ACT)
        key = tl.load(kv + (at * (S + 1) + k) * D + d, some, 0.0)
        weight = tl.load(q_weight + k * D + d, some, 0.0) * tl.load(k_weight + k * D + d, some, 0.0)
        dot, xx, kk = dot + tl.sum(x * weight * key), xx + tl.sum(x * x), kk + tl.sum(key * key)
        tl.store(h_out + (at * S + k) * D + d, x, some)
    dot *= tl.rsqrt(xx / D + norm_eps) * tl.rsqrt(kk / D + norm_eps) / tl.sqrt(D * 1.0)
    root = tl.where(dot == 0, 0.0, tl.sqrt(tl.maximum(tl.abs(dot), 1e-6)))
    gate = 1 / (1 + tl.exp(tl.where(dot > 0, -root, root)))
    tl.debug_barrier()
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        x = tl.load(h_out + (at * S + k) * D + d, d < D, 0.0).to(tl.float32)
        value = tl.load(kv + (at * (S + 1) + S) * D + d, d < D, 0.0)
        tl.store(h_out + (at * S + k) * D + d, x + gate * value, d < D)

# -- Sampling --------------------------------------------------------------------------------------
def philox(seed, c0, c1, c2=0):
    """Philox4x32-10 (Salmon et al. 2011): counters c0, c1 int64 tensors (32 bits each), key = seed
    -> the first word of the block (c0, c1, c2, 0), int64 in 0..2^32-1."""
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
    stream: 0 the target's draws, 1 the draft's own draws, 2 whether a draft is accepted."""
    token, pos = torch.arange(n, device=device), torch.full((1,), pos, device=device)
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
        scaled[order] = scaled[order].masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    return scaled

def sample(logits, temperature, top_p, seed, pos, stream=0):
    """One token id, int64 [], for position `pos` from logits fp32 [V]; a GPU is not waited for.
    temperature 0: the argmax, ties to the lower id. Otherwise an exact draw, by Gumbel noise that
    depends on seed, position and stream alone: who draws at a position again, draws the same."""
    if temperature == 0:
        return logits.argmax()
    scaled = scaled_logits(logits, temperature, top_p)
    return (scaled + gumbel(seed, pos, len(logits), logits.device, stream)).argmax()

def accept(logits, proposal, draft, temperature, top_p, seed, pos):
    """The draft if u * q(draft) < p(draft), else a draw from max(p - q, 0): exactly a draw from p
    whatever q is (Leviathan et al. 2023). logits, proposal fp32 [V]: the target's, and those the
    draft was drawn from, at temperature > 0 without top-p."""
    p = scaled_logits(logits, temperature, top_p).softmax(-1)
    q = scaled_logits(proposal, temperature).softmax(-1)
    rest = (p - q).clamp(min=0).log() + gumbel(seed, pos, len(p), p.device)
    good = uniform(seed, pos, 1, p.device, 2)[0] * q[draft] < p[draft]
    return rest.argmax().masked_fill(good, draft)
