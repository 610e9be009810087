"""Runs the programs that programs_test wrote (LOCKSTEP_PROGRAMS_DUMP) through PyTorch and compares losses and
gradients in f64: programs_torch.py FILE. Ends with 1 if any differs; programs that one of the two refuses for an in-place
op on what backward needs are counted."""
import json
import sys

import torch
import torch.nn.functional as F

UNARY = {
    "neg": lambda x: -x, "square": lambda x: x * x, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp,
    "erf": torch.erf, "gelu": F.gelu, "silu": F.silu, "root": lambda x: torch.sqrt(x * x + 1),
    "log": lambda x: torch.log(x * x + 1), "abs": torch.abs, "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1), "clamp": lambda x: x.clamp(-1, 1), "half": lambda x: x * 0.5,
    "plus": lambda x: x + 0.25, "fill": lambda x: x * 0 + 1.5,
}
UNARY_IN_PLACE = {
    "neg": torch.Tensor.neg_, "tanh": torch.Tensor.tanh_, "sigmoid": torch.Tensor.sigmoid_, "exp": torch.Tensor.exp_,
    "abs": torch.Tensor.abs_, "relu": torch.Tensor.relu_, "leaky_relu": lambda x: F.leaky_relu_(x, 0.1),
    "clamp": lambda x: x.clamp_(-1, 1), "half": lambda x: x.mul_(0.5), "plus": lambda x: x.add_(0.25),
    "fill": lambda x: x.fill_(1.5),
}
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "divide": lambda a, b: a / (b * b + 1),
    "maximum": torch.maximum, "minimum": torch.minimum, "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "copy": lambda a, b: a * 0 + b,
}
BINARY_IN_PLACE = {
    "add": torch.Tensor.add_, "sub": torch.Tensor.sub_, "mul": torch.Tensor.mul_,
    "divide": lambda a, b: a.div_(b * b + 1), "copy": torch.Tensor.copy_,
}
OTHERS = {
    "zeros": lambda a, b, n: torch.zeros(n, dtype=torch.float64), "clone": lambda a, b, n: a.clone(),
    "sum": lambda a, b, n: a.sum(n[0], keepdim=bool(n[1])), "mean": lambda a, b, n: a.mean(n[0], keepdim=bool(n[1])),
    "var": lambda a, b, n: a.var(n[0], correction=0, keepdim=bool(n[1])),
    "max": lambda a, b, n: a.max(n[0], keepdim=bool(n[1])).values, "softmax": lambda a, b, n: a.softmax(n[0]),
    "log_softmax": lambda a, b, n: a.log_softmax(n[0]), "matmul": lambda a, b, n: a @ b,
    "cat": lambda a, b, n: torch.cat([a, b], n[0]), "stack": lambda a, b, n: torch.stack([a, a * 2], n[0]),
    "reshape": lambda a, b, n: a.reshape(n).clone(), "view": lambda a, b, n: a.view(n),
    "transpose": lambda a, b, n: a.transpose(n[0], n[1]),
    "slice": lambda a, b, n: a[(slice(None),) * n[0] + (slice(n[1], n[2], n[3]),)],
    "select": lambda a, b, n: a.select(n[0], n[1]), "unsqueeze": lambda a, b, n: a.unsqueeze(n[0]),
    "squeeze": lambda a, b, n: a.squeeze(n[0]), "expand": lambda a, b, n: a.expand(n),
}


def run(program):
    leaves = [torch.tensor(i["elements"], dtype=torch.float64).reshape(i["shape"]).requires_grad_()
              for i in program["inputs"]]
    values = list(leaves)
    for op, a, b, n in program["instructions"]:
        a = values[a] if a >= 0 else None
        b = values[b] if b >= 0 else None
        if op.endswith("_"):
            name = op[:-1]
            UNARY_IN_PLACE[name](a) if name in UNARY_IN_PLACE else BINARY_IN_PLACE[name](a, b)
        elif op in UNARY:
            values.append(UNARY[op](a))
        else:
            values.append(BINARY[op](a, b) if op in BINARY else OTHERS[op](a, b, n))
    loss = torch.zeros((), dtype=torch.float64)
    for v, x in enumerate(values):
        w = torch.tensor([((i * 37 + v * 11) % 17 - 8) / 8 for i in range(x.numel())], dtype=torch.float64)
        loss = loss + (x * w.reshape(x.shape)).sum()
    try:
        return loss.item(), torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return loss.item(), None


def main():
    wrong = refused_by_one = 0
    lines = open(sys.argv[1]).readlines()
    for number, line in enumerate(lines):
        program = json.loads(line)
        loss, gradients = run(program)
        scale = max([1.0] + [g.abs().max().item() for g in gradients or [] if g.numel()])
        same = abs(loss - program["loss"]) <= 1e-9 * max(1, abs(loss))
        if (gradients is None) != program["refused"]:
            refused_by_one += 1
            print(f"program {number}: refused by {'PyTorch' if gradients is None else 'Lockstep'} alone")
        elif gradients is not None:
            for mine, theirs in zip(program["gradients"], gradients):
                same &= torch.allclose(torch.tensor(mine, dtype=torch.float64), theirs.reshape(-1), rtol=0,
                                       atol=1e-9 * scale)
        if not same:
            wrong += 1
            print(f"program {number} differs: {line[:2000]}")
    print(f"{len(lines)} programs: {wrong} differ from PyTorch, {refused_by_one} are refused by one of the two")
    sys.exit(wrong > 0)


main()
