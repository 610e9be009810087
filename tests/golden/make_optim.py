"""Trajectories of PyTorch's optimizers, clipping and schedules, for optim_test.cpp, clip_test.cpp and
schedule_test.cpp. Made with PyTorch 1.13.1:  python3 make_optim.py"""
import torch
from write_safetensors import save

STEPS = 12
out = {}


def parameters(dtype):
    g = torch.Generator().manual_seed(1)
    shapes = [(7, 5), (5,), (3, 2, 3, 3)]
    ps = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    gs = [[torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes] for _ in range(STEPS)]
    return ps, gs


def run(name, make, dtype):
    ps, gs = parameters(dtype)
    opt = make(ps)
    for step in range(STEPS):
        for i, p in enumerate(ps):
            # Parameter 1 has no gradient in step 3: it must stay as it is, and its state too.
            p.grad = None if step == 3 and i == 1 else gs[step][i].clone()
        opt.step()
        if step in (0, 3, STEPS - 1):
            for i, p in enumerate(ps):
                out[f"{name}.{'f64' if dtype == torch.float64 else 'f32'}.step{step}.{i}"] = p.detach().clone()


CASES = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_decay": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.05),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_dampening": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd_nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
    "adam_decay": lambda ps: torch.optim.Adam(ps, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    "adam_amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.05, betas=(0.5, 0.6), amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "adamw_amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.05, betas=(0.5, 0.6), weight_decay=0.2, amsgrad=True),
    "adamw_groups": lambda ps: torch.optim.AdamW(
        [{"params": ps[:1], "lr": 0.02}, {"params": ps[1:], "weight_decay": 0.0}], lr=0.05, weight_decay=0.3),
}
for name, make in CASES.items():
    for dtype in (torch.float32, torch.float64):
        run(name, make, dtype)
ps, gs = parameters(torch.float64)
for i, p in enumerate(ps):
    out[f"start.{i}"] = p.detach()
    for step in range(STEPS):
        out[f"grad.{step}.{i}"] = gs[step][i]

# Clipping: total norms and clipped gradients.
for norm_type in (2.0, 1.0, 3.0, float("inf")):
    for max_norm in (1.5, 1e4):
        ps, gs = parameters(torch.float64)
        for i, p in enumerate(ps):
            p.grad = gs[0][i].clone() if i != 1 else None
        key = f"clip.{norm_type:g}.{max_norm:g}"
        out[key + ".norm"] = torch.nn.utils.clip_grad_norm_(ps, max_norm, norm_type)
        for i in (0, 2):
            out[f"{key}.{i}"] = ps[i].grad
ps, gs = parameters(torch.float64)
for i, p in enumerate(ps):
    p.grad = gs[0][i].clone()
torch.nn.utils.clip_grad_value_(ps, 0.4)
for i, p in enumerate(ps):
    out[f"clip_value.{i}"] = p.grad

# Schedules: rates of two groups over 40 steps.
S = torch.optim.lr_scheduler


def sequential(o):
    return S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=5), S.CosineAnnealingLR(o, 20), S.StepLR(o, 3, 0.5)], [5, 25])


SCHEDULES = {
    "lambda": lambda o: S.LambdaLR(o, lambda t: 1 / (1 + t)),
    "step": lambda o: S.StepLR(o, 7, 0.3),
    "multi_step": lambda o: S.MultiStepLR(o, [3, 10, 30], 0.5),
    "exponential": lambda o: S.ExponentialLR(o, 0.9),
    "linear": lambda o: S.LinearLR(o),
    "linear_down": lambda o: S.LinearLR(o, 1.0, 0.2, 8),
    "cosine": lambda o: S.CosineAnnealingLR(o, 10, 0.01),
    "sequential": sequential,
}
for name, make in SCHEDULES.items():
    w = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    o = torch.optim.SGD([{"params": w[:1]}, {"params": w[1:], "lr": 0.02}], lr=0.4)
    s = make(o)
    rates = []
    for _ in range(40):
        rates.append([g["lr"] for g in o.param_groups])
        o.step()
        s.step()
    out["schedule." + name] = torch.tensor(rates, dtype=torch.float64)

save("optim.safetensors", out)
