"""Stands in for the package flashinfer where there is no GPU: what the bench calls, over torch.distributed on CPUs."""
