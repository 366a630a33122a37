"""Files that other programs read: models and tokenizers in the formats of `safetensors`, `tokenizers` and GGUF."""
