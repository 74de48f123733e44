"""The engine on this device, part by part, against docs/golden: `nanoflash.py --selfcheck`.

    python docs/selfcheck.py
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file                           # of the `test` extra

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nanoflash import Engine, SamplingParams, need                # noqa: E402

def selfcheck(device=None, dtype=None, deterministic=False):
    """Hold the engine to what an independent implementation made of docs/golden. One rounding of a
    cache row may fall the other way, so ValueError from 1 % on."""
    golden = load_file(HERE / "golden" / "golden.safetensors")
    torch.set_num_threads(1)                     # on small tensors a second thread only costs
    engine = Engine.load(HERE / "golden", device, dtype or torch.float32, deterministic,
                         replay=False)
    kind = "Triton kernels" if engine.model.w.fused else "PyTorch references"
    print(f"{engine.device}, {engine.model.w.dtype}, {kind}")
    for name in ("rand1", "rand2", "rand5", "rand37", "text37"):
        ids, want = golden[f"{name}.ids"].tolist(), golden[f"{name}.logits"]
        for how, chunks in (("prefill", None), ("decode", [1] * len(ids))):
            error = engine.logits(ids, chunks).cpu() - want
            share = (error.norm() / want.norm()).item()
            print(f"{name} {how}: {len(ids)} tokens, logits off by {share:.1e} of their norm, by "
                  f"{error.abs().max():.1e} at most")
            need(share <= 1e-2, f"{name} {how} is off by {share:.1e}, 1e-2 at most can be right")
    for i in range(3):
        prompt, want = (golden[f"greedy{i}.{x}"].tolist() for x in ("prompt", "tokens"))
        out = engine.generate([prompt], SamplingParams(len(want), ignore_eos=True))[0]
        same = sum(a == b for a, b in zip(out.ids, want))
        print(f"greedy{i}: {same} of {len(want)} tokens, drafts accepted {out.stats['accepted']}")

if __name__ == "__main__":
    selfcheck(*sys.argv[1:2])
