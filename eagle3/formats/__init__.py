"""Checkpoint files as they lie on disk: JSON, safetensors headers, and the conversion between formats."""
