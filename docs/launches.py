"""Count what a decode step of the released model does on a GPU, without one.

    python docs/launches.py               # launches of each kind of layer
    python docs/launches.py bytes         # that kernels read, over those that they need
    python docs/launches.py 90            # compile all of it for sm_90 (100, 120, gfx950): a minute

Launches are recorded on meta tensors, bytes counted in Triton's interpreter on a small model with
the released head sizes, and exactly the recorded specialisations compiled. Each figure is held to
its limit: the exit status tells. These are the tables of 08_kernels.md; it needs numpy and triton.
"""
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from unittest import mock

WORKER = sys.argv[1:] == ["worker"]              # compiles what the others recorded
if not WORKER:
    os.environ["TRITON_INTERPRET"] = "1"         # before triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch                                                             # noqa: E402
torch.cuda.is_available = lambda: True           # for kernels.py, which else leaves triton alone
import triton                                                            # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode               # noqa: E402

import kernels as K                                                      # noqa: E402
import nanoflash as nf                                                   # noqa: E402
from docs.plan import nbytes                                                    # noqa: E402

GOLDEN = Path(__file__).resolve().parent / "golden"
TARGETS = {"90": ("cuda", 90, 32, 232448), "100": ("cuda", 100, 32, 232448),   # .., shared memory
           "120": ("cuda", 120, 32, 101376), "gfx950": ("hip", "gfx950", 64, 163840)}
MOST = {"window": 11, "reuse": 11, "reindex": 14, "full": 16, "draft": 11}     # launches; Engram 2

class Fake(nf.Checkpoint):
    """Random bytes instead of files; on the device "meta", not even those."""

    def __init__(self, c, device):
        self.specs = self.at = nf.inventory(c)
        self.device = device

    def packed(self, name):
        """No byte is above 63: no NaN, nothing large."""
        spec = self.specs.get(name) or self.specs[name + ".weight"]
        dtype = nf.DTYPES[spec.dtypes[0]]
        if self.device == "meta":
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        return torch.randint(64, (nbytes(spec),), dtype=torch.uint8).view(dtype).view(spec.shape)

    def stored(self, name):
        """The weight, and its scale or None."""
        there = name + ".scale" in self.at
        return self.packed(name), self.packed(name + ".scale") if there else None

    def dequantized(self, name, dtype, device):
        """Its first bytes, in another type."""
        return self.packed(name).to(dtype)

