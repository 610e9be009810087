"""Writes python.safetensors with Python's own safetensors package (0.8), for tests/safetensors_test.cpp.
Run in this folder:  pip install safetensors numpy && python make_safetensors.py"""
import numpy as np
from safetensors import TensorSpec, serialize

tensors = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3) / np.float32(4) - np.float32(1),
    "double": np.array([0.1, -1e300, np.inf]),
    "half": np.array([1.0, -2.5], np.float16),
    "brain": np.array([0x3F80, 0xC000], np.uint16),  # the upper halves of the f32 numbers 1 and -2
    "long": np.array([[-(2**62)], [7]], np.int64),
    "int": np.array([-5, 2**31 - 1], np.int32),
    "byte": np.array([0, 255, 3], np.uint8),
    "flag": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "n\u00e4me \"quoted\"": np.array([9], np.uint8),
}
specs = {
    name: TensorSpec(dtype="bfloat16" if name == "brain" else a.dtype.name, shape=a.shape,
                     data_ptr=a.ctypes.data, data_len=a.nbytes)
    for name, a in tensors.items()
}
with open("python.safetensors", "wb") as f:
    f.write(bytes(serialize(specs, metadata={"format": "pt", "made by": "safetensors"})))
