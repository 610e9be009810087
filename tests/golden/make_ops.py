#!/usr/bin/env python3
"""Writes ops.safetensors: what PyTorch makes of the reductions, losses and norms, forward and backward.

Every case is a group of tensors "case/x", "case/y", "case/dx", ... in f64 (indices in i64); ops_golden_test.cpp
computes the same and compares. Made with PyTorch 1.13.1:  python3 make_ops.py
"""
import pathlib

import torch
import torch.nn.functional as F

from write_safetensors import save

torch.manual_seed(0)
tensors = {}


def record(case, f, inputs, fixed=()):
    """y = f(inputs, fixed), and the gradients of sum(y * dy) by the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = f(*leaves, *fixed)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, dy)
    for i, (x, g) in enumerate(zip(leaves, gradients)):
        tensors[f"{case}/x{i}"], tensors[f"{case}/dx{i}"] = x.detach(), g
    tensors[f"{case}/y"], tensors[f"{case}/dy"] = y.detach(), dy


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


x = randn(3, 4, 5)
record("sum", lambda x: x.sum((0, 2)), [x])
record("mean", lambda x: x.mean((0, 2), keepdim=True), [x])
record("var", lambda x: x.var((0, 2)), [x])
record("var_all", lambda x: x.var(unbiased=False), [x])
ties = torch.tensor([[1.0, 3, 3, 0], [2, 3, -1, 2]], dtype=torch.float64)
record("max", lambda x: x.max(), [ties])
record("max_dim", lambda x: x.max(1)[0], [ties])
tensors["max_dim/indices"] = ties.max(1)[1]
record("softmax", lambda x: F.softmax(x * 3, 1), [x])
record("log_softmax", lambda x: F.log_softmax(x * 3, 2), [x])

logits, labels = randn(5, 4) * 3, torch.tensor([3, 0, -100, 2, 0])
tensors["cross_entropy/target"] = labels
for reduction in ("mean", "sum", "none"):
    for smoothing in (0.0, 0.1):
        record(f"cross_entropy_{reduction}_{smoothing}",
               lambda x: F.cross_entropy(x, labels, reduction=reduction, label_smoothing=smoothing), [logits])
pixels = torch.tensor([[[0, 2], [1, 1]], [[2, -100], [0, 1]]])
tensors["cross_entropy_2d/target"] = pixels
record("cross_entropy_2d", lambda x: F.cross_entropy(x, pixels, label_smoothing=0.2), [randn(2, 3, 2, 2)])
record("mse_loss", lambda x, t: F.mse_loss(x, t), [randn(3, 4), randn(3, 4)])

record("layer_norm", lambda x, w, b: F.layer_norm(x, (4, 5), w, b, 1e-3), [x, randn(4, 5), randn(4, 5)])
for case, shape, training in (("2d", (6, 3), True), ("4d", (2, 3, 4, 5), True), ("eval", (2, 3, 4, 5), False)):
    mean, var = randn(3), torch.rand(3, dtype=torch.float64) + 0.5
    name = f"batch_norm_{case}"
    tensors[f"{name}/mean_before"], tensors[f"{name}/var_before"] = mean.clone(), var.clone()
    record(name, lambda x, w, b: F.batch_norm(x, mean, var, w, b, training, 0.2, 1e-3),
           [randn(*shape) * 2 + 1, randn(3), randn(3)])
    tensors[f"{name}/mean_after"], tensors[f"{name}/var_after"] = mean, var

record("cat", lambda a, b: torch.cat([a, b], 1), [randn(2, 3), randn(2, 1)])
record("stack", lambda a, b: torch.stack([a, b], 1), [randn(2, 3), randn(2, 3)])

save(pathlib.Path(__file__).with_name("ops.safetensors"), tensors)
