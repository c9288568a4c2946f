"""The transformers model and its tokenizer, from weights or from scratch."""
