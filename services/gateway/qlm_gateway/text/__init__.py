"""Text of a model: prompts and chats in, token ids out, and the way back."""