class Ops(TorchDispatchMode):
    """Notes the torch ops that would launch something: all but views and empty tensors."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        view = any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
        if not view and not re.match("(new_)?empty|detach|alias", op.__name__):
            self.log.append(op.__name__)
        return op(*args, **kwargs or {})

def launched(model, draft, n, T, execute):
    """A step of T rows after n others -> torch ops, (kernel, arguments, options), and the plan of
    a block before and after it, in order. execute(run, arguments) gets every launch."""
    c, device, whole = model.c, model.w.device, nf.Block.__call__
    log, F = [], triton.runtime.interpreter.InterpretedFunction
    cache, old = nf.Cache(c, 1, n // 128 + 2, n + 512, device), F.run
    for pool in (*cache.window, *cache.latents.values(), *cache.keys.values()):
        pool.rows.zero_()
    cache.global_table[:] = cache.window_table[:] = torch.arange(
        cache.global_table.shape[1], device=device)
    seq = types.SimpleNamespace(slot=0, ids=[i % 99 for i in range(n + 1)], drafts=[7] * (T - 1),
                                n_cached=n, n_reused=0, first_kept=0, window={})

    def run(kernel, *args, grid, warmup, **more):
        options = {n: more.pop(n) for n in ("num_warps", "num_stages") if n in more}
        args = inspect.signature(kernel.fn).bind(*args, **more).arguments
        log.append((kernel.fn, args, options))
        execute(partial(old, kernel, **args, grid=grid, warmup=False), args)

    def block(this, *args):
        log.append(this.attn.plan)
        out = whole(this, *args)
        log.append(this.attn.plan)
        return out
    classes, ops, Ops.log = torch.zeros(c.vocab_size, dtype=torch.int64, device=device), Ops(), log
    with mock.patch.object(F, "run", run), mock.patch.object(nf.Block, "__call__", block), ops:
        batch = nf.Batch([(seq, T)], device, (classes, 2, c.engram_max_ngram_size))
        model(batch, cache, [T])
        if draft:
            draft.commit(batch, [T], cache)
            draft.propose([seq], cache, lambda seq, row, j: row.argmax())
    return log

@functools.cache
def released():
    """Config, and {(shared memory, T, n): what a GPU would be told} of the released model."""
    c, out = nf.Config.load(GOLDEN / "config_released.json"), {}
    w = nf.Weights(Fake(c, "meta"), "meta", torch.bfloat16, None, False, 1e-20, True,
                   nf.Ranks())
    sums, like = iter(c.engram_num_embeddings), partial(torch.empty, device="meta")
    with mock.patch.multiple(torch, stack=lambda x: x[0].new_empty(len(x), *x[0].shape),
                             cat=lambda x: x[0].new_empty(sum(map(len, x)), *x[0].shape[1:])), \
            mock.patch.object(torch.Tensor, "__int__", lambda x: next(sums)):
        model = nf.Transformer(c, w)            # torch's own are slow there with 15,000 experts
        draft = nf.Draft(c, w, model)
    with mock.patch.multiple(torch.Tensor, is_cuda=True, tolist=lambda x: [[1.0] * 5]), \
            mock.patch.object(nf.Engram, "rows", lambda _, x: like(*x.shape, c.engram_head_dim)):
        for shared in (232448, 101376):
            card = types.SimpleNamespace(shared_memory_per_block_optin=shared)
            for T, n in ((1, 5000), (6, 5000), (1, 1000000), (6, 1000000)):
                with mock.patch.object(torch.cuda, "get_device_properties", lambda *_: card):
                    out[shared, T, n] = launched(model, draft, n, T, lambda *_: None)
    return c, out

def count_launches(T, n):
    """Print launches a mode; no layer has more than MOST, no torch op stands between two."""
    (c, logs), counts = released(), {}
    log = logs[232448, T, n]
    for plans in (c.layers, c.stages):
        ends = [i for i, x in enumerate(log) if x in (plans[0], plans[-1])]
        between = [x for x in log[ends[0] : ends[-1]] if type(x) is str]
        assert not between, f"torch ops inside the layer loop: {between}"
        for p in plans:
            a, b = (i for i, x in enumerate(log) if x == p)
            name = p.mode + " candidates" * (p.candidates == "source") + " engram" * (
                p.engram is not None)
            counts.setdefault(name, set()).add(b - a - 1)
            long = n > 50000 and p.mode == "full"            # more rounds of top-k
            assert long or b - a - 1 <= MOST[p.mode] + 2 * (p.engram is not None), (name, b - a - 1)
    print(f"{T} rows after {n:,}: launches", {k: max(v) for k, v in counts.items()}, "and",
          sum(type(x) is str for x in log), "torch ops outside of the layers")

def needed(a):
    """Arguments of a launch -> bytes of each weight, scale and pool of rows that it must read."""
    names = {"w", "w_scale", "s", "s_scale", "scale", "side", "gate", "fn", "wk"} & a.keys()
    out = {n: a[n].nbytes for n in names if a[n] is not None}
    if "w_scale" in a:                                   # experts: those chosen, and the shared one
        out |= {n: out[n] * len(a["experts"].unique()) // a["E"] for n in ("w", "w_scale")}
    if "newest" in a:
        out["window"] = (a["L"] + len(a["newest"]) - 1) * 528
        out["latents"] = len(a["selected"].unique()) * 288
    if "rows" in a:
        group = torch.arange((int(a["pos"].max()) + 1) // a["RATIO"])
        some = a["candidates"] is None or torch.isin(group // a["SIZE"], a["candidates"])
        out = {"rows": int((group >= 0)[some].sum()) * 68}          # w: weights of heads
    return out

def count_bytes(T):
    """Print bytes read over bytes needed, distinct and in all: 1.1 and 1.3 at most, of weights, and
    for each row of cache rows."""
    import numpy
    builder, loads, seen = triton.runtime.interpreter.InterpreterBuilder, [], {}
    plain = builder.create_masked_load

    def load(self, at, mask, *more):
        loads.append((at.data[mask.data], at.get_element_ty().primitive_bitwidth // 8))
        return plain(self, at, mask, *more)

    def check(run, a):
        loads.clear()
        run()
        for name, least in needed(a).items():
            first = a[name].data_ptr()
            mine = [(p[(p >= first) & (p < first + a[name].nbytes)], n) for p, n in loads]
            distinct = len(numpy.unique(numpy.concatenate([p for p, _ in mine])))
            distinct = distinct * a[name].itemsize / least
            by_row = T if name in ("fn", "window", "latents", "rows") else 1
            loaded = sum(len(p) * n for p, n in mine) / least / by_row
            assert 1 <= distinct <= 1.1, (name, distinct)
            assert "scale" in name or loaded <= 1.3, (name, loaded)  # small: 32 rows share one
            seen[name] = max(seen.get(name, (0, 0)), (round(distinct, 2), round(loaded, 2)))
    raw = json.loads((GOLDEN / "config.json").read_text())
    raw["text_config"] |= dict(
        head_dim=512, index_head_dim=128, qk_rope_head_dim=64, num_attention_heads=2,
        o_groups=2, index_n_heads=4, sliding_window=100, index_topk=80, candidate_topk_blocks=24)
    c = nf.Config.read(raw)
    model = nf.Transformer(c, nf.Weights(Fake(c, "cpu"), "cpu", torch.float32, None, False, 1e-20,
                                         True, nf.Ranks()))
    model.blocks = model.blocks[5:7]            # a full candidate source, and its reader
    with mock.patch.object(builder, "create_masked_load", load):
        launched(model, None, 300, T, check)
    assert len(seen) == 12
    print(f"{T} rows: bytes read over needed, distinct and in all (cache rows: a row):", seen)

def compiled(target):
    """Print registers and shared memory of every kernel, compiled for a target; none may spill."""
    specs, table, mangle = set(), {}, triton.runtime.jit.mangle_type
    *gpu, most = TARGETS[target]
    for (shared, _, _), log in released()[1].items():
        for kernel, args, options in (x for x in log if type(x) is tuple):
            kind = {n: "constexpr" if kernel.__annotations__.get(n) is K.constexpr else
                    mangle(v, specialize=n not in K.RUN_TIME) for n, v in args.items()}
            fixed = {n: args[n] for n, x in kind.items() if x == "constexpr"}    # or None, or 1
            if (shared < 2**17) == (target == "120"):
                specs.add((kernel.__name__, repr((kind, fixed, options))))
    run = subprocess.run([sys.executable, __file__, "worker"], input=repr((gpu, sorted(specs))),
                         text=True, stdout=subprocess.PIPE, check=True,
                         env={n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"})
    for line in run.stdout.splitlines():
        name, regs, shared, tensor_memory, spilled, stores = eval(line)
        assert stores and not spilled and shared <= most and tensor_memory <= 512, line
        table[name] = tuple(map(max, table.get(name, (0, 0)), (regs, shared)))
    print(f"{target}: {len(specs)} specialisations; registers, bytes of shared memory")
    for name, (regs, shared) in sorted(table.items()):
        print(f"  {name.removesuffix('_kernel'):9} {regs} / {shared}")

def worker():
    """(target, specialisations) on stdin -> what the compiler made of each on stdout."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    target, specs = eval(sys.stdin.read())
    for name, spec in specs:
        (kind, fixed, options), fn = eval(spec, {"triton": triton}), getattr(K, name)
        at = {n: (i,) for i, n in enumerate(fn.arg_names)}
        align = {at[n]: [["tt.divisibility", 16]] for n, x in kind.items() if x[0] == "*"}
        source = ASTSource(fn, kind, {at[n]: x for n, x in fixed.items()}, align)
        k = triton.compile(source, target=GPUTarget(*target), options=options)
        text = code = k.asm.get("ptx") or k.asm["amdgcn"]
        with tempfile.NamedTemporaryFile(buffering=0) as file:
            if file.write(k.asm.get("cubin", b"")):
                text = subprocess.check_output(
                    [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
        registers = max(int(a or b) for a, b in re.findall(r"REG:(\d+)|\.vgpr_count: +(\d+)", text))
        spilled = sum(map(int, re.findall(r"(?:STACK:|LOCAL:|_spill_count: +)(\d+)", text)))
        stores = bool(re.search(r"st\.global|(?:global|buffer)_store", code))
        print((name, registers, k.metadata.shared, getattr(k.metadata, "tmem_size", None) or 0,
               spilled, stores))

if __name__ == "__main__":
    torch.set_num_threads(1)
    if WORKER:
        worker()
    elif sys.argv[1:] == ["bytes"]:
        for T in (1, 6):
            count_bytes(T)
    elif sys.argv[1:]:
        compiled(sys.argv[1])
    else:
        for n in (5000, 1000000):
            for T in (1, 6):
                count_launches(T, n)
