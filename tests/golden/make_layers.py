"""Layers of torch.nn: state, input, output and gradients, for layers_test.cpp. Made with PyTorch 1.13.1:
python3 make_layers.py"""
import torch
from torch import nn
from write_safetensors import save

out = {}
torch.manual_seed(3)


def case(name, module, *inputs, eval_mode=False, forwards=1):
    """Records the state before, the inputs, the output of the last forward, gradients and the state after."""
    module = module.double()
    for k, p in enumerate(module.parameters()):  # away from ones and zeros
        p.data += torch.randn(p.shape, dtype=torch.float64) * 0.3
    for k, v in module.state_dict().items():
        out[f"{name}.state.{k}"] = v.clone()
    inputs = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    if eval_mode:
        module.eval()
    for _ in range(forwards):
        y = module(*inputs)
    w = torch.randn(y.shape, dtype=torch.float64)
    (y * w).sum().backward()
    out[f"{name}.y"], out[f"{name}.w"] = y, w
    for i, x in enumerate(inputs):
        out[f"{name}.x{i}"] = x
        if x.is_floating_point():
            out[f"{name}.dx{i}"] = x.grad
    for k, p in module.named_parameters():
        out[f"{name}.grad.{k}"] = p.grad
    for k, b in module.named_buffers():
        out[f"{name}.after.{k}"] = b.clone()


def r(*shape):
    return torch.randn(*shape)


case("linear", nn.Linear(5, 3), r(4, 5))
case("linear_no_bias", nn.Linear(5, 3, bias=False), r(2, 4, 5))
case("conv2d", nn.Conv2d(2, 4, 3), r(2, 2, 6, 5))
case("conv2d_options", nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False), r(2, 4, 7, 6))
case("batch_norm1d", nn.BatchNorm1d(3), r(6, 3), forwards=2)
case("batch_norm1d_3d", nn.BatchNorm1d(3, momentum=None), r(4, 3, 5), forwards=2)
case("batch_norm2d", nn.BatchNorm2d(3, eps=1e-3, momentum=0.2), r(4, 3, 2, 3))
case("batch_norm2d_plain", nn.BatchNorm2d(3, affine=False, track_running_stats=False), r(4, 3, 2, 3), eval_mode=True)
bn = nn.BatchNorm2d(3)
bn.running_mean += r(3)
bn.running_var += torch.rand(3)
case("batch_norm2d_eval", bn, r(4, 3, 2, 3), eval_mode=True)
case("layer_norm", nn.LayerNorm(6), r(3, 4, 6))
case("layer_norm_2d", nn.LayerNorm((4, 6), eps=1e-2), r(3, 4, 6))
case("max_pool2d", nn.MaxPool2d(2), r(2, 3, 6, 5))
case("max_pool2d_options", nn.MaxPool2d(3, stride=2, padding=1), r(2, 3, 6, 5))
case("flatten", nn.Flatten(), r(2, 3, 4))
case("flatten_some", nn.Flatten(0, 1), r(2, 3, 4))
case("relu", nn.ReLU(), r(3, 4))
case("gelu", nn.GELU(), r(3, 4))
case("silu", nn.SiLU(), r(3, 4))
case("sigmoid", nn.Sigmoid(), r(3, 4))
case("tanh", nn.Tanh(), r(3, 4))
case("leaky_relu", nn.LeakyReLU(0.2), r(3, 4))
case("softmax", nn.Softmax(1), r(3, 4))
case("log_softmax", nn.LogSoftmax(-1), r(3, 4))
case("identity", nn.Identity(), r(3, 4))
case("dropout_eval", nn.Dropout(0.7), r(3, 4), eval_mode=True)
case("sequential", nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 4), nn.Tanh()), nn.Linear(4, 2)), r(6, 5))
case("cross_entropy", nn.CrossEntropyLoss(), r(5, 4), torch.tensor([0, 3, 1, 1, 2]))
case("cross_entropy_options", nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1, reduction="sum"), r(5, 4), torch.tensor([0, 3, 1, 1, 2]))
case("mse", nn.MSELoss(), r(5, 4), r(5, 4))
case("mse_none", nn.MSELoss(reduction="none"), r(5, 4), r(5, 4))

save("layers.safetensors", out)
