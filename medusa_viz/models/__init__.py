"""What runs: presets, backbone, cache, heads, checkpoints, device, worker."""
