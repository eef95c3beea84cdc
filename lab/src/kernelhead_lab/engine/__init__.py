"""Many small runs at once: `loop` trains networks, `ensemble` heads on feature vectors."""
