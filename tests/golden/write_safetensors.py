"""save(path, {name: torch tensor}): the safetensors format in a few lines, for the scripts in this folder."""
import json
import struct

NAMES = {"torch.float32": "F32", "torch.float64": "F64", "torch.int64": "I64", "torch.bool": "BOOL"}


def save(path, tensors):
    header, data = {}, b""
    # Wider elements first, so that all are aligned.
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        raw = t.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": NAMES[str(t.dtype)], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
