"""Delivery of tokens: frames of the queue and readers' offsets in; each reader's own tokens, without gaps, out."""
