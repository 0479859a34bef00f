"""The draft while it is trained: vocabulary, architecture, data, loss, predictions, checkpoints."""
