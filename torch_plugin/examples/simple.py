#!/usr/bin/env python3
"""The smallest tenant: one line makes a PyTorch model run through SliceScheduler.

    python simple.py                       # needs a running sliced; SLICE_SOCKET names another socket
"""

import torch

import slicescheduler


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).eval()
    batch = torch.randn(32, 64)
    with torch.inference_mode():
        expected = model(batch)
        scheduled = torch.compile(model, backend="slicescheduler", fullgraph=True)  # the one line
        result = scheduled(batch)
    print("largest difference from plain PyTorch:", (result - expected).abs().max().item())
    print(slicescheduler.stats())
    return torch.allclose(result, expected, atol=1e-6)


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
