"""The model that is accelerated: where it is, what identifies it, its tokenizer."""
