"""The loss head: logits that are never made whole."""
