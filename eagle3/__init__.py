"""The library under the pipeline's stages: one module per idea, flat, imports pointing one way."""
