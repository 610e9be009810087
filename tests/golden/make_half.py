#!/usr/bin/env python3
"""Writes half.safetensors: what PyTorch computes on the CPU in float16 and bfloat16, forward and backward.

Tensors "dtype/case/x0", "dtype/case/y", "dtype/case/dy", "dtype/case/dx0": the values in f32, which holds them exactly
(labels in i64). half_golden_test.cpp computes the same. Made with PyTorch 2.15.0:  python3 make_half.py
"""
import pathlib

import torch
import torch.nn.functional as F

from write_safetensors import save

torch.manual_seed(0)
torch.set_num_threads(1)
tensors = {}
labels = torch.tensor([3, 0, -100, 2, 0])
tensors["labels"] = labels


def record(dtype, case, f, *shapes, scale=1.0):
    leaves = [(torch.randn(*s) * scale).to(dtype).requires_grad_() for s in shapes]
    y = f(*leaves)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, dy)
    name = f"{str(dtype)[6:]}/{case}"
    for i, (x, g) in enumerate(zip(leaves, gradients)):
        tensors[f"{name}/x{i}"], tensors[f"{name}/dx{i}"] = x.detach().float(), g.float()
    tensors[f"{name}/y"], tensors[f"{name}/dy"] = y.detach().float(), dy.float()


for dtype in (torch.float16, torch.bfloat16):
    record(dtype, "add", lambda a, b: a + b, (4, 5), (5,))
    record(dtype, "mul", lambda a, b: a * b, (4, 5), (4, 1))
    record(dtype, "div", lambda a, b: a / b, (4, 5), (4, 5))
    record(dtype, "exp", torch.exp, (37,))
    record(dtype, "tanh", torch.tanh, (37,))
    record(dtype, "gelu", F.gelu, (37,))
    record(dtype, "silu", F.silu, (37,))
    record(dtype, "sum", lambda x: x.sum(1), (3, 700))
    record(dtype, "mean", lambda x: x.mean(0), (300, 5))
    record(dtype, "norm", lambda x: torch.linalg.vector_norm(x, dim=1), (3, 70))
    record(dtype, "amax", lambda x: x.amax(1), (3, 70))
    record(dtype, "softmax", lambda x: F.softmax(x, 1), (5, 33))
    record(dtype, "log_softmax", lambda x: F.log_softmax(x, 1), (5, 33))
    record(dtype, "cross_entropy", lambda x: F.cross_entropy(x, labels), (5, 4))
    record(dtype, "layer_norm", lambda x, w, b: F.layer_norm(x, (40,), w, b), (6, 40), (40,), (40,))
    record(dtype, "matmul", lambda a, b: a @ b, (9, 64), (64, 7))
    record(dtype, "linear", lambda x, w, b: F.linear(x, w, b), (9, 64), (7, 64), (7,))
    record(dtype, "conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 6, 6), (4, 3, 3, 3), (4,))
    record(dtype, "max_pool2d", lambda x: F.max_pool2d(x, 2), (2, 3, 6, 6))

save(pathlib.Path(__file__).parent / "half.safetensors", tensors)
