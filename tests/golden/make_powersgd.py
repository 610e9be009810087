#!/usr/bin/env python3
"""Writes powersgd.safetensors: ten steps of PyTorch's powerSGD_hook between two ranks, for powersgd_test.cpp.

"gradients" [steps, ranks, elements] goes in; "CASE.f32.averages" [steps, elements] comes out, the same on both ranks;
"CASE.f64.averages" is the same computed in f64, where "CASE.errorRANK.K" is what rank RANK remembers of parameter K
after the last step. "CASE.q.K" is the Q that it starts from. Parameters stand in two buckets: 0 to 2 in the first, 3 to
5 in the second. Made with PyTorch 1.13.0:  python3 make_powersgd.py
"""
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from write_safetensors import save

RANKS, STEPS, START = 2, 10, 2
BUCKETS = [[(8, 6), (8,), (3, 2)], [(4, 4, 2, 2), (2,), (5, 7)]]
SHAPES = [shape for bucket in BUCKETS for shape in bucket]
CASES = {
    "rank1": dict(matrix_approximation_rank=1),
    "rank2": dict(matrix_approximation_rank=2, orthogonalization_epsilon=1e-2),
    "rank3": dict(matrix_approximation_rank=3),
    "no_feedback": dict(matrix_approximation_rank=2, use_error_feedback=False),
}
RATE = 1


def gradients():
    """Some directions that stay, and noise, so that there is something to compress."""
    g = torch.Generator().manual_seed(5)
    parts = []
    for shape in SHAPES:
        matrix = (shape[0], torch.Size(shape[1:]).numel())
        slow = torch.randn(matrix[0], 2, generator=g) @ torch.randn(2, matrix[1], generator=g)
        noise = torch.randn(STEPS, RANKS, *matrix, generator=g)
        parts.append((slow + 0.5 * noise).reshape(STEPS, RANKS, -1))
    return torch.cat(parts, 2)


def first_q(rank):
    """One per parameter that is compressed: [m, r]."""
    g = torch.Generator().manual_seed(11)
    found = {}
    for k, shape in enumerate(SHAPES):
        n, m = shape[0], torch.Size(shape[1:]).numel()
        r = min(n, m, rank)
        if power._should_compress(n, m, r, RATE)[0]:
            found[k] = torch.randn(m, r, generator=g)
    return found


class Bucket:
    """What the hook asks of a torch.distributed.GradBucket, which Python cannot make."""

    def __init__(self, index, flat):
        self.flat, self.at = flat, index

    def buffer(self):
        return self.flat

    def gradients(self):
        sizes = [torch.Size(s).numel() for s in BUCKETS[self.at]]
        return [part.view(s) for part, s in zip(self.flat.split(sizes), BUCKETS[self.at])]

    def index(self):
        return self.at

    def is_last(self):
        return self.at == len(BUCKETS) - 1


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    every, out = gradients(), {}
    first = sum(torch.Size(s).numel() for s in BUCKETS[0])
    for name, options in CASES.items():
        for dtype in (torch.float32, torch.float64):
            queue = [q.to(dtype) for q in first_q(options["matrix_approximation_rank"]).values()]
            randn, torch.randn = torch.randn, lambda *shape, **_: queue.pop(0).view(shape)
            state = power.PowerSGDState(None, start_powerSGD_iter=START, min_compression_rate=RATE, **options)
            averages = []
            for step in range(STEPS):
                flat = every[step, rank].to(dtype, copy=True)
                for index, part in enumerate((flat[:first], flat[first:])):
                    power.powerSGD_hook(state, Bucket(index, part)).wait()
                averages.append(flat)
            torch.randn = randn
            assert not queue
            out[f"{name}.{'f64' if dtype == torch.float64 else 'f32'}.averages"] = torch.stack(averages)
        for index in state.error_dict:
            for k, part in enumerate(state.error_dict[index].split([torch.Size(s).numel() for s in BUCKETS[index]])):
                out[f"{name}.error.{k + 3 * index}"] = part
    torch.save(out, f"{folder}/{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), RANKS)
        ranks = [torch.load(f"{folder}/{r}") for r in range(RANKS)]
    tensors = {"gradients": gradients()}
    for name, options in CASES.items():
        for key in (f"{name}.f32.averages", f"{name}.f64.averages"):
            assert torch.equal(ranks[0][key], ranks[1][key])
            tensors[key] = ranks[0][key]
        for k, q in first_q(options["matrix_approximation_rank"]).items():
            tensors[f"{name}.q.{k}"] = q
            for r in range(RANKS):
                if f"{name}.error.{k}" in ranks[r]:
                    n = SHAPES[k][0]
                    tensors[f"{name}.error{r}.{k}"] = ranks[r][f"{name}.error.{k}"].view(n, -1)
    save(pathlib.Path(__file__).with_name("powersgd.safetensors"), tensors)
