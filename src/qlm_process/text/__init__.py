"""Chats and prompts in, token ids by a model's own template and tokenizer out."""
