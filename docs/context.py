"""What a long prompt costs, with and without replay, and a token after it: docs/tiny, its
config.json changed to allow the length.

    python docs/context.py              # after 4,096 and after 32,768 tokens, a minute

The weights were not trained for such lengths: the time is real, the text is not. Random ids, no
drafts, one request. Full layers score every group of the context, the decoder's index sources after
the first only its candidates; all layers attend to a window and index_topk groups, whatever the
length.
"""
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import nanoflash as nf                                                          # noqa: E402

def longer(folder, n):
    """A copy of docs/tiny, by links, whose context is n tokens; -> its folder."""
    for file in (HERE / "tiny").glob("*.*"):
        if file.name != "config.json" and not (Path(folder) / file.name).exists():
            (Path(folder) / file.name).symlink_to(file)
    raw = json.loads((HERE / "tiny" / "config.json").read_text())
    holder = raw.get("text_config", raw)
    holder["max_position_embeddings"] = n
    (Path(folder) / "config.json").write_text(json.dumps(raw))
    return folder

def tokens(n):
    """n random ids."""
    return torch.randint(20, 500, (n,), generator=torch.Generator().manual_seed(n)).tolist()

def prefill(engine, n):
    """-> seconds to the first token of a prompt of n."""
    start = time.perf_counter()
    engine.generate([tokens(n)], nf.SamplingParams(1))
    return time.perf_counter() - start

def measure(engine, n, n_steps=40):
    """-> seconds of a decode step after n tokens, and the share of index scores and selections."""
    spent, index = [0.0], nf.K.index

    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return index(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start
    seq = engine.submit(tokens(n), nf.SamplingParams(n_steps + 2, ignore_eos=True))
    while len(seq.new) < 2:
        engine.step()
    nf.K.index, start = timed, time.perf_counter()
    while not seq.finish_reason:
        engine.step()
    step = (time.perf_counter() - start) / n_steps
    nf.K.index = index
    return step, spent[0] / n_steps / step

def main(lengths):
    """Print a line for each length."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine, exact = (nf.Engine.load(
            longer(folder, 2 * max(lengths)), "cpu", torch.float32, max_batch=1,
            max_pages=max(lengths) // nf.PAGE + 2, speculate=False, replay=replay)
            for replay in (True, False))
        with_replay, without = (prefill(e, lengths[0]) for e in (engine, exact))
        print(f"{lengths[0]:,} tokens: first token after {with_replay:.2f} s, {without:.2f} s "
              f"without replay ({with_replay / without:.2f})")
        first = None
        for n in lengths:
            step, share = measure(engine, n)
            first = first or step
            print(f"{n:,} tokens: {1e3 * step:.1f} ms a step ({step / first:.2f} times the first), "
                  f"{share:.0%} of it index scores and selection")

if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [4096, 32768])
